"""Curvature monitor: how well the moments fit, dead inputs, guards at work (§4.4). docs/guards.md: what is normal."""

from collections import Counter, deque
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from .coordinates.coordinates import Statistics
from .math.moments import batch_moments, usable
from .statistics.layer_statistics import LayerStatistics
from .step.block import Block
from .torch_optimizer.optimizer_step import CoordinateOptimizer

COLUMNS = (
    "log2_variance_q90",  # 0.9 quantile over inputs of |log2(batch variance / running variance)|
    "mean_shift_q90",  # 0.9 quantile over inputs of |batch mean - running mean|, in running deviations, up to 100
    "changed_inputs",  # share of inputs whose variance has been off by `threshold` the same way for 3 steps
    "dead_inputs",  # share of inputs that were zero in the last 256 rows
    "guarded_units",  # share of units that the trust radius held back
    "log10_largest_step",  # log10 of the largest step a unit asked for, relative to the unit's length
)
PRIOR_ROWS = 4  # rows of running moments that join each batch's: a variance from 3 rows is mostly noise
FLOOR = 0.03  # added to variances, relative to the layer's mean: damping makes smaller ones irrelevant to the step
LASTING = 3  # steps in a row after which a change counts as lasting
DEAD_ROWS = 256  # rows of zeros in a row after which an input counts as dead
SETTLED = 50  # steps after which a change of scale is an event; before it, all scales change
QUIET = 20  # steps after an event in which no other of its kind follows

HELD = "the trust radius holds back {guarded_units:.0%} of all units and so acts as the stepsize; lr may be too large"
FAR = "a unit asks for steps of 10^{log10_largest_step:.1f} times its own length; lr may be too large"
Alarm = tuple[str, str, float, int, str]
# kind of event, column, threshold, steps in a row at the threshold (at two inputs at least), what to say
ALARMS = (
    ("nonfinite", "skipped", 1, 1, "a gradient was not finite; the step was skipped"),
    ("scale", "changed_inputs", 0.03, 1, "the running variances no longer fit {changed_inputs:.0%} of its inputs"),
    ("dead", "newly_dead", 0.1, LASTING, "dead inputs rose by {newly_dead:.0%} to {dead_inputs:.0%}"),
    ("guards", "guarded_units", 0.85, LASTING, HELD),  # healthy runs reach 0.65
    ("guards", "log10_largest_step", 0.5, LASTING, FAR),  # 30 times the default trust radius
)


class Event(NamedTuple):
    """What a person would want to be told. `kind` is an alarm's; `layer` is "all" for the whole network."""

    step: int
    layer: str
    what: str
    kind: str = ""

    def __str__(self) -> str:
        return f"step {self.step}, layer {self.layer}: {self.what}"


