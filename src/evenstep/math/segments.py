"""Reductions over one layer, or over many that lie end to end in one tensor."""

from typing import NamedTuple

import torch
from torch import Tensor


class Whole:
    """One layer: its tensors are reduced as a whole."""

    def every(self, mask: Tensor) -> Tensor:
        """Whether all hold, to meet an element."""
        return mask.all()

    def mean(self, x: Tensor) -> Tensor:
        """The mean, to meet an element; nothing of nothing."""
        return x.mean() if x.numel() else x.sum()

    def total(self, x: Tensor) -> Tensor:
        """The sum, one per layer."""
        return x.sum()

    def totals(self, *xs: Tensor) -> tuple[Tensor, ...]:
        """Several sums."""
        return tuple(map(self.total, xs))

    def most(self, x: Tensor) -> Tensor:
        """The largest, one per layer; 0 of nothing."""
        return x.amax() if x.numel() else x.sum()

    def widen(self, x: Tensor) -> Tensor:
        """One value per layer, to meet its elements."""
        return x


class Segments(NamedTuple):
    """Layers end to end: `offsets` has where each begins, and the end; `owner` the layer of each element."""

    offsets: Tensor
    owner: Tensor

    @staticmethod
    def of(sizes: list[int], device: torch.device | str = "cpu") -> "Segments":
        """Layers of these sizes.

        >>> Segments.of([2, 0, 1]).owner.tolist()
        [0, 0, 2]
        """
        lengths = torch.tensor(sizes, dtype=torch.int64)
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        owner = torch.repeat_interleave(torch.arange(len(sizes)), lengths)
        return Segments(offsets.to(device), owner.to(device))

    def total(self, x: Tensor) -> Tensor:
        """The sum, one per layer, added up in order: the same in every run."""
        return torch.segment_reduce(x, "sum", offsets=self.offsets, unsafe=True)

    def totals(self, *xs: Tensor) -> tuple[Tensor, ...]:
        """Several sums."""
        return tuple(map(self.total, xs))

    def most(self, x: Tensor) -> Tensor:
        """The largest, one per layer."""
        return torch.segment_reduce(x, "max", offsets=self.offsets, unsafe=True)

    def widen(self, x: Tensor) -> Tensor:
        """One value (or row) per layer, to meet its elements."""
        return x.index_select(0, self.owner)

    def mean(self, x: Tensor) -> Tensor:
        """The mean, to meet an element."""
        return self.widen(self.total(x) / self.offsets.diff())

    def every(self, mask: Tensor) -> Tensor:
        """Whether all hold, to meet an element."""
        return self.widen(self.total((~mask).float()) == 0)


WHOLE = Whole()
