"""Batch norm first, then without it (App. E): insert it after a model's layers, train, fold it into their weights.

Everything is checked before anything is changed: an error leaves the model as it was.
"""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import UninitializedParameter

from .math.moments import accumulation_dtype
from .model.layers import KINDS, AttentionKind, LayerKind, kind_of
from .model.survey import lookup
from .statistics.hooks import Hook, InertHook
from .wiring import Wiring, listed

LAYERS = tuple(cls for cls, kind in KINDS.items() if not isinstance(kind, AttentionKind))
NORMS = (nn.BatchNorm1d, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)  # by the layer's spatial dimensions
CONTAINERS = (nn.Module, nn.Sequential, nn.ModuleList, nn.ModuleDict)


def insert_batchnorm(model: nn.Module, *, skip: Sequence[str] = ()) -> nn.Module:
    """Insert batch norm after every Conv, ConvTranspose and Linear but the last, in place; returns the model.

    `skip` leaves out further layers, by patterns on their paths. Each layer becomes `BatchNormed(layer, bn)` at its
    place, until `fold_batchnorm` puts it back. Build the optimizer afterwards, or give it the new parameters with
    `opt.add_param_group`.

    >>> insert_batchnorm(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)))[0]
    BatchNormed(
      (0): Linear(in_features=3, out_features=4, bias=True)
      (1): BatchNorm1d(4, ...)
    )
    """
    chosen = choose({path: m for path, m in model.named_modules() if isinstance(m, LAYERS)}, skip)
    wiring = wiring_of(model)
    reasons = {layer: why_no_place(wiring, path, layer) or why_no_host(wiring, layer) for path, layer in chosen.items()}
    refuse("insert_batchnorm: these layers cannot have batch norm; leave them out with skip=", wiring, reasons)
    for path, layer in chosen.items():
        weight, (_, norm) = layer.get_parameter("weight"), kind_and_norm(layer)
        pair = BatchNormed(layer, norm(units(layer), device=weight.device, dtype=weight.dtype))
        pair.path = path
        put(model, path, pair.train(layer.training))
    return model


def fold_batchnorm(model: nn.Module) -> nn.Module:
    """Fold every batch norm into the layer directly before it, in place; returns the model.

    w ← s·w,   b ← s·(b − mean) + β,   s = γ / √(var + eps), per unit

    with the running statistics: the same function as in eval mode, to rounding. The mode is kept, and so are names:
    what `insert_batchnorm` inserted is taken out, any other batch norm becomes nn.Identity().

    What a batch norm follows is read from a torch.fx trace of the model in eval mode; where there is none, from an
    nn.Sequential that is called as a whole. Forward hooks of others on either are refused. Shapes are not known: a
    BatchNorm1d after a Linear is taken to see [batch, features].

    Weights stay the same objects. Build the optimizer anew, or tell one that was built from the model with
    `opt.refresh()`; it then drops the batch norm's parameters and takes biases that were missing.
    One that was built from parameters must be given those with `opt.add_param_group`.
    """
    norms = {path: m for path, m in model.named_modules() if isinstance(m, _BatchNorm)}
    if not norms:
        raise ValueError(f"fold_batchnorm: this {type(model).__name__} has no BatchNorm1d, 2d or 3d to fold.")
    if isinstance(model, BatchNormed):
        raise ValueError("fold_batchnorm: this is one layer with its batch norm; give the model that holds it.")
    same_mode(norms)
    wiring = wiring_of(model)
    reasons = {bn: why_unfixed(bn) or wiring.why_shared(bn) or why_apart(wiring, bn) for bn in norms.values()}
    refuse("fold_batchnorm: these batch norms cannot be folded", wiring, reasons)
    for path, bn in norms.items():
        layer, parent = wiring.sources[bn], path.rpartition(".")[0]
        absorb(layer, bn)
        if isinstance(model.get_submodule(parent), BatchNormed):
            put(model, parent, layer)
        else:
            put(model, path, nn.Identity().train(bn.training))
    return model


