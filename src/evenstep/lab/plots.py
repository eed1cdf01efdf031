"""Figures made from records: the plain ones of a comparison, for papers, and the demo's figure 2."""

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import drawing
from .comparison import Comparison
from .labels import PREFERRED, Style, method_label, model_label, series_label
from .reading import Record
from .summary import Series, best_stepsize, diverged, final_loss, initial_loss, series

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LOWEST, HIGHEST = 1e-100, 1e100  # matplotlib's arithmetic ends not far beyond
PANELS = (("sg", "fan-in"), ("batch-norm", "whitening"))  # of figure 2


def curves(found: Comparison) -> "Figure":
    """Training loss by epoch, each method at its best stepsize: the mean over seeds, and their range."""
    figure, axes = _figure(found.title)
    best = [s.runs[summary.stepsize] for s, summary in zip(found.series, found.summaries, strict=True)]
    for s, style, summary, runs in zip(found.series, found.styles, found.summaries, best, strict=True):
        points = _over_seeds(runs)
        means = [statistics.fmean(losses) for losses in points.values()]
        label = _plain(f"{series_label(s)}: {summary.stepsize:g}")
        axes.plot(list(points), means, color=style.light, marker=style.mark, markersize=4, label=label)
        lows, highs = ([f(losses) for losses in points.values()] for f in (min, max))
        axes.fill_between(list(points), lows, highs, color=style.light, alpha=0.15, linewidth=0)
    drawing.epoch_axis(axes)
    axes.set_xlabel("epoch" + _left_out([loss for runs in best for run in runs for loss in _losses(run)]))
    _finish(figure, axes, found, [loss for run in found.runs for loss in _losses(run)])
    return figure


def sensitivity(found: Comparison) -> "Figure":
    """Final training loss by stepsize; a cross at the top is a run that diverged."""
    figure, axes = _figure(found.title)
    rates = [lr for s in found.series for lr in s.runs]
    drawn = list(filter(_drawable, rates)) or [1.0]
    axes.set_xscale("log")
    axes.set_xlim(min(drawn) / 1.3, max(drawn) * 1.3)  # before anything is drawn: a single stepsize has no range
    for s, style in zip(found.series, found.styles, strict=True):
        _draw_stepsizes(axes, s, style, found.l0)
    losses = [final_loss(run) for run in found.runs if not diverged(run, found.l0)]
    axes.set_xlabel("stepsize (log scale); × diverged" + _left_out([*rates, *losses]))
    _finish(figure, axes, found, losses)
    return figure


def _draw_stepsizes(axes: "Axes", one: Series, style: Style, l0: float | None) -> None:
    """The mean over the seeds that did not diverge, each of them, and crosses for the others."""
    grid = {lr: runs for lr, runs in one.runs.items() if _drawable(lr)}
    good = {lr: [v for r in runs if not diverged(r, l0) and _drawable(v := final_loss(r))] for lr, runs in grid.items()}
    means = {lr: statistics.fmean(losses) for lr, losses in good.items() if losses}
    axes.plot(list(means), list(means.values()), color=style.light, marker=style.mark, label=_plain(series_label(one)))
    dots = [(lr, float(loss)) for lr, losses in good.items() if len(losses) > 1 for loss in losses]
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
    """Range, ticks and legend; the range ends a little above the loss before training."""
    positive = list(filter(_drawable, losses)) or [1.0]
    top = min(max(positive), found.l0 or math.inf)
    axes.set_ylim(0.85 * min(positive), 1.15 * max(top, min(positive)))
    axes.set_ylabel("training loss (log scale)")
    drawing.plain_log(axes.yaxis)
    figure.legend(loc="outside lower center", ncols=3, fontsize=8, frameon=False)


def _over_seeds(runs: Sequence[Record]) -> dict[int, list[float]]:
    """For each epoch the losses of all seeds that a log scale can show."""
    length = max(len(run["metrics"]) for run in runs)
    rows = {k: [run["metrics"][k - 1] for run in runs if len(run["metrics"]) >= k] for k in range(1, length + 1)}
    found = {k: [float(row["train_loss"]) for row in same if _drawable(row["train_loss"])] for k, same in rows.items()}
    return {k: losses for k, losses in found.items() if losses}


def _drawable(value: float | None) -> bool:
    """Whether a value has a place on a log scale."""
    return value is not None and LOWEST <= value <= HIGHEST


def _left_out(values: Sequence[float]) -> str:
    """How many values the figure cannot show, in words for the label of its axis."""
    count = len(values) - sum(map(_drawable, values))
    return f"; not drawn: {count} outside {LOWEST:g} to {HIGHEST:g}" if count else ""


def _losses(run: Record) -> list[float]:
    return [row["train_loss"] for row in run["metrics"] if row["train_loss"] is not None]


def _plain(text: str) -> str:
    """Text that matplotlib neither reads as a formula nor, for a leading underscore, leaves out of the legend."""
    return text.replace("$", r"\$").lstrip("_")


def plot(records: list[Record]) -> "Figure":
    """The paper's figure 2: training loss by epoch, SG and SG ÷ √(n·S) left, batch norm and whitening right.

    A thick line is a method's best stepsize, if it trained at one, thin lines are the others. Both panels have the
    same axes.
    """
    figure, panels = drawing.panels(2, width=5.25, height=4.6, share=True)
    losses, l0 = [loss for record in records for loss in _losses(record) if loss], initial_loss(records)
    highest = min(max(losses, default=1.0), l0 or math.log(10))
    for axes, methods in zip(panels, PANELS, strict=True):
        axes.set_yscale("log")
        axes.set_ylim(0.85 * min([*losses, highest]), 1.15 * highest)
        drawing.plain_log(axes.yaxis)
        drawing.epoch_axis(axes)
        _draw_panel(axes, [s for s in series(records) if s.method in methods], l0)
        axes.set_title(" against ".join(map(method_label, methods)), loc="left", fontsize=11)
    panels[0].set_ylabel("mean training loss of the epoch (log scale)")
    figure.suptitle(_caption(records), x=0.01, ha="left", fontsize=9, color="0.3")
    return figure


def save(figure: "Figure", folder: Path, name: str) -> list[Path]:
    """Write the figure as PNG and as SVG; equal records give equal SVGs."""
    return [drawing.save(figure, folder / f"{name}.{ending}") for ending in ("png", "svg")]


def _draw_panel(axes: "Axes", found: list[Series], l0: float | None) -> None:
    """A line per run; the legend names each method's best stepsize."""
    for s in found:
        best = best_stepsize(s.runs, l0)
        dashes = "solid" if s.method in ("fan-in", "whitening") else (0, (4, 1.5))
        for run in s.all_runs:
            thick = run["config"]["lr"] == best and not diverged(run, l0)
            style: dict[str, Any] = {"linewidth": 2.4} if thick else {"linewidth": 0.9, "alpha": 0.55}
            style |= {"color": drawing.COLOURS[PREFERRED[s.method]], "linestyle": dashes, "zorder": 2 + thick}
            rows = [row for row in run["metrics"] if row["train_loss"]]
            label = f"{method_label(s.method)}, {best:g}" if thick else None
            axes.plot([row["epoch"] for row in rows], [row["train_loss"] for row in rows], label=label, **style)
    drawing.legend(axes)


def _caption(records: list[Record]) -> str:
    """The setting, and how to read the lines."""
    if not records:
        return "no finished run"
    config = records[0]["config"]
    return (
        f"{model_label(config['model'])} on {config['data']}, batch {config['batch_size']}, "
        f"seed {config['seed']}; thick: each method at its best stepsize, thin: the others"
    )
