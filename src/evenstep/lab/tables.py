"""The tables of a report: what is shown in each cell, and what the cell is sorted by."""

import math
import statistics
from dataclasses import dataclass

from .comparison import Comparison
from .summary import TRIALS, Summary


@dataclass(frozen=True)
class Cell:
    """A cell of a table: what is shown, and what it is sorted by (None goes last)."""

    text: str
    value: float | None = None


@dataclass(frozen=True)
class Table:
    """A table with a row per series, in the order of the comparison."""

    id: str
    title: str
    text: str
    columns: list[str]
    rows: list[list[Cell]]
    note: str = ""


def tuned(found: Comparison) -> Table:
    """The table of "best when tuned"."""
    guards = sorted({name for s in found.summaries for name in s.guards})
    return Table(
        id="best",
        title="Best when tuned",
        text="Each method at the stepsize with the lowest training loss of the last epoch, mean over seeds.",
        columns=["best stepsize", "training loss", "test accuracy", "dead units", "s per epoch", *_guard_names(guards)],
        rows=[
            [
                Cell(f"{s.stepsize:g}" + (" *" if s.at_edge else ""), s.stepsize),
                Cell(_loss(s), finite(s.loss)),
                _share(s.accuracy),
                _share(s.dead),
                Cell("–" if s.seconds_per_epoch is None else number(s.seconds_per_epoch), s.seconds_per_epoch),
                *(_share(s.guards.get(name)) for name in guards),
            ]
            for s in found.summaries
        ],
        note="* at the edge of the stepsizes tried: a better one may lie beyond."
        if any(s.at_edge for s in found.summaries)
        else "",
    )


def tuning(found: Comparison) -> Table:
    """The table of "easy to tune"."""
    return Table(
        id="tuning",
        title="Easy to tune",
        text="W5: decades of contiguous stepsizes whose worst seed ends within 5 % of the method's best loss. "
        "Diverged: no finite loss, or more than before training. Best of k: the expected lowest loss of k runs drawn "
        "at random from those of the method.",
        columns=["W5", "diverged", "diverged at the best", *(f"best of {k}" for k in TRIALS)],
        rows=[
            [
                _width(s),
                _share(s.divergence),
                _share(s.divergence_at_best),
                *(
                    Cell("–" if best is None else number(best), None if best is None else finite(best))
                    for best in s.expected_best.values()
                ),
            ]
            for s in found.summaries
        ],
        note="≥: the grid ended before the loss rose.",
    )


def _width(summary: Summary) -> Cell:
    """W5, where there is a best loss to be within 5 % of."""
    if not math.isfinite(summary.loss):
        return Cell("–")
    width = summary.width
    return Cell(("≥ " if width.below or width.above else "") + f"{width.decades:.2f}", width.decades)


def timing(found: Comparison) -> Table:
    """The table of the time to a target; steps only where rows count them."""
    columns = {"epochs": 0, "steps": 0, "seconds": 1}
    shown = {name: digits for name, digits in columns.items() if any(_has(s, name) for s in found.summaries)}
    return Table(
        id="target",
        title="Time to a target",
        text="When the training loss of an epoch first was at or below the target, at the best stepsize, median over "
        "seeds; ∞ if it never was.",
        columns=list(shown),
        rows=[[_reached(getattr(s.reach, name), digits) for name, digits in shown.items()] for s in found.summaries],
    )


def _loss(summary: Summary) -> str:
    """Mean and spread of the final loss."""
    if math.isfinite(summary.loss):
        mean, spread = number(summary.loss), summary.spread
        return mean if spread is None else f"{mean} ± {spread:.{len(mean.partition('.')[2])}f}"
    ended = [loss for loss in summary.losses if math.isfinite(loss)]
    return f"{number(statistics.fmean(ended))} where it did not diverge" if ended else "diverged"


def number(value: float) -> str:
    """Three decimals, or three digits where that says more.

    >>> number(0.5), number(0.00123), number(math.inf)
    ('0.500', '0.00123', '∞')
    """
    if not math.isfinite(value):
        return "∞"
    return f"{value:.3f}" if abs(value) >= 0.1 or value == 0 else f"{value:.3g}"


def _share(value: float | None) -> Cell:
    return Cell("–" if value is None else f"{value:.1%}", value)


def _reached(value: float | None, digits: int) -> Cell:
    if value is None:
        return Cell("–")
    return Cell("∞" if math.isinf(value) else f"{value:,.{digits}f}", finite(value))


def finite(value: float) -> float | None:
    """`value`, or None if it is not finite: JSON and sorting have no other word for it."""
    return value if math.isfinite(value) else None


def _has(summary: Summary, column: str) -> bool:
    return getattr(summary.reach, column) is not None


def _guard_names(names: list[str]) -> list[str]:
    return [name.replace("guarded_", "guarded ") for name in names]
