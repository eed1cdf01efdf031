"""Kinds of layers: where each keeps its weights, how a weight is laid out, and how to read the inputs of a call.

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

    def groups(self, module: nn.Module) -> int:
        """The number of groups that inputs and units are divided into."""
        return 1

    def matrix(self, module: nn.Module, weight: Tensor) -> Tensor:
        """`weight`, or a tensor of its shape, as [group, unit, input, kernel]."""
        return weight.unsqueeze(0).unsqueeze(-1)

    def unmatrix(self, module: nn.Module, matrix: Tensor, weight: Tensor) -> Tensor:
        """The inverse of `matrix`: a tensor of the shape of `weight`."""
        return matrix.reshape(weight.shape)

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


class TransposedKind(LayerKind):
    """A Linear whose weight is [input, unit], such as Transformers' Conv1D."""

    def matrix(self, module: nn.Module, weight: Tensor) -> Tensor:
        """[input, unit] → [1, unit, input, 1]."""
        return weight.T.unsqueeze(0).unsqueeze(-1)

    def unmatrix(self, module: nn.Module, matrix: Tensor, weight: Tensor) -> Tensor:
        """Back to [input, unit]."""
        return matrix.view(weight.shape[1], weight.shape[0]).T


class ConvKind(LayerKind):
    """Conv1d/2d/3d of any stride, padding and grouping: moments per input channel over batch and positions (App. B).

    The sharing count is the number of output positions. Moments are those of the unpadded input.
    """

    def __init__(self, rank: int) -> None:
        """`rank` is the number of spatial dimensions."""
        self.rank = rank

    def groups(self, module: nn.Module) -> int:
        """The convolution's own groups."""
        return int(module.groups)  # type: ignore[arg-type]

    def matrix(self, module: nn.Module, weight: Tensor) -> Tensor:
        """[out, in/groups, *kernel] → [group, unit, input, kernel]."""
        groups = self.groups(module)
        return weight.reshape(groups, weight.shape[0] // groups, *weight.shape[1:]).flatten(3)

    def units_dim(self, output: Tensor) -> int:
        """The channels, which come first in an output without a batch dimension."""
        return output.dim() - self.rank - 1

    def look(self, module: nn.Module, args: Args, kwargs: Kwargs, output: Any, batch_dim: int) -> Looks:
        """Counts over output positions, or over input positions, with zeros up to the number of output positions."""
        x = first_input(args, kwargs)
        channels = x.dim() - self.rank - 1
        applied = all_but(x if self.stuffed else output, channels)
        zeros = max(0, all_but(output, channels) - applied)
        return [Look(x, channels, x.shape[0] if channels else 1, applied, zeros)]


class ConvTransposeKind(ConvKind):
    """ConvTranspose1d/2d/3d: a convolution of the zero-stuffed input, whose zeros count as data.

    The sharing count is the number of input positions.
    """

    stuffed = True

    def matrix(self, module: nn.Module, weight: Tensor) -> Tensor:
        """[in, out/groups, *kernel] → [group, unit, input, kernel]."""
        return super().matrix(module, weight).transpose(1, 2)

    def unmatrix(self, module: nn.Module, matrix: Tensor, weight: Tensor) -> Tensor:
        """Back to [in, out/groups, *kernel]."""
        return matrix.transpose(1, 2).reshape(weight.shape)


class AttentionKind(LayerKind):
    """MultiheadAttention. In self-attention, the packed in_proj sees the module's own input.

    The inputs of the other projections are not visible from outside: they only get counts.
    """

    def slots(self, module: nn.Module) -> Sequence[Slot]:
        """`in_proj` if packed, else the three projections; then `out_proj`, which is never called as a module."""
        out = Slot("out_proj.weight", "out_proj.bias", input_visible=False, output_visible=False)
        if module._qkv_same_embed_dim:
            return [Slot("in_proj_weight", "in_proj_bias", output_visible=False), out]
        # one bias of three parts serves three weights, so none of them can carry it
        return [*(Slot(f"{part}_proj_weight", None, input_visible=False, output_visible=False) for part in "qkv"), out]

    def look(self, module: nn.Module, args: Args, kwargs: Kwargs, output: Any, batch_dim: int) -> Looks:
        """In cross-attention in_proj has three inputs, so there are only counts; they come from the query."""
        call = dict(zip(("query", "key", "value")[: len(args)], args[:3], strict=True)) | dict(kwargs)
        query = call["query"]
        examples = query.shape[0 if module.batch_first else 1] if query.dim() == 3 else 1
        applied = query.shape[:-1].numel()
        counts = Look(None, query.dim() - 1, examples, applied)
        own = query if query is call["key"] and query is call["value"] else None
        return [counts._replace(x=own) if slot.input_visible else counts for slot in self.slots(module)]


BY_SHAPE = (LayerKind, TransposedKind, ConvKind, ConvTransposeKind)  # kinds whose counts depend on shapes alone


def first_input(args: Args, kwargs: Kwargs) -> Tensor:
    """The input of a call: its first argument, else the keyword `input`, else the first keyword."""
    first: Tensor = args[0] if args else kwargs["input"] if "input" in kwargs else next(iter(kwargs.values()))
    return first


def rows_of(x: Tensor) -> Tensor:
    """The rows of a nested tensor, concatenated; any other tensor unchanged."""
    return x.values().reshape(-1, x.size(-1)) if x.is_nested else x


def all_but(x: Tensor, dim: int) -> int:
    """The number of elements of `x` per index along `dim`.

    >>> all_but(torch.zeros(2, 3, 5), 1)
    10
    """
    return x.shape[:dim].numel() * x.shape[dim + 1 :].numel()