class CurvatureMonitor:
    """Watch an optimizer's statistics and guards: `scalars()` for a dashboard, `events()` for a person.

    It reads tensors that the step uses anyway and stays on the device; the host waits for the device only in
    `scalars()` and `events()`. `threshold` is the factor, either way, by which the variance of an input must change to
    count as changed. The last `history` steps are kept until `events()` reads them.

        monitor = evenstep.CurvatureMonitor(opt)
        writer.add_scalars("curvature", monitor.scalars(), step)  # after a step
    """

    def __init__(self, optimizer: CoordinateOptimizer, *, threshold: float = 4.0, history: int = 1000) -> None:
        """`optimizer` must keep moments of its layers' inputs."""
        if not isinstance(optimizer, CoordinateOptimizer) or optimizer.coordinates.needs < Statistics.INPUTS:
            name = type(optimizer).__name__
            raise ValueError(f"CurvatureMonitor: {name} keeps no moments to watch; give a whitened or canonical one.")
        if not threshold > 1:
            raise ValueError(f"CurvatureMonitor: threshold must be above 1; got {threshold}.")
        self._optimizer, self._bits = optimizer, float(torch.tensor(threshold).log2())
        self._step, self._skipped = 0, int(optimizer._nonfinite)
        self._memory: dict[str, _Memory] = {}
        self._rows: dict[str, Tensor] = {}  # of the step under way: newly dead inputs, then COLUMNS
        self._newest: tuple[list[str], Tensor] = [], torch.empty(0)  # layers and rows of the last step with some
        self._records: deque[tuple[int, list[str], Tensor, Tensor]] = deque(
            maxlen=history
        )  # last: how many were skipped
        self._runs: Counter[tuple[str, str]] = Counter()  # for how many steps in a row a layer's column is at threshold
        self._told: dict[str, int] = {}  # step of the newest event of a kind
        optimizer._monitors.append(self)

    @_disable_dynamo  # compiled, the growing history would have the step compiled anew each time
    def note(self, block: Block, state: dict[str, Any]) -> None:
        """Called by the optimizer for each block, before its batch joins the moments."""
        layer = block.statistics
        if layer is None or block.entry is None or "mx" not in state or not layer.inputs:
            return
        path, vx = block.entry.label, state["vx"]
        memory = self._memory.get(path)
        if memory is None or memory.run.shape != vx.shape or memory.run.device != vx.device:
            memory = self._memory[path] = _Memory(layer.inputs, block.units, vx)
        _, held, largest = layer.last.nan_to_num(0.0).unbind()
        row = [*memory.look(layer, state, self._bits), held / block.units, largest.clamp(1e-6, 1e6).log10()]
        self._rows[path] = torch.stack([value.float() for value in row])

    @_disable_dynamo
    def end_step(self) -> None:
        """Called by the optimizer at the end of a step, also of one that was skipped."""
        self._step += 1
        skipped = self._optimizer._nonfinite.clone()
        rows = [row.to(skipped.device) for row in self._rows.values()]
        noted = [*self._rows], torch.stack(rows) if rows else torch.empty(0)
        self._records.append((self._step, *noted, skipped))
        self._newest, self._rows = noted if rows else self._newest, {}

    def scalars(self) -> dict[str, float]:
        """The newest numbers, flat: "layer/column" for each layer, "all/column" for the network.

        The network's `guarded_units` is a share of all its units; of the other columns it has the largest value.
        """
        rows = self._read(*self._newest)
        return {f"{layer}/{column}": row[column] for layer, row in rows.items() for column in COLUMNS}

    def _read(self, layers: list[str], table: Tensor) -> dict[str, dict[str, float]]:
        """The rows of a step, from the device, with names and the network's; none if the step was skipped."""
        names = "newly_dead", *COLUMNS
        rows = {k: dict(zip(names, row, strict=True)) for k, row in zip(layers, table.tolist(), strict=True)}
        units = {layer: self._memory[layer].units for layer in rows}
        network = {column: max((row[column] for row in rows.values()), default=0.0) for column in COLUMNS}
        network["guarded_units"] = sum(rows[k]["guarded_units"] * units[k] for k in rows) / max(1, sum(units.values()))
        return {**rows, "all": network} if rows else {}

    def events(self) -> list[Event]:
        """What has happened since the last call, in order."""
        found: list[Event] = []
        for step, layers, table, skipped in self._records:
            rows = self._read(layers, table)
            network = {**rows.pop("all", {}), "skipped": float(skipped > self._skipped)}
            self._skipped = int(skipped)
            for alarm in ALARMS:
                found += self._tell(step, alarm, rows if alarm[0] in ("scale", "dead") else {"all": network})
        self._records.clear()
        return found

    def _tell(self, step: int, alarm: Alarm, rows: dict[str, dict[str, float]]) -> list[Event]:
        """One event at most: the layer with the largest value speaks for all whose alarm goes on."""
        kind, column, threshold, steps, text = alarm
        if kind == "scale" and step <= SETTLED:
            return []
        started = []
        for layer, row in rows.items():
            two_inputs = 0.0 if layer == "all" else min(1.0, 2 / self._memory[layer].inputs)
            reached = row.get(column, 0.0) >= max(threshold, two_inputs)
            self._runs[column, layer] = self._runs[column, layer] + 1 if reached else 0
            if self._runs[column, layer] == steps:
                started.append(layer)
        if not started or step <= self._told.get(kind, -QUIET) + QUIET:
            return []
        self._told[kind] = step
        layer = max(started, key=lambda layer: (rows[layer][column], layer))
        more = f" (and {len(started) - 1} more layers)" if len(started) > 1 else ""
        return [Event(step, layer, text.format(**rows[layer]) + more, kind)]


class _Memory:
    """For each input of one layer: for how many steps its variance has been off, for how many rows it was zero."""

    def __init__(self, inputs: int, units: int, like: Tensor) -> None:
        self.inputs, self.units = inputs, units
        self.run = like.new_zeros(inputs)  # steps in a row with the variance off; negative where it is too small
        self.quiet = like.new_zeros(inputs)  # rows of zeros in a row
        self.rows = like.new_zeros(())
        self.lowest = like.new_ones(())  # share of dead inputs so far, from DEAD_ROWS rows on

    def look(self, layer: LayerStatistics, state: dict[str, Any], bits: float) -> list[Tensor]:
        """The share of newly dead inputs and the first columns; remembers what later steps need."""
        sums = layer.sums()
        offset, var = batch_moments(sums)
        mean, finite = layer.centre + offset, usable(sums.rows, offset, var)
        known = finite & (state["mass"] > 0)
        log2, shift = (torch.where(known, c, 0.0).nan_to_num(0.0) for c in changes(mean, var, sums.rows, state))
        up, down = self.run.clamp(min=0) + 1, self.run.clamp(max=0) - 1
        self.run = torch.where(log2 > bits, up, torch.where(log2 < -bits, down, 0.0))
        zero = var + mean * mean <= 1e-5 * layer.centre * layer.centre  # sums about a centre leave rounding behind
        seen = torch.where(finite, sums.rows, 0.0)
        self.quiet = torch.where(finite & ~zero, 0.0, self.quiet + seen)
        self.rows = self.rows + seen
        changed, dead = (self.run.abs() >= LASTING).float().mean(), (self.quiet >= DEAD_ROWS).float().mean()
        self.lowest = torch.where(self.rows < DEAD_ROWS, self.lowest, self.lowest.minimum(dead))
        # the lower neighbour of the quantile; `quantile` itself would wait for the device
        upper = torch.stack([log2.abs(), shift]).sort(1).values[:, int(0.9 * (self.inputs - 1))]
        return [dead - self.lowest, *upper, changed, dead]


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
