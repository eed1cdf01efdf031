"""Curvature monitor: how well the running moments fit each batch, which inputs are dead, how often the guards act.

The paper's authors looked at these by hand (§4.4). docs/guards.md lists what is normal, with the runs behind it.
"""

from collections import deque
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from .coordinates.coordinates import Statistics
from .math.moments import batch_moments, usable
from .statistics.batch import LayerStatistics
from .step.block import Block
from .torch_optimizer.optimizer_step import CoordinateOptimizer

COLUMNS = (
    "log2_variance",  # median over inputs of log2(batch variance / running variance)
    "log2_variance_q90",  # 0.9 quantile over inputs of its magnitude
    "mean_shift_q90",  # 0.9 quantile over inputs of |batch mean - running mean|, in running deviations, at most 100
    "changed_inputs",  # share of inputs whose variance has been off by `threshold` the same way for 3 steps
    "dead_inputs",  # share of inputs that were zero in the last 256 rows
    "guarded_inputs",  # share of inputs whose variance fresh-max raised
    "guarded_units",  # share of units that the trust radius held back
    "log10_largest_step",  # log10 of the largest step a unit asked for, relative to the unit's length
)
_HIDDEN = ("changed_by", "settled", "judged", "lost", "skipped")  # for events alone
_PER_UNIT = "guarded_units"
_LARGEST = ("log2_variance", "log2_variance_q90", "mean_shift_q90", "log10_largest_step")

PRIOR_ROWS = 4  # rows of running moments that join each batch's: a variance from 3 rows is mostly noise
FLOOR = 0.03  # added to variances, relative to the layer's mean: damping makes smaller ones irrelevant to the step
LASTING = 3  # steps in a row after which a change counts as lasting
DEAD_ROWS = 256  # rows of zeros in a row after which an input counts as dead
SETTLED = 50  # steps after which a change of scale is an event; before it, all scales change

CHANGED_SHARE = 0.03  # of a layer's inputs, and at least two of them
DEAD_SHARE = 0.1  # rise over the lowest share so far
HELD_SHARE, HELD_STEPS = 0.85, 3  # of the network's units; healthy runs reach 0.74
LONG_SHARE, LONG_STEPS = 0.5, 50  # healthy runs hold back few units after 20 steps
LARGEST_STEP = 3.0  # of a unit's length: 30 times the default trust radius
QUIET = 10  # calm steps after which trouble is over; steps after an event in which no other of its kind follows

LOST = "a gradient, but no finite statistics of its input for 3 steps; its last moments are used", "statistics are back"
FREE = "the trust radius holds back few units again"


class Event(NamedTuple):
    """A change of state worth telling a person: trouble that starts, or, with `over`, trouble that ends.

    `kind` is "scale", "dead", "guards", "nonfinite" or "statistics"; `layer` is "all" for the whole network.
    """

    step: int
    layer: str
    what: str
    kind: str = ""
    over: bool = False

    def __str__(self) -> str:
        return f"step {self.step}, layer {self.layer}: {self.what}"


_Record = tuple[int, list[str], Tensor]  # step, layers, table of [layer, column]
_Signal = tuple[float, str, str]  # of a layer, 1 where there is trouble; what to say at the start and at the end


