"""`step()` of every optimizer here: which blocks move, whether their gradients are finite, and the order of a step."""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch import distributed as dist
from torch._compile import _disable_dynamo  # torch.compiler.disable imports the compiler with the library

from .. import foreach
from ..coordinates.coordinates import Statistics
from ..parallel import reduce_statistics
from ..step import plan as plans
from ..step.block import Block, gradient
from ..step.plan import Plan
from ..step.state import init_state
from .checkpoint import step_count
from .model_optimizer import NONFINITE, ModelOptimizer
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

DISAGREE = (
    "the ranks of process_group share the work on matrices, but have gradients for different ones; average the "
    "gradients of all ranks, as DDP does, or give process_group=False to share nothing."
)


class CoordinateOptimizer(ModelOptimizer):
    """Base of all optimizers here: coordinates x rule x guard on every block of parameters."""

    def _detached(self) -> None:
        super()._detached()
        self._plan: Plan | None = None
        self._stale = False  # whether state has been made or loaded since the plan
        self._retired: list[Plan] = []  # plans whose tensors CUDA graphs may still use
        self._monitors: list[Any] = []  # are told of each block before its batch joins the moments, and of each step
        self._world = 1  # how many ranks took part in the last step
        self._ranks: Any = None  # those ranks, if they are several
        self._layout: Tensor | None = None  # the fingerprint of the plan, where ranks must agree
        self._agreed = False  # whether they have, since this rank's plan was made

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step. The closure runs first: trainers do forward and backward inside it."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        compiled = torch.compiler.is_compiling()
        ready = self._prepare_on_host(compiled) if compiled else self._prepare(compiled)
        if ready is not None:
            self._make(*ready)
        self._statistics.clear()
        return loss

    def _prepare(self, compiled: bool) -> tuple[Plan, Tensor | None] | None:
        """The plan of this step, and whether the gradients of all ranks are finite (None: one rank).

        None after an empty batch: nothing moves.
        """
        first, layers = not self._complete, self._statistics.layers.values() if compiled else ()
        _ = [(layer.tally, layer.slots) for layer in layers]  # the graph cannot add what the host has
        busy = self._statistics.forwards.saw_rows is not False
        alone = not (dist.is_available() and dist.is_initialized())
        ranks = None if alone else reduce_statistics.ranks_of(self.process_group)
        self._world, self._ranks = 1 if ranks is None else ranks.size(), ranks
        plan = self._planned(compiled)
        finite, others = (None, 0) if ranks is None else self._reduced(ranks, plan, busy)
        if not busy and not others > 0:
            return None
        if compiled or first:  # later steps know on the CPU alone, from the counts that they read anyway
            self._warn_unseen(plan.blocks, first and not any(group["capturable"] for group in self.param_groups))
        return plan, finite

    # blocks, state and warnings are Python's business; a compiled step is one graph of what follows
    _prepare_on_host = _disable_dynamo(_prepare)

    def _reduced(self, ranks: Any, plan: Plan, busy: bool) -> tuple[Tensor, Tensor]:
        """Add up the batch statistics over ranks; ranks without a batch take part, too.

        Ranks that share matrices must have the same. On a GPU, where asking takes time, those ask whose plan is new.
        """
        parts, groups = [], self._groups()
        for entry, layer in self._statistics.layers.items() if self.coordinates.needs else []:
            mass = self.state.get(entry.weight, {}).get("mass") if self.coordinates.needs >= Statistics.INPUTS else None
            reduction = groups.get(id(entry.weight), {}).get("reduction", "sum")
            parts.append(reduce_statistics.Part(layer, mass, reduction))
        grads = [gradient(p) for b in plan.blocks for p in b.parameters]
        if self._layout is None and self.rule.matrices:
            self._layout = plans.fingerprint(plan, self.param_groups)
        reduced = reduce_statistics.reduce(ranks, self._statistics, parts, grads, self._layout, busy=busy)
        if reduced.agree is not None and (reduced.agree.is_cpu or not self._agreed):
            if not reduced.agree:
                raise RuntimeError(f"{self._owner}: {DISAGREE}")
            self._agreed = True
        return reduced.finite, reduced.busy

    def _planned(self, compiled: bool) -> Plan:
        """The plan; made again when parameters, gradients or groups come and go.

        Missing state is made: before the first step, and where it has been deleted, as torch's optimizers do. Old plans
        are not kept: each has buffers as large as the model, and random sets of gradients never come back.
        """
        signature = plans.signature(self.param_groups, compiled)
        if not self._complete or (self._plan is not None and self._plan.lacks(self.state)):
            self._init_state(self._blocks(lambda p: p.requires_grad or p.grad is not None))
            self._complete = self._stale = True
        if self._plan is None or self._stale or not self._plan.current(signature):
            blocks = self._blocks(lambda p: p.grad is not None)
            plans.refuse_sparse(self._owner, blocks)
            self._init_state(blocks)
            if self._plan is not None and any(getattr(step, "captured", False) for step in self._plan.steps):
                self._retired.append(self._plan)
            self._plan, self._stale = plans.make(signature, blocks, self.state, compiled), False
            self._layout, self._agreed = None, False
            if blocks:
                self._nonfinite = self._nonfinite.to(self._plan.steps[0].device)
        return self._plan

    def _init_state(self, blocks: list[Block]) -> None:
        """Give every parameter of these blocks the state it lacks: checkpoints need every key at once."""
        for block in blocks:
            counted = block.rule.counted(block)
            for p in block.parameters:
                ours = any(p is other for other in counted)  # torch's rules keep their step counts on the CPU
                for name, value in self.state[p].items():
                    if isinstance(value, Tensor) and value.device != p.device and (ours or name != "step"):
                        self.state[p][name] = value.to(p.device)
            for p in counted:
                if "step" not in self.state[p]:
                    self.state[p]["step"] = step_count(p, 0.0)
            if block.statistics is not None:
                block.statistics.to(block.weight.device)
            init_state(self.state, block)

    def _make(self, plan: Plan, agreed: Tensor | None) -> None:
        """Make the step of all blocks; `agreed` is whether the gradients of all ranks are finite."""
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
        masks = [None if ok is None else ok.to(step.device) for step in plan.steps]
        for step, mask in zip(plan.steps, masks, strict=True):
            step.move(mask)
        for monitor in self._monitors:
            for block in plan.blocks:
                monitor.note(block, self.state[block.weight])
            monitor.end_step()
        for step, mask in zip(plan.steps, masks, strict=True):
            step.commit(mask)
        counts = [self.state[p]["step"] for block in plan.blocks for p in block.rule.counted(block)]
        if counts:
            one = counts[0].new_ones(()) if ok is None else ok.to(counts[0])
            foreach.add_(counts, [one] * len(counts))

    def _direct(self, plan: Plan, ok: Tensor | None) -> None:
        """Let each rule turn the gradients on v of all its blocks into directions."""
        if plan.replay is None or self._ranks is not None:  # ranks exchange something
            self._direct_eagerly(plan, ok)
        else:
            addresses = [address for step in plan.steps for address in step.held_addresses()]
            plan.replay(addresses, ok, partial(self._direct_eagerly, plan))

    def _direct_eagerly(self, plan: Plan, ok: Tensor | None) -> None:
        for rule, steps in plan.steps_of():
            rule.direct([step for step in steps if step.needs_direction], ok, self._ranks)

    def _divisor(self) -> Tensor | None:
        """What gradients are divided by to be those of a mean loss; None for 1."""
        return None

    def _finite(self, finite: list[Tensor]) -> Tensor | Literal[False] | None:
        """Whether all of these hold: None (yes) or False on a CPU, else a mask on the device that the host never reads.

        A step that is not finite is counted.
        """
        if not finite:
            return None
        device = finite[0].device
        ok = torch.stack([f.to(device) for f in finite]).all() if len(finite) > 1 else finite[0]
        capturable = any(group["capturable"] for group in self.param_groups)
        if device.type == "cpu" and not (torch.compiler.is_compiling() or capturable):
            if ok:
                return None
            self._nonfinite.add_(1)
            return False
        self._nonfinite.add_((~ok).to(self._nonfinite.device))
        return ok

    def _warn_unseen(self, blocks: list[Block], wait: bool) -> None:
        """Warn once of tensors without a model, and of a layer with a gradient but no statistics of this step.

        Statistics on another device are only read if the host may `wait` for them.
        """
        if self.coordinates.needs == Statistics.NOTHING or "unseen" in self._warned or at_rest(self.param_groups):
            return
        if self._statistics.model is None and blocks:
            self._warn("unseen", NO_MODEL)
        for block in blocks:
            layer = block.statistics
            if layer is None or block.entry is None or not block.weight.requires_grad:
                continue
            readable = layer.tally.is_cpu or (wait and not layer.tally.is_meta)
            if readable and not layer.applied:
                self._warn("unseen", NO_STATISTICS.format(block.entry.path, type(block.entry.module).__name__))
                return
