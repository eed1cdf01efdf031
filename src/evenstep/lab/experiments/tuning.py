"""Trainings at many stepsizes, the best of them on further seeds: what the paper's figures compare."""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from evenstep.lab.data import Arrays
from evenstep.lab.experiments.common import Progress, failures_expected, spread
from evenstep.lab.records import Record, dumps
from evenstep.lab.summary import final_loss
from evenstep.lab.sweep import sweep
from evenstep.lab.trial import Trial

PIECE = {"cuda": 24}  # trials that are started together at most; one at a time elsewhere

Score = Callable[[Record], float]


@dataclass(frozen=True)
class Contender:
    """A method with its options, and the stepsizes to begin with, in order; neighbours have a constant ratio.

    `l2` is the strength of an L2 term in the loss.
    """

    label: str
    method: str
    stepsizes: tuple[float, ...]
    options: dict[str, Any] = field(default_factory=dict)
    l2: float = 0.0

    def trial(self, lr: float, **settings: Any) -> Trial:
        """One run of it."""
        network = settings.pop("model_options", {}) | ({"l2": self.l2} if self.l2 else {})
        return Trial(self.method, lr, options=self.options, model_options=network, **settings)

    def mine(self, records: Sequence[Record]) -> list[Record]:
        """Those records that are runs of it."""
        me = self.method, self.options, self.l2
        return [r for r in records if (r["config"]["method"], r["config"]["options"], strength(r)) == me]


def strength(record: Record) -> float:
    """That of the L2 term in a run's loss."""
    return record["config"]["model_options"].get("l2", 0.0)


@dataclass(frozen=True)
class Plan:
    """How thoroughly to tune: seeds (the first picks the stepsize), and how far a grid may grow beyond its ends."""

    seeds: int = 3
    growth: int = 3
    thin: int | None = None  # only so many of each contender's stepsizes, from the middle

    def grid(self, contender: Contender) -> tuple[float, ...]:
        """The stepsizes to begin with."""
        rates = contender.stepsizes
        if self.thin is None:
            return rates
        start = (len(rates) - self.thin) // 2
        return rates[start : start + self.thin]


def decades(low: float, high: float, count: int) -> tuple[float, ...]:
    """`count` stepsizes from `low` to `high` in a constant ratio, to three digits.

    >>> decades(0.1, 10, 5)
    (0.1, 0.316, 1.0, 3.16, 10.0)
    """
    return tuple(float(f"{low * (high / low) ** (k / (count - 1)):.3g}") for k in range(count))


def tuned(
    contenders: Sequence[Contender],
    plan: Plan,
    arrays: Arrays,
    out: Path,
    *,
    device: torch.device | str,
    progress: Progress,
    seed: int = 0,
    score: Score = final_loss,
    **settings: Any,
) -> list[Record]:
    """Records of every contender at every stepsize, then of its best stepsize on further seeds.

    A grid whose best stepsize is at an end grows there, one stepsize at a time and at most `plan.growth` times, so
    that the best one has a worse neighbour on both sides. What `out` holds already is not run again.
    """
    grids = {c.label: plan.grid(c) for c in contenders}

    def run(trials: list[Trial]) -> list[Record]:
        return in_pieces(trials, arrays, out, device=device, progress=progress)

    def first_seed() -> list[Trial]:
        return [c.trial(lr, seed=seed, **settings) for c in contenders for lr in grids[c.label]]

    records = run(first_seed())
    for _ in range(plan.growth):
        grown = {c.label: beyond(c.mine(records), score) for c in contenders}
        if not any(grown.values()):
            break
        for label, lr in grown.items():
            grids[label] = tuple(sorted({*grids[label], *([lr] if lr else [])}))
        records = run(first_seed())
    rest = [
        replace(c.trial(best_rate(c.mine(records), score), **settings), seed=seed + k)
        for k in range(1, plan.seeds)
        for c in contenders
    ]
    return records + run(rest)