class CurvatureMonitor:
    """Watch an optimizer's statistics and guards: `scalars()` for a dashboard, `events()` for a person.

    It reads tensors that the step uses anyway and stays on the device; the host waits for the device only in
    `scalars()` and `events()`. `threshold` is the factor, either way, by which the variance of an input must change to
    count as changed. The last `history` steps are kept until `events()` reads them.

        monitor = evenstep.CurvatureMonitor(opt)
        ...
        writer.add_scalars("curvature", monitor.scalars(), step)
    """

    def __init__(self, optimizer: CoordinateOptimizer, *, threshold: float = 4.0, history: int = 1000) -> None:
        """`optimizer` must keep moments of its layers' inputs."""
        if not isinstance(optimizer, CoordinateOptimizer) or optimizer.needs < Statistics.INPUTS:
            name = type(optimizer).__name__
            raise ValueError(f"CurvatureMonitor: {name} keeps no moments to watch; give a whitened or canonical one.")
        if not threshold > 1:
            raise ValueError(f"CurvatureMonitor: threshold must be above 1; got {threshold}.")
        self._optimizer, self._bits = optimizer, float(torch.tensor(threshold).log2())
        self._records: deque[_Record] = deque(maxlen=history)
        self._newest: _Record | None = None
        self._rows: dict[str, Tensor] = {}
        self._memory: dict[str, _Memory] = {}
        self._sizes: dict[str, tuple[int, int]] = {}
        self._watch = _Watch(self._sizes, int(optimizer._nonfinite))
        self._step = 0
        optimizer._monitors.append(self)

    @_disable_dynamo  # compiled, the growing history would have the step compiled anew each time
    def note(self, block: Block, layer: LayerStatistics | None, state: dict[str, Any]) -> None:
        """Called by the optimizer for each block, before its batch joins the moments."""
        if layer is None or block.entry is None or "mx" not in state:
            return
        path = block.entry.label
        memory = self._memory.get(path)
        if memory is None or memory.run.shape != state["vx"].shape or memory.run.device != state["vx"].device:
            memory = self._memory[path] = _Memory(layer.inputs, state["vx"])
        self._sizes[path] = layer.inputs, block.units
        raised, held, largest = layer.last.nan_to_num(0.0).unbind()
        work = [raised / layer.inputs, held / block.units, largest.clamp(1e-6, 1e6).log10()]
        inputs = memory.look(layer, state, self._bits, block.group["decay"])
        self._rows[path] = torch.stack([value.float() for value in (*inputs[:5], *work, *inputs[5:])])

    @_disable_dynamo
    def end_step(self) -> None:
        """Called by the optimizer at the end of a step, also of one that was skipped."""
        self._step += 1
        if self._rows:
            device = next(iter(self._rows.values())).device
            table = torch.stack([row.to(device) for row in self._rows.values()])
            skipped = self._optimizer._nonfinite.to(table).expand(len(table), 1)
            self._newest = self._step, list(self._rows), torch.cat([table, skipped], 1)
            self._records.append(self._newest)
        self._rows = {}

    def scalars(self) -> dict[str, float]:
        """The newest numbers, flat: "layer/column" for each layer, "all/column" for the network.

        A share of the network is one of all its inputs or units; of the other columns, the network has the value of
        the layer where its magnitude is largest (`log10_largest_step`: where it is largest).
        """
        if self._newest is None:
            return {}
        _, layers, table = self._newest
        rows = {layer: dict(zip(COLUMNS, row, strict=False)) for layer, row in zip(layers, table.tolist(), strict=True)}
        each = {f"{layer}/{column}": value for layer, row in rows.items() for column, value in row.items()}
        return each | {f"all/{column}": self._watch.overall(rows, column) for column in COLUMNS}

    def events(self) -> list[Event]:
        """What has happened since the last call, in order."""
        found: list[Event] = []
        if self._records:
            device = self._records[-1][2].device
            values = iter(torch.cat([table.to(device) for _, _, table in self._records]).tolist())
            for step, layers, _ in self._records:
                rows = {layer: dict(zip(COLUMNS + _HIDDEN, next(values), strict=True)) for layer in layers}
                found += self._watch.events(step, rows)
        self._records.clear()
        return found + self._watch.skips(self._step, int(self._optimizer._nonfinite), passed=False)


