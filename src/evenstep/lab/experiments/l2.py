"""The sanity check of §4.2: whitening overfits; with L2 in the loss it has batch norm's test error again."""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import replace

from ..reading import Record
from ..records import dumps
from .common import Figure, NotRun, Verdict, claim, spread
from .fig2 import BATCH_NORM, GUARDED, WHITENING, settings
from .session import Session
from .tuning import Contender, at_best, beyond, middle, rates_table, strength, trained, tuned

STRENGTHS = (1e-4, 3e-4, 1e-3, 3e-3)
PENALIZED = (WHITENING, GUARDED)
PLAIN = (BATCH_NORM, *PENALIZED)
CLOSE = 0.01  # of accuracy: what counts as recovered
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


def run(session: Session) -> list[Record]:
    """Records of batch norm and whitening, then of whitening with L2 over a grid of λ and stepsize.

    If the best λ is at an end of its grid, the one beyond it is run with the further seeds, as in `tuned`.
    """
    arrays, how, quick = session.images(), settings(session), session.options.quick
    found = tuned(session, [(contender, how) for contender in PLAIN], arrays)
    seed = session.options.seed

    def train(wanted: Iterable[tuple[Contender, Sequence[float]]], count: int) -> list[Record]:
        seeds = range(seed, seed + count)
        return session.train([t for c, rates in wanted for t in c.trials(rates, seeds, how)], arrays)

    def grid(contender: Contender, strengths: Iterable[float]) -> list[tuple[Contender, Sequence[float]]]:
        rates = middle(contender.stepsizes, 1 if quick else 3)
        return [(with_l2(contender, l2), rates) for l2 in strengths]

    first = train([one for c in PENALIZED for one in grid(c, STRENGTHS[:2] if quick else STRENGTHS)], 1)
    best: list[tuple[Contender, Sequence[float]]] = []
    for contender in PENALIZED:
        mine = penalized(first, contender)
        winner = min(mine, key=error_rate)
        best.append((with_l2(contender, strength(winner)), [winner["config"]["lr"]]))
        further = None if quick else next_strength(mine)
        best += [] if further is None else grid(contender, [further])
    last = train(best, 2 if quick else 3)
    return list({dumps(r["config"]): r for r in (*found, *first, *last)}.values())


def penalized(records: list[Record], contender: Contender) -> list[Record]:
    """The contender's runs with L2."""
    return [r for l2 in strengths(records) for r in with_l2(contender, l2).runs_in(records)]


def next_strength(records: list[Record]) -> float | None:
    """The λ beyond the end of its grid at which the best one lies; None if it lies inside."""
    worst_first = sorted(records, key=error_rate, reverse=True)
    best = {strength(r): error_rate(r) for r in worst_first}  # of each λ
    scored = [{"config": {"lr": l2}, "seed": 0, "error": error} for l2, error in best.items()]
    return beyond(scored, lambda r: r["error"])


def chosen(records: list[Record], contender: Contender = WHITENING) -> list[Record]:
    """The contender's runs with L2 at the chosen strength and stepsize, by seed."""
    mine = penalized(records, contender)
    first = min((r["seed"] for r in mine), default=0)
    winner = min((r for r in mine if r["seed"] == first), key=error_rate, default=None)
    return [] if winner is None else at_best(mine, with_l2(contender, strength(winner)), error_rate)


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


@claim("§4.2", "With L2 the whitened network recovers batch norm's test error.")
def recovered(records: list[Record]) -> Verdict:
    """Test accuracy with L2 against batch norm's."""
    theirs, ours = accuracies(at_best(records, BATCH_NORM)), accuracies(chosen(records))
    if not (theirs and ours):
        raise NotRun
    held = statistics.fmean(ours) >= statistics.fmean(theirs) - CLOSE
    both = "; ".join(summary(records, contender) for contender in PENALIZED if contender.runs_in(records))
    return Verdict(held, f"Test accuracy: batch norm {spread(theirs)}; {both}.")


def epochs_to(record: Record, target: float) -> float | None:
    """The first epoch with that test accuracy; infinite if there is none, None if it was not measured as it went."""
    rows = [row for row in record["metrics"] if row.get("test_accuracy") is not None]
    if len(rows) < len(record["metrics"]):
        return None
    return next((float(row["epoch"]) for row in rows if row["test_accuracy"] >= target), math.inf)


@claim("§4.2", "The two then reduce the test error at similar rates.")
def rates(records: list[Record]) -> Verdict:
    """Epochs to the same test accuracy."""
    theirs, ours = at_best(records, BATCH_NORM), chosen(records)
    if not (theirs and ours):
        raise NotRun
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


CLAIMS = (recovered, rates)


def table(records: list[Record]) -> list[list[str]]:
    """Head and rows for the docs: without L2, then each λ at its best stepsize by test accuracy."""
    with_it = [with_l2(contender, l2) for contender in PENALIZED for l2 in strengths(records)]
    return rates_table(records, (BATCH_NORM, WHITENING, GUARDED)) + rates_table(records, with_it, error_rate)[1:]


def plot(records: list[Record]) -> Figure:
    """Test accuracy by epoch, and by λ."""
    from .. import drawing
    from .panels import curves

    figure, (by_epoch, by_strength) = drawing.panels(2)
    plain = {c.label: at_best(records, c) for c in PLAIN}
    curves(by_epoch, plain | {f"{c.label}, L2": chosen(records, c) for c in PENALIZED}, "test_accuracy")
    worked: list[float] = []  # accuracies that are not of failed runs, whose lines leave the panel
    for colour, runs in zip(drawing.COLOURS, plain.values(), strict=False):
        if runs:
            worked.append(statistics.fmean(accuracies(runs, fresh=False)))
            by_strength.axhline(worked[-1], color=colour, linestyle="--", linewidth=1)
    for k, contender in enumerate(PENALIZED, start=len(PLAIN)):
        groups = [with_l2(contender, l2).runs_in(records) for l2 in strengths(records)]
        points = [(strength(mine[0]), 1 - min(map(error_rate, mine))) for mine in groups if mine]
        worked += [accuracy for _, accuracy in points if accuracy > 0]
        style = drawing.style(k, f"{contender.label}, L2") | {"markersize": None}
        by_strength.plot(*zip(*points, strict=True), **style) if points else None
    by_epoch.set_ylabel("test accuracy")
    by_strength.set_xscale("log")
    if worked:
        by_strength.set_ylim(bottom=min(worked) - 0.02)
    by_strength.set(xlabel="λ (dashed: without; below: failed)", ylabel="test accuracy, last epoch, best stepsize")
    drawing.legend(by_epoch)
    drawing.legend(by_strength)
    return figure
