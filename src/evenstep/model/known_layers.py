"""The table of known layers: which kind each is of. Teaching evenstep another is one call of `register_layer`."""

import torch
from torch import Tensor, nn

from .experts import experts_of
from .layer_kinds import AttentionKind, ConvKind, ConvTransposeKind, LayerKind, TransposedKind

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


def register_layer(layer: type[nn.Module] | str, kind: "LayerKind | type[nn.Module]") -> None:
    """Teach evenstep a kind of layer, for optimizers that are built afterwards.

    `layer` is a class, or its dotted name if it should not be imported. Its subclasses are included unless they
    override `forward`. `kind` is a `LayerKind`, or a known class that computes the same function of its input.
    """
    if not isinstance(layer, str) and not (isinstance(layer, type) and issubclass(layer, nn.Module)):
        raise ValueError(f"register_layer: layer must be a class of nn.Module or its dotted name; got {layer!r}.")
    if isinstance(kind, type) and issubclass(kind, nn.Module):
        known = of_class(kind)
        if known is None:
            raise ValueError(f"register_layer: {kind.__name__} is no known kind of layer; give a LayerKind instead.")
        kind = known
    if not isinstance(kind, LayerKind):
        raise ValueError(f"register_layer: kind must be a LayerKind or a class of layers it knows; got {kind!r}.")
    KINDS[layer] = kind


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


def batch_second(module: nn.Module) -> bool:
    """Whether `module` takes sequences as [time, batch, feature]."""
    return isinstance(module, nn.MultiheadAttention | nn.RNNBase) and not module.batch_first
