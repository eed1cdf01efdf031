"""The sanity check of §4.2: whitening overfits; with L2 in the loss it has batch norm's test error again."""

import math
import statistics
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ..records import Record, dumps
from .common import NOT_RUN, Claim, Figure, Options, Progress, Verdict, borrow, images, only, silent, spread
from .fig2 import BATCH_NORM, GUARDED, WHITENING
from .tuning import Contender, Entrant, Plan, at_best, beyond, in_stage, rates_table, strength, trained, tuned

STRENGTHS = (1e-4, 3e-4, 1e-3, 3e-3)
PENALIZED = (WHITENING, GUARDED)
CLOSE = 0.01  # of accuracy: what counts as recovered
FULL: dict[str, Any] = {"epochs": 40, "batch_size": 64}
QUICK: dict[str, Any] = {"epochs": 2, "batch_size": 64}
SETTING = (
    "The network and the schedule of figure 2. ½·λ·Σw² over all weights is a term of the loss, so that it passes "
    "through eq. 3 as in the paper (with α² large, at first, it is then a strong force: too large a λ diverges). Batch "
    "norm and whitening without L2 take the stepsize with the lowest training loss; with L2, λ and the stepsize (of "
    "four and three, and a fifth λ beyond an end if the best lies there) with the best test accuracy on the first seed "
    f'are taken and judged on the seeds after it. "Recovered" is within {CLOSE:.0%} of accuracy; the rate is the '
    "number of epochs to within 2 % of the accuracy that all reach. Guarded whitening is our addition."
)


def with_l2(contender: Contender, l2: float) -> Contender:
    """The contender with λ in the loss."""
    return replace(contender, label=f"{contender.label}, λ = {l2:g}", l2=l2)


def error_rate(record: Record) -> float:
    """Test error of the last epoch; 1 where the run failed."""
    accuracy = record["metrics"][-1].get("test_accuracy")
    return 1.0 if accuracy is None or not trained(record) else 1 - accuracy


def run(options: Options, out: Path, device: torch.device | str = "cpu", progress: Progress = silent) -> list[Record]:
    """Records of batch norm and whitening, then of whitening with L2 over a grid of λ and stepsize.

    If the best λ is at an end of its grid, the one beyond it is run with the further seeds, as in `tuned`.
    """
    arrays, plan = images(options, device), Plan(seeds=2, growth=0, thin=1) if options.quick else Plan()
    plain, settings = (BATCH_NORM, WHITENING, GUARDED), QUICK if options.quick else FULL
    only(out, [arrays])
    borrow(out, "fig2", lambda records: [r for c in plain for r in c.mine(records)], arrays)
    entrants = [Entrant(contender, settings) for contender in plain]
    found = tuned(entrants, plan, arrays, out, device=device, progress=progress, seed=options.seed)

    def stage(entrants: list[tuple[Contender, float]], seeds: Iterable[int]) -> list[Record]:
        trials = [c.trial(lr, seed=seed, **settings) for c, lr in entrants for seed in seeds]
        return in_stage(trials, arrays, out, device=device, progress=progress)

    def grid(contender: Contender, strengths: Iterable[float]) -> list[tuple[Contender, float]]:
        rates = Plan(thin=1 if options.quick else 3).grid(contender)
        return [(with_l2(contender, l2), lr) for l2 in strengths for lr in rates]

    tried = STRENGTHS[:2] if options.quick else STRENGTHS
    first = stage([one for c in PENALIZED for one in grid(c, tried)], [options.seed])
    best: list[tuple[Contender, float]] = []
    for contender in PENALIZED:
        mine = penalized(first, contender)
        winner = min(mine, key=error_rate)
        best.append((with_l2(contender, strength(winner)), winner["config"]["lr"]))
        further = next_strength(mine) if plan.growth else None
        best += [] if further is None else grid(contender, [further])
    last = stage(best, range(options.seed, options.seed + plan.seeds))
    return found + list({dumps(r["config"]): r for r in (*first, *last)}.values())


def penalized(records: list[Record], contender: Contender) -> list[Record]:
    """The contender's runs with L2."""
    return [r for l2 in strengths(records) for r in with_l2(contender, l2).mine(records)]


def next_strength(records: list[Record]) -> float | None:
    """The λ beyond the end of its grid at which the best one lies; None if it lies inside."""
    best: dict[float, float] = {}
    for r in records:
        best[strength(r)] = min(best.get(strength(r), math.inf), error_rate(r))
    scored = [{"config": {"lr": tried}, "seed": 0, "error": error} for tried, error in best.items()]
    return beyond(scored, lambda r: r["error"])


def chosen(records: list[Record], contender: Contender = WHITENING) -> list[Record]:
    """The contender's runs with L2 at the chosen strength and stepsize, by seed."""
    mine = penalized(records, contender)
    if not mine:
        return []
    first = min(r["seed"] for r in mine)
    winner = min((r for r in mine if r["seed"] == first), key=error_rate)
    same = [r for r in mine if (strength(r), r["config"]["lr"]) == (strength(winner), winner["config"]["lr"])]
    return sorted(same, key=lambda r: r["seed"])


def strengths(records: list[Record]) -> list[float]:
    """Every λ that was tried, in order."""
    return sorted({strength(r) for r in records} - {0.0})


