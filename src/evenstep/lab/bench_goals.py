"""Suites of the benchmark with their goals, and tables of its records."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, NamedTuple

from . import usage
from .bench import Setting
from .labels import markdown_table
from .reading import Record


class Goal(NamedTuple):
    """What a contender should reach in a column of its row, and above what it fails; None: batch norm in the record."""

    contender: str
    best: float
    limit: float | None
    column: str = "ratio"


def _unit(best: float) -> Goal:
    """UnitStep may take as long as it did, and 1 % of SGD's step more."""
    return Goal("unitstep", best, best + 0.01)


def _even(best: float, limit: float) -> Goal:
    """EvenStep multiplies matrices besides."""
    return Goal("evenstep", best, limit)


ADAMW = Goal("whitened-adamw", 1.02, 1.04)
STATE = Goal("unitstep", 0.01, 0.02, "state_per_parameter")
VERSIONS = Goal("", 1.0, 1.01, "new_over_old")  # for every contender of the suite gpu that is timed in two versions
WORDS = {STATE.column: "floats of state per parameter", VERSIONS.column: "new / old"}
ON_GPU = partial(
    Setting, contenders=("sgd", "unitstep", "whitened-sgd", "adamw-fused", "whitened-adamw", "evenstep"),
    device="cuda", autocast=True, rounds=12,
)  # fmt: skip
ON_CPU = partial(Setting, contenders=("sgd", "unitstep", "whitened-sgd", "batch-norm"), threads=1, rounds=200)
SUITES: dict[str, tuple[tuple[Setting, tuple[Goal, ...]], ...]] = {
    "gpu": (
        (ON_GPU("resnet50", channels_last=True), (_unit(1.008), ADAMW, _even(1.02, 1.04))),
        (ON_GPU("alexnet"), (_unit(1.025),)),
        (ON_GPU("gpt2-small"), (_unit(1.009), ADAMW, STATE, _even(1.035, 1.07))),
        (ON_GPU("gpt2-small", compiled=True), (_unit(1.018), ADAMW, _even(1.055, 1.1))),
        (ON_GPU("vit-b16", compiled=True), (_unit(1.015), ADAMW, _even(1.06, 1.1))),
        (ON_GPU("vit-b16"), ()),
    ),
    "cpu": (
        (ON_CPU("paper-cnn"), (Goal("unitstep", 1.12, None), Goal("whitened-sgd", 1.12, None))),
        (ON_CPU("paper-cnn-4"), (Goal("unitstep", 1.03, 1.05), Goal("whitened-sgd", 1.03, 1.05))),
    ),
}
SAME = ("model", "batch", "width", "depth", "compiled", "autocast", "channels_last", "half")  # in records of a row


class Verdict(NamedTuple):
    """A goal and the newest measurement of it, None if there is none."""

    what: str
    contender: str
    goal: Goal
    limit: float | None
    measured: float | None

    @property
    def missed(self) -> bool:
        """Whether the measurement is above what is allowed."""
        return self.measured is not None and self.limit is not None and self.measured > self.limit

    def cells(self) -> list[str]:
        """A row of the table."""
        digits = 4 if self.goal.column == STATE.column else 3
        value = "–" if self.measured is None else f"{self.measured:.{digits}f}"
        limit = "batch norm's" if self.limit is None else f"{self.limit:.3f}"
        contender = ", ".join(filter(None, [self.contender, WORDS.get(self.goal.column)]))
        return [self.what, contender, f"{self.goal.best:.3f}", limit, f"**{value}**" if self.missed else value]


def verdicts(found: Sequence[Record]) -> list[Verdict]:
    """For each row of the suites that records are from, its goals beside the newest measurement of each contender."""
    rows: list[Verdict] = []
    for name, suite in SUITES.items():
        records = [[record for record in found if is_of(record, setting)] for setting, _ in suite]
        if any(records):
            for (setting, goals), same in zip(suite, records, strict=True):
                rows += _judged(title(asdict(setting)), goals, same, versions=name == "gpu")
    return rows


def is_of(record: Record, setting: Setting) -> bool:
    """Whether a record measures this row: on such a device, with these settings."""
    config = {"half": False, **record["config"]}  # which older records lack
    same = all(config[key] == getattr(setting, key) for key in SAME)
    return same and str(config["device"]).partition(":")[0] == setting.device


def _judged(what: str, goals: Sequence[Goal], records: Sequence[Record], versions: bool) -> Iterator[Verdict]:
    newest: dict[str, dict[str, Any]] = {}
    for record in records:
        lines = {line["contender"]: line for line in record["metrics"]}
        norm = lines.get("batch-norm", {}).get("ratio")
        newest |= {name: {**line, "norm": norm} for name, line in lines.items()}
    for goal in goals:
        line = newest.get(goal.contender, {})
        limit = line.get("norm") if goal.limit is None else goal.limit
        yield Verdict(what, goal.contender, goal, limit, line.get(goal.column))
    for name, line in newest.items():
        if versions and VERSIONS.column in line:
            yield Verdict(what, name, VERSIONS, VERSIONS.limit, line[VERSIONS.column][1])


def goals_table(rows: Sequence[Verdict]) -> str:
    """The goals with what was measured: **bold** is above the limit, – was not measured."""
    return markdown_table([["", "", "goal", "fails above", "measured"], *(row.cells() for row in rows)])


def title(config: Mapping[str, Any]) -> str:
    """The network and how it runs, in words."""
    sizes = [f"{key} {config[key]}" for key in ("width", "depth", "batch") if config.get(key) is not None]
    words = {"autocast": "bf16", "half": "bf16 weights", "channels_last": "channels_last"}
    how = [word for key, word in words.items() if config.get(key)]
    return ", ".join([config["model"], *sizes, "compiled" if config["compiled"] else "eager", *how])


def text(record: Record) -> str:
    """A record for the terminal: a line per contender."""
    lines = [f"{title(record['config'])}, {record['environment']['device']}"]
    for row in record["metrics"]:
        memory, versions = row["step_memory"], row.get("new_over_old")
        lines.append(
            f"  {row['contender']:21} {1e3 * row['seconds']:9.3f} ms  ratio to {row['base']} {_ratio(row)}"
            f"  state {row['state_per_parameter']:.4f}/parameter"
            + (f"  step memory {memory / 2**20:.0f} MiB" if memory else "")
            + (f"  new / old {_spread(*versions)}" if versions else "")
        )
    return "\n".join(lines)


def _spread(low: float, middle: float, high: float) -> str:
    return f"{middle:.3f} ({low:.3f} to {high:.3f})"


def _ratio(row: Mapping[str, Any]) -> str:
    return _spread(row["ratio_low"], row["ratio"], row["ratio_high"])


def table(found: Sequence[Record]) -> str:
    """Records as a table for the docs: a row per comparison, the first contender's time, ratios of the others."""
    first, *others = dict.fromkeys(record["metrics"][0]["contender"] for record in found)
    if others:
        raise usage.UsageError(
            f"the first contenders of these records differ ({first}, {', '.join(others)}); a table takes one of them"
        )
    names = list(dict.fromkeys(row["contender"] for record in found for row in record["metrics"][1:]))
    lines = [["", f"{first}, ms", *names]]
    for record in found:
        rows = {row["contender"]: row for row in record["metrics"]}
        ratios = [_ratio(rows[name]) if name in rows else "" for name in names]
        lines.append([title(record["config"]), f"{1e3 * rows[first]['seconds']:.2f}", *ratios])
    return markdown_table(lines)
