"""The search for a stepsize within a budget: runs at stepsizes around a default, most of them stopped early.

Stepsizes lie on a grid of eighths of a decade about the default. The search looks half a decade to both sides of the
best one, then a quarter, then an eighth, and repeats the best with other seeds. All runs have the same length and decay
to zero, so that their ends can be compared; Optuna's successive halving stops those that fall behind, and a run that
diverged ends at once. The state is an Optuna journal beside the records: a search that was stopped goes on.
"""

import json
import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from . import records, summary, trial
from .experiments.common import failures_expected
from .labels import number
from .reading import Record
from .sweep import known
from .train import Epoch
from .trial import Trial
from .usage import UsageError, first_line
from .user_task import UserTask

PER_DECADE, SPACINGS, REACH = 8, (4, 2, 1), 24  # grid points; how far to look from the best; at most 3 decades away
JOURNAL = "search.log"
SEEDS = 3  # runs at the best stepsize
SLACK = 0.2  # a run is not stopped while its loss is within so much of the best one at that time
RUNS = 9  # whole runs that a search takes about as long as
WHOLE, LONGEST = 3, 10  # passes over the data: fewer are cut into epochs of some steps
OVERFIT = 0.05  # how much lower the loss was before the end, if runs are said to overfit
NEAR = 0.02  # what counts as as good as the best


@dataclass(frozen=True)
class Budget:
    """How many runs, or how many seconds, all sessions of a search may take."""

    runs: int | None = None
    seconds: float | None = None

    def left(self, runs: int, seconds: float, average: float) -> float:
        """How many more runs fit, of `average` seconds each."""
        by_count = math.inf if self.runs is None else self.runs - runs
        by_time = math.inf if self.seconds is None else (self.seconds - seconds) / max(average, 1e-9)
        return min(by_count, by_time)


class Ended(Exception):
    """A run that is not worth its end: it diverged, or fell behind."""


