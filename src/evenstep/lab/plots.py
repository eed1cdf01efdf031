"""Figures made from records: those of a comparison, and the demo's figure 2."""

import math
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from . import drawing
from .comparison import Comparison
from .labels import LOSSES, Style, method_label, series_label
from .reading import Record
from .summary import Series, diverged, final_loss

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LOWEST, HIGHEST = 1e-100, 1e100  # matplotlib's arithmetic ends not far beyond
PANELS = (("sg", "fan-in"), ("batch-norm", "whitening"))  # of figure 2


def loss_curves(found: Comparison) -> "Figure":
    """Training loss by epoch, each method at its best stepsize: the mean over seeds, and their range."""
    figure, axes = _curves(found, "train_loss", LOWEST)
    best = [run for s, m in zip(found.series, found.summaries, strict=True) for run in s.runs[m.stepsize]]
    axes.set_xlabel("epoch" + _left_out([value for run in best for value in _losses(run)]))
    axes.set_ylabel("training loss (log scale)")
    _loss_axis(axes, found, [value for run in found.runs for value in _losses(run)])
    return figure


def accuracy_curves(found: Comparison) -> "Figure":
    """Test accuracy by epoch, drawn as the losses are."""
    figure, axes = _curves(found, "test_accuracy", -HIGHEST)
    axes.set_ylabel("test accuracy")
    return figure


def held_out_curves(found: Comparison) -> "Figure":
    """Held-out loss by epoch, drawn as the training losses are."""
    figure, axes = _curves(found, "test_loss", -HIGHEST)
    axes.set_ylabel("held-out loss")
    return figure


def sensitivity(found: Comparison) -> "Figure":
    """Final loss by stepsize; a cross at the top is a run that diverged."""
    figure, axes = _panel(found)
    rates = [lr for s in found.series for lr in s.runs]
    drawn = list(filter(_drawable, rates)) or [1.0]
    axes.set_xscale("log")
    axes.set_xlim(min(drawn) / 1.3, max(drawn) * 1.3)  # before anything is drawn: a single stepsize has no range
    height = 1.0
    for s, style in zip(found.series, found.styles, strict=True):
        _draw_stepsizes(axes, s, style, found.l0, height)
        height -= 0.03 * any(diverged(run, found.l0) for run in s.all_runs)  # so that no cross hides another
    losses = [final_loss(run) for run in found.runs if not diverged(run, found.l0)]
    axes.set_xlabel("stepsize (log scale); × diverged" + _left_out([*rates, *losses]))
    axes.set_ylabel(f"{LOSSES[found.judged_by]}, last epoch (log scale)")
    _loss_axis(axes, found, losses)
    _legend(figure, axes)
    return figure


def _panel(found: Comparison) -> "tuple[Figure, Axes]":
    """A figure of one panel, with the title."""
    figure, (axes,) = drawing.panels(1, width=6.4)
    axes.set_title(_plain(found.title), loc="left", fontsize=10)
    return figure, axes


def _curves(found: Comparison, column: str, lowest: float) -> "tuple[Figure, Axes]":
    """A figure of a column by epoch: for each method the mean over seeds, and their range."""
    figure, axes = _panel(found)
    for s, style, summary in zip(found.series, found.styles, found.summaries, strict=True):
        points = _over_seeds(s.runs[summary.stepsize], column, lowest)
        lows, means, highs = ([f(values) for values in points.values()] for f in (min, statistics.fmean, max))
        label = _plain(f"{series_label(s)}: {summary.stepsize:g}")
        axes.plot(list(points), means, color=style.colour, marker=style.mark, markersize=4, label=label)
        axes.fill_between(list(points), lows, highs, color=style.colour, alpha=0.15, linewidth=0)
    drawing.epoch_axis(axes)
    _legend(figure, axes)
    return figure, axes


def _draw_stepsizes(axes: "Axes", one: Series, style: Style, l0: float | None, height: float) -> None:
    """The mean over the seeds that did not diverge, each of them, and crosses at `height` for the others."""
    grid = {lr: runs for lr, runs in one.runs.items() if _drawable(lr)}
    good = {lr: [v for r in runs if not diverged(r, l0) and _drawable(v := final_loss(r))] for lr, runs in grid.items()}
    means = {lr: statistics.fmean(losses) for lr, losses in good.items() if losses}
    axes.plot(list(means), list(means.values()), color=style.colour, marker=style.mark, label=_plain(series_label(one)))
    dots = [(lr, float(loss)) for lr, losses in good.items() if len(losses) > 1 for loss in losses]
    axes.scatter([lr for lr, _ in dots], [loss for _, loss in dots], color=style.colour, s=6, alpha=0.6)
    lost = [lr for lr, runs in grid.items() if any(diverged(r, l0) for r in runs)]
    above: dict[str, Any] = {"transform": axes.get_xaxis_transform(), "clip_on": False, "in_layout": False}
    axes.plot(lost, [height] * len(lost), color=style.colour, marker="x", linestyle="none", **above)


def _loss_axis(axes: "Axes", found: Comparison, losses: Sequence[float]) -> None:
    """A log scale for these losses, which ends a little above the loss before training."""
    positive = list(filter(_drawable, losses)) or [1.0]
    top = min(max(positive), found.l0 or math.inf)
    axes.set_yscale("log")
    axes.set_ylim(0.85 * min(positive), 1.15 * max(top, min(positive)))
    drawing.plain_log(axes.yaxis)


def _legend(figure: "Figure", axes: "Axes") -> None:
    """A legend below, in as many columns as fit: about 100 small letters, 8 of them for a column's line and gap."""
    texts = axes.get_legend_handles_labels()[1]
    columns = min(3, max(1, 100 // (max(map(len, texts), default=0) + 8)))
    figure.set_figheight(4.2 + 0.17 * math.ceil(len(texts) / columns))
    figure.legend(loc="outside lower center", ncols=columns, fontsize=8, frameon=False)


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
    """Text that matplotlib neither reads as a formula nor, for a leading underscore, leaves out of the legend.

    It is cut at 64 letters, as no panel has more room.
    """
    text = text if len(text) <= 64 else text[:63] + "…"
    return text.replace("$", r"\$").lstrip("_")


def figure2(records: list[Record]) -> "Figure":
    """The paper's figure 2, at the best stepsizes: SG and SG ÷ √(n·S), and batch norm and whitening."""
    from .experiments.panels import training
    from .experiments.tuning import Contender

    figure, panels = drawing.panels(2, width=5.25, height=4.6, share=True)
    for k, (axes, methods) in enumerate(zip(panels, PANELS, strict=True)):
        axes.set_yscale("log")
        drawing.plain_log(axes.yaxis)
        axes.autoscale(axis="y")  # the limits of the first panel would cut off the curves of the second
        training(axes, records, [Contender(method_label(name), name, ()) for name in methods], shift=2 * k)
        axes.set_title(" against ".join(map(method_label, methods)), loc="left", fontsize=11)
        drawing.legend(axes)
    panels[0].set_ylabel("mean training loss of the epoch (log scale)")
    return figure
