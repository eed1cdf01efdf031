"""Train with batch norm first, then without it (App. E): insert it behind layers, train, fold it into their weights.

Both functions check everything first: an error leaves the model unchanged.
"""

import warnings
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from .model.known_layers import kind_of
from .model.survey import join, lookup
from .parallel.dtensor import sharded
from .statistics.hooks import Hook

LAYERS = (nn.Linear, _ConvNd)  # transposed convolutions are _ConvNd, too
NORMS = (nn.BatchNorm1d, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)  # by the layer's spatial dimensions
HOLDERS = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)


class BatchNormed(nn.Sequential):
    """A layer and the batch norm inserted behind it; `path` is the layer's path in the model, for messages."""

    path: str = ""

    def forward(self, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Takes the layer's arguments, such as a ConvTranspose's output_size."""
        layer, bn = self
        if isinstance(layer, nn.Linear) and input.dim() != 2:  # batch norm would take the wrong dimension for features
            raise ValueError(
                f"insert_batchnorm: layer '{self.path}' (Linear) must see [batch, features] to be followed by batch "
                f"norm; got an input of shape {list(input.shape)}. Leave it out: skip=['{self.path}']."
            )
        out: Tensor = bn(layer(input, *args, **kwargs))
        return out


def insert_batchnorm(model: nn.Module, *, skip: Sequence[str] = ()) -> nn.Module:
    """Insert batch norm behind every Conv, ConvTranspose and Linear but the last, in place; returns the model.

    `skip` leaves out further layers, by patterns on their paths. `BatchNormed(layer, bn)` replaces each layer until
    `fold_batchnorm` puts the layer back. Build the optimizer afterwards, or add the new parameters to it with
    `opt.add_param_group`.
    """
    layers = {path: m for path, m in model.named_modules() if isinstance(m, LAYERS)}
    for pattern in skip:
        if not any(fnmatchcase(path, pattern) for path in layers):
            raise ValueError(f"insert_batchnorm: skip pattern '{pattern}' fits none of the layers {[*layers]}.")
    chosen = [path for path in [*layers][:-1] if not any(fnmatchcase(path, pattern) for pattern in skip)]
    if not chosen:
        raise ValueError(f"insert_batchnorm: no layer is left: the last one and skip={[*skip]} are left out.")
    normed, names = batch_norms(model)[0].values(), all_names(model)
    reasons = {p: "is already followed by batch norm" if p in normed else why_unfit(model, p, names) for p in chosen}
    refuse("insert_batchnorm: these layers cannot have batch norm; leave them out with skip=", model, reasons)
    for path in chosen:
        pair = BatchNormed(layers[path], norm_for(layers[path])).train(layers[path].training)
        pair.path = path
        model.set_submodule(path, pair)
    return model


def fold_batchnorm(model: nn.Module) -> nn.Module:
    """Fold batch norm into the weights of the layer directly before it, in place; returns the model.

    w ← s·w,   b ← s·(b − mean) + β,   s = γ / √(var + eps), per unit

    with the running statistics: the model computes the same function as in eval mode, to rounding, and keeps its mode.
    What `insert_batchnorm` inserted is taken out. Batch norm directly behind a Conv, ConvTranspose or Linear in a plain
    nn.Sequential becomes nn.Identity(). Any other batch norm is left alone, with a warning.

    Two things cannot be checked. An nn.Sequential must be called as a whole: a forward that calls only its layer would
    see the folded weights. A BatchNorm1d behind a Linear in an nn.Sequential must see [batch, features].

    Weights stay the same objects. Call `opt.refresh()` on an optimizer that was built from the model: it drops the
    batch norm's parameters and takes over new biases. An optimizer that was built from parameters must be given the new
    biases with `opt.add_param_group`.
    """
    pairs, others = batch_norms(model)
    rest = (
        f"{others} not directly behind a Conv, ConvTranspose or Linear in an nn.Sequential. In eval mode torch folds a "
        "pair (torch.nn.utils.fusion) or all that torch.fx can trace (torch.fx.experimental.optimization.fuse)."
    )
    if not pairs or isinstance(model, BatchNormed):
        raise ValueError(f"fold_batchnorm: no layer with its batch norm in this {type(model).__name__}; got {rest}")
    names, modules = all_names(model), dict(model.named_modules(remove_duplicate=False))
    reasons = {layer: why_unfit(model, layer, names) for layer in pairs.values()}
    for bn, layer in pairs.items():
        reasons[bn] = why_unfit(model, bn, names) or why_unknown(modules[bn], norm_for(modules[layer]))
    refuse("fold_batchnorm: these batch norms cannot be folded", model, reasons)
    if others:
        warnings.warn(f"fold_batchnorm: left alone {rest}", stacklevel=2)
    for bn, layer in pairs.items():
        absorb(modules[layer], modules[bn])
        parent = bn.rpartition(".")[0]
        if isinstance(modules[parent], BatchNormed):
            model.set_submodule(parent, modules[layer])
        else:
            model.set_submodule(bn, nn.Identity().train(modules[bn].training))
    return model


def batch_norms(model: nn.Module) -> tuple[dict[str, str], list[str]]:
    """The layer that each batch norm directly follows, by their paths, and the paths of all other batch norms."""
    pairs = {
        join(path, after): join(path, before)
        for path, parent in model.named_modules()
        if type(parent).forward in (nn.Sequential.forward, BatchNormed.forward)
        for (before, layer), (after, bn) in pairwise(parent._modules.items())
        if isinstance(layer, LAYERS) and isinstance(bn, _BatchNorm)
    }
    return pairs, [path for path, m in model.named_modules() if isinstance(m, _BatchNorm) and path not in pairs]


def all_names(model: nn.Module) -> dict[int, list[str]]:
    """Every path of each module and every name of each parameter, by id."""
    found: dict[int, list[str]] = {}
    for path, value in (*model.named_modules(remove_duplicate=False), *model.named_parameters(remove_duplicate=False)):
        found.setdefault(id(value), []).append(path)
    return found


def why_unfit(model: nn.Module, path: str, names: Mapping[int, list[str]]) -> str | None:
    """Why the layer or batch norm at `path` cannot be changed; None if it can."""
    module, holder = model.get_submodule(path), model.get_submodule(path.rpartition(".")[0])
    if isinstance(holder, HOLDERS):
        return f"belongs to an nn.{type(holder).__name__}, which does not call it"
    if kind_of(module) is None and type(module).forward not in (_BatchNorm.forward, nn.SyncBatchNorm.forward):
        return "has a forward of its own"
    if len(names[id(module)]) > 1:
        return f"is shared: {names[id(module)]} are one module"
    for name in ("weight", "bias"):
        p = lookup(module, name)
        if p is None and getattr(module, name) is not None:
            return f"has a {name} computed from other parameters (parametrized, normalized or pruned)"
        if p is not None and len(names[id(p)]) > 1:
            return f"has a tied {name}: {names[id(p)]} are one parameter"
        if p is not None and sharded(p):
            return f"has a {name} that is a DTensor; insert or fold batch norm before the model is sharded"
    hooks = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
    if any(not isinstance(hook, Hook) for hook in hooks):  # hooks of evenstep change no output
        return "has a forward hook; remove it first (of a lazy layer: run one forward pass)"
    return None


def why_unknown(bn: nn.Module, fitting: _BatchNorm) -> str | None:
    """Why batch norm is not a known scale and shift of units in eval mode, as one that is `fitting`; None if it is."""
    assert isinstance(bn, _BatchNorm)
    if bn.running_mean is None or bn.running_var is None:
        return "has no running statistics (track_running_stats=False)"
    if bn.num_batches_tracked is not None and not bn.num_batches_tracked:
        return "has seen no batch yet, so its statistics mean nothing; train first"
    if not (isinstance(bn, (type(fitting), nn.SyncBatchNorm)) and bn.num_features == fitting.num_features):
        return f"has {bn.num_features} features; the layer before it needs {fitting}"
    return None


def refuse(what: str, model: nn.Module, reasons: Mapping[str, str | None]) -> None:
    """Raise all reasons at once, if there are any."""
    lines = [f"  '{p}' ({type(model.get_submodule(p)).__name__}) {reason}." for p, reason in reasons.items() if reason]
    if lines:
        raise ValueError("\n".join([f"{what}. The model is unchanged.", *lines]))


def norm_for(layer: nn.Module) -> _BatchNorm:
    """A new batch norm that fits the output of a layer."""
    assert isinstance(layer, LAYERS)
    rank = 0 if isinstance(layer, nn.Linear) else len(layer.kernel_size)
    units = layer.out_features if isinstance(layer, nn.Linear) else layer.out_channels
    return NORMS[rank](units, device=layer.weight.device, dtype=layer.weight.dtype)


@torch.no_grad()
def absorb(layer: nn.Module, bn: nn.Module) -> None:
    """Fold `bn`, as it is in eval mode, into the parameters of `layer`; arithmetic is in float32 or better."""
    kind, weight, bias = kind_of(layer), layer.get_parameter("weight"), lookup(layer, "bias")
    assert kind is not None and isinstance(bn, _BatchNorm)
    assert bn.running_mean is not None and bn.running_var is not None
    wide = torch.promote_types(torch.promote_types(weight.dtype, bn.running_var.dtype), torch.float32)
    mean, var = bn.running_mean.to(wide), bn.running_var.to(wide)
    scale = (var + bn.eps).rsqrt() * (1 if bn.weight is None else bn.weight)
    shift = scale * ((0 if bias is None else bias) - mean) + (0 if bn.bias is None else bn.bias)
    matrix = kind.matrix(layer, weight.to(wide))  # [group, unit, input, kernel]
    weight.copy_(kind.unmatrix(layer, matrix * scale.view(*matrix.shape[:2], 1, 1), weight))
    if bias is None:
        layer.bias = nn.Parameter(shift.to(weight.dtype), requires_grad=weight.requires_grad)
    else:
        bias.copy_(shift)
