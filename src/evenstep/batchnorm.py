"""Train with batch norm first, then without it (App. E): insert it behind layers, train, fold it into their weights.

Both functions check everything first: an error leaves the model unchanged.
"""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils.fusion import fuse_conv_bn_weights

from .model.layers import kind_of
from .model.survey import join, lookup
from .options import refusal
from .parallel.dtensor import sharded
from .statistics.hooks import Hook

LAYERS = (nn.Linear, _ConvNd)  # transposed convolutions are _ConvNd, too
NORMS = (nn.BatchNorm1d, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)  # by the layer's spatial dimensions
CONTAINERS = (nn.Module, nn.Sequential, nn.ModuleList, nn.ModuleDict)
TORCH_FOLDS = (
    "Of a model in eval mode, torch folds one pair (torch.nn.utils.fusion: fuse_conv_bn_eval, fuse_linear_bn_eval) or "
    "all that torch.fx can trace (torch.fx.experimental.optimization.fuse); both return copies."
)


class BatchNormed(nn.Sequential):
    """A layer and the batch norm inserted behind it; `path` is the layer's path in the model, for messages."""

    path: str = ""

    def forward(self, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Takes the layer's arguments, such as a ConvTranspose's output_size."""
        layer, bn = self
        if isinstance(layer, nn.Linear):
            input = two_dimensional(input, self.path)
        out: Tensor = bn(layer(input, *args, **kwargs))
        return out


def two_dimensional(x: Tensor, path: str) -> Tensor:
    """Check the input of a Linear: in [batch, time, features] batch norm would normalize over the wrong dimension."""
    if x.dim() != 2:
        raise ValueError(
            f"insert_batchnorm: layer '{path}' (Linear) must see [batch, features] to be followed by batch norm; got "
            f"an input of shape {list(x.shape)}. Leave it out: insert_batchnorm(model, skip=['{path}'])."
        )
    return x


fx.wrap("two_dimensional")  # so that torch.fx can trace an inserted model: its symbols have no shape to check


def insert_batchnorm(model: nn.Module, *, skip: Sequence[str] = ()) -> nn.Module:
    """Insert batch norm behind every Conv, ConvTranspose and Linear but the last, in place; returns the model.

    `skip` leaves out further layers, by patterns on their paths. `BatchNormed(layer, bn)` replaces each layer until
    `fold_batchnorm` puts the layer back. Build the optimizer afterwards, or add the new parameters to it with
    `opt.add_param_group`.

    >>> insert_batchnorm(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)))[0]
    BatchNormed(
      (0): Linear(in_features=3, out_features=4, bias=True)
      (1): BatchNorm1d(4, ...)
    )
    """
    chosen = choose({path: m for path, m in model.named_modules() if isinstance(m, LAYERS)}, skip)
    pairs, others = batch_norms(model)
    normed, names = {layer: path for path, layer in pairs.items()}, all_names(model)
    reasons = {path: why_no_place(model, path, normed) or why_unfit(m, names) for path, m in chosen.items()}
    refuse("insert_batchnorm: these layers cannot have batch norm; leave them out with skip=", model, reasons)
    if others:
        warnings.warn(
            f"insert_batchnorm: cannot tell which layers the model's own batch norm {listed(others)} follows. Leave "
            "those layers out with skip=, or they will be normalized twice.",
            stacklevel=2,
        )
    for path, layer in chosen.items():
        pair = BatchNormed(layer, norm_for(layer))
        pair.path = path
        model.set_submodule(path, pair.train(layer.training))
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
    if not pairs or isinstance(model, BatchNormed):
        raise ValueError(
            f"fold_batchnorm: {type(model).__name__} must contain a BatchNorm1d, 2d or 3d directly behind a Conv, "
            "ConvTranspose or Linear, inserted by insert_batchnorm or in an nn.Sequential; got "
            f"[{listed([*pairs, *others])}]. The model is unchanged. {TORCH_FOLDS}"
        )
    refuse("fold_batchnorm: these batch norms cannot be folded", model, why_unfolded(model, pairs))
    if others:
        warnings.warn(
            f"fold_batchnorm: left {listed(others)} alone: not directly behind a Conv, ConvTranspose or Linear in an "
            f"nn.Sequential. {TORCH_FOLDS}",
            stacklevel=2,
        )
    for path, layer_path in pairs.items():
        layer, bn, (parent, _, _) = model.get_submodule(layer_path), model.get_submodule(path), path.rpartition(".")
        absorb(layer, bn)
        if isinstance(model.get_submodule(parent), BatchNormed):
            model.set_submodule(parent, layer)
        else:
            model.set_submodule(path, nn.Identity().train(bn.training))
    return model


def batch_norms(model: nn.Module) -> tuple[dict[str, str], list[str]]:
    """The layer that each batch norm directly follows, by their paths, and the paths of all other batch norms."""
    pairs: dict[str, str] = {}
    for path, parent in model.named_modules():
        if type(parent).forward in (nn.Sequential.forward, BatchNormed.forward):
            for (before, layer), (after, bn) in pairwise(parent._modules.items()):
                if isinstance(layer, LAYERS) and isinstance(bn, _BatchNorm):
                    pairs[join(path, after)] = join(path, before)
    return pairs, [path for path, m in model.named_modules() if isinstance(m, _BatchNorm) and path not in pairs]


def choose(layers: Mapping[str, nn.Module], skip: Sequence[str]) -> dict[str, nn.Module]:
    """The layers to be followed by batch norm: all but the last and those that `skip` names."""
    if isinstance(skip, str):
        raise refusal("insert_batchnorm", "skip", skip, "a list of path patterns")
    skipped = {pattern: {path for path in layers if fnmatchcase(path, pattern)} for pattern in skip}
    for pattern, paths in skipped.items():
        if not paths:
            raise ValueError(f"insert_batchnorm: skip pattern '{pattern}' fits none of the layers {listed(layers)}.")
    left_out = set().union([*layers][-1:], *skipped.values())
    if left_out == layers.keys():
        raise ValueError(
            "insert_batchnorm: no layer to be followed by batch norm: the last Conv or Linear and those named in skip= "
            f"are left out; got the layers [{listed(layers)}] and skip={list(skip)}."
        )
    return {path: layer for path, layer in layers.items() if path not in left_out}


def all_names(model: nn.Module) -> dict[int, list[str]]:
    """Every path of each module and every name of each parameter, by id."""
    found: dict[int, list[str]] = {}
    for path, value in (*model.named_modules(remove_duplicate=False), *model.named_parameters(remove_duplicate=False)):
        found.setdefault(id(value), []).append(path)
    return found


def why_no_place(model: nn.Module, path: str, normed: Mapping[str, str]) -> str | None:
    """Why batch norm cannot be inserted behind the layer at `path`; None if it can."""
    if path in normed:
        return f"is already followed by batch norm, '{normed[path]}'"
    holder = type(model.get_submodule(path.rpartition(".")[0]))
    native = next(cls for cls in holder.__mro__ if cls.__module__.startswith("torch.nn.modules."))
    return None if native in CONTAINERS else f"belongs to an nn.{native.__name__}, which does not call it"


def why_unfolded(model: nn.Module, pairs: Mapping[str, str]) -> dict[str, str | None]:
    """For each module of a pair, by path, why it cannot be folded; None if it can."""
    reasons: dict[str, str | None] = {}
    names, modes = all_names(model), {model.get_submodule(path).training for path in pairs}
    for path, layer_path in pairs.items():
        layer, bn, (parent, _, _) = model.get_submodule(layer_path), model.get_submodule(path), path.rpartition(".")
        if isinstance(model.get_submodule(parent), BatchNormed):
            reasons[parent] = why_not_alone(model.get_submodule(parent), names)
        unfit = reasons[layer_path] = why_unfit(layer, names)
        reasons[path] = why_unfixed(bn, None if unfit else norm_for(layer)) or why_not_alone(bn, names)
        if not reasons[path] and len(modes) > 1:
            mode = "training" if bn.training else "eval"
            reasons[path] = f"is in {mode} mode, others are not; call model.eval() or model.train() first"
    return reasons


def why_unfit(layer: nn.Module, names: Mapping[int, list[str]]) -> str | None:
    """Why batch norm cannot be folded into this layer; None if it can."""
    if kind_of(layer) is None:
        return "has a forward of its own"
    for name in ("weight", "bias"):
        parameter = lookup(layer, name)
        if parameter is None and getattr(layer, name) is not None:
            return f"has a {name} computed from other parameters (parametrized, normalized or pruned)"
        if isinstance(parameter, UninitializedParameter):
            return f"has a {name} that is not initialized yet; run one forward pass first"
        if parameter is not None and not parameter.is_floating_point():
            return f"has a {name} of {parameter.dtype}; batch norm needs a real floating-point dtype"
    return why_not_alone(layer, names)


def why_not_alone(module: nn.Module, names: Mapping[int, list[str]]) -> str | None:
    """Why a module cannot be changed: hooked, registered twice, tied or sharded; None if it can."""
    hooks = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
    if any(not isinstance(hook, Hook) for hook in hooks):  # hooks of evenstep change no output
        return "has a forward hook; remove it first"
    if len(names[id(module)]) > 1:
        return f"is shared: {listed(names[id(module)])} are one module"
    for name, p in module.named_parameters(recurse=False):
        if len(names[id(p)]) > 1:
            return f"has a tied {name}: {listed(names[id(p)])} are one parameter"
        if sharded(p):
            return f"has a {name} that is a DTensor; insert or fold batch norm before the model is sharded"
    return None


def why_unfixed(bn: nn.Module, fitting: _BatchNorm | None) -> str | None:
    """Why batch norm is not a known scale and shift of units in eval mode, as one that is `fitting`; None if it is."""
    assert isinstance(bn, _BatchNorm)
    if type(bn).forward not in (_BatchNorm.forward, nn.SyncBatchNorm.forward):
        return "has a forward of its own"
    if bn.running_mean is None or bn.running_var is None:
        return "has no running statistics (track_running_stats=False)"
    if bn.num_batches_tracked is not None and not bn.num_batches_tracked:
        return "has seen no batch yet, so its statistics mean nothing; train first"
    if not (bn.running_mean.isfinite().all() and bn.running_var.isfinite().all()):
        return "has running statistics that are not finite"
    if fitting is None or (
        isinstance(bn, (type(fitting), nn.SyncBatchNorm)) and bn.num_features == fitting.num_features
    ):
        return None
    needed = f"{type(fitting).__name__}({fitting.num_features})"
    return f"has {bn.num_features} features; the layer before it needs {needed}"


def refuse(what: str, model: nn.Module, reasons: Mapping[str, str | None]) -> None:
    """Raise all reasons at once, if there are any."""
    found = [(path, type(model.get_submodule(path)).__name__, reason) for path, reason in reasons.items() if reason]
    if found:
        lines = [f"  '{path}' ({cls}) {reason}." for path, cls, reason in found]
        raise ValueError("\n".join([f"{what}. The model is unchanged.", *lines]))


def listed(names: Iterable[str]) -> str:
    """Names for a message, quoted."""
    return ", ".join(f"'{name}'" for name in names)


def norm_for(layer: nn.Module) -> _BatchNorm:
    """A new batch norm that fits the output of a layer."""
    kind, weight = kind_of(layer), layer.get_parameter("weight")
    assert kind is not None  # `why_unfit` has been asked
    rank = len(layer.kernel_size) if isinstance(layer, _ConvNd) else 0
    units = kind.matrix(layer, weight).shape[:2].numel()
    return NORMS[rank](units, device=weight.device, dtype=weight.dtype)


@torch.no_grad()
def absorb(layer: nn.Module, bn: nn.Module) -> None:
    """Fold `bn`, as it is in eval mode, into the parameters of `layer`; arithmetic is in float32 or better."""
    kind, weight, bias = kind_of(layer), layer.get_parameter("weight"), lookup(layer, "bias")
    assert (
        kind is not None and isinstance(bn, _BatchNorm) and bn.running_mean is not None and bn.running_var is not None
    )
    wide = torch.promote_types(torch.promote_types(weight.dtype, bn.running_var.dtype), torch.float32)
    mean, var = bn.running_mean.to(wide), bn.running_var.to(wide)
    b, scale, shift = (None if t is None else t.to(wide) for t in (bias, bn.weight, bn.bias))
    matrix = kind.matrix(layer, weight.to(wide))  # [group, unit, input, kernel]; torch wants all units in one dimension
    fused, fused_bias = fuse_conv_bn_weights(matrix.flatten(0, 1), b, mean, var, bn.eps, scale, shift)
    weight.copy_(kind.unmatrix(layer, fused.reshape(matrix.shape), weight))
    if bias is None:
        layer.bias = nn.Parameter(fused_bias.to(weight.dtype), requires_grad=weight.requires_grad)
    else:
        bias.copy_(fused_bias)
