"""Trainings at many stepsizes, the best of them on further seeds: the comparison behind the paper's figures."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..data import Arrays
from ..reading import Record
from ..records import dumps
from ..summary import diverged, end, initial_loss
from ..trial import Trial
from .common import spread
from .session import Session

Score = Callable[[Record], float]


def guessing(record: Record) -> float:
    """The loss of guessing among the classes; of ten, where a record does not say."""
    return initial_loss([record]) or math.log(10)


def final(record: Record) -> float:
    """Training loss of the last epoch; infinite if the run diverged or ended above guessing."""
    return end(record, guessing(record))


def trained(record: Record) -> bool:
    """Whether a run ended with a finite loss, and no worse than guessing."""
    return not diverged(record, guessing(record))


@dataclass(frozen=True)
class Contender:
    """A method with options and a grid of stepsizes with a constant ratio; `l2` is the strength of an L2 term."""

    label: str
    method: str
    stepsizes: tuple[float, ...]
    options: dict[str, Any] = field(default_factory=dict)
    l2: float = 0.0

    def trials(self, rates: Iterable[float], seeds: Iterable[int], settings: dict[str, Any]) -> list[Trial]:
        """One trial for each stepsize and seed."""
        network = settings.get("model_options", {}) | ({"l2": self.l2} if self.l2 else {})
        rest = {**settings, "options": self.options, "model_options": network}
        return [Trial(self.method, lr, seed=seed, **rest) for lr in rates for seed in seeds]

    def runs_in(self, records: Sequence[Record]) -> list[Record]:
        """The records that are runs of this contender."""
        me = self.method, self.options, self.l2
        return [r for r in records if (r["config"]["method"], r["config"]["options"], strength(r)) == me]


Entrant = tuple[Contender, dict[str, Any]]  # with the settings of its trials


def strength(record: Record) -> float:
    """The strength of the L2 term in a run's loss."""
    return (record["config"].get("model_options") or {}).get("l2", 0.0)


def doubled(low: float, count: int = 7) -> tuple[float, ...]:
    """`count` stepsizes from `low` on, each twice the one before.

    >>> doubled(0.1, 3)
    (0.1, 0.2, 0.4)
    """
    return tuple(low * 2**k for k in range(count))


def middle(rates: Sequence[float], count: int) -> Sequence[float]:
    """`count` stepsizes from the middle of a grid.

    >>> middle((0.1, 0.2, 0.4, 0.8), 2)
    (0.2, 0.4)
    """
    start = (len(rates) - count) // 2
    return rates[start : start + count]


def tuned(session: Session, entrants: Sequence[Entrant], arrays: Arrays, seeds: int = 3) -> list[Record]:
    """Records of every entrant at every stepsize of its grid, then of its best stepsize on further seeds.

    If the best stepsize is at an end of its grid, the one beyond it is run on all seeds, too. All entrants are
    trained at once, first on their grids and then at the rest, so that a GPU has many trials side by side. A quick run
    takes one stepsize and one seed.
    """
    quick, first = session.options.quick, session.options.seed

    def train(wanted: Sequence[Iterable[float]], count: int) -> list[list[Record]]:
        seeds = range(first, first + count)
        trials = [c.trials(rates, seeds, how) for (c, how), rates in zip(entrants, wanted, strict=True)]
        found = iter(session.train([t for mine in trials for t in mine], arrays))
        return [[next(found) for _ in mine] for mine in trials]

    found = train([middle(c.stepsizes, 1) if quick else c.stepsizes for c, _ in entrants], 1)
    if not quick:
        further = [[best_rate(mine), *filter(None, [beyond(mine)])] for mine in found]
        found += train(further, seeds)
    return list({dumps(r["config"]): r for mine in found for r in mine}.values())


def beyond(records: Sequence[Record], score: Score = final) -> float | None:
    """The stepsize beyond the end of the grid at which the best one lies; None if it lies inside.

    Where all runs failed a smaller stepsize is next.
    """
    rates = sorted(r["config"]["lr"] for r in records)
    best = best_rate(records, score)
    if len(rates) < 2 or rates[0] < best < rates[-1]:
        return None
    ratio = rates[1] / rates[0]
    return float(f"{best / ratio if best == rates[0] else best * ratio:.3g}")


def best_rate(records: Sequence[Record], score: Score = final) -> float:
    """The stepsize with the lowest score on the first seed; the smallest of equals."""
    first = min(r["seed"] for r in records)
    return min((score(r), r["config"]["lr"]) for r in records if r["seed"] == first)[1]


def at_best(records: Sequence[Record], contender: Contender, score: Score = final) -> list[Record]:
    """The contender's runs at its best stepsize, by seed; empty if it has none."""
    mine = contender.runs_in(records)
    lr = best_rate(mine, score) if mine else None
    return sorted((r for r in mine if r["config"]["lr"] == lr), key=lambda r: r["seed"])


def losses(records: Sequence[Record]) -> list[float]:
    """Final training losses, infinite where a run failed."""
    return [final(r) for r in records]


def best_losses(records: Sequence[Record], contender: Contender) -> list[float]:
    """The contender's final training losses at its best stepsize."""
    return losses(at_best(records, contender))


def first_failure(records: Sequence[Record], contender: Contender) -> float | None:
    """The smallest stepsize above the best one at which the first seed failed; the smallest of all if every one did."""
    mine = contender.runs_in(records)
    if not mine:
        return None
    first, best = min(r["seed"] for r in mine), best_rate(mine)
    failed = [r["config"]["lr"] for r in mine if r["seed"] == first and not trained(r)]
    return min((lr for lr in failed if lr > best or best in failed), default=None)


def outcome(records: Sequence[Record]) -> str:
    """Final training losses of one contender's seeds in a few words; failed seeds are counted, not averaged."""
    fine = [r for r in records if trained(r)]
    if len(fine) == len(records):
        return spread(losses(records))
    failed = f"{len(records) - len(fine)} of {len(records)} seeds failed"
    return f"{spread(losses(fine))} ({failed})" if fine else failed


def rates_table(records: Sequence[Record], contenders: Sequence[Contender], score: Score = final) -> list[list[str]]:
    """A head, and a row for each contender at its best stepsize, for the docs."""
    rows = [["method", "best stepsize", "seeds", "training loss", "test accuracy", "dead units", "fails from"]]
    for contender in contenders:
        best = at_best(records, contender, score)
        if not best:
            continue
        last = [r["metrics"][-1] for r in [r for r in best if trained(r)] or best]
        accuracy, dead = ([row[c] for row in last if row.get(c) is not None] for c in ("test_accuracy", "dead_share"))
        failure = first_failure(records, contender)
        rows.append([
            contender.label,
            f"{best[0]['config']['lr']:g}",
            str(len(best)),
            outcome(best),
            spread(accuracy),
            spread([100 * share for share in dead], 1) + " %",
            "" if failure is None else f"{failure:g}",
        ])  # fmt: skip
    return rows
