"""What a torch rule is shown of many blocks and what it gives back: gradients on v and steps on v, each end to end.

Both are as large as the model, and needed within a step alone. Their memory is taken at its beginning and given back at
its end; the stand-ins, which are views of it, stay.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..step.block import Block
from .torch_rule import StandIn

EVENLY = 16  # numbers: a multiple of these is where each tensor begins


class Place(NamedTuple):
    """Where a block's rows lie, and its bias: the first number, and the distance from one row to the next."""

    start: int
    apart: int
    bias: int
    bias_apart: int


class Given:
    """Room for one layout's blocks: gradients in `both[0]`, and in the same order steps in `both[1]`."""

    def __init__(self, blocks: Sequence[Block], joint: Callable[[Block], bool]) -> None:
        """Of a block that is `joint` the rule sees one matrix, with the bias as a column."""
        self.places: list[Place] = []
        shapes: list[list[tuple[int, Tensor | torch.Size]]] = []  # where each stand-in begins, and what it is like
        total = 0
        for block in blocks:
            columns, biased = block.weight.numel() // block.units, len(block.biases)
            if joint(block):
                apart = columns + biased
                self.places.append(Place(total, apart, total + columns, apart))
                shapes.append([(total, torch.Size([block.units, apart]))])
                total = evenly(total + block.units * apart)
            else:
                bias = evenly(total + block.weight.numel())
                self.places.append(Place(total, columns, bias, 1))
                shapes.append([(total, block.weight), *((bias, b) for b in block.biases)])
                total = evenly(bias + block.units * biased)
        weight = blocks[0].weight
        self.both = torch.empty(2, total, dtype=weight.dtype, device=weight.device)
        self.stand_ins = [[self._stand_in(start, like) for start, like in some] for some in shapes]
        self.close()

    def _stand_in(self, start: int, like: Tensor | torch.Size) -> StandIn:
        """A parameter among the steps whose gradient lies at the same place of the gradients."""
        shape = like if isinstance(like, torch.Size) else like.shape
        stride = (shape[1], 1) if isinstance(like, torch.Size) else like.stride()
        grad, step = (part.as_strided(shape, stride, part.storage_offset() + start) for part in self.both)
        found = nn.Parameter(step)
        found.grad = grad
        return StandIn(found)

    def open(self) -> None:
        """Take the memory, whose numbers are anything."""
        self.both.untyped_storage().resize_(self.both.numel() * self.both.element_size())

    def close(self) -> None:
        """Give it back."""
        self.both.untyped_storage().resize_(0)

    def addresses(self) -> list[tuple[int, int, int, int]]:
        """Where each block's gradients and its bias's are to be written, and where their steps will be."""
        base, size, far = self.both.data_ptr(), self.both.element_size(), self.both.stride(0)
        return [
            tuple(base + size * at for at in (p.start, p.bias, far + p.start, far + p.bias))  # type: ignore[misc]
            for p in self.places
        ]


def evenly(number: int) -> int:
    """The next multiple of `EVENLY`.

    >>> evenly(17)
    32
    """
    return -(-number // EVENLY) * EVENLY
