"""What a kind of layer is: where its weights are, how they are laid out, and how to read the inputs of a call.

Every kind presents its weight as [group, unit, input, kernel] and its bias as [group, unit].
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class Slot(NamedTuple):
    """One weight of a module, with its bias, by their names in the module.

    `input_visible`: whether the weight's input can be read from a call of the module. `output_visible`: whether the
    weight's output is the module's output, where its gradient can be read.
    """

    weight: str
    bias: str | None
    input_visible: bool = True
    output_visible: bool = True


class Look(NamedTuple):
    """The input of one slot in one call of its module.

    `x` has the inputs along `dim`; it is None where only the counts are known. `examples` is the number of examples,
    `applied` the number of times the weight was used (examples times sharing). `zeros` is the number of rows of zeros
    that the layer itself inserts between those of `x`.
    """

    x: Tensor | None
    dim: int
    examples: int
    applied: int
    zeros: int = 0


Args = tuple[Any, ...]
Kwargs = Mapping[str, Any]
Looks = Sequence[Look | None]


class LayerKind:
    """Everything evenstep needs to know about a kind of layer. The base class describes `nn.Linear`."""

    stuffed: bool = False  # whether the layer inserts rows of zeros between the rows of its input

    def slots(self, module: nn.Module) -> Sequence[Slot]:
        """The weights of `module` that have coordinates of their own."""
        return [Slot("weight", "bias")]

    def matrix(self, module: nn.Module, weight: Tensor) -> Tensor:
        """`weight`, or a tensor of its shape, as [group, unit, input, kernel]."""
        return weight.unsqueeze(0).unsqueeze(-1)

    def unmatrix(self, module: nn.Module, matrix: Tensor, weight: Tensor) -> Tensor:
        """The inverse of `matrix`, which must be a view: a tensor of the shape of `weight`."""
        found = matrix.new_empty(weight.shape)
        self.matrix(module, found).copy_(matrix)
        return found

    def units_dim(self, output: Tensor) -> int:
        """The dimension of the module's output that runs over the units."""
        return output.dim() - 1

    def look(self, module: nn.Module, args: Args, kwargs: Kwargs, output: Any, batch_dim: int) -> Looks:
        """The input of each slot in a call; None for a slot that the call did not use."""
        x = first_input(args, kwargs)
        if x.is_nested:
            rows = rows_of(x)
            return [Look(rows, 1, x.size(0), len(rows))]
        examples = x.shape[batch_dim if x.dim() == 3 else 0] if x.dim() > 1 else 1
        look = Look(x, x.dim() - 1, examples, x.shape[:-1].numel())
        return [look if x.layout is torch.strided else look._replace(x=None)]


def first_input(args: Args, kwargs: Kwargs) -> Tensor:
    """The input of a call: its first argument, else the keyword `input`, else the first keyword."""
    first: Tensor = args[0] if args else kwargs["input"] if "input" in kwargs else next(iter(kwargs.values()))
    return first


def rows_of(x: Tensor) -> Tensor:
    """The rows of a nested tensor, concatenated; any other tensor unchanged."""
    return x.values().reshape(-1, x.size(-1)) if x.is_nested else x
