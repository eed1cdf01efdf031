"""Batch statistics of one layer: the sums over its forward and backward passes since the last step.

Hooks only add; a step averages. The tensors are not buffers of a module, which DDP would broadcast.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import add
from typing import Any

import torch
from torch import Tensor, nn

from .. import foreach
from ..kernels import input_sums as moments_kernel
from ..math.moments import Lattice, Sums, accumulation_dtype, add_zeros, lattice, moments_about, sum_about, thinned
from ..model.layer_kind import Look

graph_task_id = torch._C._current_graph_task_id
transforms, tracing = torch._C._functorch.peek_interpreter_stack, torch._C._get_tracing_state
NONE: Sequence[float] = (0.0, 0.0, 0.0, 0.0)  # the counts of no call


@dataclass
class CallPlan:
    """How to add calls of a layer with tensors of one shape and memory layout."""

    look: Look  # the counts of such a call, without its tensor
    rows: Lattice | None  # the rows of the input to read; None if only shapes are known
    launches: dict[Any, Any] = field(default_factory=dict)  # of the kernel, by device, dtype and alignment


class ForwardState:
    """The model's forward passes since the last step.

    They are numbered by a clock, a tensor per device, so that repeated calls of a layer, which share examples, can be
    told from micro-batches, which do not. A call outside of them reads NaN, which equals no number. The flags are for
    the host.
    """

    running = False  # a forward pass is running
    started = False  # there was one, so that a backward pass may run parts of it again, as reentrant checkpointing does
    saw_rows: bool | None = None  # whether an eager call had rows; None if there was no call
    number = 0  # of the pass, among those that started eagerly
    traced = False  # compiled code has run, which counts in tensors alone
    last: Any = None  # the statistics of the layer that was called last, eagerly

    def __init__(self) -> None:
        self.clocks: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def clocks_on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """The clock on a device, and the tensor that calls outside of forward passes read there."""
        if device not in self.clocks:
            self.clocks[device] = torch.zeros((), device=device), torch.full((), torch.nan, device=device)
        return self.clocks[device]

    def start(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Before the model's forward: a pass starts, if the model trains."""
        eager = not torch.compiler.is_dynamo_compiling()
        if not (module.training and torch.is_grad_enabled()) or (eager and in_transform()):
            return
        # compiled code guards the attributes it reads: these are the same at the start of every pass
        self.running = self.started = True
        if eager:
            self.number += 1
        else:
            self.traced = True
        for clock, _ in self.clocks.values():
            clock.add_(1).remainder_(2**20)

    def end(self, *args: Any) -> None:
        """After the forward. The output stays in `args`: a compiler would trace a variable of its own."""
        if self.running:  # a forward pass that does not train writes nothing
            self.running = False

    def contain_this_call(self) -> bool:
        """Whether the current call is part of a forward pass."""
        return self.running or (not torch.compiler.is_compiling() and self.started and graph_task_id() != -1)

    def note(self, layer: "LayerStatistics", rows: bool) -> None:
        """Note an eager call of a layer, and whether it had `rows`."""
        self.saw_rows = self.saw_rows or rows
        if graph_task_id() == -1:  # reentrant checkpointing calls early layers again during the backward pass
            self.last = layer

    def clear(self) -> None:
        """Start over after a step."""
        self.running, self.started, self.saw_rows = False, False, None


