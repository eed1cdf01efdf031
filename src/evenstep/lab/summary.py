"""The metrics of the lab: pure functions from records to the numbers that answer "how good?" and "how easy to tune?".

A run is a record of one method at one stepsize and one seed; a series is all runs of one method with the same options.
"""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from . import records as files
from .reading import Record

TOLERANCE = 0.05  # W5: how far above the best loss a stepsize may end
TRIALS = (1, 2, 4, 8)  # k of "expected best of k"
SMALLEST = 1e-300  # smaller losses have too few digits to be rounded
CLASSES = {"Fashion-MNIST": 10, "CIFAR-10": 10}  # of data sets whose old records do not count them, by their prefix


@dataclass(frozen=True)
class Series:
    """The runs of one method with the same options: for each stepsize, ascending, one run per seed."""

    method: str
    options: dict[str, Any]
    runs: dict[float, list[Record]]

    @property
    def all_runs(self) -> list[Record]:
        """Every run, by stepsize."""
        return [run for runs in self.runs.values() for run in runs]


@dataclass(frozen=True)
class Width:
    """Decades of usable stepsizes; `below` and `above` say that the grid ended there while the loss was still low."""

    decades: float
    below: bool
    above: bool


@dataclass(frozen=True)
class Reach:
    """When a loss was first reached; infinity if never. Steps and seconds are None where records do not count them."""

    epochs: float
    steps: float | None
    seconds: float | None


@dataclass(frozen=True)
class Summary:
    """A series in numbers; those at the best stepsize are means over its seeds."""

    stepsize: float
    at_edge: bool  # of several stepsizes the best is the smallest or the largest
    losses: list[float]  # final loss of each seed, infinity if it diverged
    accuracies: list[float]
    dead_shares: list[float]
    seconds_per_epoch: float | None
    width: Width
    divergence: float
    divergence_at_best: float
    expected_best: dict[int, float | None]
    reach: Reach

    @property
    def loss(self) -> float:
        """Mean final loss at the best stepsize; infinity if a seed diverged there."""
        return statistics.fmean(self.losses)


def final_loss(record: Record) -> float:
    """The loss of the last epoch by which a run is judged; infinity if the run diverged."""
    last = record["metrics"][-1]
    loss = last.get(judged_by(record["config"]))
    return math.inf if last.get("diverged") or last["train_loss"] is None or loss is None else loss


def judged_by(config: dict[str, Any]) -> str:
    """The loss by which runs are judged: the held-out one for a user's task, else that of training."""
    return "test_loss" if config.get("judged_by") == "test_loss" else "train_loss"


def diverged(record: Record, l0: float | None = None) -> bool:
    """Whether a run ended without a finite loss, or above l₀, the loss it began with."""
    loss = final_loss(record)
    return not math.isfinite(loss) or (l0 is not None and loss > l0)


def end(record: Record, l0: float | None = None) -> float:
    """Training loss of the last epoch; infinity if the run diverged, also by ending above l₀."""
    return math.inf if diverged(record, l0) else final_loss(record)


def series(records: Iterable[Record]) -> list[Series]:
    """The records as series, in order of appearance; of runs recorded twice the later one counts."""
    newest: dict[tuple[str, str], dict[tuple[float, Any], Record]] = {}
    for record in records:
        config = record["config"]
        mine = newest.setdefault((config["method"], files.dumps(config.get("options") or {})), {})
        mine[config["lr"], record.get("seed")] = record
    found = []
    for (method, _), runs in newest.items():
        grid: dict[float, list[Record]] = {lr: [] for lr in sorted({lr for lr, _ in runs})}
        for (lr, _), run in runs.items():
            grid[lr].append(run)
        options = next(iter(runs.values()))["config"].get("options") or {}
        found.append(Series(method, options, grid))
    return found


def initial_loss(records: Iterable[Record]) -> float | None:
    """l₀, the loss before training: as recorded, or log(number of classes); None if neither is known."""
    for record in records:
        config = record["config"]
        recorded = record.get("initial_loss") or config.get("initial_loss")
        if isinstance(recorded, float):
            return recorded
        known = [count for name, count in CLASSES.items() if str(config.get("data", "")).startswith(name)]
        options = config.get("model_options")
        declared = config.get("classes") or (options.get("classes") if isinstance(options, dict) else None)
        classes = declared or (known[0] if known else None)
        if isinstance(classes, int) and classes > 1:
            return math.log(classes)
    return None


def divergence_rate(runs: Sequence[Record], l0: float | None = None) -> float:
    """Share of the runs that diverged."""
    return sum(diverged(run, l0) for run in runs) / len(runs)


def best_stepsize(runs: dict[float, list[Record]], l0: float | None = None) -> float:
    """The stepsize with the lowest mean final loss; if a seed diverged at each, the one with the fewest such seeds."""

    def score(lr: float) -> tuple[float, int, float, float]:
        losses = [end(run, l0) for run in runs[lr]]
        finite = [loss for loss in losses if math.isfinite(loss)]
        lost, ended = len(losses) - len(finite), statistics.fmean(finite or [math.inf])
        return statistics.fmean(losses), lost, ended, statistics.fmean(map(final_loss, runs[lr]))

    return min(runs, key=score)


