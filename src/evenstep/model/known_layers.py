"""The layers that evenstep knows: their kinds, and `KINDS`, the table that says which class is of which kind."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .experts import experts_of
from .layer_kind import Args, Kwargs, LayerKind, Look, Looks, Slot, first_input


class TransposedKind(LayerKind):
    """A Linear whose weight is [input, unit], such as Transformers' Conv1D."""

    def matrix(self, module: nn.Module, weight: Tensor) -> Tensor:
        """[input, unit] → [1, unit, input, 1]."""
        return weight.T.unsqueeze(0).unsqueeze(-1)


class ConvKind(LayerKind):
    """Conv1d/2d/3d of any stride, padding and grouping: moments per input channel over batch and positions (App. B).

    The sharing count is the number of output positions. Moments are those of the unpadded input.
    """

    def __init__(self, rank: int) -> None:
        """`rank` is the number of spatial dimensions."""
        self.rank = rank

    def matrix(self, module: nn.Module, weight: Tensor) -> Tensor:
        """[out, in/groups, *kernel] → [group, unit, input, kernel]."""
        groups: Any = module.groups
        return weight.reshape(groups, weight.shape[0] // groups, *weight.shape[1:]).flatten(3)

    def units_dim(self, output: Tensor) -> int:
        """The channels, which come first in an output without a batch dimension."""
        return output.dim() - self.rank - 1

    def look(self, module: nn.Module, args: Args, kwargs: Kwargs, output: Any, batch_dim: int) -> Looks:
        """Counts over output positions, or over input positions, with zeros up to the number of output positions."""
        x = first_input(args, kwargs)
        channels = x.dim() - self.rank - 1
        examples = x.shape[0] if channels else 1
        before, after = (examples * t.shape[channels + 1 :].numel() for t in (x, output))
        applied = before if self.stuffed else after
        return [Look(x, channels, examples, applied, zeros=max(0, after - applied))]


class ConvTransposeKind(ConvKind):
    """ConvTranspose1d/2d/3d: a convolution of the zero-stuffed input, whose zeros count as data.

    The sharing count is the number of input positions.
    """

    stuffed = True

    def matrix(self, module: nn.Module, weight: Tensor) -> Tensor:
        """[in, out/groups, *kernel] → [group, unit, input, kernel]."""
        return super().matrix(module, weight).transpose(1, 2)


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


KINDS: dict[type[nn.Module] | str, LayerKind] = {  # by class, or by a name whose package need not be imported
    nn.Linear: LayerKind(),
    nn.Conv1d: ConvKind(1),
    nn.Conv2d: ConvKind(2),
    nn.Conv3d: ConvKind(3),
    nn.ConvTranspose1d: ConvTransposeKind(1),
    nn.ConvTranspose2d: ConvTransposeKind(2),
    nn.ConvTranspose3d: ConvTransposeKind(3),
    nn.MultiheadAttention: AttentionKind(),
    "transformers.pytorch_utils.Conv1D": TransposedKind(),
    "torch_geometric.nn.dense.linear.Linear": LayerKind(),
}
BY_SHAPE = (LayerKind, TransposedKind, ConvKind, ConvTransposeKind)  # kinds whose counts depend on shapes alone


def register_layer(layer: type[nn.Module] | str, kind: LayerKind | type[nn.Module]) -> None:
    """Teach evenstep a kind of layer, for optimizers that are built afterwards.

    `layer` is a class, or its dotted name if it should not be imported. Its subclasses are included unless they
    override `forward`. `kind` is a `LayerKind`, or a known class that computes the same function of its input.
    """
    if not isinstance(layer, str) and not (isinstance(layer, type) and issubclass(layer, nn.Module)):
        raise ValueError(f"register_layer: layer must be a class of nn.Module or its dotted name; got {layer!r}.")
    found = of_class(kind) if isinstance(kind, type) else kind
    if not isinstance(found, LayerKind):
        raise ValueError(f"register_layer: kind must be a LayerKind or a class of layers it knows; got {kind!r}.")
    KINDS[layer] = found


def of_class(cls: type[nn.Module]) -> LayerKind | None:
    """The kind that exactly this class was registered with."""
    return KINDS.get(cls) or KINDS.get(f"{cls.__module__}.{cls.__qualname__}")


def kind_of(module: nn.Module) -> LayerKind | None:
    """The kind of `module`; None if it has none, or if its class overrides the forward of a known one."""
    own = type(module)
    for cls in own.__mro__:
        if kind := of_class(cls):
            same = all(getattr(own, f, None) is getattr(cls, f, None) for f in ("forward", "_conv_forward"))
            return kind if same else None
    return experts_of(module)


def check_layout(path: str, module: nn.Module, kind: LayerKind, weight: Tensor) -> None:
    """Check that the `matrix` of a user's kind has four dimensions and that its `unmatrix` is the inverse."""
    if type(kind).__module__.startswith(f"{__package__}."):
        return
    places = torch.arange(weight.numel(), dtype=torch.int32).view(weight.shape)
    matrix = kind.matrix(module, places)
    if matrix.dim() != 4 or not torch.equal(kind.unmatrix(module, matrix, weight), places):
        raise ValueError(
            f"layer '{path}' ({type(module).__name__}): {type(kind).__name__}.matrix must give [group, unit, input, "
            f"kernel], and unmatrix undo it; got {list(matrix.shape)} for a weight of shape {list(weight.shape)}."
        )
