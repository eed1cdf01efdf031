"""What the race measures, as pure functions of numbers."""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

Values = dict[int, float]  # by seed


def diverged(metrics: Mapping[str, Any]) -> bool:
    """Whether a run ended in numbers that are not finite, or above the loss it began with."""
    last, first = metrics.get("training_loss"), metrics.get("first_loss")
    return last is None or not math.isfinite(last) or (first is not None and last > first)


def mean(values: Iterable[float]) -> float:
    """The mean; infinite if any value is, NaN of none.

    >>> mean([1.0, math.inf]), mean([])
    (inf, nan)
    """
    values = list(values)
    return sum(values) / len(values) if values else math.nan


def standard_error(values: Sequence[float]) -> float:
    """Of the mean; NaN of fewer than two values, or of values that are not finite."""
    if len(values) < 2 or not all(map(math.isfinite, values)):
        return math.nan
    return statistics.stdev(values) / math.sqrt(len(values))


def paired(ours: Values, theirs: Values) -> tuple[float, float, int]:
    """The mean of ours − theirs over the seeds that both have, its standard error, and their number.

    >>> paired({0: 1.0, 1: 3.0, 2: 9.0}, {0: 0.0, 1: 1.0})
    (1.5, 0.5, 2)
    """
    seeds = sorted(set(ours) & set(theirs))
    differences = [ours[seed] - theirs[seed] for seed in seeds]
    return mean(differences), standard_error(differences), len(seeds)


def verdict(difference: float, error: float) -> str:
    """Ahead or behind, if by more than a standard error."""
    if math.isnan(error) and not math.isinf(difference):
        return "one seed"
    return "ahead" if difference > error or difference == math.inf else "behind" if difference < -error else "level"


class Width(NamedTuple):
    """Decades of usable stepsizes; `open` says that the grid ended before the metric fell off."""

    decades: float
    open: bool


def width(values: Mapping[float, float], tolerance: float, higher: bool) -> Width:
    """Decades of contiguous stepsizes about the best whose metric is within `tolerance` of it.

    Between two stepsizes the metric is taken to be linear in log lr, so that a coarse grid does not read as 0; nothing
    is taken from the side of a run that diverged.

    >>> width({1.0: 2.0, 10.0: 1.0, 100.0: 2.0}, 0.05, higher=False)
    Width(decades=0.1, open=False)
    """
    grid = sorted(values)
    best = (max if higher else min)(grid, key=lambda lr: values[lr])
    if not math.isfinite(values[best]):
        return Width(0.0, False)
    limit = values[best] * (1 - tolerance if higher else 1 + tolerance)
    ends = []
    for side in (grid[grid.index(best) :: -1], grid[grid.index(best) :]):
        inside, outside = side[0], None
        for lr in side[1:]:
            if values[lr] < limit if higher else values[lr] > limit:
                outside = lr
                break
            inside = lr
        reach = abs(math.log10(inside / best))
        if outside is not None and math.isfinite(values[outside]) and values[outside] != 0:
            share = (limit - values[inside]) / (values[outside] - values[inside])
            reach += share * abs(math.log10(outside / inside))
        ends.append((reach, outside is None))
    return Width(round(sum(reach for reach, _ in ends), 10), any(is_open for _, is_open in ends))


def first_reached(steps: Sequence[int], values: Sequence[float | None], target: float, higher: bool) -> float:
    """The step at which a curve reaches a target, linear between its points; infinite if it never does.

    >>> first_reached([10, 20], [3.0, 1.0], 2.0, higher=False)
    15.0
    """
    before: tuple[int, float] | None = None
    for step, value in zip(steps, values, strict=True):
        if value is None or not math.isfinite(value):
            before = None
            continue
        if value >= target if higher else value <= target:
            if before is None or before[1] == value:
                return float(step)
            return before[0] + (step - before[0]) * (target - before[1]) / (value - before[1])
        before = step, value
    return math.inf


def profile(costs: Mapping[str, Mapping[str, float]]) -> dict[str, list[float]]:
    """The performance profile of methods by their costs on tasks: each method's costs over the least on the task.

    The share of a list's numbers that are τ or less is how often the method is within a factor τ of the best.

    >>> profile({"a": {"x": 1.0, "y": 3.0}, "b": {"x": 2.0, "y": 2.0}})
    {'a': [1.0, 1.5], 'b': [1.0, 2.0]}
    """
    tasks = list(next(iter(costs.values()), {}))
    least = {task: min(own[task] for own in costs.values()) for task in tasks}
    return {name: sorted(own[task] / least[task] for task in tasks) for name, own in costs.items()}
