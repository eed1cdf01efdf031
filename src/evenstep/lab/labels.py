"""Names, numbers, colours and markers as figures, tables and reports show them."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from .methods import METHODS

if TYPE_CHECKING:
    from .summary import Series

LOSSES = {"train_loss": "training loss", "test_loss": "held-out loss"}
MODEL_NAMES = {
    "paper_cnn": "The paper's CNN",
    "deep_net": "The nine-layer net",
    "alexnet": "The AlexNet-like net",
    "transformer": "The character transformer",
}
COLOURS = (  # on white at least 4.5 : 1; after Okabe-Ito and Tol, distinct for the colour-blind
    "#C0440A",  # vermilion
    "#0069B4",  # blue
    "#A32A78",  # purple
    "#00755A",  # green
    "#866300",  # amber
    "#06798C",  # cyan
    "#8A2F22",  # rust
    "#1A1D21",  # ink
)
MARKERS = "os^DvPh*"  # matplotlib's letters
PREFERRED = {"sg": 0, "fan-in": 1, "batch-norm": 2, "whitening": 3, "adam": 4, "canonical": 5, "muon": 6}
PREFERRED |= {"unitstep": 7, "evenstep": 7}


class Style(NamedTuple):
    """How a series is drawn."""

    colour: str
    mark: str


def method_label(name: str) -> str:
    """A method's name for readers; unknown ones as they are."""
    return METHODS[name].label if name in METHODS else name


def series_label(series: "Series") -> str:
    """A method and its options."""
    return ", ".join(filter(None, [method_label(series.method), options_label(series.options)]))


def options_label(options: dict[str, Any]) -> str:
    """Options as a reader would list them.

    >>> options_label({"damping": 0.1, "fresh_max": None, "he": True})
    'damping 0.1, no fresh max, he'
    """
    return ", ".join(_option(key.replace("_", " "), value) for key, value in options.items())


def _option(name: str, value: Any) -> str:
    if value is True:
        return name
    return f"no {name}" if value is None or value is False else f"{name} {value}"


def augmentations(augment: Any) -> list[str]:
    """The augmentations that a record's `augment` stands for.

    >>> augmentations(True), augmentations("flip+cutout"), augmentations(False)
    (['crop', 'flip'], ['flip', 'cutout'], [])
    """
    return augment.split("+") if isinstance(augment, str) else ["crop", "flip"] if augment else []


def model_label(name: Any) -> str:
    """A network's name for readers."""
    return MODEL_NAMES.get(str(name), str(name))


def number(value: float) -> str:
    """Three decimals, or three digits for small numbers.

    >>> number(0.5), number(0.00123), number(math.inf)
    ('0.500', '0.00123', '∞')
    """
    if not math.isfinite(value):
        return "∞"
    return f"{value:.3f}" if abs(value) >= 0.1 or value == 0 else f"{value:.3g}"


def markdown_table(rows: Sequence[Sequence[str]]) -> str:
    r"""Rows of cells as a table in Markdown, the first row its head.

    >>> print(markdown_table([["", "ms"], ["a|b", "1"]]))
    | | ms |
    | --- | --- |
    | a\|b | 1 |
    """
    first, *rest = [[cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows]
    lines = [first, ["---"] * len(first), *rest]
    return "\n".join("|" + "".join(f" {cell} |" if cell else " |" for cell in cells) for cells in lines)


def styles(found: "Sequence[Series]") -> list[Style]:
    """A style for each series: known methods look the same everywhere unless two of a kind meet."""
    free, chosen = list(range(len(COLOURS))), dict[int, int]()
    for known_first in (True, False):
        for number, series in enumerate(found):
            wanted = None if series.options else PREFERRED.get(series.method)
            if number not in chosen and (wanted in free or not known_first):
                chosen[number] = wanted if wanted in free else free[0] if free else number % len(COLOURS)
                free = [slot for slot in free if slot != chosen[number]]
    slots = [chosen[number] for number in range(len(found))]
    marks = [(slot + slots[:k].count(slot)) % len(MARKERS) for k, slot in enumerate(slots)]
    return [Style(COLOURS[slot], MARKERS[mark]) for slot, mark in zip(slots, marks, strict=True)]
