"""The best stepsize of each method, from records."""

import math
from dataclasses import dataclass

from evenstep.lab.records import Record


@dataclass(frozen=True)
class Best:
    """A method's best run: the one with the lowest training loss in its last epoch."""

    record: Record
    at_edge: bool  # no run at a smaller, or none at a larger stepsize: the best may lie outside the grid


def final_loss(record: Record) -> float:
    """Training loss of the last epoch; infinity if the run diverged."""
    last = record["metrics"][-1]
    return math.inf if last["diverged"] or last["train_loss"] is None else last["train_loss"]


def by_method(records: list[Record]) -> dict[str, list[Record]]:
    """Records of each method, by ascending stepsize; methods in order of appearance."""
    methods: dict[str, list[Record]] = {}
    for record in records:
        methods.setdefault(record["config"]["method"], []).append(record)
    return {name: sorted(runs, key=lambda r: r["config"]["lr"]) for name, runs in methods.items()}


def best_runs(records: list[Record]) -> dict[str, Best]:
    """The best run of each method."""
    best = {}
    for name, runs in by_method(records).items():
        winner = min(range(len(runs)), key=lambda i: final_loss(runs[i]))
        best[name] = Best(runs[winner], at_edge=winner in (0, len(runs) - 1))
    return best
