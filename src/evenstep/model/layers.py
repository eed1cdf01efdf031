"""The only file that knows Linear from Conv: how each kind of layer lays out its weight and shows its input.

Every kind presents its weight as [group, unit, input, kernel] and its bias as [group, unit]; the core knows no other
shapes. Adding a kind is one class here, or `register_layer` from outside.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class Slot(NamedTuple):
    """One weight of a module, with its bias.

    `seen` is False where the module never shows that weight's input, `shown` where its output is not the module's.
    """

    weight: str
    bias: str | None
    seen: bool = True
    shown: bool = True


class Look(NamedTuple):
    """What one call shows of a slot: its input `x`, inputs along `dim` (x is None where only shapes are known).

    `examples` counts examples, `applied` how often the weight was used (examples times sharing), `zeros` the rows of
    zeros that the layer itself inserts between those of `x`.
    """

    x: Tensor | None
    dim: int
    examples: int
    applied: int
    zeros: int = 0


class LayerKind:
    """What evenstep must know of a kind of layer. As it stands it describes `nn.Linear`."""

    stuffed: bool = False  # whether the layer inserts zeros between the rows of its input

    def slots(self, module: nn.Module) -> Sequence[Slot]:
        """The weights of this module that have coordinates of their own."""
        return [Slot("weight", "bias")]

    def groups(self, module: nn.Module) -> int:
        """In how many groups inputs and units fall."""
        return 1

    def matrix(self, module: nn.Module, weight: Tensor) -> Tensor:
        """`weight`, or a tensor shaped like it, as [group, unit, input, kernel]."""
        return weight.unsqueeze(0).unsqueeze(-1)

    def unmatrix(self, module: nn.Module, matrix: Tensor, weight: Tensor) -> Tensor:
        """Back from `matrix` to the shape of `weight`."""
        return matrix.reshape(weight.shape)

    def units_dim(self, output: Tensor) -> int:
        """The dimension of the module's output that runs over the units."""
        return output.dim() - 1

    def look(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any, batch_dim: int
    ) -> Sequence[Look | None]:
        """What a call shows, one entry per slot; None for a slot that this call does not show."""
        x = shown(args, kwargs)
        if x.is_nested:
            rows = rows_of(x)
            return [Look(rows, 1, x.size(0), len(rows))]
        examples = x.shape[batch_dim if x.dim() == 3 else 0] if x.dim() > 1 else 1
        look = Look(x, x.dim() - 1, examples, x.shape[:-1].numel())
        return [look if x.layout is torch.strided else look._replace(x=None)]


class TransposedKind(LayerKind):
    """A Linear whose weight is [input, unit], as in Transformers' Conv1D."""

    def matrix(self, module: nn.Module, weight: Tensor) -> Tensor:
        """[input, unit] → [1, unit, input, 1]."""
        return weight.T.unsqueeze(0).unsqueeze(-1)

    def unmatrix(self, module: nn.Module, matrix: Tensor, weight: Tensor) -> Tensor:
        """Back to [input, unit]."""
        return matrix.view(weight.shape[1], weight.shape[0]).T


class ConvKind(LayerKind):
    """Conv1d/2d/3d of any stride, padding and grouping: moments per input channel over batch and positions (App. B)."""

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
        """The channels, first in an output without batch dimension."""
        return output.dim() - self.rank - 1

    def look(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any, batch_dim: int
    ) -> Sequence[Look | None]:
        """The sharing count is the number of output positions."""
        x = shown(args, kwargs)
        channels = x.dim() - self.rank - 1
        applied = output.shape[:channels].numel() * output.shape[channels + 1 :].numel()
        return [Look(x, channels, x.shape[0] if channels else 1, applied)]


class ConvTransposeKind(ConvKind):
    """ConvTranspose1d/2d/3d: a convolution of the zero-stuffed input, whose zeros are data."""

    stuffed = True

    def matrix(self, module: nn.Module, weight: Tensor) -> Tensor:
        """[in, out/groups, *kernel] → [group, unit, input, kernel]."""
        return super().matrix(module, weight).transpose(1, 2)

    def unmatrix(self, module: nn.Module, matrix: Tensor, weight: Tensor) -> Tensor:
        """Back to [in, out/groups, *kernel]."""
        return matrix.transpose(1, 2).reshape(weight.shape)

    def look(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any, batch_dim: int
    ) -> Sequence[Look | None]:
        """The sharing count is the number of input positions; zeros fill up to the output positions."""
        x = shown(args, kwargs)
        channels = x.dim() - self.rank - 1
        applied = x.shape[:channels].numel() * x.shape[channels + 1 :].numel()
        positions = output.shape[:channels].numel() * output.shape[channels + 1 :].numel()
        return [Look(x, channels, x.shape[0] if channels else 1, applied, max(0, positions - applied))]


SHAPED = (LayerKind, TransposedKind, ConvKind, ConvTransposeKind)  # kinds whose `look` goes by shapes alone


