"""What the paper's authors looked at by hand (§4.4): running moments against fresh ones, dead units, guards at work."""

from collections import deque
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .math.moments import batch_moments, usable
from .statistics.batch import LayerStatistics
from .step.block import Block
from .torch_optimizer.step import CoordinateOptimizer

COLUMNS = (
    "mean_distance",  # largest |fresh mean − running mean|, in units of the running deviation
    "variance_ratio",  # largest factor between fresh and running variance, either way
    "growth",  # largest factor by which a variance grew
    "grown",  # how many inputs' variance grew beyond the threshold
    "dead_inputs",  # share of inputs that were zero on the whole batch
    "guarded_inputs",  # share of inputs that fresh-max raised
    "guarded_units",  # share of units that the trust radius held back
    "largest_step",  # largest step a unit asked for, relative to its own length
)


class Event(NamedTuple):
    """Something out of the ordinary in one layer at one step."""

    step: int
    layer: str
    what: str

    def __str__(self) -> str:
        """As a sentence."""
        return f"step {self.step}, layer {self.layer}: {self.what}"


class CurvatureMonitor:
    """Watch an optimizer's statistics: how far each batch is from the running moments, and what the guards did.

    It reads what the hooks staged anyway, at the end of each step, into tensors on the device; nothing waits for the
    device until `scalars()` or `events()` is called. `threshold` is how many times a variance must grow, or a guarded
    step exceed its unit's length, to make an event; the last `history` steps are kept until read.

        monitor = evenstep.CurvatureMonitor(opt)
        ...
        writer.add_scalars("curvature", monitor.scalars(), step)
    """

    def __init__(self, optimizer: CoordinateOptimizer, *, threshold: float = 10.0, history: int = 1000) -> None:
        """`optimizer` must keep moments of its layers' inputs."""
        if not isinstance(optimizer, CoordinateOptimizer) or optimizer.coordinates not in ("whitened", "canonical"):
            name = type(optimizer).__name__
            raise ValueError(f"CurvatureMonitor: {name} keeps no moments to watch; give a whitened or canonical one.")
        self.threshold = threshold
        self._records: deque[tuple[int, list[str], Tensor]] = deque(maxlen=history)
        self._rows: dict[str, Tensor] = {}
        self._step = self._told = 0
        optimizer._monitors.append(self)

    def note(self, block: Block, stage: LayerStatistics | None, state: dict[str, Any]) -> None:
        """Called by the optimizer for each block, before its batch joins the moments."""
        if stage is not None and block.entry is not None and "mx" in state:
            raised, held, largest = stage.last.unbind()
            work = [raised / stage.inputs, held / block.units, largest]
            self._rows[block.entry.path] = torch.stack([*distances(stage, state, self.threshold), *work])

    def end_step(self) -> None:
        """Called by the optimizer when a step is made."""
        self._step += 1
        if self._rows:
            device = next(iter(self._rows.values())).device
            table = torch.stack([row.to(device) for row in self._rows.values()])
            self._records.append((self._step, list(self._rows), table))
        self._rows = {}

    def scalars(self) -> dict[str, float]:
        """The newest numbers, flat: "layer/column" for each layer, "all/column" for the network's largest."""
        if not self._records:
            return {}
        _, layers, table = self._records[-1]
        values = table.tolist()
        found = {
            f"{layer}/{c}": row[k] for layer, row in zip(layers, values, strict=True) for k, c in enumerate(COLUMNS)
        }
        return found | {f"all/{c}": max(row[k] for row in values) for k, c in enumerate(COLUMNS)}

    def events(self) -> list[Event]:
        """What happened since the last call (variances that grew, units that died or were held back), in order."""
        found: list[Event] = []
        before: dict[str, dict[str, float]] = {}
        for step, layers, table in self._records:
            for layer, row in zip(layers, table.tolist(), strict=True):
                now = dict(zip(COLUMNS, row, strict=True))
                if step > self._told:
                    found += [Event(step, layer, what) for what in self._noteworthy(now, before.get(layer))]
                before[layer] = now
        self._told = self._step
        while len(self._records) > 1:  # the newest stays, for scalars()
            self._records.popleft()
        return found

    def _noteworthy(self, now: dict[str, float], before: dict[str, float] | None) -> list[str]:
        guarded = "guarded" if now["guarded_inputs"] or now["guarded_units"] else "not guarded"
        found = []
        if now["grown"]:
            found.append(f"variance of {now['grown']:.0f} inputs grew, up to {now['growth']:.0f}-fold; {guarded}")
        if before is not None and now["dead_inputs"] > before["dead_inputs"] + 0.05:
            found.append(f"dead inputs rose from {before['dead_inputs']:.0%} to {now['dead_inputs']:.0%}")
        if now["largest_step"] > self.threshold:
            found.append(f"a unit asked for {now['largest_step']:.0f} times its own length; held back")
        return found


def distances(stage: LayerStatistics, state: dict[str, Any], threshold: float) -> list[Tensor]:
    """Distances between the batch and the running moments of one layer; zero where there is nothing to compare."""
    sums, tiny = stage.sums(), torch.finfo(stage.centre.dtype).tiny
    mean, var = batch_moments(sums, stage.centre)
    mx, vx = state["mx"], state["vx"]
    known = usable(sums) & (state["mass"] > 0)
    alive = known & (vx > tiny)
    growth = torch.where(alive, var / vx.clamp(min=tiny), 1.0)
    ratio = torch.where(alive & (var > tiny), torch.maximum(growth, 1 / growth.clamp(min=tiny)), 1.0)
    distance = torch.where(alive, (mean - mx).abs() * vx.clamp(min=tiny).rsqrt(), 0.0)
    dead = usable(sums) & (mean == 0) & (var == 0)
    return [
        distance.amax().float(),
        ratio.amax().float(),
        growth.amax().float(),
        (growth > threshold).sum().float(),
        dead.float().mean(),
    ]
