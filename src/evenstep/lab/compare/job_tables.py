"""Tables of single jobs, in Markdown.

A setting is a method with its options at one lr. The best is the one with the best mean over the seeds that all
settings of the method have: a grid of one seed may choose, and more seeds of the chosen setting then judge. All options
of a rival are tuned together, each variant of ours stands by itself. Differences are paired by seed, and positive where
ours is better.
"""

import math
import statistics
from collections.abc import Iterable
from typing import Any, NamedTuple

from .formatting import difference, scale, table
from .jobs import usual_lr
from .methods import METHODS
from .scores import Values, diverged, mean, paired, verdict
from .tasks import TASKS
from .tasks.task import ACCURACY, LOSS

OURS = "evenstep"
WORST = {LOSS: math.inf, ACCURACY: 0.0}


class Setting(NamedTuple):
    """A method with its options, and a stepsize."""

    method: str
    lr: float

    @property
    def family(self) -> str:
        """What is tuned as one method."""
        name = self.method.partition(",")[0]
        return name if name in METHODS and METHODS[name].rival else self.method


class TaskRuns:
    """All runs of one task: the held-out values of each setting by seed, and which runs diverged."""

    def __init__(self, records: Iterable[dict[str, Any]]) -> None:
        self.values: dict[Setting, Values] = {}
        self.lost: dict[Setting, dict[int, bool]] = {}
        for record in records:
            config, metrics = record["config"], record["metrics"]
            setting, seed = Setting(config["method"], config["lr"]), record["seed"]
            metric = next(name for name in WORST if name in metrics)
            value, broken = metrics[metric], diverged(metrics)
            self.higher = metric == ACCURACY
            self.values.setdefault(setting, {})[seed] = WORST[metric] if broken or value is None else value
            self.lost.setdefault(setting, {})[seed] = broken

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

    def at_end(self, setting: Setting) -> bool:
        """Whether a setting has the smallest or the largest lr that its method was tried at with these options."""
        rates = [s.lr for s in self.values if s.method == setting.method]
        return setting.lr in (min(rates), max(rates))

    def ahead(self, ours: Setting, theirs: Setting) -> tuple[float, float, int]:
        """By how much one setting is better than another, the standard error of that, and the number of seeds."""
        sign = 1 if self.higher else -1
        signed = [{seed: sign * v for seed, v in self.values[s].items()} for s in (ours, theirs)]
        return paired(*signed)

    def row(self, family: str) -> list[str]:
        """A method at its best."""
        best, default = self.best(family), Setting(OURS, usual_lr(OURS))
        compared = ["–", "–"]
        if default in self.values and default != best:
            ahead, error, seeds = self.ahead(default, best)
            if seeds:
                compared = [f"{difference(ahead, error, self.higher)} ({seeds})", verdict(ahead, error)]
        lost = [broken for s in self.settings(family) for broken in self.lost[s].values()]
        return [
            family,
            self.shown(best),
            f"{best.method}, {best.lr:g}" + (" (end of grid)" if self.at_end(best) else ""),
            str(len(self.values[best])),
            *compared,
            self.by_lr(best.method),
            f"{sum(lost)} of {len(lost)}",
        ]

    def shown(self, setting: Setting) -> str:
        """Mean ± standard deviation over seeds; accuracies in per cent."""
        values, (factor, digits) = list(self.values[setting].values()), scale(self.higher)
        if not all(map(math.isfinite, values)):
            return "diverged"
        deviation = f" ± {statistics.stdev(values) * factor:.{digits}f}" if len(values) > 1 else ""
        return f"{mean(values) * factor:.{digits}f}{deviation}"

    def by_lr(self, method: str) -> str:
        """The mean at each lr that a method was tried at with these options."""
        settings, (factor, digits) = sorted(s for s in self.values if s.method == method), scale(self.higher)
        means = [(s.lr, mean(self.values[s].values()) * factor) for s in settings]
        return ", ".join(f"{lr:g}: {m:.{digits}f}" if math.isfinite(m) else f"{lr:g}: diverged" for lr, m in means)


def markdown(records: list[dict[str, Any]]) -> str:
    """A table of all methods at their best for each task, the best first, then jobs that failed."""
    latest = {(task_name(r), r["config"]["method"], r["config"]["lr"], r["seed"]): r for r in records}
    parts, errors = [], []
    for name in dict.fromkeys(key[0] for key in latest):
        own = [r for key, r in latest.items() if key[0] == name]
        errors += [r for r in own if "error" in r["metrics"]]
        if fine := [r for r in own if "error" not in r["metrics"]]:
            task = TaskRuns(fine)
            head = [
                "method", "held-out accuracy, %" if task.higher else "held-out loss", "at", "seeds",
                "EvenStep's default ahead by", "verdict", "by lr", "diverged",
            ]  # fmt: skip
            parts.append(f"### {name}\n\n{table(head, [task.row(family) for family in task.families()])}")
    if errors:
        parts.append("### Jobs that failed\n\n" + "\n".join(map(failure, errors)))
    return "\n\n".join(parts)


def task_name(record: dict[str, Any]) -> str:
    """The task, with its number of steps where that is not the usual one."""
    name, steps = record["config"]["task"], record["config"].get("steps")
    return name if steps is None or (name in TASKS and steps == TASKS[name].steps) else f"{name}, {steps} steps"


def failure(record: dict[str, Any]) -> str:
    """A job that ended in an error."""
    config = record["config"]
    return f"- {config['task']}, {config['method']}, {config['lr']:g}, {record['seed']}: {record['metrics']['error']}"
