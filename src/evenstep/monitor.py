"""Curvature monitor: how well the running moments fit each batch, which inputs are dead, how often the guards act.

The paper's authors looked at these by hand (§4.4). docs/guards.md lists what is normal, with the runs behind it.
"""

import math
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from .coordinates.coordinates import Statistics
from .math.moments import batch_moments, usable
from .statistics.batch import LayerStatistics
from .step.block import Block
from .torch_optimizer.optimizer_step import CoordinateOptimizer

# of each layer; of the network, the mean over all "inputs" or "units", or the layer's value where this is largest
COLUMNS: dict[str, str | Callable[[float], float]] = {
    "log2_variance": abs,  # median over inputs of log2(batch variance / running variance)
    "log2_variance_q90": abs,  # 0.9 quantile over inputs of its magnitude
    "mean_shift_q90": abs,  # 0.9 quantile over inputs of |batch mean - running mean|, in running deviations, up to 100
    "changed_inputs": "inputs",  # share of inputs whose variance has been off by `threshold` the same way for 3 steps
    "dead_inputs": "inputs",  # share of inputs that were zero in the last 256 rows
    "guarded_inputs": "inputs",  # share of inputs whose variance fresh-max raised
    "guarded_units": "units",  # share of units that the trust radius held back
    "log10_largest_step": float,  # log10 of the largest step a unit asked for, relative to the unit's length
}

PRIOR_ROWS = 4  # rows of running moments that join each batch's: a variance from 3 rows is mostly noise
FLOOR = 0.03  # added to variances, relative to the layer's mean: damping makes smaller ones irrelevant to the step
LASTING = 3  # steps in a row after which a change counts as lasting
DEAD_ROWS = 256  # rows of zeros in a row after which an input counts as dead
SETTLED = 50  # steps after which a change of scale is an event; before it, all scales change
QUIET = 10  # calm steps after which trouble is over; steps after an event in which no other of its kind follows

HELD = "the trust radius holds back {guarded_units:.0%} of all units and so acts as the stepsize; lr may be too large"
FAR = "a unit asks for steps of {largest_step:.2g} times its own length; {guarded_units:.0%} of all are held back"
FREE = "the trust radius holds back few units again"
LOST = "a gradient, but no finite statistics of its input for 3 steps; its last moments are used"
# (kind, column, threshold, steps in a row): what to say at the start and at the end
ALARMS: dict[tuple[str, str, float, int], tuple[str, str]] = {
    ("nonfinite", "skipped", 1, 1): ("a gradient was not finite; the step was skipped", "gradients are finite"),
    ("statistics", "lost", 1, LASTING): (LOST, "statistics are back"),
    ("scale", "changed_scale", 0.03, 1): (
        "the variance of {changed_inputs:.0%} of its inputs {change} the running one",
        "the running variances fit its inputs again",
    ),
    ("dead", "newly_dead", 0.1, LASTING): (
        "dead inputs rose from {lowest_dead:.0%} to {dead_inputs:.0%}",
        "dead inputs fell to {dead_inputs:.0%}",
    ),
    ("guards", "guarded_units", 0.85, 3): (HELD, FREE),  # healthy runs reach 0.65
    ("guards", "largest_step", 3.0, 3): (FAR, FREE),  # 30 times the default trust radius
    ("guards", "guarded_units", 0.5, 50): (f"{HELD} (for 50 steps)", FREE),  # healthy ones hold few units after step 20
}
OF_NETWORK = "nonfinite", "guards"  # the other kinds are of layers, where two inputs at least must signal


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


_Key = tuple[str, str, float, int]  # of ALARMS
_Row = dict[str, float]  # columns of a layer or of the network, and what events need besides
_Record = tuple[int, list[str], Tensor, Tensor]  # step, layers, table [layer, column], number of steps skipped so far
EMPTY: tuple[list[str], Tensor] = [], torch.empty(0)  # layers and table of a step that was skipped


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
        self._newest = EMPTY  # layers and table of the last step that was not skipped
        self._names: list[str] = []  # of the elements of a row
        self._rows: dict[str, Tensor] = {}
        self._sizes: dict[str, dict[str, int]] = {}
        self._memory: dict[str, _Memory] = {}
        self._watch = _Watch(int(optimizer._nonfinite))
        self._step = 0
        optimizer._monitors.append(self)

    @_disable_dynamo  # compiled, the growing history would have the step compiled anew each time
    def note(self, block: Block, state: dict[str, Any]) -> None:
        """Called by the optimizer for each block, before its batch joins the moments."""
        layer = block.statistics
        if layer is None or block.entry is None or "mx" not in state:
            return
        path = block.entry.label
        memory = self._memory.get(path)
        if memory is None or memory.run.shape != state["vx"].shape or memory.run.device != state["vx"].device:
            memory = self._memory[path] = _Memory(layer.inputs, state["vx"])
        self._sizes[path] = {"inputs": layer.inputs, "units": block.units}
        raised, held, largest = layer.last.nan_to_num(0.0).unbind()
        row = memory.look(layer, state, self._bits, block.group["decay"])
        row["guarded_inputs"], row["guarded_units"] = raised / layer.inputs, held / block.units
        row["log10_largest_step"] = largest.clamp(1e-6, 1e6).log10()
        self._names, self._rows[path] = [*row], torch.stack([value.float() for value in row.values()])

    @_disable_dynamo
    def end_step(self) -> None:
        """Called by the optimizer at the end of a step, also of one that was skipped."""
        self._step += 1
        skipped, rows = self._optimizer._nonfinite.clone(), self._rows.values()
        if rows:
            self._newest = [*self._rows], torch.stack([row.to(skipped.device) for row in rows])
        self._records.append((self._step, *(self._newest if rows else EMPTY), skipped))
        self._rows = {}

    def _read(self, layers: list[str], table: Tensor) -> dict[str, _Row]:
        """The rows of a step with names, from the device."""
        pairs = zip(layers, table.tolist(), strict=True)
        return {layer: {**self._sizes[layer], **dict(zip(self._names, row, strict=True))} for layer, row in pairs}

    def scalars(self) -> dict[str, float]:
        """The newest numbers, flat: "layer/column" for each layer, "all/column" for the network.

        A share of the network is one of all its inputs or units; of the other columns, the network has the value of
        the layer where its magnitude is largest (`log10_largest_step`: where it is largest).
        """
        rows = self._read(*self._newest)
        if rows:
            rows["all"] = overall([*rows.values()])
        return {f"{layer}/{column}": row[column] for layer, row in rows.items() for column in COLUMNS}

    def events(self) -> list[Event]:
        """What has happened since the last call, in order."""
        found: list[Event] = []
        for step, layers, table, skipped in self._records:
            found += self._watch.events(step, self._read(layers, table), int(skipped))
        self._records.clear()
        return found