def accuracies(records: list[Record], fresh: bool = True) -> list[float]:
    """Test accuracy of the last epoch; with `fresh`, of the seeds that did not choose λ and the stepsize, if any."""
    wanted = records[1:] if fresh and len(records) > 1 else records
    return [1 - error_rate(r) for r in wanted]


def summary(records: list[Record], contender: Contender) -> str:
    """A contender's test accuracy with and without L2, in a few words."""
    plain, best = accuracies(at_best(records, contender)), chosen(records, contender)
    if not best:
        return f"{contender.label} {spread(plain)} without L2"
    at = f"λ = {strength(best[0]):g}, stepsize {best[0]['config']['lr']:g}"
    return f"{contender.label} {spread(accuracies(best))} with L2 ({at}), {spread(plain)} without"


def recovered(records: list[Record]) -> Verdict:
    """Test accuracy with L2 against batch norm's."""
    theirs, ours = accuracies(at_best(records, BATCH_NORM)), accuracies(chosen(records))
    if not (theirs and ours):
        return NOT_RUN
    held = statistics.fmean(ours) >= statistics.fmean(theirs) - CLOSE
    both = "; ".join(summary(records, contender) for contender in PENALIZED if contender.mine(records))
    return Verdict(held, f"Test accuracy: batch norm {spread(theirs)}; {both}.")


def epochs_to(record: Record, target: float) -> float | None:
    """The first epoch with that test accuracy; infinite if there is none, None if it was not measured as it went."""
    rows = [row for row in record["metrics"] if row.get("test_accuracy") is not None]
    if len(rows) < len(record["metrics"]):
        return None
    return next((float(row["epoch"]) for row in rows if row["test_accuracy"] >= target), math.inf)


def rates(records: list[Record]) -> Verdict:
    """Epochs to the same test accuracy."""
    theirs, ours = at_best(records, BATCH_NORM), chosen(records)
    if not (theirs and ours):
        return NOT_RUN
    reached = [max((row.get("test_accuracy") or 0.0) for row in r["metrics"]) for r in (*theirs, *ours)]
    target = math.floor(100 * (min(reached) - 0.02)) / 100
    times = [[epochs_to(r, target) for r in group] for group in (theirs, ours)]
    if any(t is None for group in times for t in group):
        return Verdict(None, "Test error was measured after the last epoch alone.")
    a, b = (statistics.fmean(t for t in group if t is not None) for group in times)
    return Verdict(
        max(a, b) <= 2 * min(a, b),
        f"A test accuracy of {target:.2f} takes batch norm {a:.1f} epochs, whitening with L2 {b:.1f}.",
    )


def table(records: list[Record]) -> list[list[str]]:
    """Head and rows for the docs: without L2, then each λ at its best stepsize by test accuracy."""
    with_it = [with_l2(contender, l2) for contender in PENALIZED for l2 in strengths(records)]
    return rates_table(records, (BATCH_NORM, WHITENING, GUARDED)) + rates_table(records, with_it, error_rate)[1:]


CLAIMS = (
    Claim("§4.2", "With L2 the whitened network recovers batch norm's test error.", recovered),
    Claim("§4.2", "The two then reduce the test error at similar rates.", rates),
)


def plot(records: list[Record]) -> Figure:
    """Test accuracy by epoch, and by λ."""
    from .. import drawing

    figure, (curves, by_strength) = drawing.panels(2)
    groups = {c.label: at_best(records, c) for c in (BATCH_NORM, WHITENING, GUARDED)}
    groups |= {f"{c.label}, L2": chosen(records, c) for c in PENALIZED}
    worked: list[float] = []  # accuracies that are not of failed runs, whose lines leave the panel
    for k, (label, runs) in enumerate(groups.items()):
        for number, record in enumerate(runs):
            rows = [row for row in record["metrics"] if row.get("test_accuracy") is not None]
            curves.plot(
                [row["epoch"] for row in rows],
                [row["test_accuracy"] for row in rows],
                color=drawing.COLOURS[k],
                marker=drawing.MARKS[k] if len(rows) == 1 else None,
                linewidth=0.7 if number else 2,
                label=None if number else label,
            )
        if k < 3 and (found := accuracies(runs, fresh=False)):
            by_strength.axhline(statistics.fmean(found), color=drawing.COLOURS[k], linestyle="--", linewidth=1)
            worked.append(statistics.fmean(found))
    for k, contender in enumerate(PENALIZED, start=3):
        runs = [
            min(mine, key=error_rate) for l2 in strengths(records) if (mine := with_l2(contender, l2).mine(records))
        ]
        points = [(strength(r), 1 - error_rate(r)) for r in runs]
        worked += [accuracy for _, accuracy in points if accuracy > 0]
        style: dict[str, Any] = {"marker": drawing.MARKS[k], "color": drawing.COLOURS[k]}
        by_strength.plot(*zip(*points, strict=True), label=f"{contender.label}, L2", **style) if points else None
    drawing.epoch_axis(curves)
    curves.set_ylabel("test accuracy")
    by_strength.set_xscale("log")
    if worked:
        by_strength.set_ylim(bottom=min(worked) - 0.02)
    by_strength.set(xlabel="λ (dashed: without; below: failed)", ylabel="test accuracy, last epoch, best stepsize")
    drawing.legend(curves)
    drawing.legend(by_strength)
    return figure
