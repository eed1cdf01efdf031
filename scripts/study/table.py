"""Tables of the study's records, in Markdown.

A setting is a method with its options at one lr. The best setting is the one with the best mean over the seeds that
all settings of the method have; so a grid of one seed may choose, and more seeds of the chosen setting then judge.
Differences to a rival are paired by seed, and positive where ours is better.
"""

import math
import statistics
from collections.abc import Iterable
from typing import Any, NamedTuple

from .methods import METHODS
from .tasks import TASKS

OURS = "evenstep"
WORST = {"held_out_loss": math.inf, "held_out_accuracy": 0.0}


class Setting(NamedTuple):
    """A method with its options, and a stepsize."""

    method: str
    lr: float

    @property
    def family(self) -> str:
        """What is tuned as one method: a rival with all its options; each variant of ours by itself."""
        name = self.method.partition(",")[0]
        return name if name in METHODS and METHODS[name].rival else self.method


Values = dict[int, float]  # of each seed


class Task:
    """All runs of one task: the held-out values of each setting by seed, and which runs diverged."""

    def __init__(self, records: Iterable[dict[str, Any]]) -> None:
        self.values: dict[Setting, Values] = {}
        self.diverged: dict[Setting, dict[int, bool]] = {}
        self.metric = ""
        for record in records:
            config, metrics = record["config"], record["metrics"]
            setting, seed = Setting(config["method"], config["lr"]), record["seed"]
            self.metric = next(name for name in WORST if name in metrics)
            value, broken = metrics[self.metric], diverged(metrics)
            self.values.setdefault(setting, {})[seed] = WORST[self.metric] if broken or value is None else value
            self.diverged.setdefault(setting, {})[seed] = broken

    @property
    def higher(self) -> bool:
        """Whether the metric is better when it is higher."""
        return self.metric == "held_out_accuracy"

    def settings(self, family: str) -> list[Setting]:
        """The settings of a method, by lr."""
        return sorted((s for s in self.values if s.family == family), key=lambda s: s.lr)

    def families(self) -> list[str]:
        """All methods, the best first."""
        names = dict.fromkeys(s.family for s in self.values)
        return sorted(names, key=lambda name: mean(self.values[self.best(name)].values()), reverse=self.higher)

    def best(self, family: str) -> Setting:
        """The best setting of a method, by the seeds that all of its settings have."""
        settings = self.settings(family)
        shared = set.intersection(*(set(self.values[s]) for s in settings))

        def score(setting: Setting) -> float:
            values = self.values[setting]
            return mean(values[seed] for seed in (shared or values))

        return (max if self.higher else min)(settings, key=score)

    def at_default(self, family: str) -> Setting | None:
        """A method at its usual lr with the options of its best setting, if it has been run there."""
        setting = Setting(self.best(family).method, usual_lr(family))
        return setting if setting in self.values else None

    def at_end(self, setting: Setting) -> bool:
        """Whether a setting has the smallest or the largest lr that its method was tried at with these options."""
        rates = [s.lr for s in self.values if s.method == setting.method]
        return setting.lr in (min(rates), max(rates))

    def rival(self) -> Setting | None:
        """The best setting of the best rival."""
        names = [n for n in self.families() if n in METHODS and METHODS[n].rival]
        return self.best(names[0]) if names else None

    def ahead(self, ours: Setting, theirs: Setting) -> tuple[float, float, int]:
        """By how much one setting is better than another, the standard error of that, and the number of seeds."""
        sign = 1 if self.higher else -1
        return paired({k: sign * v for k, v in self.values[ours].items()}, {
            k: sign * v for k, v in self.values[theirs].items()
        })  # fmt: skip

    def loss_of_default(self, family: str) -> float:
        """By which share the usual lr is worse than the best of the grid, on the seeds that both have."""
        default, best = self.at_default(family), self.best(family)
        if default is None:
            return math.nan
        seeds = set(self.values[default]) & set(self.values[best])
        theirs, ours = (mean(self.values[s][k] for k in seeds) for s in (best, default))
        worse = theirs - ours if self.higher else ours - theirs
        return worse / theirs if seeds and theirs else math.nan

    def divergences(self, family: str, factor: float) -> tuple[int, int]:
        """How many runs diverged, of how many, within a factor of the usual lr."""
        usual = usual_lr(family)
        wide = factor * 1.001  # a little more, for rounding
        near = [s for s in self.settings(family) if math.isinf(factor) or usual / wide <= s.lr <= usual * wide]
        runs = [broken for s in near for broken in self.diverged[s].values()]
        return sum(runs), len(runs)


def usual_lr(family: str) -> float:
    """The usual lr of a method; NaN of one that is gone."""
    name = family.partition(",")[0]
    return float(METHODS[name].lr) if name in METHODS else math.nan


def diverged(metrics: dict[str, Any]) -> bool:
    """Whether a run ended in numbers that are not finite, or above the loss it began with."""
    last, first = metrics.get("training_loss"), metrics.get("first_loss")
    return last is None or (first is not None and last > first)


def mean(values: Iterable[float]) -> float:
    """The mean; infinite if any value is, NaN of none.

    >>> mean([1.0, math.inf]), mean([])
    (inf, nan)
    """
    values = list(values)
    return sum(values) / len(values) if values else math.nan


def paired(ours: Values, theirs: Values) -> tuple[float, float, int]:
    """The mean of ours − theirs over the seeds that both have, its standard error, and their number.

    >>> paired({0: 1.0, 1: 3.0, 2: 9.0}, {0: 0.0, 1: 1.0})
    (1.5, 0.5, 2)
    """
    seeds = sorted(set(ours) & set(theirs))
    differences = [ours[seed] - theirs[seed] for seed in seeds]
    finite = len(seeds) > 1 and all(map(math.isfinite, differences))
    error = statistics.stdev(differences) / math.sqrt(len(seeds)) if finite else math.nan
    return mean(differences), error, len(seeds)


