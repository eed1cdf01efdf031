"""The only file that registers hooks: what passes through a layer is added up into tensors that `step()` reads.

A hook adds; it never averages, allocates state or asks the device, so forwards may be repeated, split, recomputed or
compiled. It holds its own tensors (module buffers would be broadcast by DDP) and is inert when copied.
"""

import sys
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..math.moments import sum_about
from ..model.layers import SHAPED, LayerKind, rows_of, shown
from ..model.survey import Entry
from ..parallel import dtensor as shards
from .batch import Forwards, Glance, Stage, glance, graph_task

transforms, tracing = torch._C._functorch.peek_interpreter_stack, torch._C._get_tracing_state


def add_square(total: Tensor, grad: Tensor, dim: int) -> None:
    """Add Σ ĝ² over all but the units, which lie along `dim`, counted from the last."""
    total.add_(sum_about(rows_of(grad.detach()), total.new_zeros(()), dim)[1])


class ShownGradient(torch.autograd.Function):
    """A layer's output as it is; its gradient is added to a sum of squares on its way back."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, total: Tensor, dim: int) -> Tensor:
        """A copy, which a compiler need not make: the output itself could not be changed in place."""
        ctx.save_for_backward(total)
        ctx.dim = dim
        return output.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        """The gradient as it came."""
        (total,), (grad,) = ctx.saved_tensors, grads
        add_square(total, grad, ctx.dim)
        return grad, None, None


def hookable(output: Tensor, dim: int) -> Tensor | None:
    """A tensor whose hook gets the gradient of `output`, units along `dim`, whatever is done to `output` in place.

    An in-place operation on a view takes the view's own node out of the graph, with its hooks, and records itself
    behind its base. So the hook goes to the base if that has the same elements in the same order, else nowhere (None).
    """
    base = output._base
    if base is None or type(output) is not Tensor or output.is_nested:
        return output
    same = base.numel() == output.numel() and base.shape[dim:] == output.shape[dim:]
    return base if same and base.is_contiguous() and output.is_contiguous() else None


class Traffic:
    """Whether anything, or an empty batch, came by since the last step (not kept in compiled code)."""

    rows = False
    empty = False


class Watch:
    """The forward hook of one module: shows its calls to the stages of its slots."""

    def __init__(
        self,
        kind: LayerKind,
        stages: list[Stage | None],
        batch_dim: int,
        inputs: bool,
        gradients: bool,
        traffic: Traffic,
    ) -> None:
        """`stages` has one place per slot, None for a slot that nobody trains."""
        self.kind, self.stages, self.batch_dim = kind, stages, batch_dim
        self.inputs, self.gradients, self.traffic = inputs, gradients, traffic
        self.glances: dict[Any, Glance] = {}
        self.shaped = inputs and not gradients and type(kind) in SHAPED  # whether shapes tell all but the numbers

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> Any:
        """Count training forwards alone: not eval(), no_grad, inference_mode, transforms, traces, nor a second run.

        A layer that is frozen is not looked at; it may thaw at any time.

        In compiled code, the output whose gradient is watched; else nothing, which leaves the layer its own.
        """
        if not (module.training and torch.is_grad_enabled() and trains(module)):
            return None
        eager = not torch.compiler.is_dynamo_compiling()
        if eager and (in_transform() or recomputing()):
            return None
        if eager and self.shaped and self._glanced(module, args, kwargs, output):
            return None
        with torch.no_grad():
            looks = self.kind.look(module, args, kwargs, output, self.batch_dim)
            for stage, look in zip(self.stages, looks, strict=True):
                if stage is None or look is None:
                    continue
                if eager:
                    self.traffic.rows |= look.applied > 0
                    self.traffic.empty |= look.applied == 0
                if look.applied:
                    stage.see(look._replace(x=shards.visible(look.x, look.dim) if self.inputs else None))
        return self._watch_gradient(output)

    def _glanced(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> bool:
        """Show an eager call to the stage, if it is one with plain tensors that are not empty, on a CPU or GPU."""
        x, stage = args[0] if args else shown(args, kwargs), self.stages[0]
        if type(x) is not Tensor or x.layout is not torch.strided or x.is_nested or not (x.is_cpu or x.is_cuda):
            return False
        key = x.shape, x.stride(), output.shape
        known = self.glances.get(key)
        if known is None:
            (look,) = self.kind.look(module, args, kwargs, output, self.batch_dim)
            if stage is None or look is None or not look.applied or not x.numel():
                return False
            if len(self.glances) > 8:  # sizes that never come back need not be kept
                self.glances.clear()
            known = self.glances[key] = glance(x, look, stage.limit)
        assert stage is not None
        stage.see_like(x, known)
        self.traffic.rows = True
        return True

    def _watch_gradient(self, output: Any) -> Any:
        """Canonical constants need g²: a tensor hook, since a full backward hook forbids in-place activations.

        Compiled code gets an autograd function instead: compilers reject hooks on tensors inside a graph, or run them
        wrongly (torch 2.9, 2.11). So does a view that has no equivalent base to hook.
        """
        stage = self.stages[0]
        if not self.gradients or stage is None or not stage.units or not output.requires_grad:
            return None
        dim = self.kind.units_dim(output) - output.dim()
        if output.size(dim) != stage.units or shards.sharded(output):
            raise RuntimeError(
                f"canonical coordinates need the whole output of a layer; got {output.size(dim)} of {stage.units} "
                "units here (tensor parallelism): exclude that layer, or take another optimizer."
            )
        hooked = None if torch.compiler.is_compiling() else hookable(output, dim)
        if hooked is None:
            return ShownGradient.apply(output, stage.g2, dim)  # type: ignore[no-untyped-call]
        hooked.register_hook(lambda grad: add_square(stage.g2, grad, dim))
        return None

    def __deepcopy__(self, memo: dict[int, Any]) -> "Inert":
        """A copied model trains without us."""
        return Inert()

    def __reduce__(self) -> tuple[type["Inert"], tuple[()]]:
        """A pickled model trains without us."""
        return Inert, ()


class Announce(Watch):
    """The model's own pre-hook: a new forward begins, so a layer's next call shows new examples."""

    def __init__(self, forwards: Forwards) -> None:
        """The forwards that the model's stages know."""
        self.forwards, self.ticks = forwards, 0

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:  # type: ignore[override]
        """Let the clocks tick; repeated calls within this forward are sharing, not examples."""
        eager = not torch.compiler.is_dynamo_compiling()
        if not (module.training and torch.is_grad_enabled()) or (eager and in_transform()):
            return
        if eager:
            self.ticks = (self.ticks + 1) % 2**20
        self.forwards.running = self.forwards.announced = True
        for clock in self.forwards.clocks.values():
            if eager and clock.is_cpu:
                clock.fill_(self.ticks + 0.5)  # compiled code counts in whole numbers
            else:
                with torch.no_grad():
                    clock.copy_(clock.nan_to_num().floor().add(1).remainder(2**20))


