"""The only file that registers hooks: they add up the inputs of layers in tensors that `step()` reads.

A hook only adds. It does not average, allocate state or wait for the device, so that a forward pass may be repeated,
split, recomputed or compiled. It runs after the layer, whose output tells the sharing count without arithmetic.
"""

import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from .. import foreach
from ..coordinates.coordinates import Statistics
from ..math.moments import sum_about
from ..model.known_layers import BY_SHAPE
from ..model.layer_kind import first_input, rows_of
from ..model.survey import Entry
from ..parallel import dtensor
from .layer_statistics import CallPlan, ForwardState, LayerStatistics, graph_task_id, in_transform

PLANS = 8  # shapes of calls that a layer's hook remembers


def add_square(total: Tensor, grad: Tensor, dim: int) -> None:
    """Add Σ g² over all dimensions but the units, which lie along `dim`, counted from the last."""
    total.add_(sum_about(rows_of(grad.detach()), total.new_zeros(()), dim)[1])


class SquaredGradient(torch.autograd.Function):
    """Identity of a layer's output; the backward pass adds the squared gradient to a tensor."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, total: Tensor, dim: int) -> Tensor:
        """A copy, since autograd forbids operations in place on the output itself; compilers need not make it."""
        ctx.save_for_backward(total)
        ctx.dim = dim
        return output.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        """The gradient as it came."""
        (total,), (grad,) = ctx.saved_tensors, grads
        add_square(total, grad, ctx.dim)
        return grad, None, None


class Hook:
    """A hook that calls a function; in copies and pickles of a model it does nothing."""

    def __init__(self, function: Callable[..., Any] = lambda *args: None) -> None:
        self.function = function

    def __call__(self, *args: Any) -> Any:
        """Call the function."""
        return self.function(*args)

    def __reduce__(self) -> tuple[type["Hook"], tuple[()]]:
        return Hook, ()


class LayerHook(Hook):
    """The forward hook of one module: adds its calls to the statistics of its weights."""

    def __init__(self, entry: Entry, layers: list[LayerStatistics | None]) -> None:
        """`layers` has one place per slot of the layer's kind, None for a slot that is not trained."""
        self.kind, self.layers, self.batch_dim = entry.kind, layers, entry.batch_dim
        self.first = first = next(layer for layer in layers if layer is not None)
        self.forwards, self.plans = first.forwards, dict[Any, CallPlan]()
        self.planned = type(entry.kind) in BY_SHAPE and first.inputs and not first.units  # calls of one shape are alike

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> Any:
        """Add a training call of a layer that is not frozen; returns the output to use instead, or None.

        Calls in eval(), no_grad, inference_mode, transforms, traces and second runs of checkpoints do not count.
        """
        if not (module.training and torch.is_grad_enabled() and trains(module)):
            return None
        eager = not torch.compiler.is_dynamo_compiling()
        if eager and (in_transform() or recomputing()):
            return None
        if eager and self.planned and is_plain(x := first_input(args, kwargs)):
            key = x.shape, x.stride(), output.shape
            plan = self.plans.get(key)
            if plan is None:
                if len(self.plans) > PLANS:
                    self.plans.clear()
                (call,) = filter(None, self.kind.look(module, args, kwargs, output, self.batch_dim))
                plan = self.plans[key] = self.first.plan(call)
            self.forwards.note(self.first, rows=True)
            self.first.add_planned_call(x, plan)
            return None
        with torch.no_grad():
            looks = self.kind.look(module, args, kwargs, output, self.batch_dim)
            for layer, look in zip(self.layers, looks, strict=True):
                if layer is None or look is None:
                    continue
                if eager:
                    self.forwards.note(layer, rows=look.applied > 0)
                if look.applied:
                    layer.add_call(look._replace(x=dtensor.visible(look.x, look.dim)))
        return self._hook_gradient(output)

    def _hook_gradient(self, output: Any) -> Any:
        """Have the backward pass add g², for canonical constants; returns the output to use instead, or None.

        A full backward hook would forbid activations in place, so this is a hook on a tensor. Compilers do not take
        those, or not well (torch 2.9, 2.11): compiled code gets an autograd function.
        """
        layer = self.layers[0]
        if layer is None or not layer.units or not output.requires_grad:
            return None
        dim = self.kind.units_dim(output) - output.dim()
        if output.size(dim) != layer.units or dtensor.sharded(output):
            raise RuntimeError(
                f"canonical coordinates need the whole output of a layer; got {output.size(dim)} of {layer.units} "
                "units here (tensor parallelism): exclude that layer, or take another optimizer."
            )
        if torch.compiler.is_compiling():
            return SquaredGradient.apply(output, layer.g2, dim)  # type: ignore[no-untyped-call]
        if output._base is not None:  # an operation in place on a view would remove its hooks
            output = output.clone()
        output.register_hook(lambda grad: add_square(layer.g2, grad, dim))
        return output


