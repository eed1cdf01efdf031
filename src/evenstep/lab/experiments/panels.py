"""Panels of contenders for figures: training at the best stepsize, and the final loss at every stepsize."""

from collections.abc import Iterable, Sequence
from typing import Any

from ..drawing import COLOURS, MARKS, epoch_axis, plain_log
from ..records import Record
from ..summary import final_loss
from .tuning import Contender, at_best, guessing

Axes = Any  # matplotlib's


def curves(
    axes: Axes, records: Sequence[Record], contenders: Sequence[Contender], column: str = "train_loss", shift: int = 0
) -> None:
    """`column` against epochs at each contender's best stepsize: the first seed thick, the others thin."""
    for k, contender in enumerate(contenders, start=shift):
        for number, record in enumerate(at_best(records, contender)):
            rows = [row for row in record["metrics"] if row.get(column) is not None]
            label = f"{contender.label}, {record['config']['lr']:g}" if number == 0 else None
            style: dict[str, Any] = {"linewidth": 2.0} if number == 0 else {"linewidth": 0.7, "alpha": 0.6}
            axes.plot(
                [row["epoch"] for row in rows],
                [row[column] for row in rows],
                color=COLOURS[k % len(COLOURS)],
                marker=MARKS[k % len(MARKS)] if len(rows) == 1 else None,
                label=label,
                **style,
            )
    best = [r for c in contenders for r in at_best(records, c)]
    if column == "train_loss" and best:
        axes.set_ylim(top=min(axes.get_ylim()[1], 1.2 * guessing(best[0])))
    epoch_axis(axes)


def sensitivity(axes: Axes, records: Sequence[Record], contenders: Iterable[Contender], shift: int = 0) -> None:
    """The final training loss at every stepsize of the first seed, cut off at 1.2 times guessing."""
    top = 1.0
    for k, contender in enumerate(contenders, start=shift):
        mine = contender.mine(records)
        first = min((r["seed"] for r in mine), default=0)
        points = sorted((r["config"]["lr"], min(final_loss(r), 1.2 * guessing(r))) for r in mine if r["seed"] == first)
        top = max([top, *(1.2 * guessing(r) for r in mine)])
        style: dict[str, Any] = {"color": COLOURS[k % len(COLOURS)], "marker": MARKS[k % len(MARKS)], "markersize": 4}
        axes.plot(*zip(*points, strict=True), label=contender.label, linewidth=1.2, **style) if points else None
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_ylim(top=1.05 * top)
    plain_log(axes.yaxis)
    low, high = axes.get_xlim()
    if high < 100 * low:
        plain_log(axes.xaxis)
    axes.set_xlabel("stepsize")
    axes.set_title("final training loss by stepsize (top: failed)", loc="left", fontsize=10)