@dataclass
class Search:
    """The search for the stepsize of `example`, whose lr is where it begins; `say` is told of each run."""

    example: Trial
    task: UserTask
    path: Path
    device: Any
    budget: Budget
    say: Callable[[str], None]
    study: Any = field(init=False)

    def __post_init__(self) -> None:
        import optuna
        from optuna.storages import JournalStorage
        from optuna.storages.journal import JournalFileBackend

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.optuna, journal = optuna, self.path.with_name(JOURNAL)
        key = study_name(self.example, self.task)
        with journal_errors(journal):
            self.study = optuna.create_study(
                storage=JournalStorage(JournalFileBackend(str(journal))),
                study_name=key,
                load_if_exists=True,
                pruner=optuna.pruners.SuccessiveHalvingPruner(-(-self.example.epochs // 3), 2),
            )
        for left in self.study.get_trials(states=[optuna.trial.TrialState.RUNNING]):  # by a process that was stopped
            self.study.tell(left.number, state=optuna.trial.TrialState.FAIL)

    def run(self) -> None:
        """Run what the budget allows; returns early when nothing is left to find out."""
        while (wanted := self.next()) is not None and self.left() >= 0.5:
            self.one(*wanted)

    def left(self) -> float:
        """How many more runs the budget has."""
        ended = [t for t in self.tried() if t.user_attrs.get("seconds")]
        seconds = [t.user_attrs["seconds"] for t in ended]
        return self.budget.left(len(ended), sum(seconds), max(seconds, default=0.0))

    def tried(self) -> list[Any]:
        """The runs so far that ended, or were stopped for what they showed."""
        states = self.optuna.trial.TrialState
        return self.study.get_trials(deepcopy=False, states=[states.COMPLETE, states.PRUNED])

    def scores(self) -> dict[int, dict[int, float]]:
        """The loss of each run by its place on the grid and its seed; infinity if it was stopped."""
        found: dict[int, dict[int, float]] = {}
        for one in self.tried():
            complete = one.state == self.optuna.trial.TrialState.COMPLETE
            found.setdefault(one.user_attrs["place"], {})[one.user_attrs["seed"]] = one.value if complete else math.inf
        return found

    def next(self) -> tuple[int, int] | None:
        """The next place on the grid and the seed; None if there is nothing left to find out."""
        scores = {place: statistics.fmean(losses.values()) for place, losses in self.scores().items()}
        place, seeds_to_run = next_place(scores), SEEDS - 1
        found = any(map(math.isfinite, scores.values()))
        if place is not None and (not found or self.left() > seeds_to_run):
            return place, self.example.seed
        best = min(scores, key=lambda k: scores[k])
        taken = self.scores()[best]
        free = [seed for seed in range(self.example.seed, self.example.seed + SEEDS) if seed not in taken]
        return (best, free[0]) if free and math.isfinite(scores[best]) else None

    def one(self, place: int, seed: int) -> None:
        """Run one training, or take it from the records; tell the study how it went."""
        wanted = replace(self.example, lr=at(self.example.lr, place), seed=seed)
        attempt, started = self.study.ask(), time.monotonic()
        attempt.set_user_attr("place", place)
        attempt.set_user_attr("seed", seed)
        record, word = known(self.path, self.task).get(records.dumps(trial.config(wanted, self.task))), ""
        try:
            if record is None:
                record = self.train(wanted, attempt)
            else:
                self.replay(record, attempt)
            loss = summary.end(record, record.get("initial_loss"))
            word = f"held-out loss {number(loss)}" if math.isfinite(loss) else "diverged"
        except Ended as end:
            loss, word = math.inf, str(end)
        attempt.set_user_attr("seconds", time.monotonic() - started)
        state = self.optuna.trial.TrialState.COMPLETE if math.isfinite(loss) else self.optuna.trial.TrialState.PRUNED
        self.study.tell(attempt, loss if math.isfinite(loss) else None, state=state)
        self.say(f"lr {wanted.lr:<8g} seed {seed:<3} {word}")

    def train(self, wanted: Trial, attempt: Any) -> Record:
        """The record of a run that came to its end; Ended if it did not."""
        training = trial.start(wanted, self.task, self.device)
        first, seed_runs = trial.first_loss(training), wanted.seed != self.example.seed

        def look(row: Epoch) -> None:
            loss, at_epoch = row["test_loss"], row["epoch"]
            if row["diverged"] or not math.isfinite(loss) or (at_epoch > 1 and first is not None and loss > first):
                if not row["diverged"] and at_epoch < wanted.epochs:
                    raise Ended(
                        f"diverged: held-out loss {number(loss)} in epoch {at_epoch}, {number(first or 0)} at first"
                    )
                return
            attempt.report(self.judged(loss, at_epoch), at_epoch)
            if at_epoch < wanted.epochs and not seed_runs and attempt.should_prune():
                raise Ended(f"stopped in epoch {at_epoch} of {wanted.epochs}: held-out loss {number(loss)} is behind")

        with failures_expected():
            training.finish(look)
        return records.append(self.path, trial.recorded(wanted, training, first), once=True)

    def replay(self, record: Record, attempt: Any) -> None:
        """Tell the pruner of a run that was recorded earlier."""
        for row in record["metrics"]:
            if row.get("test_loss") is not None:
                attempt.report(self.judged(row["test_loss"], row["epoch"]), row["epoch"])

    def judged(self, loss: float, epoch: int) -> float:
        """The loss after an epoch as the pruner sees it: one within SLACK of the best so far counts as the best."""
        best = min((t.intermediate_values.get(epoch, math.inf) for t in self.tried()), default=math.inf)
        return best if best < loss <= best + SLACK * abs(best) else loss


def study_name(example: Trial, task: UserTask) -> str:
    """What a search is known by: the configuration of its first run."""
    return records.dumps(trial.config(example, task))


def planned(example: Trial, task: UserTask, path: Path) -> tuple[int, int | None] | None:
    """The length of the runs of a search that was begun beside the records `path`: epochs, and steps of an epoch."""
    from optuna import get_all_study_names
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    if not path.with_name(JOURNAL).exists():
        return None
    wanted = trial.config(example, task)
    with journal_errors(path.with_name(JOURNAL)):
        names = get_all_study_names(JournalStorage(JournalFileBackend(str(path.with_name(JOURNAL)))))
        for config in map(json.loads, names):
            if {**config, "epochs": None, "steps": None} == {**records.plain(wanted), "epochs": None, "steps": None}:
                return config["epochs"], config.get("steps")
    return None


@contextmanager
def journal_errors(path: Path) -> Iterator[None]:
    """Turn a failure to read Optuna's journal into a UsageError."""
    try:
        yield
    except ModuleNotFoundError:
        raise
    except Exception as error:  # of any kind: the file may contain anything
        raise UsageError(
            f"{path} is no search of this version ({first_line(error)}); remove it, or choose another --out"
        ) from error


def fit(example: Trial, task: UserTask, device: Any, budget: Budget) -> tuple[int, int | None]:
    """How long a run may be in this budget: epochs, and steps of an epoch (None: a whole pass)."""
    if budget.seconds is None:
        return LONGEST, None
    each = budget.seconds / min(budget.runs or RUNS, RUNS)
    training = trial.start(example, task, device)
    started = time.perf_counter()
    trial.first_loss(training)
    looking, times = time.perf_counter() - started, [time.perf_counter()]
    for _ in training.epoch():
        times.append(time.perf_counter())
        if len(times) > 50 or times[-1] - times[0] > 0.1 * each:
            break
    steps = [after - before for before, after in pairwise(times)]
    step = statistics.median(steps[2:] or steps)
    passes = each / (step * task.steps_per_epoch() + looking)
    if passes >= WHOLE:
        return min(LONGEST, int(passes)), None
    epochs = 2 * WHOLE if 2 * WHOLE * looking < each / 3 else WHOLE
    return epochs, max(1, int((each - epochs * looking) / step / epochs))


def at(lr: float, place: int) -> float:
    """The stepsize at a place of the grid about `lr`, in two digits.

    >>> at(0.025, 0), at(0.025, 4), at(0.025, -8)
    (0.025, 0.079, 0.0025)
    """
    return lr if place == 0 else float(f"{lr * 10 ** (place / PER_DECADE):.2g}")


def next_place(scores: dict[int, float]) -> int | None:
    """Where to look next, given the losses by place: to both sides of the best, from far to near.

    >>> next_place({}), next_place({0: 1.0}), next_place({0: 1.0, 4: 2.0}), next_place({0: 1.0, 4: 2.0, -4: 0.5})
    (0, 4, -4, -8)
    """
    if not scores:
        return 0
    if not any(map(math.isfinite, scores.values())):  # all diverged
        return min(scores) - SPACINGS[0] if min(scores) > -REACH else None
    best = min(scores, key=lambda place: scores[place])
    wanted = [best + side * spacing for spacing in SPACINGS for side in (1, -1)]
    return next((place for place in wanted if place not in scores and abs(place) <= REACH), None)


def headline(found: summary.Series, label: str) -> str:
    """What the search found, in one line: the stepsize, its loss, and the stepsizes that are about as good."""
    runs = {lr: [summary.final_loss(run) for run in rs] for lr, rs in found.runs.items()}
    best = summary.best_stepsize(found.runs)
    losses, mean = runs[best], statistics.fmean(runs[best])
    if not math.isfinite(mean):
        return f"{label}: every run diverged; are the data on a sensible scale, and the loss a mean over the batch?"
    shown, deviation = number(mean), statistics.stdev(losses) if len(losses) > 1 else 0.0
    spread = f" ± {deviation:.{len(shown.partition('.')[2])}f}" if deviation else " (one seed)"
    near = max(NEAR, deviation / abs(mean) if mean else 0.0)
    good = [lr for lr in runs if statistics.fmean(runs[lr]) <= mean + near * abs(mean)]
    low, high = contiguous(sorted(runs), best, good)
    around = f"anything from {low:g} to {high:g}" if low < high else "no other lr that was tried to its end"
    why = ", as far as seeds differ" if near > NEAR else ""
    return f"{label}, lr {best:g}: held-out loss {shown}{spread}; {around} is within {near:.0%}{why}"


def overfits(found: summary.Series) -> str:
    """A remark if held-out losses at the best stepsize were much lower before the end; else nothing."""
    best = found.runs[summary.best_stepsize(found.runs)]
    curves = [[row["test_loss"] for row in run["metrics"] if row.get("test_loss") is not None] for run in best]
    if len({len(curve) for curve in curves}) != 1 or len(curves[0]) < 2:
        return ""
    means = [statistics.fmean(losses) for losses in zip(*curves, strict=True)]
    low = min(means)
    if means[-1] - low <= OVERFIT * abs(low):
        return ""
    return (
        f"The held-out loss was {number(low)} after epoch {means.index(low) + 1}, and rose: these runs overfit. "
        "Try fewer --epochs, --options weight_decay=0.1, more data or augmentation."
    )


def contiguous(grid: list[float], best: float, good: list[float]) -> tuple[float, float]:
    """The ends of the row of good stepsizes that holds the best one.

    >>> contiguous([1, 2, 3, 4, 5], 3, [1, 3, 4])
    (3, 4)
    """
    low = high = grid.index(best)
    while low > 0 and grid[low - 1] in good:
        low -= 1
    while high + 1 < len(grid) and grid[high + 1] in good:
        high += 1
    return grid[low], grid[high]