class ModelStatistics:
    """The statistics of all layers of one model for one optimizer, and the hooks that add to them."""

    same_layers = False  # whether all ranks are known to have the same layers

    def __init__(
        self, model: nn.Module | None, entries: list[Entry], needs: Statistics, limits: Sequence[int | None] = ()
    ) -> None:
        """For `entries`; `limits` are the numbers of rows that are read of a call of each, None for all."""
        self.model, self.forwards = model, ForwardState()
        self.layers: dict[Entry, LayerStatistics] = {}
        for entry, limit in zip(entries, limits, strict=True):
            groups, units, inputs, _ = entry.shape
            gradients = needs >= Statistics.GRADIENTS and entry.slot.output_visible
            sizes = groups * inputs if needs >= Statistics.INPUTS else 0, groups * units if gradients else 0
            self.layers[entry] = LayerStatistics(*sizes, entry.weight, entry.kind.stuffed, limit, self.forwards)
        self._hooks = ExitStack()  # removes them when it is closed

    def attach(self, owner: object) -> None:
        """Register the hooks; they are removed when `owner` is deleted, unless `detach` did that before."""
        modules: dict[nn.Module, dict[str, Entry]] = {}
        for entry in self.layers:
            for _, module in entry.places:
                modules.setdefault(module, {})[entry.slot.weight] = entry
        for module, found in modules.items():
            entry = next(iter(found.values()))
            of_slot = [found.get(slot.weight) for slot in entry.kind.slots(module)]
            hook = LayerHook(entry, [self.layers[e] if e else None for e in of_slot])
            self._hooks.callback(module.register_forward_hook(hook, with_kwargs=True).remove)
        if self.model is not None and self.layers:
            start, end = Hook(self.forwards.start), Hook(self.forwards.end)
            self._hooks.callback(self.model.register_forward_pre_hook(start, prepend=True).remove)
            self._hooks.callback(self.model.register_forward_hook(end, always_call=True).remove)
            guard_hooks_in_dynamo()
        weakref.finalize(owner, self._hooks.close)

    def detach(self) -> None:
        """Remove these hooks and no others."""
        self._hooks.close()

    def examples(self) -> Tensor:
        """The number of examples since the last step: that of the layer that had most."""
        if not self.layers:
            return torch.ones(())
        return torch.stack([layer.examples for layer in self.layers.values()]).amax().clamp(min=1)

    def unscale(self, scale: Tensor) -> None:
        """Take a GradScaler's factor out of the squared gradients."""
        for layer in self.layers.values():
            layer.g2.div_(scale.to(layer.g2.device) ** 2)

    def clear(self) -> None:
        """Start over after a step."""
        layers = self.layers.values()
        foreach.zero_([t for layer in layers for t in (layer.added, layer.counter, layer.g2)])
        for layer in layers:
            layer.clear_counts()
        self.forwards.clear()


def guard_hooks_in_dynamo() -> None:
    """Have Dynamo, if it is loaded, recompile modules that get hooks.

    By default it ignores hooks that were registered after it compiled a class of modules, for a model without an
    optimizer of evenstep's, say: their code would be reused here, and hooks would not run.
    """
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None and getattr(dynamo.config, "skip_nnmodule_hook_guards", False):
        dynamo.config.skip_nnmodule_hook_guards = False
        dynamo.reset()


def is_plain(x: Any) -> bool:
    """Whether calls with tensors like `x` are alike: a dense tensor that is not empty, on a CPU or GPU."""
    dense = type(x) is Tensor and x.layout is torch.strided and not x.is_nested
    return dense and (x.is_cpu or x.is_cuda) and x.numel() > 0


def trains(module: nn.Module) -> bool:
    """Whether any parameter of the layer, or of its submodules, requires a gradient."""
    for p in module._parameters.values():  # a loop: this runs at every call of every layer
        if p is not None and p.requires_grad:
            return True
    return any(p.requires_grad for p in module.parameters())


def recomputing() -> bool:
    """Whether this eager call is the second run of a checkpointed forward pass whose first run was counted.

    Non-reentrant checkpointing runs forwards with gradients enabled twice, the second time under saved-tensor hooks of
    its own. Reentrant checkpointing disables gradients in the first run, so that only the second one is counted.
    """
    if graph_task_id() == -1:
        return False
    top = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return top is not None and "_recomputation_hook" in top[0].__qualname__
