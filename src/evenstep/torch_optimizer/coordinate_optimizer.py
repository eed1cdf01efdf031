"""`step()` of every optimizer here: which blocks move, whether their gradients are finite, and the order of a step."""

from collections.abc import Callable
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from torch._compile import _disable_dynamo  # torch.compiler.disable imports the compiler with the library

from .. import foreach
from ..coordinates.coordinates import Statistics
from ..parallel import reduce
from ..statistics.batch import LayerStatistics
from ..step import plan as plans
from ..step.block import Block
from ..step.gradients import gradient
from ..step.plan import Plan
from ..step.state import init_state
from .base import NONFINITE, ModelOptimizer
from .checkpoint import step_count
from .param_groups import at_rest

NO_MODEL = (
    "no model is attached, so all parameters are trained in plain coordinates; give the model as the first argument, "
    "as model=, or call opt.attach(model)."
)

NO_STATISTICS = (
    "layer '{}' ({}) has a gradient but saw no input since the last step (compiled without its hooks? then "
    "torch._dynamo.reset() helps; eval mode? a functional call?); using its last moments, or fan-in coordinates if it "
    "has none."
)

NO_RATIO = (
    "plain_lr was given with lr=0, so there is no ratio to keep, and parameters outside layers take lr itself; build "
    "the optimizer with the lr that is to be reached, and set lr in its groups."
)


class Monitor(Protocol):
    """Told of every step: each block before its batch joins the moments, then the end."""

    def note(self, block: Block, stage: LayerStatistics | None, state: dict[str, Any]) -> None:
        """One block."""

    def end_step(self) -> None:
        """All blocks have been noted."""