class AttentionKind(LayerKind):
    """MultiheadAttention: the packed in_proj sees the module's input in self-attention; the rest shows only shapes."""

    def slots(self, module: nn.Module) -> Sequence[Slot]:
        """`in_proj` if packed, else the three projections; then `out_proj`, which is never called as a module."""
        out = Slot("out_proj.weight", "out_proj.bias", seen=False, shown=False)
        if module._qkv_same_embed_dim:
            return [Slot("in_proj_weight", "in_proj_bias", shown=False), out]
        # one bias of three parts serves three weights: none of them can have it as its own
        return [*(Slot(f"{part}_proj_weight", None, seen=False, shown=False) for part in "qkv"), out]

    def look(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any, batch_dim: int
    ) -> Sequence[Look | None]:
        """In cross-attention in_proj has three inputs and shows none; batch and positions come from the query."""
        call = dict(zip(("query", "key", "value")[: len(args)], args[:3], strict=True)) | dict(kwargs)
        query = call["query"]
        examples = query.shape[0 if module.batch_first else 1] if query.dim() == 3 else 1
        applied = query.shape[:-1].numel()
        shapes = Look(None, query.dim() - 1, examples, applied)
        own = query if query is call["key"] and query is call["value"] else None
        return [shapes._replace(x=own) if slot.seen else shapes for slot in self.slots(module)]


KINDS: dict[type[nn.Module], LayerKind] = {
    nn.Linear: LayerKind(),
    nn.Conv1d: ConvKind(1),
    nn.Conv2d: ConvKind(2),
    nn.Conv3d: ConvKind(3),
    nn.ConvTranspose1d: ConvTransposeKind(1),
    nn.ConvTranspose2d: ConvTransposeKind(2),
    nn.ConvTranspose3d: ConvTransposeKind(3),
    nn.MultiheadAttention: AttentionKind(),
}
NAMED: dict[str, LayerKind] = {"transformers.pytorch_utils.Conv1D": TransposedKind()}  # known without an import


def register_layer(layer: type[nn.Module] | str, kind: "LayerKind | type[nn.Module]") -> None:
    """Teach evenstep a kind of layer, for optimizers that are built after it.

    `layer` is the class, or its dotted name where it is not to be imported; its subclasses are known with it unless
    they have a forward of their own. `kind` is a `LayerKind` that says how the layer lays out its weight and shows its
    input, or a class that is known already and computes the same of its input.
    """
    if not isinstance(layer, str) and not (isinstance(layer, type) and issubclass(layer, nn.Module)):
        raise ValueError(f"register_layer: layer must be a class of nn.Module or its dotted name; got {layer!r}.")
    if isinstance(kind, type) and issubclass(kind, nn.Module):
        found = of_class(kind)
        if found is None:
            raise ValueError(f"register_layer: {kind.__name__} is no known kind of layer; give a LayerKind instead.")
        kind = found
    if not isinstance(kind, LayerKind):
        raise ValueError(f"register_layer: kind must be a LayerKind or a class of layers it knows; got {kind!r}.")
    if isinstance(layer, str):
        NAMED[layer] = kind
    else:
        KINDS[layer] = kind


def of_class(cls: type[nn.Module]) -> LayerKind | None:
    """The kind that a class itself was registered with."""
    return KINDS.get(cls) or NAMED.get(f"{cls.__module__}.{cls.__qualname__}")


def kind_of(module: nn.Module) -> LayerKind | None:
    """The kind of `module`; None if it has none or computes something else (a subclass with a forward of its own)."""
    for cls in type(module).__mro__:
        if kind := of_class(cls):
            same = all(
                getattr(type(module), name, None) is getattr(cls, name, None) for name in ("forward", "_conv_forward")
            )
            return kind if same else None
    return None


def overrides_forward(module: nn.Module) -> bool:
    """Whether `module` would be known but for a forward of its own."""
    return kind_of(module) is None and any(of_class(cls) for cls in type(module).__mro__)


def shown(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    """The input of a call: its first argument, the one named so, or the first by any other name."""
    first: Tensor = args[0] if args else kwargs["input"] if "input" in kwargs else next(iter(kwargs.values()))
    return first


def rows_of(x: Tensor) -> Tensor:
    """The rows of a nested tensor end to end; any other tensor as it is."""
    return x.values().reshape(-1, x.size(-1)) if x.is_nested else x


def check_layout(path: str, module: nn.Module, kind: LayerKind, weight: Tensor) -> None:
    """See that the `matrix` of a kind from outside has four dimensions and that its `unmatrix` undoes it."""
    if type(kind).__module__ == __name__:
        return
    places = torch.arange(weight.numel(), dtype=torch.int32).view(weight.shape)
    matrix = kind.matrix(module, places)
    if matrix.dim() != 4 or not torch.equal(kind.unmatrix(module, matrix, weight), places):
        raise ValueError(
            f"layer '{path}' ({type(module).__name__}): {type(kind).__name__}.matrix must give [group, unit, input, "
            f"kernel], and unmatrix undo it; got {list(matrix.shape)} for a weight of shape {list(weight.shape)}."
        )


def batch_second(module: nn.Module) -> bool:
    """Whether `module` takes sequences as [time, batch, feature]."""
    return isinstance(module, nn.MultiheadAttention | nn.RNNBase) and not module.batch_first
