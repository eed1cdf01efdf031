"""The step, once for every optimizer of the library: coordinates x rule x guard on every block of parameters.

A subclass names its coordinates and its rule; the arithmetic is in the core.
"""

from collections.abc import Callable
from typing import Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor
from torch._compile import _disable_dynamo  # torch.compiler.disable imports the compiler with the library

from ..math import update
from ..math.guards import TRUST_FLOOR
from ..math.moments import accumulation_dtype
from ..model.coverage import unseen_of
from ..parallel import dtensor as shards
from ..parallel import reduce as distributed
from ..statistics.batch import LayerStatistics
from ..step import frames
from ..step import plan as plans
from ..step.block import Block
from ..step.layout import arrange
from ..step.plan import Plan
from ..step.together import begin
from .base import NONFINITE, ModelOptimizer
from .motion import all_finite, at_rest, displace, follow, gradient, per_bias, rates, step_count

NO_MODEL = (
    "no model is attached, so all parameters are trained in plain coordinates; give the model as the first argument, "
    "as model=, or call opt.attach(model)."
)

NO_RATIO = (
    "plain_lr was given with lr=0, so there is no ratio to keep, and parameters outside layers take lr itself; build "
    "the optimizer with the lr that is to be reached, and set lr in its groups."
)


class Common:
    """What all blocks of a step go by; attributes of an optimizer compiled code may not set (torch 2.11)."""

    examples: Tensor  # of this step and rank
    square: Tensor  # of the whole network's gradient


class Monitor(Protocol):
    """What a step tells to whoever watches it: each block before its batch joins the moments, then the end."""

    def note(self, block: Block, stage: LayerStatistics | None, state: dict[str, Any]) -> None:
        """One block."""

    def end_step(self) -> None:
        """All blocks have been noted."""


