"""The protocol: which jobs the race needs next, derived from the results that there are.

1. Grid: five stepsizes in factor-2 steps about the usual one, one seed, measured on the validation split.
2. While the best is at an end, the grid is widened there. Widened points may be chosen; best-of-k uses the five.
3. Judged on the test split with three fresh seeds: the chosen stepsize, ours at its default, a rival's own setting.
4. Timed: a few steps alone on the device.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from .jobs import GRID, JUDGED, TIMED, Job, of_race
from .methods import METHODS, parse
from .methods.method import EVERYWHERE, canonical
from .scores import Values, diverged
from .tasks import RACE, TASKS

FACTOR, HALF = 2.0, 2  # between stepsizes; points on each side of the usual one
WIDER = 4  # points that a side can get beyond the five
CHOOSING, JUDGING = 0, (1, 2, 3)  # seeds

Pair = tuple[str, str]  # task and method


@dataclass
class Results:
    """All results of one method on one task; metrics by lr, those of settings that are judged by seed, too."""

    task: str
    method: str
    grid: dict[float, dict[str, Any]] = field(default_factory=dict)
    judged: dict[tuple[str, float], dict[int, dict[str, Any]]] = field(default_factory=dict)
    timed: dict[str, Any] = field(default_factory=dict)

    @property
    def usual(self) -> float:
        """The usual stepsize, in the middle of the five."""
        return float(parse(self.method)[0].lr)

    @property
    def five(self) -> list[float]:
        """The stepsizes that every method gets."""
        return [self.usual * FACTOR**k for k in range(-HALF, HALF + 1)]

    @property
    def error(self) -> str | None:
        """Why the method cannot run the task, if any job says so; the authors' setting apart."""
        own = [m for (method, _), seeds in self.judged.items() if method == self.method for m in seeds.values()]
        runs = [*self.grid.values(), *own, self.timed]
        return next((m["error"] for m in runs if "error" in m), None)

    def value(self, metrics: dict[str, Any]) -> float:
        """The held-out metric, the worst there is if the run diverged."""
        task = TASKS[self.task]
        found = metrics.get(task.metric)
        worst = 0.0 if task.higher else math.inf
        return worst if found is None or diverged(metrics) else float(found)

    def values(self) -> dict[float, float]:
        """The validation metric of each stepsize, ascending."""
        return {lr: self.value(self.grid[lr]) for lr in sorted(self.grid)}

    def seeds(self, method: str, lr: float) -> Values:
        """The test metric of a judged setting by seed."""
        return {seed: self.value(metrics) for seed, metrics in sorted(self.judged.get((method, lr), {}).items())}

    def best(self) -> float:
        """The stepsize with the best validation metric; of several, the one nearest to the usual one."""
        values, sign = self.values(), -1 if TASKS[self.task].higher else 1
        return min(values, key=lambda lr: (sign * values[lr], abs(math.log(lr / self.usual))))

    def widened(self) -> list[float]:
        """The stepsize to try next beyond an end of the grid, if the best is there and is not as good as the usual."""
        values, best = self.values(), self.best()
        lost = not any(math.isfinite(v) and v > 0 for v in values.values())
        if lost or (best == min(values) and best != self.usual):
            new = min(values) / FACTOR  # where all diverged, too: smaller steps are what may help
        elif best == max(values) and best != self.usual:
            new = max(values) * FACTOR
        else:
            return []
        return [new] if abs(math.log(new / self.usual, FACTOR)) < HALF + WIDER + 0.5 else []

    def settings(self) -> list[tuple[str, float]]:
        """What is judged: the chosen stepsize once the grid is done, our default, and the authors' own setting."""
        method = parse(self.method)[0]
        found = [] if method.rival else [(self.method, self.usual)]
        if method.authors and "," not in self.method:
            options, lr = method.authors
            found.append((canonical(f"{self.method},{options}"), lr))
        if all(lr in self.grid for lr in self.five) and not self.widened():
            found.append((self.method, self.best()))
        return list(dict.fromkeys(found))

    def missing(self) -> list[Job]:
        """The jobs that can run now, all but the timed one."""
        if self.error is not None:
            return []
        rates = [lr for lr in self.five if lr not in self.grid]
        if not rates:
            rates = self.widened()
        jobs = [Job(self.task, self.method, lr, CHOOSING, GRID) for lr in rates]
        for method, lr in self.settings():
            seeds = self.judged.get((method, lr), {})
            jobs += [Job(self.task, method, lr, seed, JUDGED) for seed in JUDGING if seed not in seeds]
        return jobs

    def untimed(self) -> list[Job]:
        """The timed job, if there is no result of it."""
        lost = self.timed or self.error is not None
        return [] if lost else [Job(self.task, self.method, self.usual, CHOOSING, TIMED)]


def results(records: Iterable[dict[str, Any]], pairs: Sequence[Pair]) -> dict[Pair, Results]:
    """The results of each pair; an authors' setting belongs to the method whose options it sets."""
    found = {pair: Results(*pair) for pair in pairs}
    theirs = {(own.task, *setting): own for own in found.values() for setting in own.settings()}
    for job, metrics in of_race(records).items():
        own = found.get((job.task, job.method))
        if own is None and job.phase == JUDGED:
            own = theirs.get((job.task, job.method, job.lr))
        if own is None:
            continue
        if job.phase == GRID:
            own.grid[job.lr] = metrics
        elif job.phase == TIMED:
            own.timed = metrics
        else:
            own.judged.setdefault((job.method, job.lr), {})[job.seed] = metrics
    return found


def pairs(tasks: Sequence[str], methods: Sequence[str]) -> list[Pair]:
    """Tasks with methods: each method on its tasks, or if both are named, all of these with all of those."""
    chosen = [canonical(method) for method in methods] or list(METHODS)
    found = []
    for task in tasks or RACE:
        for method in chosen:
            own = parse(method)[0].tasks
            if (tasks and methods) or own == EVERYWHERE or task in own:
                found.append((task, method))
    return found
