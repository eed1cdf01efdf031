"""The demo's figure, from records."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import drawing
from .labels import PREFERRED, model_label
from .methods import METHODS
from .records import Record
from .summary import best_runs, by_method, initial_loss

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PANELS = (("sg", "fan-in"), ("batch-norm", "whitening"))
COLOURS = {name: drawing.COLOURS[PREFERRED[name]] for pair in PANELS for name in pair}
DASHES = {"sg": (0, (4, 1.5)), "fan-in": "solid", "batch-norm": (0, (4, 1.5)), "whitening": "solid"}


def plot(records: list[Record]) -> "Figure":
    """The paper's figure 2: training loss against epochs, SG and SG ÷ √(n·S) left, batch norm and whitening right.

    A thick line is the method's best stepsize, if it trained at one, thin lines are the others. Both panels have the
    same axes.
    """
    figure, panels = drawing.panels(2, width=5.25, height=4.6, share=True)
    top, bottom = _loss_range(records)
    for axes, methods in zip(panels, PANELS, strict=True):
        _prepare(axes, top, bottom)
        _draw(axes, [r for r in records if r["config"]["method"] in methods])
        axes.set_title(" against ".join(METHODS[name].label for name in methods), loc="left", fontsize=11)
    panels[0].set_ylabel("mean training loss of the epoch (log scale)")
    figure.suptitle(_caption(records), x=0.01, ha="left", fontsize=9, color="0.3")
    return figure


def save(figure: "Figure", folder: Path, name: str) -> list[Path]:
    """Write the figure as PNG and as SVG; the same records give the same SVG."""
    return [drawing.save(figure, folder / f"{name}.{ending}") for ending in ("png", "svg")]


def _loss_range(records: list[Record]) -> tuple[float, float]:
    """Largest and smallest loss to show; what lies above the loss of guessing is of no interest."""
    losses = [row["train_loss"] for record in records for row in record["metrics"] if row["train_loss"]]
    highest = min(max(losses, default=1.0), initial_loss(records) or math.log(10))
    return 1.15 * highest, 0.85 * min([*losses, highest])


def _prepare(axes: "Axes", top: float, bottom: float) -> None:
    """Scales and ticks."""
    axes.set_yscale("log")
    axes.set_ylim(bottom, top)
    drawing.plain_log(axes.yaxis)
    drawing.epoch_axis(axes)


def _draw(axes: "Axes", records: list[Record]) -> None:
    """A line per run, with its stepsize written at its right end."""
    best = {name: found.record for name, found in best_runs(records).items()}
    ends: list[tuple[float, float, str, str, bool]] = []
    for name, runs in by_method(records).items():
        for record in runs:
            is_best = record is best.get(name)
            epochs, losses = _curve(record)
            style: dict[str, Any] = {"linewidth": 2.4} if is_best else {"linewidth": 0.9, "alpha": 0.55}
            axes.plot(epochs, losses, color=COLOURS[name], linestyle=DASHES[name], zorder=2 + is_best, **style)
            if losses and not record["metrics"][-1]["diverged"]:
                stepsize = f"{record['config']['lr']:g}"
                text = f"{METHODS[name].label}, {stepsize}" if is_best else stepsize
                ends.append((losses[-1], epochs[-1], text, COLOURS[name], is_best))
    _label_ends(axes, ends)


def _curve(record: Record) -> tuple[list[int], list[float]]:
    """Epochs and losses of a run, as far as the loss was finite."""
    rows = [row for row in record["metrics"] if row["train_loss"]]
    return [row["epoch"] for row in rows], [row["train_loss"] for row in rows]


def _label_ends(axes: "Axes", ends: list[tuple[float, float, str, str, bool]]) -> None:
    """Write each label beside the end of its line, moved up or down as little as keeps labels apart."""
    low, high = (math.log(limit) for limit in axes.get_ylim())
    ends = sorted(ends)
    wanted = [(min(max(math.log(loss), low), high) - low) / (high - low) for loss, *_ in ends]
    for height, (_, epoch, text, colour, is_best) in zip(_spread(wanted, gap=0.04), ends, strict=True):
        axes.annotate(
            text,
            xy=(epoch, math.exp(low + height * (high - low))),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            color=colour,
            fontsize=9.5 if is_best else 7.5,
            fontweight="bold" if is_best else "normal",
            annotation_clip=False,
        )


def _spread(wanted: list[float], gap: float) -> list[float]:
    """Ascending positions at least `gap` apart, near the ascending ones wanted: crowded ones share their mean.

    >>> [round(x, 2) for x in _spread([0.1, 0.5, 0.5], gap=0.1)]
    [0.1, 0.45, 0.55]
    """
    clusters: list[list[float]] = []  # each [sum of what its members want for the first of them, number]
    for position in wanted:
        clusters.append([position, 1])
        while len(clusters) > 1 and _start(clusters[-2]) + clusters[-2][1] * gap > _start(clusters[-1]):
            total, count = clusters.pop()
            clusters[-1][0] += total - count * clusters[-1][1] * gap
            clusters[-1][1] += count
    return [_start(cluster) + i * gap for cluster in clusters for i in range(int(cluster[1]))]


def _start(cluster: list[float]) -> float:
    """Position of a cluster's first member: the mean of what its members want."""
    return cluster[0] / cluster[1]


def _caption(records: list[Record]) -> str:
    """What was trained, on what; and how to read the lines."""
    if not records:
        return "no finished run"
    config = records[0]["config"]
    return (
        f"{model_label(config['model'])} on {config['data']}, batch {config['batch_size']}, "
        f"seed {config['seed']}; thick: best stepsize, thin: the others (numbers: stepsizes)"
    )
