"""What the results of the race say of each method."""

import math
import statistics
from collections.abc import Mapping, Sequence
from functools import cached_property

from evenstep.lab.summary import expected_best

from .methods import METHODS
from .methods.method import EVERYWHERE
from .protocol import Pair, Results
from .scores import Values, Width, diverged, first_reached, mean, paired, profile, width
from .tasks import RACE

OURS = "evenstep"
DEFAULT = "evenstep at its default"  # as a column beside the tuned one
REFERENCE = "adamw"  # whose result is the target of times
LEAST = 1e-12  # a cost of zero would have no ratio


class Verdicts:
    """The results of all pairs, and the questions that the page answers."""

    def __init__(self, results: Mapping[Pair, Results]) -> None:
        self.results = results
        self.tasks = list(dict.fromkeys(task for task, _ in results))
        named = list(dict.fromkeys(method for _, method in results))
        self.tuned = sorted(named, key=list(METHODS).index)
        self.methods = ([DEFAULT] if OURS in named else []) + self.tuned
        self.errors = {pair: own.error for pair, own in results.items() if own.error is not None}

    @cached_property
    def common(self) -> list[str]:
        """The methods that run on every task."""
        return [name for name in self.methods if name == DEFAULT or METHODS[name].tasks == EVERYWHERE]

    def own(self, task: str, name: str) -> Results | None:
        """The results of a column, if it has any that count."""
        pair = task, OURS if name == DEFAULT else name
        return None if pair in self.errors else self.results.get(pair)

    def lr(self, task: str, name: str) -> float | None:
        """The stepsize that a column stands for."""
        own = self.own(task, name)
        if own is None:
            return None
        return own.usual if name == DEFAULT else own.best() if own.grid else None

    def values(self, task: str, name: str) -> Values:
        """The test metric by seed."""
        own, lr = self.own(task, name), self.lr(task, name)
        return own.seeds(own.method, lr) if own and lr is not None else {}

    def best_of_row(self, task: str, methods: Sequence[str]) -> str | None:
        """The method with the best mean on a task, of those that ended well at every seed."""
        sign = -1 if RACE[task].higher else 1
        means = {name: sign * mean(values.values()) for name in methods if (values := self.values(task, name))}
        fine = {name: m for name, m in means.items() if math.isfinite(m) and m != 0}
        return min(fine, key=lambda name: fine[name], default=None)

    def ahead(self, task: str, ours: str, theirs: str) -> tuple[float, float, int]:
        """By how much one column is better than another, paired by seed."""
        sign = 1 if RACE[task].higher else -1
        signed = [{seed: sign * v for seed, v in self.values(task, name).items()} for name in (ours, theirs)]
        return paired(*signed)

    def ahead_of(self, rival: str, default: bool) -> list[bool]:
        """For each task with both, whether EvenStep's mean is better; a rival that cannot run a task has none there."""
        found = [self.ahead(task, DEFAULT if default else OURS, rival) for task in self.tasks]
        return [value > 0 for value, _, seeds in found if seeds]

    def first(self) -> list[bool]:
        """For each task, whether tuned EvenStep is first or within one standard error of the first."""
        found = []
        for task in self.tasks:
            names = [name for name in self.tuned if name != OURS and self.values(task, name)]
            if self.values(task, OURS) and names:
                rivals = [self.ahead(task, OURS, name) for name in names]
                found.append(all(value >= 0 or value >= -error for value, error, _ in rivals))
        return found

    def near_best(self, name: str = OURS, tolerance: float = 0.01) -> list[bool]:
        """For each task, whether the usual stepsize is within `tolerance` of the best, on the validation split."""
        found = []
        for task in self.tasks:
            own = self.own(task, name)
            if own is not None and own.usual in own.grid:
                values, higher = own.values(), RACE[task].higher
                best, usual = values[own.best()], values[own.usual]
                found.append(usual >= best * (1 - tolerance) if higher else usual <= best * (1 + tolerance))
        return found

    def width(self, task: str, name: str, tolerance: float) -> Width | None:
        """Decades of stepsizes within `tolerance` of the best."""
        own = self.own(task, name)
        return width(own.values(), tolerance, RACE[task].higher) if own and own.grid else None

    def widest(self) -> list[bool]:
        """For each task, whether EvenStep is wider within 5 % than every rival."""
        found = []
        for task in self.tasks:
            ours, rivals = self.width(task, OURS, 0.05), [name for name in self.tuned if METHODS[name].rival]
            theirs = [w.decades for name in rivals if (w := self.width(task, name, 0.05))]
            if ours and theirs:
                found.append(ours.decades > max(theirs))
        return found

    def divergence(self, name: str) -> tuple[int, int]:
        """How many runs of the grids diverged, of how many."""
        runs = [m for task in self.tasks if (own := self.own(task, name)) for m in own.grid.values()]
        return sum(map(diverged, runs)), len(runs)

    def cost(self, task: str, value: float) -> float:
        """The loss, or the share of wrong answers, which is less for better."""
        return 1 - value if RACE[task].higher else value

    def best_of(self, name: str, trials: int) -> float:
        """The expected least cost of so many of the five stepsizes over the least of all, a geometric mean over tasks.

        A run that diverged costs what the network did before training: its first loss, or all answers wrong.
        """
        ratios = []
        for task in self.tasks:
            own = self.own(task, name)
            if own is None or not all(lr in own.grid for lr in own.five):
                continue
            costs = [self.cost(task, own.value(own.grid[lr])) for lr in own.five]
            first = [float(own.grid[lr].get("first_loss") or math.nan) for lr in own.five]
            costs = [c if math.isfinite(c) else f for c, f in zip(costs, first, strict=True)]
            expected, least = expected_best(costs, trials), self.cost(task, own.values()[own.best()])
            if expected is not None and math.isfinite(expected) and least > 0:
                ratios.append(math.log(expected / least))
        return math.exp(statistics.fmean(ratios)) if ratios else math.nan

    def target(self, task: str) -> float | None:
        """The validation metric that tuned AdamW ends with, at its worst seed."""
        own, lr = self.own(task, REFERENCE), self.lr(task, REFERENCE)
        if own is None or lr is None:
            return None
        ends = [m["curve"]["validation"][-1] for m in own.judged.get((own.method, lr), {}).values() if "curve" in m]
        known = [end for end in ends if end is not None]
        return None if not known or len(known) < len(ends) else (min if RACE[task].higher else max)(known)

    def time(self, task: str, name: str) -> tuple[float, float]:
        """Seconds and steps to the target, means over seeds; infinite if one misses it, NaN if it is not known."""
        own, lr, target = self.own(task, name), self.lr(task, name), self.target(task)
        runs = list(own.judged.get((own.method, lr), {}).values()) if own and lr is not None else []
        if own is None or target is None or not runs:
            return math.nan, math.nan
        higher = RACE[task].higher
        curves = [m["curve"] for m in runs]
        steps = mean(first_reached(c["steps"], c["validation"], target, higher) for c in curves)
        return steps * own.timed.get("seconds_per_step", math.nan), steps

    def faster_than(self, rival: str) -> list[bool]:
        """For each task where both are timed, whether EvenStep at its default needs fewer seconds to the target."""
        times = [(self.time(task, DEFAULT)[0], self.time(task, rival)[0]) for task in self.tasks]
        return [ours < theirs for ours, theirs in times if not (math.isnan(ours) or math.isnan(theirs))]

    def profile(self) -> dict[str, list[float]]:
        """The performance profile of the methods that run everywhere; a failed or diverged method is infinitely bad."""
        costs = {name: {task: self._judged_cost(task, name) for task in self.tasks} for name in self.common}
        whole = [task for task in self.tasks if any(math.isfinite(own[task]) for own in costs.values())]
        return profile({name: {task: own[task] for task in whole} for name, own in costs.items()})

    def _judged_cost(self, task: str, name: str) -> float:
        values = self.values(task, name)
        return max(LEAST, self.cost(task, mean(values.values()))) if values else math.inf

    def widened(self) -> dict[Pair, list[float]]:
        """The stepsizes beyond the five of each pair."""
        more = {pair: sorted(lr for lr in own.grid if lr not in own.five) for pair, own in self.results.items()}
        return {pair: rates for pair, rates in more.items() if rates}