def width(runs: dict[float, list[Record]], tolerance: float = TOLERANCE, l0: float | None = None) -> Width:
    """W5: decades of contiguous stepsizes around the best whose worst seed is within `tolerance` of the best loss."""
    grid = sorted(runs)
    best = best_stepsize(runs, l0)
    limit = (1 + tolerance) * statistics.fmean(end(run, l0) for run in runs[best])
    good = [math.isfinite(limit) and max(end(run, l0) for run in runs[lr]) <= limit for lr in grid]
    first = last = grid.index(best)
    if not good[first]:
        return Width(0.0, below=False, above=False)
    while first > 0 and good[first - 1]:
        first -= 1
    while last + 1 < len(grid) and good[last + 1]:
        last += 1
    return Width(math.log10(grid[last]) - math.log10(grid[first]), below=first == 0, above=last == len(grid) - 1)


def expected_best(losses: Sequence[float], trials: int) -> float | None:
    """Expected lowest loss of `trials` runs drawn without replacement: Σ_i v_(i) C(n−1−i, k−1) / C(n, k).

    None if there are fewer runs than that.

    >>> expected_best([3.0, 1.0, 2.0], 2)  # of the pairs (1, 2), (1, 3), (2, 3)
    1.3333333333333333
    """
    n, k = len(losses), trials
    if not 1 <= k <= n:
        return None
    weights = [math.comb(n - 1 - i, k - 1) for i in range(n - k + 1)]  # larger values are never the best of k
    return sum(v * w for v, w in zip(sorted(losses), weights, strict=False)) / math.comb(n, k)


def scored(runs: Sequence[Record], l0: float | None) -> list[float]:
    """Final losses, with l₀ for runs that diverged, or the worst loss of the others where l₀ is not known."""
    finite = [final_loss(run) for run in runs if not diverged(run, l0)]
    penalty = l0 if l0 is not None else max(finite, default=math.inf)
    return [penalty if diverged(run, l0) else final_loss(run) for run in runs]


def reach(record: Record, target: float) -> Reach:
    """The end of the first epoch whose loss, by which runs are judged, was at or below `target`."""
    rows, loss = record["metrics"], judged_by(record["config"])
    hit = next((k for k, r in enumerate(rows, 1) if r.get(loss) is not None and r[loss] <= target), None)

    def total(column: str) -> float | None:
        if column not in rows[0]:
            return None
        return math.inf if hit is None else sum(row.get(column) or 0 for row in rows[:hit])

    return Reach(math.inf if hit is None else hit, total("steps"), total("seconds"))


def common_target(found: Iterable[Series], l0: float | None = None) -> float | None:
    """A loss that every method reaches with every seed of its best stepsize, unless one diverged there.

    It is rounded up where it then still lies below l₀.
    """
    ends = [[end(run, l0) for run in s.runs[best_stepsize(s.runs, l0)]] for s in found]
    worst = max((max(losses) for losses in ends if all(map(math.isfinite, losses))), default=None)
    if worst is None:
        return None
    rounded = round_up(worst)
    return rounded if l0 is None or rounded < l0 else worst


def round_up(loss: float) -> float:
    """The next number with three digits.

    >>> round_up(0.51234), round_up(0.5)
    (0.513, 0.5)
    """
    if loss < SMALLEST:
        return loss
    unit = 10.0 ** (2 - math.floor(math.log10(loss)))
    return max(loss, math.ceil(loss * unit) / unit)


def summarize(runs: Series, l0: float | None, target: float | None) -> Summary:
    """The numbers of a series; `target` is the loss of the time to a target."""
    stepsize = best_stepsize(runs.runs, l0)
    best, every = runs.runs[stepsize], runs.all_runs
    lasts = [run["metrics"][-1] for run in best]
    seconds = numbers([row for run in best for row in run["metrics"]], "seconds")
    reached = [reach(run, -math.inf if target is None else target) for run in best]
    return Summary(
        stepsize=stepsize,
        at_edge=len(runs.runs) > 1 and stepsize in (min(runs.runs), max(runs.runs)),
        losses=[end(run, l0) for run in best],
        accuracies=numbers(lasts, "test_accuracy"),
        dead_shares=numbers(lasts, "dead_share"),
        seconds_per_epoch=statistics.fmean(seconds) if seconds else None,
        width=width(runs.runs, l0=l0),
        divergence=divergence_rate(every, l0),
        divergence_at_best=divergence_rate(best, l0),
        expected_best={k: expected_best(scored(every, l0), k) for k in TRIALS},
        reach=Reach(
            statistics.median([r.epochs for r in reached]),
            _median([r.steps for r in reached]),
            _median([r.seconds for r in reached]),
        ),
    )


def numbers(rows: Sequence[dict[str, Any]], name: str) -> list[float]:
    """The numbers in a column."""
    return [row[name] for row in rows if isinstance(row.get(name), int | float)]


def _median(values: list[float | None]) -> float | None:
    """The median, None if a value is missing; infinite if half of the seeds missed the target."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if len(known) == len(values) else None