class Conclude(Watch):
    """The model's own hook: its forward is over, so what is called from now on is no part of it."""

    def __init__(self, forwards: Forwards) -> None:
        """The forwards that the model's stages know."""
        self.forwards = forwards

    def __call__(self, *given: Any) -> None:
        """Tell the stages, if they have been told that it runs: forwards that do not train have no effect.

        The output stays in `given`: as a name it would be looked at by a compiler, gradient and all.
        """
        if self.forwards.running:
            self.forwards.running = False


class Inert:
    """What a hook becomes in a copy of the model."""

    def __call__(self, *args: Any) -> None:
        """Do nothing."""


class Collector:
    """All hooks of one optimizer on one model, and the stages they fill."""

    def __init__(
        self,
        model: nn.Module,
        entries: Iterable[Entry],
        *,
        inputs: bool,
        gradients: bool,
        rows: Callable[[Entry], int | None] = lambda entry: None,
    ) -> None:
        """Stages for `entries`, of their inputs' moments and squared gradients as wanted; hooks come with `attach`.

        `rows(entry)` bounds how many rows of a call are looked at.
        """
        self.model, self.inputs, self.gradients, self.traffic = model, inputs, gradients, Traffic()
        self.entries = list(entries)
        self.forwards = Forwards()
        self.stages = {entry.name: self._stage(entry, rows(entry)) for entry in self.entries}
        self._handles: list[RemovableHandle] = []

    def _stage(self, entry: Entry, limit: int | None) -> Stage:
        groups, units, inputs, _ = entry.shape
        return Stage(
            groups * inputs,
            groups * units if self.gradients and entry.slot.shown else 0,
            entry.weight,
            stuffed=entry.kind.stuffed,
            limit=limit,
            forwards=self.forwards,
        )

    def _stage_of(self, entry: Entry | None) -> Stage | None:
        return None if entry is None else self.stages[entry.name]

    def staged(self) -> list[tuple[Entry, Stage]]:
        """The entries with their stages."""
        return [(entry, self.stages[entry.name]) for entry in self.entries]

    def attach(self, owner: object) -> None:
        """Register the hooks; they go with `owner` if `detach` is never called."""
        modules: dict[nn.Module, dict[str, Entry]] = {}
        for entry in self.entries:
            for _, module in entry.places:
                modules.setdefault(module, {})[entry.slot.weight] = entry
        for module, found in modules.items():
            kind, batch_dim = (e := next(iter(found.values()))).kind, e.batch_dim
            stages = [self._stage_of(found.get(slot.weight)) for slot in kind.slots(module)]
            watch = Watch(kind, stages, batch_dim, self.inputs, self.gradients, self.traffic)
            self._handles.append(module.register_forward_hook(watch, with_kwargs=True))
        if self.stages:
            announce, conclude = Announce(self.forwards), Conclude(self.forwards)
            self._handles.append(self.model.register_forward_pre_hook(announce, prepend=True))
            self._handles.append(self.model.register_forward_hook(conclude, always_call=True))
            let_dynamo_look()
        weakref.finalize(owner, remove, self._handles)

    def detach(self) -> None:
        """Remove the hooks, all of them and no others."""
        remove(self._handles)

    def examples(self) -> Tensor:
        """How many examples this step has, as the layer that saw most of them counts."""
        if not self.stages:
            return torch.ones(())
        return torch.stack([stage.examples for stage in self.stages.values()]).amax().clamp(min=1)

    def unscale(self, scale: Tensor) -> None:
        """Take a GradScaler's factor out of the squared gradients: hooks see scaled ones."""
        for stage in self.stages.values():
            stage.g2.div_(scale.to(stage.g2.device) ** 2)

    def write_held(self) -> None:
        """Let tensors have all that stages hold."""
        for stage in self.stages.values():
            stage.write_held()

    def clear(self) -> None:
        """Forget what was staged: it has been used, or is not to be."""
        used = [t for stage in self.stages.values() for t in stage.use_up()]
        if used:
            torch._foreach_zero_(used)
            for stage in self.stages.values():
                stage.emptied()
        self.traffic.rows = self.traffic.empty = False
        self.forwards.running = self.forwards.announced = False