class BatchNormed(nn.Sequential):
    """A layer and the batch norm inserted after it; `path` is the layer's place in the model, for messages."""

    path: str = ""

    def forward(self, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Called as the layer is, a ConvTranspose's output_size included."""
        layer, bn = self
        if isinstance(layer, nn.Linear):
            input = two_dimensional(input, self.path)
        out: Tensor = bn(layer(input, *args, **kwargs))
        return out


def two_dimensional(x: Tensor, path: str) -> Tensor:
    """The input of a Linear under batch norm: of [batch, time, feature] the wrong dimension would be normalized."""
    if x.dim() != 2:
        raise ValueError(
            f"insert_batchnorm: layer '{path}' (Linear) must see [batch, features] to be followed by batch norm; got "
            f"an input of shape {list(x.shape)}. Leave it out: insert_batchnorm(model, skip=['{path}'])."
        )
    return x


fx.wrap("two_dimensional")  # a trace has no shapes to look at


def wiring_of(model: nn.Module) -> Wiring:
    """The connections of a model's layers and batch norms."""
    return Wiring(model, leaves=(*KINDS, _BatchNorm), chains=(nn.Sequential, BatchNormed))


def choose(layers: Mapping[str, nn.Module], skip: Sequence[str]) -> dict[str, nn.Module]:
    """The layers to be followed by batch norm."""
    if isinstance(skip, str):
        raise ValueError(f"insert_batchnorm: skip must be a list of path patterns; got the string {skip!r}.")
    for pattern in skip:
        if not any(fnmatchcase(path, pattern) for path in layers):
            raise ValueError(f"insert_batchnorm: skip pattern '{pattern}' fits none of the layers {listed(layers)}.")
    chosen = {p: layer for p, layer in list(layers.items())[:-1] if not any(fnmatchcase(p, s) for s in skip)}
    if not chosen:
        raise ValueError(
            "insert_batchnorm: no layer to be followed by batch norm: the last Conv or Linear is left out, and what "
            f"skip= names; got the layers [{listed(layers)}] and skip={list(skip)}."
        )
    return chosen


def why_no_place(wiring: Wiring, path: str, layer: nn.Module) -> str | None:
    """Why there is no place for a batch norm after this layer; None if there is."""
    holder = type(wiring.model.get_submodule(path.rpartition(".")[0]))
    if issubclass(holder, BatchNormed):
        return "has batch norm inserted already; fold_batchnorm(model) takes it out"
    native = next(cls for cls in holder.__mro__ if cls.__module__.startswith("torch.nn.modules."))
    if native not in CONTAINERS:
        return f"belongs to an nn.{native.__name__}, which uses its weight without calling it"
    sources = wiring.doubted | wiring.sources
    after = (m for m, source in sources.items() if source is layer and isinstance(m, _BatchNorm))
    return next((f"is already followed by batch norm, {wiring.where(bn)}" for bn in after), None)


def why_no_host(wiring: Wiring, layer: nn.Module) -> str | None:
    """Why a batch norm cannot be folded into this layer; None if it can."""
    if kind_of(layer) is None:
        return "has a forward of its own"
    for name in ("weight", "bias"):
        parameter = lookup(layer, name)
        if parameter is None and getattr(layer, name) is not None:
            return f"has a {name} computed from other parameters (parametrized, normalized or pruned)"
        if isinstance(parameter, UninitializedParameter):
            return f"has a {name} that is not initialized yet; run one forward pass first"
    return why_hooked(layer) or wiring.why_shared(layer)


def why_hooked(module: nn.Module) -> str | None:
    """Whether a hook of others may change what goes into a module, or comes out of it."""
    hooks = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
    return "has a forward hook; remove it first" if any(not isinstance(h, (Hook, InertHook)) for h in hooks) else None


def why_unfixed(bn: _BatchNorm) -> str | None:
    """Why this batch norm is not a known scale and shift in eval mode; None if it is."""
    if type(bn).forward not in (_BatchNorm.forward, nn.SyncBatchNorm.forward):
        return "has a forward of its own"
    if bn.running_mean is None or bn.running_var is None:
        return "has no running statistics (track_running_stats=False)"
    if bn.num_batches_tracked is not None and not bn.num_batches_tracked:
        return "has seen no batch yet, so its statistics mean nothing; train first"
    if not (bn.running_mean.isfinite().all() and bn.running_var.isfinite().all()):
        return "has running statistics that are not finite"
    return why_hooked(bn)


def why_apart(wiring: Wiring, bn: _BatchNorm) -> str | None:
    """Why this batch norm does not act on the units of a layer directly before it, and them alone; None if it does."""
    layer, wanted = wiring.sources.get(bn), "a Conv, ConvTranspose or Linear"
    if layer is None and bn in wiring.cut:
        return f"comes after {wiring.cut[bn]}, not directly after {wanted}"
    if layer is None:
        why = f"torch.fx cannot trace the model: {wiring.failure}" if wiring.failure else "eval mode does not call it"
        whole = " that is surely called as a whole" if bn in wiring.doubted else ""
        return f"does not follow {wanted} in an nn.Sequential{whole}, and {why}"
    where = f"comes after {wiring.where(layer)}"
    if not isinstance(layer, LAYERS):
        return f"{where}, not directly after {wanted}"
    reason = why_no_host(wiring, layer)
    if reason:
        return f"{where}, which {reason}"
    _, fitting = kind_and_norm(layer)
    if not isinstance(bn, (fitting, nn.SyncBatchNorm)):
        return f"{where}, whose units a {fitting.__name__} would normalize"
    if bn.num_features != units(layer):
        return f"{where}, which has {units(layer)} units, not {bn.num_features}"
    reason = wiring.why_not_only(layer, bn)
    return f"{where}, {reason}" if reason else None


def same_mode(norms: Mapping[str, _BatchNorm]) -> None:
    """All in training mode or all in eval mode: half-way it is not clear which function to keep."""
    training, evaluated = ([p for p, bn in norms.items() if bn.training is mode] for mode in (True, False))
    if training and evaluated:
        raise ValueError(
            f"fold_batchnorm: {listed(training)} are in training mode, {listed(evaluated)} in eval mode; call "
            "model.eval() or model.train() first. The model is unchanged."
        )


def refuse(what: str, wiring: Wiring, reasons: Mapping[Any, str | None]) -> None:
    """Raise with all reasons at once, if there are any."""
    lines = [f"  {wiring.where(module)} {reason}." for module, reason in reasons.items() if reason]
    if lines:
        raise ValueError("\n".join([f"{what}. The model is unchanged.", *lines]))


def kind_and_norm(layer: nn.Module) -> tuple[LayerKind, type[_BatchNorm]]:
    """The kind of a layer that is known to have one, and the batch norm that fits it."""
    kind = kind_of(layer)
    assert kind is not None
    return kind, NORMS[getattr(kind, "rank", 0)]


def units(layer: nn.Module) -> int:
    """How many units a layer has, over all groups."""
    kind, _ = kind_and_norm(layer)
    return kind.matrix(layer, layer.get_parameter("weight")).shape[:2].numel()


def put(model: nn.Module, path: str, module: nn.Module) -> None:
    """Replace the module at `path`."""
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, module)


@torch.no_grad()
def absorb(layer: nn.Module, bn: _BatchNorm) -> None:
    """Make `layer` compute what `bn` makes of its output in eval mode, in at least float32."""
    assert bn.running_mean is not None and bn.running_var is not None
    (kind, _), weight, bias = kind_and_norm(layer), layer.get_parameter("weight"), lookup(layer, "bias")
    wide = accumulation_dtype(torch.promote_types(weight.dtype, bn.running_var.dtype))
    scale = (bn.running_var.to(wide) + bn.eps).rsqrt()
    if bn.weight is not None:
        scale = scale * bn.weight
    shift = -bn.running_mean.to(wide) if bias is None else bias - bn.running_mean.to(wide)
    shift = shift * scale if bn.bias is None else shift * scale + bn.bias
    matrix = kind.matrix(layer, weight.to(wide))
    weight.copy_(kind.unmatrix(layer, matrix * scale.view(*matrix.shape[:2], 1, 1), weight))
    if bias is None:
        layer.bias = nn.Parameter(shift.to(weight.dtype), requires_grad=weight.requires_grad)
    else:
        bias.copy_(shift)
