"""Reductions over one layer, or over many layers packed into one flat tensor."""

from collections.abc import Sequence

import torch
from torch import Tensor


class Whole:
    """One layer: its tensors are reduced as a whole."""

    def total(self, x: Tensor) -> Tensor:
        """Sum of `x`, one for each layer."""
        return x.sum()

    def totals(self, *xs: Tensor) -> tuple[Tensor, ...]:
        """The sum of each tensor."""
        return tuple(map(self.total, xs))

    def most(self, x: Tensor) -> Tensor:
        """Largest element of `x`, one for each layer (0 where none is above 0)."""
        return x.amax().clamp(min=0) if x.numel() else x.sum()

    def widen(self, x: Tensor) -> Tensor:
        """A value of each layer, which broadcasts to its elements."""
        return x

    def mean(self, x: Tensor) -> Tensor:
        """Mean of `x`, which broadcasts to its elements (0 if `x` is empty)."""
        return self.widen(self.total(x) / max(1, x.numel()))

    def every(self, mask: Tensor) -> Tensor:
        """Whether the mask holds for every element, one for each layer."""
        return self.total((~mask).float()) == 0


class Segments(Whole):
    """Layers packed into flat tensors, one after another: reductions give one value per layer."""

    def __init__(self, sizes: Sequence[int], device: torch.device | str = "cpu") -> None:
        """Layers with these numbers of elements."""
        self.sizes = list(sizes)
        lengths = torch.tensor(self.sizes, dtype=torch.int64)
        self.offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).to(device)
        self.owner = torch.repeat_interleave(torch.arange(len(self.sizes)), lengths).to(device)

    def total(self, x: Tensor) -> Tensor:
        """Sums, one per layer, in the same order of additions in every run."""
        return self._reduce(x, "sum")

    def mean(self, x: Tensor) -> Tensor:
        """Means, repeated for each element of their layer."""
        return self.widen(self._reduce(x, "mean"))

    def most(self, x: Tensor) -> Tensor:
        """Largest elements, one per layer (0 where a layer is empty or has none above 0)."""
        return self._reduce(x, "max").clamp(min=0)

    def _reduce(self, x: Tensor, how: str) -> Tensor:
        if torch.compiler.is_compiling():  # compilers fuse plain reductions and do not know this one
            parts = torch.split(x, self.sizes)
            how = "amax" if how == "max" else how
            return torch.stack([getattr(part, how if part.numel() else "sum")() for part in parts])
        return torch.segment_reduce(x, how, offsets=self.offsets, unsafe=True)

    def widen(self, x: Tensor) -> Tensor:
        """One value per layer, repeated for each of its elements."""
        return x if x.dim() == 0 else x.index_select(0, self.owner)


WHOLE = Whole()