class CoordinateOptimizer(ModelOptimizer):
    """Base of all optimizers here: coordinates x rule x guard on every block of parameters."""

    _reads_device = False  # whether a step waits for one bool, to skip a gradient that is not finite

    def _detached(self) -> None:
        super()._detached()
        self._plan: Plan | None = None
        self._stale = False  # whether state has been made or loaded since the plan
        self._retired: list[Plan] = []  # plans whose tensors CUDA graphs may still use
        self._monitors: list[Monitor] = []
        self._world = 1  # how many ranks took part in the last step

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step. The closure runs first: trainers do forward and backward inside it."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        compiled = torch.compiler.is_compiling()
        ready = self._prepare_on_host() if compiled else self._prepare(compiled=False)
        if ready is not None:
            self._make(*ready)
        if self._statistics is not None:
            self._statistics.clear()
        return loss

    @_disable_dynamo
    def _prepare_on_host(self) -> tuple[Plan, Tensor | None] | None:
        """What compilers leave to the host."""
        return self._prepare(compiled=True)

    def _prepare(self, compiled: bool) -> tuple[Plan, Tensor | None] | None:
        """The plan of this step, with its state, and whether ranks have found their gradients finite.

        After an empty batch only what has a gradient that is not zero moves; None if nothing has.
        """
        first = not self._complete
        if first:
            self._init_state(self._blocks(lambda p: p.requires_grad or p.grad is not None))
            self._complete, self._stale = True, True
        for group in self.param_groups:
            if group.get("plain_lr") and group.get("plain_at") == 0 and not at_rest([group]):
                self._warn("plain_lr", NO_RATIO)
        forwards = None if self._statistics is None else self._statistics.forwards
        busy = forwards is None or forwards.saw_rows or not forwards.saw_empty
        ranks = reduce.ranks_of(self.process_group)
        self._world = 1 if ranks is None else ranks.size()
        plan = self._planned(compiled)
        agreed = None if ranks is None else self._reduced(ranks, plan.blocks, busy)
        if not busy and (agreed is None or not agreed.busy > 0):
            moved = reduce.pulled(ranks, [p for group in self.param_groups for p in group["params"]])
            blocks = [b for b in plan.blocks if any(id(p) in moved for p in b.parameters)]
            if not blocks:
                return None
            plan = plans.make([], self._with_statistics(blocks), self.state, compiled)
        if compiled or first:  # later steps know on the CPU alone, from the counts that they read anyway
            self._warn_unseen(plan.blocks, first and not any(group["capturable"] for group in self.param_groups))
        return plan, None if agreed is None else agreed.finite

    def _reduced(self, ranks: Any, blocks: list[Block], busy: bool) -> reduce.Agreed:
        """Add up the batch statistics over ranks; every rank takes part, whatever it saw."""
        parts, groups = [], self._groups()
        if self._statistics is not None and self.needs > Statistics.NOTHING:
            for entry, stage in self._statistics.items():
                mass = self.state.get(entry.weight, {}).get("mass") if self.needs >= Statistics.INPUTS else None
                reduction = groups.get(id(entry.weight), {}).get("reduction", "sum")
                parts.append(reduce.Part(stage, mass, reduction))
        return self._pool.reduce(ranks, parts, [gradient(p) for b in blocks for p in b.parameters], busy=busy)

    def _planned(self, compiled: bool) -> Plan:
        """The plan; made again when parameters, gradients or groups come and go.

        State that has been taken away is made anew, as torch's optimizers do.
        """
        signature = plans.signature(self.param_groups, compiled)
        if self._plan is not None and self._plan.lacks(self.state):
            self._init_state(self._blocks(lambda p: p.requires_grad or p.grad is not None))
            self._stale = True
        if self._plan is None or self._stale or not self._plan.current(signature):
            blocks = self._blocks(lambda p: p.grad is not None)
            plans.refuse_sparse(self._owner, blocks)
            self._init_state(blocks)
            if self._plan is not None and any(getattr(step, "captured", False) for step in self._plan.steps):
                self._retired.append(self._plan)
            self._plan, self._stale = plans.make(signature, self._with_statistics(blocks), self.state, compiled), False
            if blocks:
                self._nonfinite = self._nonfinite.to(self._plan.steps[0].device)
        return self._plan

    def _init_state(self, blocks: list[Block]) -> None:
        """Give every parameter of these blocks the state it lacks, all of it at once: checkpoints need every key."""
        for block in blocks:
            counted = self._counted(block)
            for p in block.parameters:
                self._follow(p, keep_step=all(p is not other for other in counted))
            for p in counted:
                if "step" not in self.state[p]:
                    self.state[p]["step"] = step_count(p, 0.0)
            stage = self._layer_statistics(block)
            if stage is not None:
                stage.to(block.weight.device)
            init_state(self.state, block, stage)

    def _follow(self, p: Tensor, keep_step: bool) -> None:
        """Move a parameter's state to the device it is on now; torch's rules keep step counts on the CPU."""
        for name, value in self.state[p].items():
            if isinstance(value, Tensor) and value.device != p.device and not (keep_step and name == "step"):
                self.state[p][name] = value.to(p.device)

    def _counted(self, block: Block) -> list[Tensor]:
        """The parameters whose steps we count: every parameter needs some state, or checkpointers refuse it."""
        return block.rule.counted(block)

    def _make(self, plan: Plan, agreed: Tensor | None) -> None:
        """Make the step of all blocks; `agreed` is whether ranks have found all gradients finite."""
        if torch.compiler.is_compiling():  # a compiler that meets parameters as keys of the state guards each gradient
            for block in plan.blocks:
                for p in block.parameters:
                    gradient(p)
        divisor = self._divisor()
        for step in plan.steps:
            step.look(divisor)
        ok = self._finite([agreed] if agreed is not None else [step.finite() for step in plan.steps])
        if ok is False:
            self._warn("nonfinite", NONFINITE)
            self._recentre()
            for monitor in self._monitors:
                monitor.end_step()
            return
        if not all(step.all_seen for step in plan.steps):
            self._warn_unseen(plan.blocks, wait=False)
        self._direct(plan, ok)
        for step in plan.steps:
            step.move(masked(ok, step))
        for monitor in self._monitors:
            for block in plan.blocks:
                monitor.note(block, self._layer_statistics(block), self.state[block.weight])
            monitor.end_step()
        for step in plan.steps:
            step.commit(masked(ok, step))
        counts = [self.state[p]["step"] for block in plan.blocks for p in self._counted(block)]
        if counts:
            one = counts[0].new_ones(()) if ok is None else ok.to(counts[0])
            foreach.add_(counts, [one] * len(counts))

    def _direct(self, plan: Plan, ok: Tensor | None) -> None:
        """Let each rule turn the gradients on v of all its blocks into directions."""
        for rule, steps in plan.steps_of():
            rule.direct([step for step in steps if step.needs_direction], ok)

    def _divisor(self) -> Tensor | None:
        """What gradients are divided by to be those of a mean loss; None for 1."""
        return None

    def _finite(self, finite: list[Tensor]) -> Tensor | Literal[False] | None:
        """Whether all of these hold: None or False where the host may know, else a bool on the device, a mask.

        A step that is not finite is counted.
        """
        if not finite:
            return None
        device = finite[0].device
        ok = torch.stack([f.to(device) for f in finite]).all() if len(finite) > 1 else finite[0]
        wait = self._reads_device and not any(group["capturable"] for group in self.param_groups)
        if not torch.compiler.is_compiling() and (wait or self._host_reads(device)):
            if ok:
                return None
            self._nonfinite.add_(1)
            return False
        self._nonfinite.add_((~ok).to(self._nonfinite.device))
        return ok

    def _host_reads(self, device: torch.device) -> bool:
        """Whether the host may look at a bool there: on the CPU, unless the step must be capturable."""
        return device.type == "cpu" and not any(group["capturable"] for group in self.param_groups)

    def _warn_unseen(self, blocks: list[Block], wait: bool) -> None:
        """Warn once of tensors without a model, and of a layer with a gradient but no statistics of this step.

        Statistics on another device are only read if the host may `wait` for them.
        """
        if self.needs == Statistics.NOTHING or "unseen" in self._warned or at_rest(self.param_groups):
            return
        if self._statistics is None and blocks:
            self._warn("unseen", NO_MODEL)
        for block, layer in self._with_statistics(blocks):
            if layer is None or block.entry is None or not block.weight.requires_grad:
                continue
            readable = layer.device.type == "cpu" or (wait and layer.device.type != "meta")
            if readable and not layer.applied:
                self._warn("unseen", NO_STATISTICS.format(block.entry.path, type(block.entry.module).__name__))
                return


def masked(ok: Tensor | None, step: Any) -> Tensor | None:
    """The mask on the device of a step."""
    return ok if ok is None else ok.to(step.device)
