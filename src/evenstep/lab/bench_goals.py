"""What a training step may cost: where its ratio to SGD's is to be, and what it must not exceed.

`evenstep bench --goals` measures those of a device; with `--table FILE`, the module `bench` judges records instead.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from .bench_tables import title
from .records import Record

OURS = ("whitened-sgd", "evenstep")


class Goal(NamedTuple):
    """What steps of one network may cost, as ratios to SGD with the same momentum, guards on."""

    best: float
    limit: float
    how: dict[str, Any]  # fields of bench.Setting


GOALS = {
    "cuda": [
        Goal(1.01, 1.03, {"model": "resnet50", "autocast": True, "channels_last": True}),
        Goal(1.02, 1.04, {"model": "alexnet", "autocast": True}),
        Goal(1.01, 1.03, {"model": "gpt2-small", "autocast": True}),
        Goal(1.01, 1.02, {"model": "gpt2-small", "autocast": True, "compiled": True}),
        Goal(1.01, 1.02, {"model": "vit-b16", "autocast": True, "compiled": True}),
    ],
    "cpu": [Goal(1.05, 1.08, {"model": "paper-cnn"}), Goal(1.02, 1.03, {"model": "paper-cnn-4"})],
}
CONTENDERS = {"cuda": ("sgd", *OURS), "cpu": ("sgd", *OURS, "batch-norm")}
STATE = Goal(0.01, 0.02, {"model": "gpt2-small"})  # floats per parameter beyond momentum
USUAL = {"compiled": False, "autocast": False, "channels_last": False, "batch": None, "width": None, "depth": None}


class Verdict(NamedTuple):
    """A goal, and what was measured of each of our optimizers."""

    what: str
    goal: Goal
    found: dict[str, float]
    missed: list[str]  # who is above the limit, or not below batch norm where that was measured, too

    def cells(self) -> list[str]:
        """A row of the table."""
        digits = 4 if self.goal is STATE else 3
        shown = {name: f"{value:.{digits}f}" for name, value in self.found.items()}
        found = [f"**{shown[name]}**" if name in self.missed else shown.get(name, "–") for name in OURS]
        return [self.what, f"{self.goal.best:.2f}", f"{self.goal.limit:.2f}", *found]


def verdicts(found: Sequence[Record]) -> list[Verdict]:
    """For each goal of the devices that records are from, what the newest record of it says; then the state's."""
    by_sgd = [record for record in found if record["metrics"][0]["contender"] == "sgd"]
    rows, state = [], None
    for kind, goals in GOALS.items():
        here = [record for record in by_sgd if str(record["config"]["device"]).partition(":")[0] == kind]
        newest = [next((r for r in reversed(here) if is_about(r, goal)), None) for goal in goals]
        if any(newest):
            rows += [verdict(goal, record) for goal, record in zip(goals, newest, strict=True)]
            state = next((r for r in newest if r and r["config"]["model"] == STATE.how["model"]), state)
    if state is not None:
        floats = ours(state, "state_per_parameter")
        over = [name for name, value in floats.items() if value > STATE.limit]
        rows.append(Verdict(f"{STATE.how['model']}, state beyond momentum, floats per parameter", STATE, floats, over))
    return rows


def is_about(record: Record, goal: Goal) -> bool:
    """Whether this is what the goal is for."""
    config = record["config"]
    return not config.get("half") and all(config.get(key) == value for key, value in (USUAL | goal.how).items())


def ours(record: Record, column: str) -> dict[str, float]:
    """What was measured of our optimizers."""
    return {row["contender"]: row[column] for row in record["metrics"] if row["contender"] in OURS}


def verdict(goal: Goal, record: Record | None) -> Verdict:
    """What a record says of a goal."""
    found = {} if record is None else ours(record, "ratio")
    norms = [] if record is None else [r["ratio"] for r in record["metrics"] if r["contender"] == "batch-norm"]
    limit = min([goal.limit, *norms])
    return Verdict(title(USUAL | goal.how), goal, found, [name for name, value in found.items() if not value <= limit])


def table(rows: Sequence[Verdict]) -> str:
    """Goals, limits and what was measured; **bold** is above its limit, – was not measured."""
    lines = [["", "goal", "limit", *OURS], ["---"] * (3 + len(OURS)), *(row.cells() for row in rows)]
    return "\n".join("|" + "".join(f" {cell} |" if cell else " |" for cell in line) for line in lines)