def verdict(difference: float, error: float) -> str:
    """Ahead or behind, if by more than a standard error."""
    if math.isnan(error):
        return "one seed"
    return "ahead" if difference > error else "behind" if difference < -error else "level"


def markdown(records: list[dict[str, Any]]) -> str:
    """A summary over tasks, then a table of all methods for each task."""
    names = dict.fromkeys(map(task_name, records))
    latest = {(task_name(r), r["config"]["method"], r["config"]["lr"], r["seed"]): r for r in records}
    tasks: dict[str, Task] = {}
    errors = []
    for name in names:
        own = [r for key, r in latest.items() if key[0] == name]
        errors += [r for r in own if "error" in r["metrics"]]
        if fine := [r for r in own if "error" not in r["metrics"]]:
            tasks[name] = Task(fine)
    parts = [summary(tasks), *(details(name, task) for name, task in tasks.items())]
    if errors:
        parts.append("### Jobs that failed\n\n" + "\n".join(failure(r) for r in errors))
    return "\n\n".join(parts)


def task_name(record: dict[str, Any]) -> str:
    """The task, with its number of steps where that is not the usual one."""
    name, steps = record["config"]["task"], record["config"]["steps"]
    return name if name in TASKS and steps == TASKS[name].steps else f"{name}, {steps} steps"


def summary(tasks: dict[str, Task]) -> str:
    """One row for each task: ours at its default and tuned, the best rival, and their paired difference."""
    head = [
        "task", "EvenStep at its default", "tuned", "best rival, tuned", "at", "ahead by", "verdict",
        "default behind its best", "diverged within a factor of 10, 30",
    ]  # fmt: skip
    rows = []
    for name, task in tasks.items():
        tuned = task.best(OURS) if task.settings(OURS) else None
        default, rival = task.at_default(OURS) if tuned else None, task.rival()
        compared = task.ahead(default, rival) if default and rival else None
        rows.append([
            name,
            spread(task, default),
            spread(task, tuned) + (f" at {tuned.lr:g}" if tuned else ""),
            spread(task, rival),
            described(task, rival),
            difference(task, *compared) if compared else "–",
            verdict(*compared[:2]) if compared else "–",
            share(task.loss_of_default(OURS)) if tuned else "–",
            ", ".join("{} of {}".format(*task.divergences(OURS, factor)) for factor in (10, 30)),
        ])  # fmt: skip
    return table(head, rows)


def details(name: str, task: Task) -> str:
    """All methods of a task at their best, the best first."""
    word = "accuracy, %" if task.higher else "loss"
    head = ["method", f"held-out {word}", "at", "seeds", "EvenStep's default ahead by", "by lr", "worse by at usual lr"]
    default, rows = task.at_default(OURS) if task.settings(OURS) else None, []
    for family in task.families():
        best = task.best(family)
        rows.append(
            [
                family,
                spread(task, best),
                described(task, best),
                str(len(task.values[best])),
                difference(task, *task.ahead(default, best)) if default and best != default else "–",
                by_lr(task, best.method),
                share(task.loss_of_default(family)),
            ]
        )
    return f"### {name}\n\n" + table([*head, "diverged"], [[*row, lost(task, row[0])] for row in rows])


def by_lr(task: Task, method: str) -> str:
    """The mean at each lr that a method was tried at with these options."""
    settings = sorted((s for s in task.values if s.method == method), key=lambda s: s.lr)
    scale, digits = scaled(task)
    means = [mean(task.values[s].values()) for s in settings]
    shown = [f"{value * scale:.{digits}f}" if math.isfinite(value) else "diverged" for value in means]
    return ", ".join(f"{s.lr:g}: {text}" for s, text in zip(settings, shown, strict=True))


def lost(task: Task, family: str) -> str:
    """How many runs of a method diverged, of how many."""
    return "{} of {}".format(*task.divergences(family, math.inf))


def described(task: Task, setting: Setting | None) -> str:
    """The method's options and lr, with a mark where the grid ends there."""
    if setting is None:
        return "–"
    return f"{setting.method}, {setting.lr:g}" + (" (end of grid)" if task.at_end(setting) else "")


def spread(task: Task, setting: Setting | None) -> str:
    """Mean ± standard deviation over seeds; accuracies in per cent."""
    if setting is None:
        return "–"
    values, scale, digits = list(task.values[setting].values()), *scaled(task)
    if not all(map(math.isfinite, values)):
        return "diverged"
    deviation = f" ± {statistics.stdev(values) * scale:.{digits}f}" if len(values) > 1 else ""
    return f"{mean(values) * scale:.{digits}f}{deviation}"


def difference(task: Task, value: float, error: float, seeds: int) -> str:
    """A paired difference with its standard error."""
    scale, digits = scaled(task)
    sure = f" ± {error * scale:.{digits}f}" if math.isfinite(error) else ""
    return f"{value * scale:+.{digits}f}{sure} ({seeds})" if math.isfinite(value) else "–"


def scaled(task: Task) -> tuple[float, int]:
    """Accuracies are shown in per cent with two digits, losses with four."""
    return (100.0, 2) if task.higher else (1.0, 4)


def share(value: float) -> str:
    """A share in per cent."""
    return f"{value:.1%}" if math.isfinite(value) else "diverged" if value > 0 else "–"


def failure(record: dict[str, Any]) -> str:
    """A job that ended in an error."""
    config = record["config"]
    return f"- {config['task']}, {config['method']}, {config['lr']:g}, {record['seed']}: {record['metrics']['error']}"


def table(head: list[str], rows: list[list[str]]) -> str:
    """Rows as Markdown."""
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *rows])
