"""The tables of a report, for the page, the terminal and, as Markdown, for documents."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from . import labels
from .comparison import Comparison
from .summary import TRIALS, Summary

MISSING = "–"


@dataclass(frozen=True)
class Table:
    """A table with a row per series, in the order of the comparison."""

    id: str
    title: str
    text: str
    columns: list[str]
    rows: list[list[str]]
    note: str = ""


def all_tables(found: Comparison) -> list[Table]:
    """The tables of a comparison."""
    return [tuned(found), tuning(found), timing(found)]


def tuned(found: Comparison) -> Table:
    """The table "best when tuned"."""
    loss = labels.LOSSES[found.judged_by]
    columns = ["best stepsize", loss, "test accuracy", "dead units", "s per epoch", "seeds"]
    rows = [
        [
            f"{s.stepsize:g}" + (" *" if s.at_edge else ""),
            _loss(s),
            _shares(s.accuracies),
            _shares(s.dead_shares),
            _number(s.seconds_per_epoch),
            str(len(s.losses)),
        ]
        for s in found.summaries
    ]
    if found.judged_by == "test_loss":  # a task of any kind: not all have what images have
        empty = {k for k in range(len(columns)) if all(row[k] == MISSING for row in rows)}
        columns, *rows = [[cell for k, cell in enumerate(row) if k not in empty] for row in (columns, *rows)]
    return Table(
        "best",
        "Best when tuned",
        f"Each method at the stepsize with the lowest {loss} of the last epoch, mean over seeds.",
        columns,
        rows,
        "* the smallest or largest stepsize tried: a better one may lie beyond."
        if any(s.at_edge for s in found.summaries)
        else "",
    )


def tuning(found: Comparison) -> Table:
    """The table "easy to tune"."""
    rows = [
        [_width(s), f"{s.divergence:.1%}", f"{s.divergence_at_best:.1%}", *map(_number, s.expected_best.values())]
        for s in found.summaries
    ]
    return Table(
        "tuning",
        "Easy to tune",
        "W5: decades of contiguous stepsizes whose worst seed ends within 5 % of the method's best loss. "
        "Diverged: no finite loss, or a higher one than before training. Best of k: the expected lowest loss of k runs "
        "drawn at random from those of the method.",
        ["W5", "diverged", "diverged at the best", *(f"best of {k}" for k in TRIALS)],
        rows,
        "≥: the grid ended before the loss rose.",
    )


def timing(found: Comparison) -> Table:
    """The table of the time to a target; only with columns that the records count."""
    digits = {"epochs": 0, "steps": 0, "seconds": 1}
    columns = [name for name in digits if any(getattr(s.reach, name) is not None for s in found.summaries)]
    return Table(
        "target",
        "Time to a target",
        f"When the {labels.LOSSES[found.judged_by]} of an epoch first was at or below the target, at the best "
        "stepsize, median over seeds; ∞ if it never was.",
        columns,
        [[_reached(getattr(s.reach, name), digits[name]) for name in columns] for s in found.summaries],
    )


def best(found: Comparison) -> str:
    """The table "best when tuned" for the terminal."""
    table = tuned(found)
    rows = _texts(found, table)
    first, *widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join([name.ljust(first), *map(str.rjust, texts, widths)]) for name, *texts in rows]
    return "\n".join([f"{table.title}: {found.title}", *lines, *filter(None, [table.note])])


def markdown(found: Comparison) -> str:
    """All tables of a comparison as Markdown."""
    parts = [f"## {found.title}"]
    for table in all_tables(found):
        parts.append(f"{table.title}:\n\n" + labels.markdown_table(_texts(found, table)))
        parts += [table.note] if table.note else []
    return "\n\n".join(parts)


def _texts(found: Comparison, table: Table) -> list[list[str]]:
    """The head and the rows of a table, with the methods."""
    names = [labels.series_label(series) for series in found.series]
    rows = [[name, *row] for name, row in zip(names, table.rows, strict=True)]
    return [["method", *table.columns], *rows]


def _loss(summary: Summary) -> str:
    """Mean and standard deviation of the final loss."""
    if math.isfinite(summary.loss):
        return _with_spread(summary.losses, labels.number(summary.loss))
    ended = [loss for loss in summary.losses if math.isfinite(loss)]
    return f"{labels.number(statistics.fmean(ended))} where it did not diverge" if ended else "diverged"


def _with_spread(values: Sequence[float], mean: str) -> str:
    """A mean with the standard deviation over seeds, in as many digits."""
    return mean if len(values) < 2 else f"{mean} ± {statistics.stdev(values):.{len(mean.partition('.')[2])}f}"


def _shares(values: Sequence[float]) -> str:
    """Mean and standard deviation of shares, in percent."""
    if not values:
        return MISSING
    return _with_spread([100 * value for value in values], f"{100 * statistics.fmean(values):.1f}") + "%"


def _number(value: float | None) -> str:
    return MISSING if value is None else labels.number(value)


def _width(summary: Summary) -> str:
    """W5; none without a finite best loss."""
    if not math.isfinite(summary.loss):
        return MISSING
    width = summary.width
    return ("≥ " if width.below or width.above else "") + f"{width.decades:.2f}"


def _reached(value: float | None, digits: int) -> str:
    if value is None:
        return MISSING
    return "∞" if math.isinf(value) else f"{value:,.{digits}f}"