class _Memory:
    """For each input of one layer: for how many steps its variance has been off, for how many rows it was zero."""

    def __init__(self, inputs: int, like: Tensor) -> None:
        self.run = like.new_zeros(inputs)  # steps in a row with the variance off; negative where it is too small
        self.quiet = like.new_zeros(inputs)  # rows of zeros in a row
        self.rows = like.new_zeros(())

    def look(self, layer: LayerStatistics, state: dict[str, Any], bits: float, decay: float) -> list[Tensor]:
        """The columns that are about inputs, then the hidden ones."""
        sums = layer.sums()
        mean, var = batch_moments(sums, layer.centre)
        finite = usable(sums)
        known = finite & (state["mass"] > 0)
        log2, shift = (torch.where(known, c, 0.0).nan_to_num(0.0) for c in changes(mean, var, sums.rows, state))
        up, down = self.run.clamp(min=0) + 1, self.run.clamp(max=0) - 1
        self.run = torch.where(log2 > bits, up, torch.where(log2 < -bits, down, 0.0))
        zero = var + mean * mean <= 1e-5 * layer.centre * layer.centre  # sums about a centre leave rounding behind
        seen = torch.where(finite, sums.rows, 0.0)
        self.quiet = torch.where(finite & ~zero, 0.0, self.quiet + seen)
        self.rows = self.rows + seen
        lasting = self.run.abs() >= LASTING
        shares = [lasting.float().mean(), (self.quiet >= DEAD_ROWS).float().mean()]
        changed_by = torch.where(lasting, log2, 0.0).sum() / lasting.sum().clamp(min=1)
        settled = state["mass"] >= min(1 - decay**SETTLED, 0.999)
        quantiles = [quantile(log2, 0.5), quantile(log2.abs(), 0.9), quantile(shift, 0.9)]
        return [*quantiles, *shares, changed_by, settled, self.rows >= DEAD_ROWS, ~finite]