def in_pieces(
    trials: list[Trial], arrays: Arrays, out: Path, *, device: torch.device | str, progress: Progress
) -> list[Record]:
    """The records of all trials, in order; `progress` is told before each piece, and may stop there by raising.

    A piece has trials that differ in stepsize and seed alone: those that can be trained together.
    """
    arrays, size, done = arrays.to(device), PIECE.get(torch.device(device).type, 1), 0
    alike: dict[str, list[Trial]] = {}
    for trial in trials:
        alike.setdefault(dumps({**asdict(trial), "lr": 0, "seed": 0}), []).append(trial)
    for piece in [group[k : k + size] for group in alike.values() for k in range(0, len(group), size)]:
        progress(f"{piece[0].method}, stepsize {', '.join(f'{t.lr:g}' for t in piece)}", done, len(trials))
        with failures_expected():
            sweep(piece, arrays, out, device=device)
        done += len(piece)
    return sweep(trials, arrays, out, device=device)


def beyond(records: Sequence[Record], score: Score = final_loss) -> float | None:
    """The stepsize to try next, beyond the end of the grid at which the best one lies; None if it lies inside.

    Where all runs diverged a smaller stepsize is next.
    """
    rates = sorted(r["config"]["lr"] for r in records)
    best = best_rate(records, score)
    if len(rates) < 2 or rates[0] < best < rates[-1]:
        return None
    ratio = rates[1] / rates[0]
    return float(f"{best / ratio if best == rates[0] else best * ratio:.3g}")


def best_rate(records: Sequence[Record], score: Score = final_loss) -> float:
    """The stepsize with the lowest score on the first seed; the smallest of equals."""
    first = min(r["seed"] for r in records)
    return min((score(r), r["config"]["lr"]) for r in records if r["seed"] == first)[1]


def at_best(records: Sequence[Record], contender: Contender, score: Score = final_loss) -> list[Record]:
    """The contender's runs at its best stepsize, all seeds; nothing if it has none."""
    mine = contender.mine(records)
    if not mine:
        return []
    lr = best_rate(mine, score)
    return sorted((r for r in mine if r["config"]["lr"] == lr), key=lambda r: r["seed"])


def losses(records: Sequence[Record]) -> list[float]:
    """Final training losses, infinite where a run diverged."""
    return [final_loss(r) for r in records]


def first_failure(records: Sequence[Record], contender: Contender) -> float | None:
    """The smallest stepsize above the best one at which the first seed diverged, or ended above guessing."""
    mine = contender.mine(records)
    if not mine:
        return None
    first, best = min(r["seed"] for r in mine), best_rate(mine)
    failed = [r["config"]["lr"] for r in mine if r["seed"] == first and final_loss(r) > guessing(r)]
    return min((lr for lr in failed if lr > best), default=None)


def rates_table(
    records: Sequence[Record], contenders: Sequence[Contender], score: Score = final_loss
) -> list[list[str]]:
    """Header, and a row for each contender at its best stepsize, for the docs."""
    rows = [["method", "best stepsize", "seeds", "training loss", "test accuracy", "dead units", "fails from"]]
    for contender in contenders:
        best = at_best(records, contender, score)
        if best:
            last, failure = [r["metrics"][-1] for r in best], first_failure(records, contender)
            rows.append([
                contender.label,
                f"{best[0]['config']['lr']:g}",
                str(len(best)),
                spread(losses(best)),
                spread([row["test_accuracy"] for row in last if row.get("test_accuracy") is not None]),
                spread([100 * row["dead_share"] for row in last if row.get("dead_share") is not None], 1) + " %",
                "" if failure is None else f"{failure:g}",
            ])  # fmt: skip
    return rows


def guessing(record: Record) -> float:
    """The loss of a network that knows nothing but the number of classes."""
    return math.log(record["config"]["model_options"].get("classes", 10))
