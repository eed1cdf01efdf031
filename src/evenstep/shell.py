"""torch.optim's contract, kept once for every optimizer of the library: groups, state, closure, model, faults.

A subclass names its coordinates and its rule; the arithmetic is in the core.
"""

import warnings
from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo  # torch.compiler.disable imports the compiler with the library
from torch.optim import Optimizer

from . import checkpoints, checks, distributed, frames, shards, update
from .blocks import Block, gather
from .coverage import Coverage, survey
from .hooks import Collector
from .layout import Layout, arrange
from .moments import accumulation_dtype
from .motion import at_rest, displace, exchange, follow, gradient, named, per_bias, rates, restored, step_count
from .report import coverage_of
from .stages import Stage
from .together import begin

TRUST_FLOOR = 1e-3  # s₀: a unit shorter than this is measured as if it had this length

NONFINITE = "a gradient is not finite; the step is skipped, weights and moments are unchanged."


class Plan(NamedTuple):
    """The blocks of a step: those that move together, and the rest, which move one by one."""

    signature: list[Any]
    blocks: list[Block]
    layouts: list[Layout]
    rest: list[Block]


class Common:
    """What all blocks of a step go by; attributes of an optimizer compiled code may not set (torch 2.11)."""

    examples: Tensor  # of this step and rank
    square: Tensor  # of the whole network's gradient


class Monitor(Protocol):
    """What a step tells to whoever watches it: each block before its batch joins the moments, then the end."""

    def note(self, block: Block, stage: Stage | None, state: dict[str, Any]) -> None:
        """One block."""

    def end_step(self) -> None:
        """All blocks have been noted."""