def let_dynamo_look() -> None:
    """Have Dynamo, where it is loaded, tell modules with hooks from those without.

    By default it takes no notice of hooks that were not there when it compiled a class of modules: what it has made of
    another model, without an optimizer of ours, would run without our hooks. What was compiled is compiled again.
    """
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None and getattr(dynamo.config, "skip_nnmodule_hook_guards", False):
        dynamo.config.skip_nnmodule_hook_guards = False
        dynamo.reset()


def remove(handles: list[RemovableHandle]) -> None:
    """Remove hooks by their handles."""
    while handles:
        handles.pop().remove()


def trains(module: nn.Module) -> bool:
    """Whether any parameter of the layer, or of what it is made of, gets a gradient."""
    for p in module._parameters.values():  # a loop: this runs at every call of every layer
        if p is not None and p.requires_grad:
            return True
    return any(p.requires_grad for p in module.parameters())


def recomputing() -> bool:
    """Whether this, in eager code, is the second run of a checkpointed forward whose first run was counted.

    Non-reentrant checkpointing runs forwards with gradients on twice, and marks the second with saved-tensor hooks of
    its own; reentrant checkpointing has them off in the first run, so that the second is the one to count.
    """
    if graph_task() == -1:
        return False
    top = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return top is not None and "_recomputation_hook" in top[0].__qualname__


def in_transform() -> bool:
    """Whether `torch.func`, whose tensors we could not keep, `torch.jit.trace` or `torch.export` runs this eager code.

    What they make of a model runs without us.
    """
    return transforms() is not None or tracing() is not None or torch.compiler.is_compiling()
