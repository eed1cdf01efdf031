"""The style of all figures, and the one file that imports matplotlib; importers of it do so where they draw."""

import warnings
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from . import labels

COLOURS, MARKS = labels.COLOURS, labels.MARKERS


def panels(count: int, width: float = 4.6, height: float = 4.0, share: bool = False) -> tuple[Figure, list[Axes]]:
    """A figure with `count` panels side by side; `share` gives them the same axes."""
    figure = Figure(figsize=(width * count, height), layout="constrained")
    axes = figure.subplots(1, count, sharex=share, sharey=share, squeeze=False)[0]
    for panel in axes:
        panel.grid(alpha=0.25, linewidth=0.6)
        panel.spines[["top", "right"]].set_visible(False)
    return figure, list(axes)


def style(number: int, label: str) -> dict[str, Any]:
    """Colour, mark and label of the line with that number."""
    marker, colour = MARKS[number % len(MARKS)], COLOURS[number % len(COLOURS)]
    return {"color": colour, "marker": marker, "markersize": 4, "label": label}


def plain_log(axis: Axis) -> None:
    """Ticks at 1, 2, 5 times powers of ten, written as plain numbers."""
    axis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=12))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def epoch_axis(axes: Axes) -> None:
    """Whole epochs to the right, also if there is only one."""
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.set_xlabel("epoch")


def legend(axes: Axes) -> None:
    """A small legend without a box, unless it would be empty."""
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize=8)


def save(figure: Figure, path: Path, outlines: bool = True) -> Path:
    """Write the format that the path ends with; equal figures give equal SVGs, with letters as outlines or as text."""
    fonts = mpl.rc_context({"svg.hashsalt": "evenstep", "svg.fonttype": "path" if outlines else "none"})
    with fonts, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing", UserWarning)  # the font lacks a letter of some name
        figure.savefig(path, dpi=160, metadata={"Date": None})
    return path
