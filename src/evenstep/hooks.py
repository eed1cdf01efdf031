"""The only file that registers hooks: what passes through a layer is added up into tensors that `step()` reads.

A hook adds; it never averages, allocates state or asks the device, so forwards may be repeated, split, recomputed or
compiled. It holds its own tensors (module buffers would be broadcast by DDP) and is inert when copied.
"""

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from . import shards
from .coverage import Entry
from .kernels import moments as moments_kernel
from .layers import SHAPED, LayerKind, Look
from .moments import Lattice, Sums, accumulation_dtype, add_zeros, lattice, sum_about, thinned

TALLY = ("rows", "zeros", "applied", "examples")
HELD = 2**18  # numbers beyond which a call is added up at once


class Glance(NamedTuple):
    """What calls with tensors of one shape show: which rows, and their counts."""

    rows: Lattice
    look: Look
    others: list[int]  # the dimensions that rows run along
    behind: int  # how many of them lie behind the inputs
    calls: dict[Any, Any]  # of the kernel, by what it must be built for


class Stage:
    """What one entry's hooks have added up since the last step.

    `slots` holds Σ(x − c) and Σ(x − c)² as [slot, 2, input]: a kernel that works in parallel adds to several slots, so
    that its sums come in the same order in every run. The centre c is the running mean, or the first row seen (NaN:
    none yet). `tally` counts rows, rows of zeros, uses of the weight, and examples. Of a forward that the model
    announces, a layer's first call alone counts examples: `clock` numbers the forwards (NaN where none was announced,
    which no number equals), `seen` is the last one it was called in. `fired` counts inputs raised, units held back and
    steps since the start, `last` the same guards' work in the newest step with its largest relative step.

    On the CPU, where an operation between two layers costs more than its arithmetic, a call is `held` as deviations
    from the centre and counts on the host, until `slots` and `tally` are asked for; the host knows them to be zero
    otherwise by the tensors' versions, which compiled code raises, too.
    """

    rows: Tensor
    zeros: Tensor
    applied: Tensor
    examples: Tensor

    def __init__(
        self,
        inputs: int,
        units: int,
        like: Tensor,
        *,
        stuffed: bool = False,
        limit: int | None = None,
        clocks: dict[torch.device, Tensor] | None = None,
    ) -> None:
        """Room for `inputs` inputs and the squared gradients of `units` units, from at most `limit` rows a call.

        `clocks` are those of the model, one per device.
        """
        dtype = accumulation_dtype(like.dtype)
        self.inputs, self.units, self.stuffed, self.limit = inputs, units, stuffed, limit
        self.clocks = {} if clocks is None else clocks
        self._slots = torch.zeros(moments_kernel.slots(like), 2, inputs, dtype=dtype, device=like.device)
        self.centre = torch.full((inputs,), torch.nan, dtype=dtype, device=like.device)
        self.g2 = torch.zeros(units, dtype=dtype, device=like.device)
        self._tally = torch.zeros(4, dtype=dtype, device=like.device)
        self.seen = torch.zeros((), device=like.device)
        self.centred = False  # whether the host knows that the centre is a running mean
        self.counts: dict[tuple[int, int, int], Tensor] = {}
        self.held: tuple[Tensor, list[int]] | None = None
        self.held_sums: tuple[Tensor, Tensor] | None = None
        self.held_counts: list[float] = [0, 0, 0, 0]
        self.seen_at = 0  # the clock's version when the host last looked
        self.fired, self.last = torch.zeros(2, 3, dtype=torch.float32, device=like.device)
        self._name()

    def _name(self) -> None:
        self._counts = self._tally.unbind()
        self._sums = self._slots[0].unbind()
        self.counts = {}
        self.centres: dict[int, Tensor] = {}
        self.empty_at = -1, -1
        device = self._tally.device
        self.clock = self.clocks.setdefault(device, torch.full((), torch.nan, device=device))

    @property
    def slots(self) -> Tensor:
        """Σ(x − c) and Σ(x − c)²."""
        self._add_up()
        if self.held_sums is not None:
            torch._foreach_add_(self._sums, self.held_sums)
            self.held_sums = None
        return self._slots

    @property
    def tally(self) -> Tensor:
        """Rows, rows of zeros, uses of the weight, and examples."""
        if any(self.held_counts):
            self._tally.add_(self._tally.new_tensor(self.held_counts))
            self.held_counts = [0, 0, 0, 0]
        return self._tally

    def __getattr__(self, name: str) -> Tensor:
        """The numbers of the tally: `rows`, `zeros`, `applied`, `examples`."""
        if name not in TALLY:
            raise AttributeError(f"{type(self).__name__} has no attribute '{name}'")
        return self.tally[TALLY.index(name)]

    def _add_up(self) -> None:
        """Let what is held be sums."""
        if self.held is not None:
            found, self.held = squared(*self.held), None
            if self.held_sums is not None:
                torch._foreach_add_(self.held_sums, found)
            else:
                self.held_sums = found

    def sums_here(self) -> tuple[Tensor, Tensor]:
        """Σ(x − c) and Σ(x − c)² on the CPU."""
        self._add_up()
        if self.held_sums is not None and self._slots._version == self.empty_at[0]:
            return self.held_sums
        first, second = self.slots[0]
        return first, second

    def counts_here(self) -> list[float]:
        """The tally as numbers, on the CPU."""
        if self._tally._version == self.empty_at[1]:
            return self.held_counts
        return self.tally.tolist()

    def to(self, device: torch.device) -> None:
        """Follow the model to another device."""
        if self._tally.device != device:
            whole, self._tally = self.slots.sum(0), self.tally.to(device)
            self._slots = whole.new_zeros(moments_kernel.slots(whole, device), *whole.shape)
            self._slots[0] = whole
            for name in ("_slots", "centre", "g2", "seen", "fired", "last"):
                setattr(self, name, getattr(self, name).to(device))
            self._name()

    def sums(self) -> Sums:
        """The batch so far, with the zeros that the layer inserts."""
        first, second = self.slots.sum(0) if len(self.slots) > 1 else self.slots[0]
        sums = Sums(self.rows, first, second)
        return add_zeros(sums, self.zeros, self.centre) if self.stuffed else sums

    def see(self, look: Look) -> None:
        """Add one call. Repeated calls within one forward of the model show the same examples again."""
        if look.x is not None:
            self.to(look.x.device)
        x = None if look.x is None else thinned(look.x.detach(), look.dim, self.limit)
        if x is not None and moments_kernel.serves(x, self._slots):
            moments_kernel.add(x, look, self, {})
            return
        self._count(0 if x is None else x.numel() // x.shape[look.dim], look)
        if x is None:
            return
        self._centre_on(x, look.dim)
        first, second = sum_about(x, self.centre, look.dim)
        sums = self._slots[0].unbind() if torch.compiler.is_compiling() else self._sums
        sums[0].add_(first)
        sums[1].add_(second)

    def _centre_on(self, x: Tensor, inputs: int) -> None:
        """Let the first row be the centre where there is none."""
        if torch.compiler.is_compiling() or not self.centred:
            row = x
            for dim in reversed(range(x.dim())):
                row = row if dim == inputs else row.select(dim, 0)
            self.centre.copy_(torch.where(self.centre.isnan(), row, self.centre))

    def hold(self, x: Tensor, glance: Glance) -> None:
        """Add one eager call on the CPU, in as few operations as may be until it is asked for."""
        if not self._tally.is_cpu:
            self.to(x.device)
        if self.held is not None:
            self._add_up()
        look, x = glance.look, glance.rows.of(x.detach())
        if not self.centred:
            self._centre_on(x, look.dim)
        centre = self.centres.get(glance.behind)
        if centre is None:
            centre = self.centres[glance.behind] = self.centre.view(-1, *[1] * glance.behind)
        deviation = (x if x.dtype == centre.dtype else x.to(centre.dtype)) - centre
        self.held = deviation, glance.others
        if deviation.numel() > HELD:
            self._add_up()
        counts, now = self.held_counts, self.clock._version
        counts[0] += glance.rows.rows
        counts[1] += look.zeros
        counts[2] += look.applied
        if self.seen._version:  # compiled calls look at the tensors
            new = self.clock.item() != self.seen.item()
            self.seen.copy_(self.clock)
        else:
            new = not now or now != self.seen_at
        self.seen_at = now
        counts[3] += look.examples if new else 0

    def launch(self, x: Tensor, glance: Glance) -> bool:
        """Add one eager call on a GPU by the kernel, if it takes such tensors."""
        self.to(x.device)
        x = glance.rows.of(x.detach())
        served = moments_kernel.serves(x, self._slots)
        if served:
            moments_kernel.add(x, glance.look, self, glance.calls)
        return served

    def _count(self, rows: int, look: Look) -> None:
        """Add to the tally: number by number in compiled code, which fuses it, else as one tensor that is kept.

        Compiled code takes views of its own: ours may lie off the 16 bytes from which CUDA graphs may write.
        """
        new, key = self.seen != self.clock, (rows, look.zeros, look.applied)
        if torch.compiler.is_compiling():
            *tally, examples = self._tally.unbind()
            for total, count in zip(tally, key, strict=True):
                total.add_(count)
            examples.add_(new, alpha=look.examples)
        else:
            if key not in self.counts:
                if len(self.counts) > 8:  # sizes that never come back need not be kept
                    self.counts.clear()
                self.counts[key] = self._tally.new_tensor([*key, 0])
            self._tally.add_(self.counts[key])
            self._counts[3].add_(new, alpha=look.examples)
        self.seen.copy_(self.clock)

    def guarded(self, raised: Tensor, held: Tensor, largest: Tensor) -> None:
        """Count, on the device, what the guards did in a step."""
        self.last.copy_(torch.stack([raised.float(), held.float(), largest.float()]))
        self.fired.add_(torch.stack([self.last[0], self.last[1], torch.ones_like(self.last[2])]))

    def use_up(self) -> list[Tensor]:
        """Drop what is held, and name the tensors that are to be zeroed for the next step."""
        self.held, self.held_sums, self.held_counts = None, None, [0, 0, 0, 0]
        found = [self.g2] if self.units else []
        if not self._tally.is_cpu or self.empty_at != (self._slots._version, self._tally._version):
            found += [self._slots, self._tally]
        return found

    def emptied(self) -> None:
        """Note that these are zero now."""
        self.empty_at = self._slots._version, self._tally._version


def squared(deviation: Tensor, others: list[int]) -> tuple[Tensor, Tensor]:
    """Σ(x − c) and Σ(x − c)², the deviations used up."""
    if not others:
        return deviation, deviation * deviation
    first = deviation.sum(others)
    return first, deviation.mul_(deviation).sum(others)


def add_square(total: Tensor, grad: Tensor, dim: int) -> None:
    """Add Σ ĝ² over all but the units, which lie along `dim`."""
    total.add_(sum_about(grad.detach(), total.new_zeros(()), dim)[1])


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
        """Count training forwards alone: not eval(), no_grad, inference_mode, `torch.func`, nor a second run.

        A layer that is frozen is not looked at; it may thaw at any time.

        In compiled code, the output whose gradient is watched; else nothing, which leaves the layer its own.
        """
        if not (module.training and torch.is_grad_enabled() and trains(module)) or in_transform() or recomputing():
            return None
        if self.shaped and self._glanced(module, args, kwargs, output):
            return None
        with torch.no_grad():
            looks = self.kind.look(module, args, kwargs, output, self.batch_dim)
            for stage, look in zip(self.stages, looks, strict=True):
                if stage is None or look is None:
                    continue
                if not torch.compiler.is_compiling():
                    self.traffic.rows |= look.applied > 0
                    self.traffic.empty |= look.applied == 0
                if look.applied:
                    stage.see(look._replace(x=shards.visible(look.x, look.dim) if self.inputs else None))
        return self._watch_gradient(output)

    def _glanced(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> bool:
        """Show an eager call to the stage, if it is one with plain tensors that are not empty, on a CPU or GPU."""
        x = args[0] if args else next(iter(kwargs.values()))
        if torch.compiler.is_compiling() or type(x) is not Tensor or not (x.is_cpu or x.is_cuda):
            return False
        key, stage = (x.shape, x.stride(), output.shape), self.stages[0]
        glance = self.glances.get(key)
        if glance is None:
            (look,) = self.kind.look(module, args, kwargs, output, self.batch_dim)
            if stage is None or look is None or not look.applied or not x.numel():
                return False
            if len(self.glances) > 8:  # sizes that never come back need not be kept
                self.glances.clear()
            found = lattice(x.detach(), look.dim, stage.limit)
            others = [d for d in range(x.dim()) if d != look.dim]
            glance = self.glances[key] = Glance(found, look._replace(x=None), others, x.dim() - 1 - look.dim, {})
        assert stage is not None
        if x.is_cpu:
            stage.hold(x, glance)
        elif not stage.launch(x, glance):
            return False
        self.traffic.rows = True
        return True

    def _watch_gradient(self, output: Any) -> Any:
        """Canonical constants need g²: a tensor hook, since a full backward hook forbids in-place activations.

        Compilers do not take hooks on what they compile, or not well (torch 2.9, 2.11); a function of autograd they do.
        """
        stage = self.stages[0]
        if not self.gradients or stage is None or not stage.units or not output.requires_grad:
            return None
        dim = self.kind.units_dim(output)
        if output.shape[dim] != stage.units or shards.sharded(output):
            raise RuntimeError(
                f"canonical coordinates need the whole output of a layer; got {output.shape[dim]} of {stage.units} "
                "units here (tensor parallelism): exclude that layer, or take another optimizer."
            )
        if torch.compiler.is_compiling():
            return ShownGradient.apply(output, stage.g2, dim)  # type: ignore[no-untyped-call]
        output.register_hook(lambda grad: add_square(stage.g2, grad, dim))
        return None

    def __deepcopy__(self, memo: dict[int, Any]) -> "Inert":
        """A copied model trains without us."""
        return Inert()

    def __reduce__(self) -> tuple[type["Inert"], tuple[()]]:
        """A pickled model trains without us."""
        return Inert, ()


class Announce(Watch):
    """The model's own pre-hook: a new forward begins, so a layer's next call shows new examples."""

    def __init__(self, clocks: dict[torch.device, Tensor]) -> None:
        """The clocks of the model's stages."""
        self.clocks, self.ticks = clocks, 0

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:  # type: ignore[override]
        """Let the clocks tick; repeated calls within this forward are sharing, not examples."""
        if not (module.training and torch.is_grad_enabled()) or in_transform():
            return
        eager = not torch.compiler.is_compiling()
        if eager:
            self.ticks = (self.ticks + 1) % 2**20
        for clock in self.clocks.values():
            if eager and clock.is_cpu:
                clock.fill_(self.ticks + 0.5)  # compiled code counts in whole numbers
            else:
                with torch.no_grad():
                    clock.copy_(clock.nan_to_num().floor().add(1).remainder(2**20))


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
        self.clocks: dict[torch.device, Tensor] = {}
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
            clocks=self.clocks,
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
            announce = Announce(self.clocks)
            self._handles.append(self.model.register_forward_pre_hook(announce, prepend=True))
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

    def clear(self) -> None:
        """Forget what was staged: it has been used, or is not to be."""
        used = [t for stage in self.stages.values() for t in stage.use_up()]
        if used:
            torch._foreach_zero_(used)
            for stage in self.stages.values():
                stage.emptied()
        self.traffic.rows = self.traffic.empty = False


def remove(handles: list[RemovableHandle]) -> None:
    """Remove hooks by their handles."""
    while handles:
        handles.pop().remove()


def trains(module: nn.Module) -> bool:
    """Whether any parameter of the layer, or of what it is made of, gets a gradient."""
    own = any(p is not None and p.requires_grad for p in module._parameters.values())
    return own or any(p.requires_grad for p in module.parameters())


def recomputing() -> bool:
    """Whether this is the second run of a checkpointed forward whose first run was counted.

    Non-reentrant checkpointing runs forwards with gradients on twice, and marks the second with saved-tensor hooks of
    its own; reentrant checkpointing has them off in the first run, so that the second is the one to count.
    """
    if torch.compiler.is_compiling() or torch._C._current_graph_task_id() == -1:
        return False
    top = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return top is not None and "_recomputation_hook" in top[0].__qualname__


def in_transform() -> bool:
    """Whether a `torch.func` transform is active: what passes then is not a tensor we could keep."""
    return not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is not None