class _Memory:
    """For each input of one layer: for how many steps its variance has been off, for how many rows it was zero."""

    def __init__(self, inputs: int, like: Tensor) -> None:
        self.run = like.new_zeros(inputs)  # steps in a row with the variance off; negative where it is too small
        self.quiet = like.new_zeros(inputs)  # rows of zeros in a row
        self.rows = like.new_zeros(())
        self.lowest = like.new_ones(())  # share of dead inputs so far, from DEAD_ROWS rows on

    def look(self, layer: LayerStatistics, state: dict[str, Any], bits: float, decay: float) -> dict[str, Tensor]:
        """What this step says of the layer's inputs; remembers what later steps need."""
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
        changed, dead = lasting.float().mean(), (self.quiet >= DEAD_ROWS).float().mean()
        self.lowest = torch.where(self.rows < DEAD_ROWS, self.lowest, self.lowest.minimum(dead))
        return {
            "log2_variance": quantile(log2, 0.5),
            "log2_variance_q90": quantile(log2.abs(), 0.9),
            "mean_shift_q90": quantile(shift, 0.9),
            "changed_inputs": changed,
            "changed_scale": changed * (state["mass"] >= min(1 - decay**SETTLED, 0.999)),
            "changed_by": torch.where(lasting, log2, 0.0).sum() / lasting.sum().clamp(min=1),
            "dead_inputs": dead,
            "lowest_dead": self.lowest,
            "newly_dead": dead - self.lowest,
            "lost": ~finite,
        }


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


def overall(rows: list[_Row]) -> _Row:
    """The network's value of each column; none without layers."""
    found: _Row = {}
    for column, how in COLUMNS.items() if rows else ():
        if isinstance(how, str):
            found[column] = sum(row[how] * row[column] for row in rows) / max(1, sum(row[how] for row in rows))
        else:
            found[column] = max((row[column] for row in rows), key=how)
    return found


class _Watch:
    """Turns each step's numbers into events."""

    def __init__(self, skipped: int) -> None:
        self.skipped = skipped
        self.on: set[tuple[_Key, str]] = set()  # alarms that are on, with their layer
        self.runs: dict[tuple[_Key, str], int] = {}  # for how many steps in a row an alarm has had reason to turn
        self.told: dict[str, int] = {}  # step of the newest start of a kind
        self.open: set[str] = set()  # kinds whose end has not been told

    def events(self, step: int, rows: dict[str, _Row], skipped: int) -> list[Event]:
        """The events of one step; it has no rows if it was skipped."""
        network = {"skipped": float(skipped > self.skipped), **overall(list(rows.values()))}
        self.skipped = skipped
        if rows:
            network["largest_step"] = 10 ** network["log10_largest_step"]
        found = [self._event(step, key, {"all": network} if key[0] in OF_NETWORK else rows) for key in ALARMS]
        return [event for event in found if event is not None]

    def _event(self, step: int, key: _Key, rows: dict[str, _Row]) -> Event | None:
        """The layer with the strongest signal speaks for all whose alarm goes on."""
        (kind, column, threshold, after), texts, turned = key, ALARMS[key], dict[str, float]()
        for name, row in rows.items():
            if column not in row:  # of a step without layers
                continue
            alarm, two_inputs = (key, name), 2 / max(1.0, row.get("inputs", math.inf))
            signal, on = row[column] / max(threshold, min(1.0, two_inputs)), alarm in self.on
            self.runs[alarm] = self.runs.get(alarm, 0) + 1 if (signal < 0.5 if on else signal >= 1) else 0
            if self.runs[alarm] >= (QUIET if on else after):
                self.on, self.runs[alarm], turned[name] = self.on ^ {alarm}, 0, signal
        started = [name for name in turned if (key, name) in self.on]
        if started and step > self.told.get(kind, -QUIET) + QUIET:
            name = max(started, key=lambda name: (turned[name], name))
            self.told[kind] = step
            self.open.add(kind)
            more = f" (and {len(started) - 1} more layers)" if len(started) > 1 else ""
            return Event(step, name, say(texts[0], rows[name]) + more, kind)
        if turned and kind in self.open and not any(other[0] == kind for other, _ in self.on):
            self.open.remove(kind)
            name = [*turned][-1]
            return Event(step, name, say(texts[1], rows[name]), kind, over=True)
        return None


def say(text: str, row: _Row) -> str:
    """The text with the values of a row."""
    by = row.get("changed_by", 0.0)
    change = f"grew to {2**by:.3g} times" if by > 0 else f"shrank to 1/{2**-by:.3g} of"
    return text.format(**row, change=change)
