"""Figures made from records: those of a comparison, and the demo's figure 2."""

import math
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from . import drawing
from .comparison import Comparison
from .labels import Style, method_label, series_label
from .reading import Record
from .summary import Series, diverged, final_loss

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LOWEST, HIGHEST = 1e-100, 1e100  # matplotlib's arithmetic ends not far beyond
PANELS = (("sg", "fan-in"), ("batch-norm", "whitening"))  # of figure 2


def curves(found: Comparison) -> "Figure":
    """Loss and test accuracy by epoch, each method at its best stepsize: the mean over seeds, and their range."""
    figure, (loss, accuracy) = drawing.panels(2, width=5.6, height=4.6)
    for s, style, summary in zip(found.series, found.styles, found.summaries, strict=True):
        runs, label = s.runs[summary.stepsize], _plain(f"{series_label(s)}: {summary.stepsize:g}")
        _draw_curve(loss, _over_seeds(runs, "train_loss", LOWEST), style, label)
        _draw_curve(accuracy, _over_seeds(runs, "test_accuracy", -HIGHEST), style, None)
    for axes, word in ((loss, "training loss (log scale)"), (accuracy, "test accuracy")):
        drawing.epoch_axis(axes)
        axes.set_ylabel(word)
    best = [run for s, m in zip(found.series, found.summaries, strict=True) for run in s.runs[m.stepsize]]
    loss.set_xlabel("epoch" + _left_out([value for run in best for value in _losses(run)]))
    _finish(figure, loss, found, [value for run in found.runs for value in _losses(run)])
    return figure


def sensitivity(found: Comparison) -> "Figure":
    """Final training loss by stepsize; a cross at the top is a run that diverged."""
    figure, (axes,) = drawing.panels(1, width=6.4, height=4.6)
    rates = [lr for s in found.series for lr in s.runs]
    drawn = list(filter(_drawable, rates)) or [1.0]
    axes.set_xscale("log")
    axes.set_xlim(min(drawn) / 1.3, max(drawn) * 1.3)  # before anything is drawn: a single stepsize has no range
    for s, style in zip(found.series, found.styles, strict=True):
        _draw_stepsizes(axes, s, style, found.l0)
    losses = [final_loss(run) for run in found.runs if not diverged(run, found.l0)]
    axes.set_xlabel("stepsize (log scale); × diverged" + _left_out([*rates, *losses]))
    axes.set_ylabel("training loss, last epoch (log scale)")
    _finish(figure, axes, found, losses)
    return figure


def _draw_curve(axes: "Axes", points: dict[int, list[float]], style: Style, label: str | None) -> None:
    """The mean over seeds at each epoch, and their range."""
    lows, means, highs = ([f(values) for values in points.values()] for f in (min, statistics.fmean, max))
    axes.plot(list(points), means, color=style.colour, marker=style.mark, markersize=4, label=label)
    axes.fill_between(list(points), lows, highs, color=style.colour, alpha=0.15, linewidth=0)


def _draw_stepsizes(axes: "Axes", one: Series, style: Style, l0: float | None) -> None:
    """The mean over the seeds that did not diverge, each of them, and crosses for the others."""
    grid = {lr: runs for lr, runs in one.runs.items() if _drawable(lr)}
    good = {lr: [v for r in runs if not diverged(r, l0) and _drawable(v := final_loss(r))] for lr, runs in grid.items()}
    means = {lr: statistics.fmean(losses) for lr, losses in good.items() if losses}
    axes.plot(list(means), list(means.values()), color=style.colour, marker=style.mark, label=_plain(series_label(one)))
    dots = [(lr, float(loss)) for lr, losses in good.items() if len(losses) > 1 for loss in losses]
    axes.scatter([lr for lr, _ in dots], [loss for _, loss in dots], color=style.colour, s=6, alpha=0.6)
    lost = [lr for lr, runs in grid.items() if any(diverged(r, l0) for r in runs)]
    above: dict[str, Any] = {"transform": axes.get_xaxis_transform(), "clip_on": False, "in_layout": False}
    axes.plot(lost, [1.0] * len(lost), color=style.colour, marker="x", linestyle="none", **above)


def _finish(figure: "Figure", axes: "Axes", found: Comparison, losses: Sequence[float]) -> None:
    """Title, range of the losses and legend; the range ends a little above the loss before training."""
    positive = list(filter(_drawable, losses)) or [1.0]
    top = min(max(positive), found.l0 or math.inf)
    axes.set_title(_plain(found.title), loc="left", fontsize=10)
    axes.set_yscale("log")
    axes.set_ylim(0.85 * min(positive), 1.15 * max(top, min(positive)))
    drawing.plain_log(axes.yaxis)
    figure.legend(loc="outside lower center", ncols=3, fontsize=8, frameon=False)


def _over_seeds(runs: Sequence[Record], column: str, lowest: float) -> dict[int, list[float]]:
    """For each epoch the values of all seeds that can be drawn."""
    length = max(len(run["metrics"]) for run in runs)
    rows = {k: [run["metrics"][k - 1] for run in runs if len(run["metrics"]) >= k] for k in range(1, length + 1)}
    found = {k: [float(row[column]) for row in same if _drawable(row.get(column), lowest)] for k, same in rows.items()}
    return {k: values for k, values in found.items() if values}


def _drawable(value: float | None, lowest: float = LOWEST) -> bool:
    """Whether a value has a place on an axis, by default one with a log scale."""
    return value is not None and lowest <= value <= HIGHEST


def _left_out(values: Sequence[float]) -> str:
    """How many values the figure cannot show, in words for the label of its axis."""
    count = len(values) - sum(map(_drawable, values))
    return f"; not drawn: {count} outside {LOWEST:g} to {HIGHEST:g}" if count else ""


def _losses(run: Record) -> list[float]:
    return [row["train_loss"] for row in run["metrics"] if row["train_loss"] is not None]


def _plain(text: str) -> str:
    """Text that matplotlib neither reads as a formula nor, for a leading underscore, leaves out of the legend."""
    return text.replace("$", r"\$").lstrip("_")


def figure2(records: list[Record]) -> "Figure":
    """The paper's figure 2, at the best stepsizes: SG and SG ÷ √(n·S), and batch norm and whitening."""
    from .experiments.panels import training
    from .experiments.tuning import Contender

    figure, panels = drawing.panels(2, width=5.25, height=4.6, share=True)
    for k, (axes, methods) in enumerate(zip(panels, PANELS, strict=True)):
        axes.set_yscale("log")
        drawing.plain_log(axes.yaxis)
        training(axes, records, [Contender(method_label(name), name, ()) for name in methods], shift=2 * k)
        axes.set_title(" against ".join(map(method_label, methods)), loc="left", fontsize=11)
        drawing.legend(axes)
    panels[0].set_ylabel("mean training loss of the epoch (log scale)")
    return figure