class LayerStatistics:
    """What the hooks of one layer have added up since the last step.

    - `slots` is Σ(x − c) and Σ(x − c)², [slot, 2, input]. The GPU kernel adds to several slots in parallel, so that the
      order of additions, and with it the result, is the same in every run.
    - `centre` is c: the running mean, or the first row until there is one (NaN: no row yet).
    - `tally` counts rows, rows of zeros, uses of the weight, and examples. Only the first call of a layer in a forward
      pass counts examples: `clock` numbers the passes, `seen` is the pass of the last call. Of eager calls on a CPU
      these are plain numbers, `counted` and `seen_number`, which join the tensor when it is asked for. Of the first
      there are `moments`, ⟨x⟩ − c, variance and rows, which join `slots` likewise, before a second call does.
    - `g2` is the sum of squared gradients of each unit.
    - `fired` counts inputs raised, units held back, and steps, since the start; `last` is the share of the newest step,
      with its largest relative step.
    - `settled`: `centre` is known to be the running mean, which all ranks share; `centred`: it is known not to be NaN.

    A GPU kernel adds calls to these tensors; plain operations do on the CPU, and with inputs that it does not take.
    """

    settled = centred = False
    counted: Sequence[float] = NONE
    seen_number: int | None = None
    moments: tuple[Tensor, Tensor, int] | None = None
    cleared = True

    def __init__(
        self,
        inputs: int,
        units: int,
        like: Tensor,
        stuffed: bool = False,
        limit: int | None = None,
        forwards: ForwardState | None = None,
    ) -> None:
        """For `inputs` inputs and the squared gradients of `units` units; at most `limit` rows of a call are read."""
        dtype, device = accumulation_dtype(like.dtype), like.device
        self.inputs, self.units, self.stuffed, self.limit = inputs, units, stuffed, limit
        self.forwards = forwards or ForwardState()
        self.added = torch.zeros(moments_kernel.slots(like), 2, inputs, dtype=dtype, device=device)
        self.counter = torch.zeros(4, dtype=dtype, device=device)
        self.centre = torch.full((inputs,), torch.nan, dtype=dtype, device=device)
        self.g2 = torch.zeros(units, dtype=dtype, device=device)
        self.seen = torch.full((), torch.nan, device=device)
        self.fired, self.last = torch.zeros(2, 3, dtype=torch.float32, device=device)
        self._clock, self._outside = self.forwards.clocks_on(device)

    def to(self, device: torch.device) -> None:
        """Follow the model to another device."""
        if self.counter.device != device:
            whole = self.in_one_slot()
            self.added = whole.new_zeros(moments_kernel.slots(whole, device), *whole.shape)
            self.added[0] = whole
            for name in ("added", "counter", "centre", "g2", "seen", "fired", "last"):
                setattr(self, name, getattr(self, name).to(device))
            self._clock, self._outside = self.forwards.clocks_on(device)

    @property
    def clock(self) -> Tensor:
        """The number of the forward pass that the current call is part of."""
        return self._clock if self.forwards.contain_this_call() else self._outside

    @property
    def slots(self) -> Tensor:
        """The sums. Compiled code, which cannot add the first call's, finds them added before."""
        if not torch.compiler.is_compiling() and self.moments is not None:
            (offset, var, rows), self.moments = self.moments, None
            self.added[0].add_(torch.stack([offset, torch.addcmul(var, offset, offset)]), alpha=rows)
        return self.added

    @property
    def tally(self) -> Tensor:
        """The counts. Compiled code, which cannot add those of the host, finds them added before."""
        if self.counted is not NONE and not torch.compiler.is_compiling():
            self.counter.add_(self.counter.new_tensor(self.counted))
            self.counted = NONE
        return self.counter

    rows = property(lambda self: self.tally[0], doc="The number of rows of inputs.")
    applied = property(lambda self: self.tally[2], doc="How often the weight was used.")
    examples = property(lambda self: self.tally[3], doc="The number of examples.")

    def sums(self) -> Sums:
        """The sums of all rows, with the zeros that the layer inserts."""
        sums = Sums(self.rows, *self.slots.sum(0))
        return add_zeros(sums, self.tally[1], self.centre) if self.stuffed else sums

    def in_one_slot(self) -> Tensor:
        """The sums of all rows, moved to the first slot."""
        if len(self.slots) > 1:
            self.slots[0] = self.slots.sum(0)
            self.slots[1:].zero_()
        return self.slots[0]

    def add_call(self, look: Look) -> None:
        """Add one call."""
        if not torch.compiler.is_compiling():
            self.add_planned_call(look.x, self.plan(look))
            return
        self.forwards.traced = True
        x = None if look.x is None or not self.inputs else look.x.detach()
        if x is not None:
            self.to(x.device)
            tensors = self.added, self.centre, self.counter, self.seen, self.clock
            if moments_kernel.add_compiled(x, look, self.limit, *tensors):
                return
            x = thinned(x, look.dim, self.limit)
        self._add(x, look)

    def plan(self, look: Look) -> CallPlan:
        """How to add eager calls with tensors like that of `look`."""
        x = look.x
        rows = None if x is None or not self.inputs else lattice(x.detach(), look.dim % x.dim(), self.limit)
        return CallPlan(look._replace(x=None), rows)

    def add_planned_call(self, x: Any, plan: CallPlan) -> None:
        """Add one eager call with a tensor that the plan was made for."""
        if plan.rows is None:
            x = None
        else:
            self.to(x.device)
            x = plan.rows.of(x.detach())
        look, forwards = plan.look, self.forwards
        if not self.counter.is_cpu or forwards.traced:
            if x is None or not moments_kernel.add(x, look, self, plan.launches):
                self._add(x, look)
            return
        # as `_add`, by few operations: between two layers each takes longer than its arithmetic
        number = forwards.number if forwards.contain_this_call() else None
        examples = 0 if number is not None and number == self.seen_number else look.examples
        rows = 0 if plan.rows is None else plan.rows.rows
        self.counted = [*map(add, self.counted, (rows, look.zeros, look.applied, examples))]
        self.seen_number = number
        if x is not None:
            if not self.centred:
                self._centre_on(x, look.dim)
            if self.cleared and rows:
                self.moments = *moments_about(x, self.centre, look.dim), rows
            else:
                self.slots[0].add_(sum_about(x, self.centre, look.dim))
            self.cleared = False

    def clear_counts(self) -> None:
        """Forget what the host knows of calls."""
        self.counted, self.moments, self.cleared = NONE, None, True

    def _add(self, x: Tensor | None, look: Look) -> None:
        """Add a call to the tensors.

        Compilers fuse all of this. The views are made anew in each call: CUDA graphs write only to addresses that are
        multiples of 16 bytes, which kept views may not be.
        """
        rows = 0 if x is None else x.numel() // x.shape[look.dim]
        *tally, examples = self.tally.unbind()
        for total, count in zip(tally, (rows, look.zeros, look.applied), strict=True):
            if count:
                total.add_(count)
        clock = self.clock
        examples.add_(self.seen != clock, alpha=look.examples)
        self.seen.copy_(clock)
        if x is not None:
            self._centre_on(x, look.dim)
            self.slots[0].add_(sum_about(x, self.centre, look.dim))

    def _centre_on(self, x: Tensor, inputs: int) -> None:
        """Take the first row for the centre if there is none yet."""
        row = x
        for dim in reversed([d for d in range(x.dim()) if d != inputs % x.dim()]):
            row = row.select(dim, 0)
        self.centre.copy_(torch.where(self.centre.isnan(), row, self.centre))


def set_centres(layers: Sequence[LayerStatistics], centres: Sequence[Tensor], known: bool = False) -> None:
    """Sum the next batch about these centres: running means, or NaN for its first row, which none is if `known`."""
    foreach.copy_([layer.centre for layer in layers], centres)
    for layer in layers:
        layer.centred = known


def in_transform() -> bool:
    """Whether `torch.func`, `torch.jit.trace` or `torch.export` runs this eager code.

    Hooks cannot keep the tensors of these, and their results run without hooks. `torch.compiler.is_exporting()` does
    not help: it is always true in torch 2.11.
    """
    return transforms() is not None or tracing() is not None or torch.compiler.is_compiling()