class CoordinateOptimizer(Optimizer):
    """Base of all optimizers here: coordinates x rule x guard on every block of parameters."""

    coordinates: ClassVar[str] = "whitened"  # what layers get: "whitened", "canonical", "fan-in" or "plain"
    linear: ClassVar[bool] = True  # a rule that normalizes gets β = 1
    _together: ClassVar[str | None] = None  # the rule that many blocks can follow at once: "sg", "even", or none
    _copied: ClassVar[tuple[str, ...]] = ()  # attributes that a copy of the optimizer keeps
    process_group: Any

    def __init__(
        self, params: Any, defaults: dict[str, Any], model: nn.Module | None = None, process_group: Any = None
    ) -> None:
        """`params` is a module, or what torch takes, then with `model=` or a later `attach`."""
        self._detached()
        self.process_group = distributed.checked(self._owner, process_group)
        whole = isinstance(params, nn.Module)
        params, model = checks.parameters_of(self._owner, params, model)
        self._whole = whole
        checks.hyperparameters(self._owner, defaults)
        super().__init__(params, defaults)
        if model is not None:
            self.attach(model)

    def _detached(self) -> None:
        self._owner = type(self).__name__
        self._collector: Collector | None = None
        self._left_out: dict[int, str] = {}
        self._whole = False  # whether it was built from a module, so that all its parameters are ours
        self._complete = False  # whether every parameter has its state
        self._plan: Plan | None = None
        self._stale = False  # whether state has been made or loaded since the plan
        self._retired: list[Plan] = []
        self._warned: set[str] = set()
        self._nonfinite = torch.zeros((), dtype=torch.int64)
        self._monitors: list[Monitor] = []
        self.process_group = None
        self._pool = distributed.Pool()
        self._common = Common()
        self._world = 1  # how many ranks took part in the last step

    def __getstate__(self) -> dict[str, Any]:
        """Groups and state, as torch's, and what the rule needs; never the model or its hooks."""
        own = {k: self.__dict__[k] for k in self._copied if k in self.__dict__}
        return {**super().__getstate__(), **own, "process_group": distributed.lasting(self.process_group)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copied or unpickled optimizer has its groups and state, but no model until `attach`."""
        if "_collector" not in self.__dict__:
            self._detached()
        super().__setstate__(state)
        for group in self.param_groups:
            for key, value in self.defaults.items():
                if key != "differentiable":  # torch puts that among the defaults of every optimizer it unpickles
                    group.setdefault(key, value)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's, with the group's hyperparameters checked."""
        if self._whole and self.param_groups:  # they have names, then, though nobody gave any
            model = None if self._collector is None else self._collector.model
            param_group = {**param_group, "params": named(param_group["params"], model)}
        full = {**self.defaults, **param_group}
        checks.hyperparameters(self._owner, full)
        if full.get("plain_lr") is not None:  # kept as a ratio, so that schedules and groups' own lr move it too
            own = "plain_lr" in param_group or not self.defaults["lr"]
            lr = full["lr"] if own else self.defaults["lr"]
            param_group.setdefault("plain_ratio", full["plain_lr"] / float(lr) if lr else 1.0)
        super().add_param_group(param_group)
        checks.supported(self._owner, self.param_groups[-1]["params"])
        if self._collector is not None:
            self.attach(self._collector.model)

    # the model

    def attach(self, model: nn.Module) -> None:
        """Watch the layers of `model` whose parameters this optimizer holds."""
        held = {id(p) for group in self.param_groups for p in group["params"]}
        if not any(id(p) in held for p in model.parameters()):
            raise ValueError(
                f"{self._owner}: none of the parameters of this {type(model).__name__} is in the optimizer; build it "
                "from the model, or from that model's parameters."
            )
        self.detach()
        entries, self._left_out = survey(model, self._why_not)
        trained = [e for e in entries if any(p is not None and id(p) in held for p in [e.weight, *e.biases])]
        moments = self.coordinates in ("whitened", "canonical")
        self._collector = Collector(
            model,
            trained,
            inputs=moments,
            gradients=self.coordinates == "canonical",
            rows=lambda entry: self._option(entry.weight, "rows", None),
        )
        self._complete, self._pool = False, distributed.Pool()
        self._recentre()
        if self.coordinates != "plain":
            self._collector.attach(self)
            if not trained:
                self._warn(
                    "coverage",
                    f"no layer of this {type(model).__name__} is covered, so every parameter is trained in plain "
                    "coordinates; opt.coverage() says why.",
                )

    def detach(self) -> None:
        """Take the hooks off the model (to export it, or for good); steps go on with the last moments."""
        if self._collector is not None:
            self._collector.detach()

    def refresh(self) -> None:
        """Look at the model again after surgery on its layers.

        An optimizer that was built from the model drops parameters that have left it, with their state, and takes new
        ones into its first group; one that was built from parameters keeps to those.
        """
        if self._collector is None:
            raise RuntimeError(f"{self._owner}: refresh() needs a model; call attach(model) first.")
        model = self._collector.model
        if self._whole:
            exchange(self.param_groups, model)
            kept = {id(p) for group in self.param_groups for p in group["params"]}
            for p in [p for p in self.state if id(p) not in kept]:
                del self.state[p]
        self.attach(model)

    def _why_not(self, name: str, weight: Tensor) -> str | None:
        patterns = self._option(weight, "exclude", ())
        return next((f"excluded by '{p}'" for p in patterns if fnmatchcase(name, p)), None)

    def _option(self, weight: Tensor, name: str, default: Any) -> Any:
        """An option of the group that holds `weight`."""
        group = next((g for g in self.param_groups if any(p is weight for p in g["params"])), {})
        return group.get(name, default)

    def coverage(self) -> Coverage:
        """How each parameter is treated: rows (parameter, layer, treatment, reason); prints as a table."""
        if self._collector is None:
            return coverage_of(self.param_groups, self._blocks(lambda p: p.requires_grad), None, {})
        reasons = dict(self._left_out)
        for entry in self._collector.entries:
            if unfit := entry.unfit:
                reasons |= {id(p): unfit for p in [entry.weight, *entry.biases] if p is not None}
        return coverage_of(self.param_groups, self._blocks(lambda p: p.requires_grad), self._collector.model, reasons)

    def __repr__(self) -> str:
        """torch's own, with the coverage in one line."""
        return f"{super().__repr__()}\ncoverage: {self.coverage().summary()}"

    def _stage(self, block: Block) -> Stage | None:
        return None if self._collector is None or block.entry is None else self._collector.stages[block.entry.name]

    def _blocks(self, trains: Callable[[Tensor], bool]) -> list[Block]:
        entries = [] if self._collector is None else self._collector.entries
        return gather(self.param_groups, entries, self.coordinates, trains)

    # the step

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step. The closure runs first: trainers do forward and backward inside it."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        ready = self._ready_apart() if torch.compiler.is_compiling() else self._ready(compiled=False)
        if ready is not None:
            self._step_blocks(*ready)
        if self._collector is not None:
            self._collector.clear()
        return loss

    @_disable_dynamo
    def _ready_apart(self) -> tuple[Plan, Tensor | None] | None:
        """What compilers leave to the host."""
        if self._collector is not None:
            self._collector.write_held()
        return self._ready(compiled=True)

    def _ready(self, compiled: bool) -> tuple[Plan, Tensor | None] | None:
        """What moves in this step, with its state, and whether ranks have found their gradients finite.

        None after an empty batch.
        """
        first = not self._complete
        if first:
            self._init_state(self._blocks(lambda p: p.requires_grad or p.grad is not None))
            self._complete, self._stale = True, True
        traffic = None if self._collector is None else self._collector.traffic
        busy = traffic is None or traffic.rows or not traffic.empty
        ranks = distributed.ranks_of(self.process_group)
        self._world = 1 if ranks is None else ranks.size()
        if ranks is None and not busy:
            return None
        plan = self._planned(compiled)
        agreed = None if ranks is None else self._pooled(ranks, plan.blocks, busy)
        if not busy and (agreed is None or not agreed.busy > 0):
            return None
        if compiled or first:
            self._say_unseen(plan.blocks, first and not any(group["capturable"] for group in self.param_groups))
        return plan, None if agreed is None else agreed.finite

    def _pooled(self, ranks: Any, blocks: list[Block], busy: bool) -> distributed.Agreed:
        """Add up over ranks what hooks have staged; every rank takes part, whatever it saw."""
        parts = []
        if self._collector is not None and self.coordinates != "plain":
            for entry, stage in self._collector.staged():
                mass = self.state.get(entry.weight, {}).get("mass") if self._collector.inputs else None
                parts.append(distributed.Part(stage, mass, self._option(entry.weight, "reduction", "sum")))
        return self._pool.reduce(ranks, parts, [gradient(p) for b in blocks for p in b.parameters], busy=busy)

    def _planned(self, compiled: bool) -> Plan:
        """Which blocks move in this step, and how; made again when parameters, gradients or groups come and go.

        Compiled steps take all blocks one by one: a compiler fuses those by itself.
        """
        signature = [
            compiled,
            *(
                (
                    id(group),
                    group["foreach"],
                    group.get("momentum"),
                    group["maximize"],
                    group["capturable"],
                    [(id(p), p.device, p.dtype) for p in group["params"] if p.grad is not None],
                )
                for group in self.param_groups
            ),
        ]
        if self._plan is None or self._stale or self._plan.signature != signature:
            blocks = self._blocks(lambda p: p.grad is not None)
            if any(gradient(p).layout != torch.strided for block in blocks for p in block.parameters):
                raise RuntimeError(
                    f"{self._owner} does not support sparse gradients; build the Embedding with sparse=False."
                )
            self._init_state(blocks)
            together = [(b, self._stage(b)) for b in blocks] if self._together and not compiled else []
            layouts, rest = arrange(together, blocks, self.state)
            if self._plan is not None and any(layout.captured for layout in self._plan.layouts):
                self._retired.append(self._plan)  # a CUDA graph goes on using its tensors
            self._plan, self._stale = Plan(signature, blocks, layouts, rest), False
            first = next((lay.device for lay in layouts), rest[0].weight.device if rest else self._nonfinite.device)
            self._nonfinite = self._nonfinite.to(first)
        return self._plan

    def _step_blocks(self, plan: Plan, agreed: Tensor | None) -> None:
        """Move all blocks; `agreed` is what ranks have found together of their gradients: whether they are finite."""
        blocks = plan.blocks
        moving = [begin(lay, self.state, linear=self.linear, even=self._together == "even") for lay in plan.layouts]
        known = [move.finite() for move in moving]
        ok = self._finite(plan.rest, known) if agreed is None else self._finite([], [agreed, *known])
        on_host = ok.device.type == "cpu" and not (
            torch.compiler.is_compiling() or any(group["capturable"] for group in self.param_groups)
        )
        if on_host and not ok:
            self._warn("nonfinite", NONFINITE)
            self._recentre()
            return
        if not (
            torch.compiler.is_compiling() or (moving and not plan.rest and all(lay.all_seen for lay in plan.layouts))
        ):
            self._say_unseen(blocks)
        mask = None if on_host else ok
        for move in moving:
            here = None if mask is None else mask.to(move.layout.device)
            move.move(here, TRUST_FLOOR)
            for block, stage in zip(move.layout.blocks, move.layout.stages, strict=True):
                for monitor in self._monitors:
                    monitor.note(block, stage, self.state[block.weight])
            move.commit(here)
        self._advance(plan.rest, mask)
        counted = [*plan.rest, *(b for lay in plan.layouts if not lay.counts_steps for b in lay.blocks)]
        steps = [self.state[p]["step"] for block in counted for p in self._counted(block)]
        if steps:
            torch._foreach_add_(steps, 1 if on_host else [ok.to(steps[0])] * len(steps))
        for monitor in self._monitors:
            monitor.end_step()

    def _init_state(self, blocks: list[Block]) -> None:
        """Give every parameter of these blocks the state it lacks, whole at once: checkpoints need all keys."""
        for block in blocks:
            counted = self._counted(block)
            for p in block.parameters:
                follow(self.state[p], p.device, all(p is not other for other in counted))
            for p in counted:
                if "step" not in self.state[p]:
                    self.state[p]["step"] = step_count(p, 0.0)
            stage = self._stage(block)
            if stage is not None:
                stage.to(block.weight.device)
            frames.init(self.state[block.weight], block, stage)
            self._init_rule(block)

    def _counted(self, block: Block) -> list[Tensor]:
        """The parameters whose steps we count: every parameter needs some state, or checkpointers refuse it."""
        return block.parameters

    def _finite(self, blocks: list[Block], known: list[Tensor]) -> Tensor:
        """Whether all gradients are finite, as a bool on the device; a step that is not is counted."""
        grads = [gradient(p) for block in blocks for p in block.parameters if p.numel()]
        largest = torch._foreach_norm(grads, float("inf")) if grads else []
        finite = [*known, *(torch.isfinite(norm) for norm in largest)]
        if not finite:
            return torch.ones((), dtype=torch.bool)
        device = finite[0].device
        ok = finite[0] if len(finite) == 1 else torch.stack([f.to(device) for f in finite]).all()
        if device.type != "cpu" or torch.compiler.is_compiling() or not ok:  # the host need not count what is well
            self._nonfinite.add_((~ok).to(self._nonfinite.device))
        return ok

    @property
    def nonfinite_steps(self) -> int:
        """How many steps were skipped because a gradient was not finite (reads the device)."""
        count = int(self._nonfinite)
        if count:
            self._warn("nonfinite", NONFINITE)
        return count

    def fired(self) -> dict[str, tuple[float, float]]:
        """How often each guard fired since the start, per layer: share of inputs raised, share of units held back."""
        found: dict[str, tuple[float, float]] = {}
        for block in self._blocks(lambda p: p.requires_grad):
            stage = self._stage(block)
            if stage is not None and block.entry is not None and not block.alone:
                raised, held, steps = stage.fired.tolist()
                inputs, units = max(1, steps * stage.inputs), max(1, steps * block.units)
                found[block.entry.path] = (raised / inputs, held / units)
        return found

    def _say_unseen(self, blocks: list[Block], wait: bool = False) -> None:
        """Warn once of tensors without a model, and of a layer with a gradient but no statistics.

        Statistics on another device are read only if we may `wait` for them.
        """
        if self.coordinates == "plain" or "unseen" in self._warned or at_rest(self.param_groups):
            return
        if self._collector is None and blocks:
            self._warn(
                "unseen",
                "no model is attached, so all parameters are trained in plain coordinates; give the model as the first "
                "argument, as model=, or call opt.attach(model).",
            )
        for block in blocks:
            stage, entry = self._stage(block), block.entry
            if stage is None or entry is None or stage.applied.is_meta or not block.weight.requires_grad:
                continue
            if (wait or stage.applied.device.type == "cpu") and not stage.applied:
                self._warn(
                    "unseen",
                    f"layer '{entry.path}' ({type(entry.module).__name__}) has a gradient but saw no input since the "
                    "last step (compiled before the optimizer was built? eval mode? a functional call?); using its "
                    "last moments.",
                )

    def _warn(self, key: str, message: str) -> None:
        if key not in self._warned:
            self._warned.add(key)
            warnings.warn(f"{self._owner}: {message}", stacklevel=2)

    def _advance(self, blocks: list[Block], ok: Tensor | None) -> None:
        """Move every block; `ok` masks, on the device, a step whose gradients turn out not to be finite."""
        for block in blocks:
            frame = self._frame(block)
            on_v = update.gradient_on_v(*self._gradients(block), frame)
            weight_step, bias_steps = self._rule(block, *on_v, ok)
            rate, *bias_rates = rates(block)
            if bias_steps is not None:
                bias_steps = -per_bias(bias_rates, bias_steps) * bias_steps
            self._move(block, frame, -rate * weight_step, bias_steps, ok)

    def _frame(self, block: Block) -> update.Frame:
        return frames.frame(self.state[block.weight], block, self._stage(block), linear=self.linear)

    def _weight(self, block: Block) -> Tensor:
        """The block's weight in the core's shape."""
        return block.matrix(shards.local(block.weight))

    def _gradients(self, block: Block) -> tuple[Tensor, Tensor | None]:
        """The block's gradients in the core's shapes and in float32 or better."""
        wide = [g.to(accumulation_dtype(g.dtype)) for g in map(gradient, block.parameters)]
        if block.group["maximize"]:
            wide = [-g for g in wide]
        return block.matrix(wide[0]), block.stack(wide[1:])

    def _init_rule(self, block: Block) -> None:
        """Add the state that the rule keeps for a block: none here."""

    def _rule(
        self, block: Block, on_weight: Tensor, on_bias: Tensor | None, ok: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """A direction on v, to be descended, from the gradient on v: here the gradient itself."""
        return on_weight, on_bias

    def _move(
        self, block: Block, frame: update.Frame, weight_step: Tensor, bias_steps: Tensor | None, ok: Tensor | None
    ) -> None:
        """Take a step on v back to w, guard it, move the parameters; then let the batch join the moments."""
        stage, trust = self._stage(block), block.group["trust"]
        weight_step, bias_steps = update.step_on_w(weight_step, bias_steps, frame)
        if stage is not None and trust is not None:
            weight_step, bias_steps, held, largest = update.within_trust(
                frames.unit_length2(block, frame),
                weight_step,
                bias_steps,
                frame,
                radius=trust,
                floor=TRUST_FLOOR,
                crowd=not self.linear,
                over=block.over,
            )
            stage.guarded(frame.raised, held, largest)
        elif stage is not None and block.group.get("fresh_max") is not None:
            stage.guarded(frame.raised, torch.zeros_like(frame.raised), torch.zeros_like(stage.rows))
        steps = [block.unmatrix(weight_step), *block.unstack(bias_steps)]
        groups = [block.group, *block.bias_groups]
        for p, s, rate, group in zip(block.parameters, steps, rates(block), groups, strict=True):
            displace(shards.local(p), s, rate * group["weight_decay"], ok)
        for monitor in self._monitors:
            monitor.note(block, stage, self.state[block.weight])
        frames.commit(self.state[block.weight], block, stage, ok)

    # checkpoints

    def state_dict(self) -> dict[str, Any]:
        """As torch's, sealed. It reads the device anyway, so it is where steps skipped there come to be told of."""
        _ = self.nonfinite_steps
        return checkpoints.seal(super().state_dict(), self._writer())

    def _writer(self) -> str:
        """Who writes a checkpoint: the class of ours, whatever a subclass is called."""
        return next(cls.__name__ for cls in type(self).__mro__ if cls.__module__.startswith("evenstep."))

    def _known_state(self) -> tuple[set[str], set[str], bool]:
        """The names that state may have, those that never lack, and whether the shapes of others are known, too."""
        return set(checkpoints.OURS), {"step"}, False

    def _check(self, state_dict: Any, sealed: bool) -> None:
        """Refuse a state_dict that does not fit, before anything is changed."""
        known, required, rule = self._known_state()
        wanted: dict[Tensor, checkpoints.Wanted] = {}
        for block in self._blocks(lambda p: True):
            wanted |= checkpoints.wanted_of(block, self._stage(block), required, rule)
        checkpoints.refuse(self._owner, checkpoints.misfits(state_dict, self.param_groups, wanted, known, sealed))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, but state keeps the dtype it was saved in: torch would round moments to the parameter's.

        Loaded values are copied into live tensors where there are any, since captured graphs hold those. What does not
        fit, or was damaged since it was saved, is refused before anything is changed; `dict(state_dict)` has no seal.
        """
        sealed = checkpoints.seal_of(state_dict) is not None
        if not hasattr(state_dict, "copy"):  # which torch calls before it looks
            self._check(state_dict, sealed)
        damages, edits = checkpoints.altered(state_dict, self._writer())
        checkpoints.refuse(self._owner, damages)
        if edits:
            warnings.warn(
                f"{self._owner}: {', '.join(edits)} changed since this state_dict was saved: edited, or damaged?",
                stacklevel=2,
            )
        live = {p: dict(self.state[p]) for group in self.param_groups for p in group["params"] if p in self.state}
        final: dict[str, Any] = {}

        def take(_: Optimizer, loaded: dict[str, Any]) -> None:
            self._check(loaded, sealed)
            final.update(loaded)

        handle = self.register_load_state_dict_pre_hook(take)
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()
        ids = [k for group in final["param_groups"] for k in group["params"]]
        params = [p for group in self.param_groups for p in group["params"]]
        for k, p in zip(ids, params, strict=True):
            for name, value in final["state"].get(k, {}).items():
                if name == "step":  # torch has a rule of its own for their device, and would share the saved one
                    count = self.state[p][name]
                    self.state[p][name] = count.detach().clone() if isinstance(count, Tensor) else step_count(p, count)
                elif isinstance(value, Tensor):
                    self.state[p][name] = restored(live.get(p, {}).get(name), value, p.device)
        self._complete = False
        self._recentre()

    def _recentre(self) -> None:
        """Make hooks sum about the running means, as after a step, and forget what is staged."""
        self._pool.settled.clear()
        if self._collector is not None:
            self._collector.clear()
            for entry, stage in self._collector.staged():
                frames.recentre(self.state.get(entry.weight, {}), stage)