def changes(mean: Tensor, var: Tensor, rows: Tensor, state: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """For each input, log2 of batch over running variance, and |batch mean − running mean| in running deviations.

    PRIOR_ROWS rows of running moments join the batch's n rows, so that few rows say little:
    with s = n/(n + PRIOR_ROWS) and f = FLOOR · mean v + (10⁻⁶ μ)², log2((v + f + s (var − v))/(v + f)) and
    s |mean − μ|/√(v + f).
    """
    mx, vx = state["mx"], state["vx"]
    base = (vx + FLOOR * vx.mean() + 1e-12 * mx * mx).clamp(min=torch.finfo(vx.dtype).tiny)
    share = rows / (rows + PRIOR_ROWS)
    log2 = (1 + share * ((var - vx) / base)).clamp(min=2**-20, max=2**20).log2()
    return log2, (share * (mean - mx).abs() * base.rsqrt()).clamp(max=100)


def quantile(values: Tensor, q: float) -> Tensor:
    """The q-quantile of a vector, interpolated between neighbours; 0 for an empty one. Needs no read of the device.

    >>> quantile(torch.tensor([4.0, 0.0, 1.0]), 0.75)
    tensor(2.5000)
    """
    if not len(values):
        return values.new_zeros(())
    ordered, place = values.sort().values, q * (len(values) - 1)
    below = int(place)
    return torch.lerp(ordered[below], ordered[min(below + 1, len(values) - 1)], place - below)


@dataclass
class _Alarm:
    """On after `on_after` signals of at least 1 in a row, off after QUIET below a half."""

    on_after: int
    on: bool = False
    run: int = 0

    def turned(self, signal: float) -> bool:
        """Whether this signal turns the alarm on or off."""
        self.run = self.run + 1 if (signal < 0.5 if self.on else signal >= 1) else 0
        if self.run < (QUIET if self.on else self.on_after):
            return False
        self.on, self.run = not self.on, 0
        return True


class _Watch:
    """Turns each step's numbers into events."""

    def __init__(self, sizes: dict[str, tuple[int, int]], skipped: int) -> None:
        self.sizes, self.skipped = sizes, skipped
        self.alarms: dict[tuple[str, str], _Alarm] = {}
        self.told: dict[str, int] = {}  # step of the newest start of a kind
        self.open: set[str] = set()  # kinds whose end has not been told
        self.lowest: dict[str, float] = {}  # share of dead inputs

    def overall(self, rows: dict[str, dict[str, float]], column: str) -> float:
        """The network's value of a column."""
        if column in _LARGEST:
            size = float if column == "log10_largest_step" else abs
            return max((row[column] for row in rows.values()), key=size)
        weights = {layer: self.sizes[layer][column == _PER_UNIT] for layer in rows}
        return sum(weights[layer] * row[column] for layer, row in rows.items()) / max(1, sum(weights.values()))

    def events(self, step: int, rows: dict[str, dict[str, float]]) -> list[Event]:
        """The events of one step."""
        found = self.skips(step, int(max(row["skipped"] for row in rows.values())))
        found += self._layers(step, "statistics", {n: (row["lost"], *LOST) for n, row in rows.items()}, LASTING)
        found += self._layers(step, "scale", {n: self._scale(n, row) for n, row in rows.items()}, 1)
        dead = {n: self._dead(n, row) for n, row in rows.items() if row["judged"]}
        return found + self._layers(step, "dead", dead, LASTING) + self._guards(step, rows)

    def skips(self, step: int, count: int, passed: bool = True) -> list[Event]:
        """Steps whose gradient was not finite, and, if a step has `passed`, the end of a series of them."""
        new, self.skipped = count - self.skipped, count
        if not (new > 0 or passed):
            return []
        signal = {"all": (float(new > 0), "a gradient was not finite; the step was skipped", "gradients are finite")}
        return self._layers(step, "nonfinite", signal, 1)

    def _scale(self, layer: str, row: dict[str, float]) -> _Signal:
        share, by = row["changed_inputs"], row["changed_by"]
        to = f"grew to {2**by:.3g} times" if by > 0 else f"shrank to 1/{2**-by:.3g} of"
        what = f"the variance of {share:.0%} of its inputs {to} the running one"
        signal = row["settled"] * share / self._least(layer, CHANGED_SHARE)
        return signal, what, "the running variances fit its inputs again"

    def _dead(self, layer: str, row: dict[str, float]) -> _Signal:
        dead, lowest = row["dead_inputs"], self.lowest.setdefault(layer, row["dead_inputs"])
        alarm = self.alarms.get(("dead", layer))
        if alarm is None or not alarm.on:
            self.lowest[layer] = lowest = min(lowest, dead)
        what = f"dead inputs rose from {lowest:.0%} to {dead:.0%}"
        return (dead - lowest) / self._least(layer, DEAD_SHARE), what, f"dead inputs fell to {dead:.0%}"

    def _least(self, layer: str, share: float) -> float:
        """This share of a layer's inputs, and at least two of them."""
        return max(share, min(1.0, 2 / max(1, self.sizes[layer][0])))

    def _guards(self, step: int, rows: dict[str, dict[str, float]]) -> list[Event]:
        share, largest = (self.overall(rows, column) for column in (_PER_UNIT, "log10_largest_step"))
        what = f"the trust radius holds back {share:.0%} of all units and so acts as the stepsize; lr may be too large"
        if share < HELD_SHARE and 10**largest >= LARGEST_STEP:
            what = f"a unit asks for steps of {10**largest:.2g} times its own length; {share:.0%} of all are held back"
        signals = max(share / HELD_SHARE, 10**largest / LARGEST_STEP), share / LONG_SHARE
        found = self._layers(step, "guards", {"all": (signals[0], what, FREE)}, HELD_STEPS)
        for event in self._layers(step, "guards for long", {"all": (signals[1], what, FREE)}, LONG_STEPS):
            found.append(event._replace(kind="guards", what=f"{event.what} (for {LONG_STEPS} steps)"))
        return found

    def _layers(self, step: int, kind: str, now: dict[str, _Signal], on_after: int) -> list[Event]:
        """At most one event of a kind: the layer with the strongest signal speaks for all whose alarm goes on."""
        alarms = {layer: self.alarms.setdefault((kind, layer), _Alarm(on_after)) for layer in now}
        turned = [layer for layer, (signal, _, _) in now.items() if alarms[layer].turned(signal)]
        on = [layer for layer in turned if alarms[layer].on]
        if on and step > self.told.get(kind, -QUIET) + QUIET:
            layer = max(on, key=lambda name: (now[name][0], name))
            self.told[kind] = step
            self.open.add(kind)
            more = f" (and {len(on) - 1} more layers)" if len(on) > 1 else ""
            return [Event(step, layer, now[layer][1] + more, kind)]
        if turned and kind in self.open and not any(a.on for (k, _), a in self.alarms.items() if k == kind):
            self.open.remove(kind)
            return [Event(step, turned[-1], now[turned[-1]][2], kind, over=True)]
        return []
