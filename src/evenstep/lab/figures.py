"""Plain figures of a comparison, for papers: the same lines as the report's page, drawn by matplotlib."""

import math
import statistics
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import drawing
from .comparison import Comparison
from .labels import Style, series_label
from .records import Record
from .summary import Series, diverged, final_loss

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

HEADROOM = 1.15
LOWEST, HIGHEST = 1e-100, 1e100  # what a figure shows; matplotlib's arithmetic ends not far beyond


def curves(found: Comparison) -> "Figure":
    """Training loss of each epoch, each method at its best stepsize: the mean over seeds, and their range."""
    figure, axes = _figure(found.title)
    for s, style, summary in zip(found.series, found.styles, found.summaries, strict=True):
        epochs, means, lows, highs = _over_seeds(s.runs[summary.stepsize])
        axes.plot(epochs, means, color=style.light, marker=style.mark, markersize=4, label=_label(s, summary.stepsize))
        axes.fill_between(epochs, lows, highs, color=style.light, alpha=0.15, linewidth=0)
    drawing.epoch_axis(axes)
    shown = [s.runs[summary.stepsize] for s, summary in zip(found.series, found.summaries, strict=True)]
    axes.set_xlabel(axes.get_xlabel() + _left_out([v for runs in shown for run in runs for v in _losses(run)]))
    _finish(figure, axes, found, [v for s in found.series for run in s.all_runs for v in _losses(run)])
    return figure


def sensitivity(found: Comparison) -> "Figure":
    """Final training loss over the stepsize; a cross at the top is a run that diverged."""
    figure, axes = _figure(found.title)
    rates = [lr for s in found.series for lr in s.runs]
    drawn = list(filter(_drawable, rates)) or [1.0]
    axes.set_xscale("log")
    axes.set_xlim(min(drawn) / 1.3, max(drawn) * 1.3)  # before anything is drawn: one stepsize alone has no range
    for s, style in zip(found.series, found.styles, strict=True):
        _draw_stepsizes(axes, s, style, found.l0)
    losses = [final_loss(run) for run in found.runs if not diverged(run, found.l0)]
    axes.set_xlabel("stepsize (log scale); × diverged" + _left_out([*rates, *losses]))
    _finish(figure, axes, found, losses)
    return figure


def save(figure: "Figure", path: Path) -> Path:
    """Write an SVG; the same records give the same file. Letters that the font lacks become boxes, not warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return drawing.save(figure, path)


def _draw_stepsizes(axes: "Axes", series: Series, style: Style, l0: float | None) -> None:
    """The mean over seeds of runs that did not diverge, each of them, and crosses for the others."""
    grid = {lr: runs for lr, runs in series.runs.items() if _drawable(lr)}
    good = {
        lr: [float(v) for r in runs if not diverged(r, l0) and _drawable(v := final_loss(r))]
        for lr, runs in grid.items()
    }
    means = {lr: statistics.fmean(losses) for lr, losses in good.items() if losses}
    axes.plot(list(means), list(means.values()), color=style.light, marker=style.mark, label=_label(series))
    dots = [(lr, loss) for lr, losses in good.items() if len(losses) > 1 for loss in losses]
    axes.scatter([lr for lr, _ in dots], [loss for _, loss in dots], color=style.light, s=6, alpha=0.6)
    lost = [lr for lr, runs in grid.items() if any(diverged(r, l0) for r in runs)]
    above: dict[str, Any] = {"transform": axes.get_xaxis_transform(), "clip_on": False, "in_layout": False}
    axes.plot(lost, [1.0] * len(lost), color=style.light, marker="x", linestyle="none", **above)


def _figure(title: str) -> tuple["Figure", "Axes"]:
    figure, (axes,) = drawing.panels(1, width=6.4, height=4.6)
    axes.set_title(_plain(title), loc="left", fontsize=10)
    axes.set_yscale("log")
    return figure, axes


def _finish(figure: "Figure", axes: "Axes", found: Comparison, losses: Sequence[float]) -> None:
    """Range, ticks and legend; what lies far above the first loss is of no interest."""
    positive = list(filter(_drawable, losses)) or [1.0]
    top = min(max(positive), found.l0 or math.inf)
    axes.set_ylim(0.85 * min(positive), HEADROOM * max(top, min(positive)))
    axes.set_ylabel("training loss (log scale)")
    drawing.plain_log(axes.yaxis)
    figure.legend(loc="outside lower center", ncols=3, fontsize=8, frameon=False)


def _over_seeds(runs: Sequence[Record]) -> tuple[list[int], list[float], list[float], list[float]]:
    """Epochs, and the mean, lowest and highest loss over the seeds that have one there, as far as a log scale has."""
    columns = {}
    for k in range(max(len(run["metrics"]) for run in runs)):
        values = [run["metrics"][k]["train_loss"] for run in runs if k < len(run["metrics"])]
        if drawn := [float(value) for value in values if value is not None and _drawable(value)]:
            columns[k + 1] = drawn
    lists = list(columns.values())
    return list(columns), [statistics.fmean(v) for v in lists], [min(v) for v in lists], [max(v) for v in lists]


def _drawable(value: float) -> bool:
    """Whether a value has a place on a log scale."""
    return LOWEST <= value <= HIGHEST


def _left_out(values: Sequence[float]) -> str:
    """How many of the values a figure cannot show, in words for the label of its axis."""
    count = len(values) - sum(map(_drawable, values))
    return f"; not drawn: {count} outside {LOWEST:g} to {HIGHEST:g}" if count else ""


def _losses(run: Record) -> list[float]:
    return [row["train_loss"] for row in run["metrics"] if row["train_loss"] is not None]


def _label(series: Series, stepsize: float | None = None) -> str:
    text = series_label(series)
    return _plain(text if stepsize is None else f"{text}: {stepsize:g}")


def _plain(text: str) -> str:
    """Text that matplotlib takes for no formula, and that no legend hides for its first letter."""
    return text.replace("$", r"\$").lstrip("_")
