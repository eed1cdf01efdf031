"""Trainings at many stepsizes, the best of them on further seeds: the comparison behind the paper's figures."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..data import Arrays
from ..identity import by_key
from ..records import Record, dumps
from ..summary import diverged, end, initial_loss
from ..sweep import key, sweep
from ..trial import Trial, config
from .common import Progress, failures_expected, finished, spread

Score = Callable[[Record], float]


def guessing(record: Record) -> float:
    """The loss of guessing among the classes; of ten, where a record does not say."""
    return initial_loss([record]) or math.log(10)


def final(record: Record) -> float:
    """Training loss of the last epoch; infinite if the run diverged or ended above guessing."""
    return end(record, guessing(record))


@dataclass(frozen=True)
class Contender:
    """A method with options and a grid of stepsizes with a constant ratio; `l2` is the strength of an L2 term."""

    label: str
    method: str
    stepsizes: tuple[float, ...]
    options: dict[str, Any] = field(default_factory=dict)
    l2: float = 0.0

    def trial(self, lr: float, **settings: Any) -> Trial:
        """One run."""
        network = settings.pop("model_options", {}) | ({"l2": self.l2} if self.l2 else {})
        return Trial(self.method, lr, options=self.options, model_options=network, **settings)

    def mine(self, records: Sequence[Record]) -> list[Record]:
        """The records that are runs of this contender."""
        me = self.method, self.options, self.l2
        return [r for r in records if (r["config"]["method"], r["config"]["options"], strength(r)) == me]


def strength(record: Record) -> float:
    """The strength of the L2 term in a run's loss."""
    return record["config"]["model_options"].get("l2", 0.0)


@dataclass(frozen=True)
class Plan:
    """How thoroughly to tune: seeds (the first picks the stepsize), and how far a grid may grow beyond its ends."""

    seeds: int = 3
    growth: int = 1
    thin: int | None = None  # use only so many of each contender's stepsizes, from the middle

    def grid(self, contender: Contender) -> tuple[float, ...]:
        """The first stepsizes."""
        rates = contender.stepsizes
        if self.thin is None:
            return rates
        start = (len(rates) - self.thin) // 2
        return rates[start : start + self.thin]


def doubled(low: float, count: int = 7) -> tuple[float, ...]:
    """`count` stepsizes from `low` on, each twice the one before.

    >>> doubled(0.1, 3)
    (0.1, 0.2, 0.4)
    """
    return tuple(low * 2**k for k in range(count))


class Entrant(NamedTuple):
    """A contender with the settings of its trials."""

    contender: Contender
    settings: dict[str, Any]

    def trials(self, rates: Iterable[float], seeds: Iterable[int]) -> list[Trial]:
        """One trial for each stepsize and seed."""
        return [self.contender.trial(lr, seed=seed, **self.settings) for lr in rates for seed in seeds]


def tuned(
    entrants: Sequence[Entrant],
    plan: Plan,
    arrays: Arrays,
    out: Path,
    *,
    device: torch.device | str,
    progress: Progress,
    seed: int = 0,
    score: Score = final,
) -> list[Record]:
    """Records of every entrant at every stepsize of its grid, then of its best stepsize on further seeds.

    A grid whose best stepsize is at an end grows there, one stepsize at a time and at most `plan.growth` times. The
    last growth includes the further seeds, at both stepsizes that may turn out best: all entrants run together in few
    stages, so that a GPU trains many trials side by side. Records that `out` has are not made again.
    """
    seeds = range(seed, seed + plan.seeds)

    def stage(wanted: Sequence[Iterable[float]], seeds: Iterable[int]) -> list[list[Record]]:
        trials = [e.trials(rates, seeds) for e, rates in zip(entrants, wanted, strict=True)]
        found = iter(in_stage([t for mine in trials for t in mine], arrays, out, device=device, progress=progress))
        return [[next(found) for _ in mine] for mine in trials]

    def ends(records: list[Record]) -> list[float]:
        further = beyond(records, score)
        return [] if further is None else [further]

    found = stage([plan.grid(e.contender) for e in entrants], [seed])
    for _ in range(plan.growth - 1):
        grown = [ends(mine) for mine in found]
        if not any(grown):
            break
        found = [mine + more for mine, more in zip(found, stage(grown, [seed]), strict=True)]
    grown = [ends(mine) if plan.growth else [] for mine in found]
    last = stage([[best_rate(mine, score), *more] for mine, more in zip(found, grown, strict=True)], seeds)
    every = [r for mine in (*found, *last) for r in mine]
    return list({(dumps(r["config"]), r["seed"]): r for r in every}.values())


def in_stage(
    trials: list[Trial], arrays: Arrays, out: Path, *, device: torch.device | str, progress: Progress
) -> list[Record]:
    """The records of all trials, in order; `progress` is called before each missing one, and may raise to stop."""
    have = by_key(finished(out), arrays, out)
    names = [key(config(trial, arrays)) for trial in trials]
    missing = {name: trial for name, trial in zip(names, trials, strict=True) if name not in have}
    done = len(trials) - len(missing)

    def begin(trial: Trial) -> None:
        nonlocal done
        progress(f"{trial.method}, stepsize {trial.lr:g}", done, len(trials))
        done += 1

    with failures_expected():
        made = sweep(list(missing.values()), arrays, out, device=device, on_begin=begin)
    have |= dict(zip(missing, made, strict=True))
    return [have[name] for name in names]


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
    mine = contender.mine(records)
    if not mine:
        return []
    lr = best_rate(mine, score)
    return sorted((r for r in mine if r["config"]["lr"] == lr), key=lambda r: r["seed"])


def losses(records: Sequence[Record]) -> list[float]:
    """Final training losses, infinite where a run failed."""
    return [final(r) for r in records]


def first_failure(records: Sequence[Record], contender: Contender) -> float | None:
    """The smallest stepsize above the best one at which the first seed failed; the smallest of all if every one did."""
    mine = contender.mine(records)
    if not mine:
        return None
    first, best = min(r["seed"] for r in mine), best_rate(mine)
    failed = [r["config"]["lr"] for r in mine if r["seed"] == first and not trained(r)]
    return min((lr for lr in failed if lr > best or best in failed), default=None)


def trained(record: Record) -> bool:
    """Whether a run ended with a finite loss, and no worse than guessing."""
    return not diverged(record, guessing(record))


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
