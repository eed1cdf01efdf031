"""How figures look. The only file here that imports matplotlib; experiments import it inside `plot`."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from evenstep.lab.experiments.tuning import Contender, at_best, guessing
from evenstep.lab.records import Record
from evenstep.lab.summary import final_loss

COLOURS = ("#C0440A", "#0069B4", "#A32A78", "#00755A", "#866300", "#06798C", "#1A1D21", "#7F7F7F")  # Okabe-Ito, Tol
MARKS = "os^DvPh*"


def panels(count: int, width: float = 4.6, height: float = 4.0) -> tuple[Figure, list[Axes]]:
    """A figure with so many panels side by side."""
    figure = Figure(figsize=(width * count, height), layout="constrained")
    axes = figure.subplots(1, count, squeeze=False)[0]
    for panel in axes:
        panel.grid(alpha=0.25, linewidth=0.6)
        panel.spines[["top", "right"]].set_visible(False)
    return figure, list(axes)


def save(figure: Figure, path: Path) -> None:
    """Write an SVG; the same figure gives the same file."""
    with mpl.rc_context({"svg.hashsalt": "evenstep", "svg.fonttype": "none"}):
        figure.savefig(path, metadata={"Date": None})


def plain_log(axis: Any) -> None:
    """Ticks 1, 2, 5 times powers of ten, written as plain numbers."""
    axis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=12))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


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
    shown = [r for c in contenders for r in at_best(records, c)]
    if column == "train_loss" and shown:
        axes.set_ylim(top=min(axes.get_ylim()[1], 1.2 * guessing(shown[0])))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("epoch")


def sensitivity(axes: Axes, records: Sequence[Record], contenders: Iterable[Contender], shift: int = 0) -> None:
    """The final training loss at every stepsize of the first seed; above guessing it is drawn at the top."""
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
    plain_log(axes.xaxis) if high < 100 * low else axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("stepsize")
    axes.set_title("final training loss by stepsize (top: failed)", loc="left", fontsize=10)


def legend(axes: Axes) -> None:
    """A small legend without a box, if there is something in it."""
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize=8)
