"""Panels of contenders for figures: training at the best stepsize, and the final loss at every stepsize."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..drawing import COLOURS, MARKS, epoch_axis, plain_log, style
from ..reading import Record
from ..summary import final_loss
from .tuning import Contender, at_best, guessing

Axes = Any  # matplotlib's


def curves(
    axes: Axes, runs: Mapping[str, Sequence[Record]], column: str, shift: int = 0, faint: float | None = None
) -> None:
    """`column` against epochs: the first run of each label thick, the others thin."""
    for k, (label, mine) in enumerate(runs.items(), start=shift):
        for number, record in enumerate(mine):
            rows = [row for row in record["metrics"] if row.get(column) is not None]
            axes.plot(
                [row["epoch"] for row in rows],
                [row[column] for row in rows],
                color=COLOURS[k % len(COLOURS)],
                marker=MARKS[k % len(MARKS)] if len(rows) == 1 else None,
                linewidth=0.7 if number else 2.0,
                alpha=faint if number else None,
                label=None if number else label,
            )
    epoch_axis(axes)


def training(axes: Axes, records: Sequence[Record], contenders: Sequence[Contender], shift: int = 0) -> None:
    """The training loss at each contender's best stepsize, cut off at 1.2 times guessing."""
    best = {contender.label: at_best(records, contender) for contender in contenders}
    labelled = {f"{k}, {mine[0]['config']['lr']:g}" if mine else k: mine for k, mine in best.items()}
    curves(axes, labelled, "train_loss", shift, faint=0.6)
    if found := [r for mine in best.values() for r in mine]:
        axes.set_ylim(top=min(axes.get_ylim()[1], 1.2 * guessing(found[0])))


def sensitivity(axes: Axes, records: Sequence[Record], contenders: Iterable[Contender], shift: int = 0) -> None:
    """The final training loss at every stepsize of the first seed, cut off at 1.2 times guessing."""
    top = 1.0
    for k, contender in enumerate(contenders, start=shift):
        mine = contender.runs_in(records)
        first = min((r["seed"] for r in mine), default=0)
        points = sorted((r["config"]["lr"], min(final_loss(r), 1.2 * guessing(r))) for r in mine if r["seed"] == first)
        top = max([top, *(1.2 * guessing(r) for r in mine)])
        axes.plot(*zip(*points, strict=True), linewidth=1.2, **style(k, contender.label)) if points else None
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_ylim(top=1.05 * top)
    plain_log(axes.yaxis)
    low, high = axes.get_xlim()
    if high < 100 * low:
        plain_log(axes.xaxis)
    axes.set_xlabel("stepsize")
    axes.set_title("final training loss by stepsize (top: failed)", loc="left", fontsize=10)