class CoordinateOptimizer(ModelOptimizer):
    """Base of all optimizers here."""

    linear: ClassVar[bool] = True  # a rule that normalizes gets β = 1
    _together: ClassVar[str | None] = None  # the rule that many blocks can follow at once: "sg", "even", a "given" one
    _joint: Any = None  # a function: which blocks a given rule sees as one matrix

    def _detached(self) -> None:
        super()._detached()
        self._plan: Plan | None = None
        self._stale = False  # whether state has been made or loaded since the plan
        self._retired: list[Plan] = []
        self._monitors: list[Monitor] = []
        self._common = Common()
        self._world = 1  # how many ranks took part in the last step

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
        if self._statistics is not None:
            self._statistics.clear()
        return loss

    @_disable_dynamo
    def _ready_apart(self) -> tuple[Plan, Tensor | None] | None:
        """What compilers leave to the host."""
        if self._statistics is not None:
            self._statistics.flush()
        return self._ready(compiled=True)

    def _ready(self, compiled: bool) -> tuple[Plan, Tensor | None] | None:
        """What moves in this step, with its state, and whether ranks have found their gradients finite.

        After an empty batch, what has a gradient that is not zero; None if nothing has.
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
        ranks = distributed.ranks_of(self.process_group)
        self._world = 1 if ranks is None else ranks.size()
        plan = self._planned(compiled)
        agreed = None if ranks is None else self._pooled(ranks, plan.blocks, busy)
        if not busy and (agreed is None or not agreed.busy > 0):
            pulled = distributed.pulled(ranks, [p for group in self.param_groups for p in group["params"]])
            plan = plan.one_by_one([b for b in plan.blocks if any(id(p) in pulled for p in b.parameters)])
            if not plan.blocks:
                return None
        if compiled or first:
            self._say_unseen(plan.blocks, first and not any(group["capturable"] for group in self.param_groups))
        return plan, None if agreed is None else agreed.finite

    def _pooled(self, ranks: Any, blocks: list[Block], busy: bool) -> distributed.Agreed:
        """Add up over ranks what hooks have staged; every rank takes part, whatever it saw."""
        parts, groups = [], self._groups()
        if self._statistics is not None and self.coordinates != "plain":
            for entry, stage in self._statistics.items():
                mass = self.state.get(entry.weight, {}).get("mass") if self._statistics.inputs else None
                reduction = groups.get(id(entry.weight), {}).get("reduction", "sum")
                parts.append(distributed.Part(stage, mass, reduction))
        return self._pool.reduce(ranks, parts, [gradient(p) for b in blocks for p in b.parameters], busy=busy)

    def _planned(self, compiled: bool) -> Plan:
        """Which blocks move in this step, and how; made again when parameters, gradients or groups come and go.

        State that has been taken away is made anew, as torch's optimizers do. Compiled steps take all blocks one by
        one: a compiler fuses those by itself.
        """
        signature = plans.signature(self.param_groups, compiled)
        if self._plan is not None and self._plan.lacks(self.state):
            self._init_state(self._blocks(lambda p: p.requires_grad or p.grad is not None))
            self._stale = True
        if self._plan is None or self._stale or self._plan.signature != signature or not self._plan.whole:
            blocks = self._blocks(lambda p: p.grad is not None)
            plans.refuse_sparse(self._owner, blocks)
            self._init_state(blocks)
            candidates = self._with_statistics(blocks) if self._together and not compiled else []
            layouts, rest = arrange(candidates, blocks, self.state, self._joint)
            if self._plan is not None:
                self._plan.part(self.state, layouts)
                self._retired += [self._plan] if self._plan.captured else []
            sizes = [*map(len, self.state.values())]
            homes = [block.entry.home for block in blocks if block.entry is not None]
            found = [parameters for parameters, _ in homes], [name for _, name in homes]
            self._plan, self._stale = Plan(signature, blocks, layouts, rest, sizes, *found), False
            self._nonfinite = self._nonfinite.to(self._plan.device or self._nonfinite.device)
        return self._plan

    def _step_blocks(self, plan: Plan, agreed: Tensor | None) -> None:
        """Move all blocks; `agreed` is what ranks have found together of their gradients: whether they are finite."""
        moving = [begin(lay, self.state, linear=self.linear, even=self._together == "even") for lay in plan.layouts]
        finite: list[Tensor | bool] = [move.finite() for move in moving]
        if agreed is not None:
            finite.insert(0, agreed)
        elif plan.rest:
            finite.append(all_finite([gradient(p) for block in plan.rest for p in block.parameters]))
        mask = self._finite(finite)
        if mask is False:
            self._warn("nonfinite", NONFINITE)
            self._recentre()
            return
        if not (torch.compiler.is_compiling() or plan.all_seen):
            self._say_unseen(plan.blocks)
        self._advance_all(moving, plan.rest, mask)
        counted = [*plan.rest, *(b for move in moving if not move.counts_steps for b in move.layout.blocks)]
        steps = [self.state[p]["step"] for block in counted for p in self._counted(block)]
        if steps:
            torch._foreach_add_(steps, 1 if mask is None else [mask.to(steps[0])] * len(steps))
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
            stage = self._layer_statistics(block)
            if stage is not None:
                stage.to(block.weight.device)
            frames.init(self.state[block.weight], block, stage)
            self._init_rule(block)

    def _counted(self, block: Block) -> list[Tensor]:
        """The parameters whose steps we count: every parameter needs some state, or checkpointers refuse it."""
        return block.parameters

    def _finite(self, finite: list[Tensor | bool]) -> Tensor | Literal[False] | None:
        """Whether all of these are true: None or False where the host may know, else a bool on the device, a mask.

        A step that is not finite is counted.
        """
        tensors = [f for f in finite if isinstance(f, Tensor)]
        if not tensors:
            ok: Tensor | bool = all(finite)
        else:
            device = tensors[0].device
            known = [torch.tensor(f, device=device) for f in finite if isinstance(f, bool)]
            ok = torch.stack([f.to(device) for f in (*tensors, *known)]).all() if len(finite) > 1 else tensors[0]
            waits = torch.compiler.is_compiling() or any(group["capturable"] for group in self.param_groups)
            if device.type != "cpu" or waits:
                self._nonfinite.add_((~ok).to(self._nonfinite.device))
                return ok
        if ok:
            return None
        self._nonfinite.add_(1)
        return False

    def _say_unseen(self, blocks: list[Block], wait: bool = False) -> None:
        """Warn once of tensors without a model, and of a layer with a gradient but no statistics."""
        if self.coordinates == "plain" or "unseen" in self._warned or at_rest(self.param_groups):
            return
        message = unseen_of(self._with_statistics(blocks), wait)
        if self._statistics is None:
            message = NO_MODEL if blocks else None
        if message is not None:
            self._warn("unseen", message)

    def _advance_all(self, moving: list[Any], rest: list[Block], ok: Tensor | None) -> None:
        """Move all blocks: those that move together, then the rest."""
        for move in moving:
            self._make(move, ok)
        self._advance(rest, ok)

    def _make(self, move: Any, ok: Tensor | None) -> None:
        """Make the step of blocks that move together."""
        here = None if ok is None else ok.to(move.layout.device)
        if here is not None and here.is_cpu and not here:  # a network on two devices: the host waits for the other
            return
        move.move(here, TRUST_FLOOR)
        for monitor in self._monitors:
            for block, stage in zip(move.layout.blocks, move.layout.stages, strict=True):
                monitor.note(block, stage, self.state[block.weight])
        move.commit(here)

    # block by block

    def _advance(self, blocks: list[Block], ok: Tensor | None) -> None:
        """Move every block; `ok` masks, on the device, a step whose gradients turn out not to be finite."""
        for block in blocks:
            frame = self._frame(block)
            on_v = update.gradient_on_v(*self._gradients(block), frame)
            weight_step, bias_steps = self._rule(block, *on_v, ok)
            del on_v  # a parameter may be large
            rate, *bias_rates = rates(block)
            if bias_steps is not None:
                bias_steps = -per_bias(bias_rates, bias_steps) * bias_steps
            self._move(block, frame, -rate * weight_step, bias_steps, ok)

    def _frame(self, block: Block) -> update.Frame | update.Still:
        return frames.frame(self.state[block.weight], block, self._layer_statistics(block), linear=self.linear)

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
        self,
        block: Block,
        frame: update.Frame | update.Still,
        weight_step: Tensor,
        bias_steps: Tensor | None,
        ok: Tensor | None,
    ) -> None:
        """Take a step on v back to w, guard it, move the parameters; then let the batch join the moments."""
        stage = self._layer_statistics(block)
        on_w = update.step_on_w(weight_step, bias_steps, frame)
        weight_step, bias_steps = frames.guarded(block, stage, frame, *on_w, linear=self.linear)
        steps = [block.unmatrix(weight_step), *block.unstack(bias_steps)]
        groups = [block.group, *block.bias_groups]
        for p, s, rate, group in zip(block.parameters, steps, rates(block), groups, strict=True):
            displace(shards.local(p), s, rate * group["weight_decay"], ok)
        for monitor in self._monitors:
            monitor.note(block, stage, self.state[block.weight])
        frames.commit(self.state[block.weight], block, stage, ok)
