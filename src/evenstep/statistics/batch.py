"""What hooks have added up of one layer since the last step: sums of its input, counts, squared gradients.

A stage holds its own tensors (module buffers would be broadcast by DDP), and adds up alone: a step averages.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..kernels import input_sums as moments_kernel
from ..math.moments import Lattice, Sums, accumulation_dtype, add_zeros, lattice, sum_about, thinned
from ..model.kinds import Look

HELD = 2**18  # numbers beyond which a call is added up at once
graph_task = torch._C._current_graph_task_id


class Glance(NamedTuple):
    """What calls with tensors of one shape show: which rows, and their counts."""

    look: Look  # without its tensor
    rows: Lattice | None  # None where only shapes are known
    others: list[int]  # the dimensions that rows run along
    behind: int  # how many of them lie behind the inputs
    calls: dict[Any, Any]  # of the kernel, by what it must be built for


def glance(x: Tensor | None, look: Look, limit: int | None = None) -> Glance:
    """For calls with tensors like `x`, of which at most `limit` rows are looked at."""
    look = look._replace(x=None)
    if x is None:
        return Glance(look, None, [], 0, {})
    dim = look.dim % x.dim()
    others = [d for d in range(x.dim()) if d != dim]
    rows = lattice(x.detach(), dim, limit)
    return Glance(look, rows, others, x.dim() - 1 - dim, {})


class Forwards:
    """The model's forwards as its stages know them: `clocks` number them, one on each device.

    A call outside of them meets a clock that stands at NaN, which no number equals. The host knows whether a forward is
    `running`, and whether one was `announced` since the last step: a backward pass may then run parts of it, as
    reentrant checkpointing does.
    """

    running = False
    announced = False

    def __init__(self) -> None:
        """None so far."""
        self.clocks: dict[torch.device, Tensor] = {}
        self.standing: dict[torch.device, Tensor] = {}

    def clocks_on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """The clock there, and the one that stands."""
        clock, standing = (
            clocks.setdefault(device, torch.full((), torch.nan, device=device))
            for clocks in (self.clocks, self.standing)
        )
        return clock, standing

    def inside(self) -> bool:
        """Whether a call is part of a forward that was announced."""
        return self.running or (not torch.compiler.is_compiling() and self.announced and graph_task() != -1)


class Held:
    """Calls on the CPU until they are asked for: as sums or, the newest one, as deviations, and all as counts."""

    __slots__ = ("before", "counts", "newest")

    def __init__(self) -> None:
        """No calls."""
        self.newest: tuple[Tensor, list[int]] | None = None
        self.before: tuple[Tensor, Tensor] | None = None
        self.counts: list[float] = [0, 0, 0, 0]

    def add(self, deviation: Tensor, others: list[int]) -> None:
        """Hold x − c of one more call, whose rows run along `others`."""
        if self.newest is not None:
            self.sums()
        self.newest = deviation, others
        if deviation.numel() > HELD:
            self.sums()

    def sums(self) -> tuple[Tensor, Tensor] | None:
        """Σ(x − c) and Σ(x − c)² of all calls; None if none has shown its input."""
        if self.newest is not None:
            found, self.newest = squared(*self.newest), None
            if self.before is None:
                self.before = found
            else:
                torch._foreach_add_(self.before, found)
        return self.before


def squared(
    deviation: Tensor, others: list[int], out: tuple[Tensor | None, Tensor | None] = (None, None)
) -> tuple[Tensor, Tensor]:
    """Σ(x − c) and Σ(x − c)², the deviations used up."""
    if not others:
        deviation, others = deviation.unsqueeze(0), [0]
    first = torch.sum(deviation, others, out=out[0])
    return first, torch.sum(deviation.mul_(deviation), others, out=out[1])


class Stage:
    """What one entry's hooks have added up since the last step.

    `slots` holds Σ(x − c) and Σ(x − c)² as [slot, 2, input]: a kernel that works in parallel adds to several slots, so
    that its sums come in the same order in every run. The centre c is the running mean, or the first row seen (NaN:
    none yet). `tally` counts rows, rows of zeros, uses of the weight, and examples. Of a forward that the model
    announces, a layer's first call alone counts examples: `clock` numbers the forwards (NaN outside of them, which no
    number equals), `seen` is the one it was last called in. `fired` counts inputs raised, units held back and steps
    since the start, `last` the same guards' work in the newest step with its largest relative step.

    A call is added in one of three ways. On a GPU a kernel does it. On the CPU, where an operation between two layers
    costs more than its arithmetic, calls are `held` until they are asked for: the host knows `slots` and `tally` to be
    zero otherwise by their versions, which compiled code raises, too. Code compiled for a CPU, and what no kernel
    serves, adds to the tensors in plain operations.
    """

    def __init__(
        self,
        inputs: int,
        units: int,
        like: Tensor,
        *,
        stuffed: bool = False,
        limit: int | None = None,
        forwards: Forwards | None = None,
    ) -> None:
        """Room for `inputs` inputs and the squared gradients of `units` units, from at most `limit` rows a call.

        `forwards` are those of the model.
        """
        dtype, device = accumulation_dtype(like.dtype), like.device
        self.inputs, self.units, self.stuffed, self.limit = inputs, units, stuffed, limit
        self.forwards = forwards or Forwards()
        self._slots = torch.zeros(moments_kernel.slots(like), 2, inputs, dtype=dtype, device=device)
        self._tally = torch.zeros(4, dtype=dtype, device=device)
        self.centre = torch.full((inputs,), torch.nan, dtype=dtype, device=device)
        self.centred = False  # whether the host knows that the centre is a running mean
        self.g2 = torch.zeros(units, dtype=dtype, device=device)
        self.seen = torch.zeros((), device=device)
        self.seen_at = 0  # the clock's version when the host last looked
        self.held: Held | None = None
        self.fired, self.last = torch.zeros(2, 3, dtype=torch.float32, device=device)
        self._settle_in()

    def _settle_in(self) -> None:
        """What goes by where the tensors are."""
        device = self._tally.device
        self._clock, self._standing = self.forwards.clocks_on(device)
        self.centres: dict[int, Tensor] = {}  # the centre, to meet inputs with so many dimensions behind them
        self.empty_at = -1, -1

    def to(self, device: torch.device) -> None:
        """Follow the model to another device."""
        if self._tally.device != device:
            whole, self._tally = self.slots.sum(0), self.tally.to(device)
            self._slots = whole.new_zeros(moments_kernel.slots(whole, device), *whole.shape)
            self._slots[0] = whole
            for name in ("_slots", "centre", "g2", "seen", "fired", "last"):
                setattr(self, name, getattr(self, name).to(device))
            self._settle_in()

    @property
    def device(self) -> torch.device:
        """Where its tensors are."""
        return self._tally.device

    @property
    def slot_count(self) -> int:
        """In how many slots its sums are."""
        return len(self._slots)

    @property
    def clock(self) -> Tensor:
        """The number of the forward that a call is part of."""
        return self._clock if self.forwards.inside() else self._standing

    # what was added up

    @property
    def slots(self) -> Tensor:
        """Σ(x − c) and Σ(x − c)²."""
        self.write_held()
        return self._slots

    @property
    def tally(self) -> Tensor:
        """Rows, rows of zeros, uses of the weight, and examples."""
        self.write_held()
        return self._tally

    @property
    def rows(self) -> Tensor:
        """How many rows of inputs were seen."""
        return self.tally[0]

    @property
    def zeros(self) -> Tensor:
        """How many rows of zeros the layer has inserted."""
        return self.tally[1]

    @property
    def applied(self) -> Tensor:
        """How often the weight was used."""
        return self.tally[2]

    @property
    def examples(self) -> Tensor:
        """How many examples there were."""
        return self.tally[3]

    def sums(self) -> Sums:
        """The batch so far, with the zeros that the layer inserts."""
        first, second = self.slots.sum(0) if len(self.slots) > 1 else self.slots[0]
        sums = Sums(self.rows, first, second)
        return add_zeros(sums, self.zeros, self.centre) if self.stuffed else sums

    def sum_here(self, first: Tensor, second: Tensor) -> None:
        """Write Σ(x − c) and Σ(x − c)² to places on the CPU."""
        held = self.held if self._empty() else None
        if held is not None and held.newest is not None and held.before is None:
            held.before, held.newest = squared(*held.newest, (first, second)), None
            return
        sums = None if held is None else held.sums()
        torch._foreach_copy_([first, second], self.slots[0].unbind() if sums is None else sums)

    def counts_here(self) -> list[float]:
        """The tally as numbers, on the CPU."""
        return self.held.counts if self.held is not None and self._empty() else self.tally.tolist()

    def _empty(self) -> bool:
        """Whether the host knows the tensors to be zero; compiled code cannot ask (torch 2.11)."""
        return not torch.compiler.is_compiling() and self.empty_at == (self._slots._version, self._tally._version)

    def write_held(self) -> None:
        """Add to the tensors what is held."""
        if self.held is not None:
            held, self.held = self.held, None
            if (sums := held.sums()) is not None:
                torch._foreach_add_(self._slots[0].unbind(), sums)
            self._tally.add_(self._tally.new_tensor(held.counts))

    # calls

    def see(self, look: Look) -> None:
        """Add one call. Repeated calls within one forward of the model show the same examples again."""
        x = None if look.x is None or not self.inputs else look.x.detach()
        compiled = torch.compiler.is_compiling()
        if compiled and x is not None:
            self.to(x.device)
            tensors = self._slots, self.centre, self._tally, self.seen, self.clock
            if moments_kernel.add_compiled(x, look, self.limit, *tensors):
                return
        x = None if x is None else thinned(x, look.dim, self.limit)
        if compiled:
            self._add(x, look)
        else:
            self.see_like(x, glance(x, look))

    def see_like(self, x: Tensor | None, known: Glance) -> None:
        """Add one eager call with a tensor of a shape that is known."""
        if x is not None and known.rows is not None:
            self.to(x.device)
            x = known.rows.of(x.detach())
        if self._tally.is_cpu:
            self._hold(x, known)
        elif x is None or not moments_kernel.add(x, known.look, self, known.calls):
            self._add(x, known.look)

    def _hold(self, x: Tensor | None, known: Glance) -> None:
        """Keep a call on the CPU, in as few operations as may be."""
        held = self.held = self.held or Held()
        if x is not None and known.rows is not None:
            if not self.centred:
                self._centre_on(x, known.look.dim)
            centre = self.centres.get(known.behind)
            if centre is None:
                centre = self.centres[known.behind] = self.centre.view(-1, *[1] * known.behind)
            held.add((x if x.dtype == centre.dtype else x.to(centre.dtype)) - centre, known.others)
        self._count(held, known)

    def _count(self, held: Held, known: Glance) -> None:
        """Count a call that is held."""
        look, counts = known.look, held.counts
        if known.rows is not None:
            counts[0] += known.rows.rows
        counts[1] += look.zeros
        counts[2] += look.applied
        if self._is_new():
            counts[3] += look.examples

    def _is_new(self) -> bool:
        """Whether this is a layer's first eager call in a forward, as the host knows it."""
        clock = self.clock
        now = clock._version
        new = not now or now != self.seen_at
        if self.seen._version:  # compiled calls look at the tensors
            new = clock.item() != self.seen.item()
            self.seen.copy_(clock)
        self.seen_at = now
        return new

    def _add(self, x: Tensor | None, look: Look) -> None:
        """Add a call to the tensors.

        Compiled code fuses all of this. It is given views of its own: kept ones may lie off the 16 bytes from which
        CUDA graphs may write.
        """
        rows = 0 if x is None else x.numel() // x.shape[look.dim]
        *tally, examples = self._tally.unbind()
        for total, count in zip(tally, (rows, look.zeros, look.applied), strict=True):
            if count:
                total.add_(count)
        clock = self.clock
        examples.add_(self.seen != clock, alpha=look.examples)
        self.seen.copy_(clock)
        if x is not None:
            self._centre_on(x, look.dim)
            for total, found in zip(self._slots[0].unbind(), sum_about(x, self.centre, look.dim), strict=True):
                total.add_(found)

    def _centre_on(self, x: Tensor, inputs: int) -> None:
        """Let the first row be the centre where there is none."""
        if torch.compiler.is_compiling() or not self.centred:
            row = x
            for dim in reversed(range(x.dim())):
                row = row if dim == inputs else row.select(dim, 0)
            self.centre.copy_(torch.where(self.centre.isnan(), row, self.centre))

    # the step

    def guarded(self, raised: Tensor, held: Tensor, largest: Tensor) -> None:
        """Count, on the device, what the guards did in a step."""
        self.last.copy_(torch.stack([raised.float(), held.float(), largest.float()]))
        self.fired.add_(torch.stack([self.last[0], self.last[1], torch.ones_like(self.last[2])]))

    def use_up(self) -> list[Tensor]:
        """Drop what is held, and name the tensors that are to be zeroed for the next step."""
        self.held = None
        found = [self.g2] if self.units else []
        if not (self._tally.is_cpu and self._empty()):
            found += [self._slots, self._tally]
        return found

    def emptied(self) -> None:
        """Note that these are zero now, where that can be known."""
        if not torch.compiler.is_compiling():
            self.empty_at = self._slots._version, self._tally._version


def recentre(stages: Sequence[Stage], centres: Sequence[Tensor]) -> None:
    """Sum the next batch about these centres: running means, or NaN for its first row."""
    if stages:
        torch._foreach_copy_([stage.centre for stage in stages], list(centres))
    for stage in stages:
        stage.centred = False
