"""Numbers and tables as Markdown."""

import math
from collections.abc import Sequence

from .scores import mean, standard_error

NOTHING = "–"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Rows as Markdown."""
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *rows])


def scale(higher: bool) -> tuple[float, int]:
    """Accuracies are shown in per cent with two digits, losses with four."""
    return (100.0, 2) if higher else (1.0, 4)


def spread(values: Sequence[float], higher: bool) -> str:
    """Mean ± standard error over seeds.

    >>> spread([0.5, 0.52], higher=True), spread([1.0], higher=False), spread([1.0, math.inf], higher=False)
    ('51.00 ± 1.00', '1.0000', 'diverged')
    """
    if not values:
        return NOTHING
    if not all(map(math.isfinite, values)) or (higher and not all(values)):
        return "diverged"
    factor, digits = scale(higher)
    error = standard_error(values)
    sure = f" ± {error * factor:.{digits}f}" if math.isfinite(error) else ""
    return f"{mean(values) * factor:.{digits}f}{sure}"


def difference(value: float, error: float, higher: bool) -> str:
    """A paired difference with its standard error."""
    factor, digits = scale(higher)
    if not math.isfinite(value):
        return NOTHING if math.isnan(value) else f"{value:+}"
    sure = f" ± {error * factor:.{digits}f}" if math.isfinite(error) else ""
    return f"{value * factor:+.{digits}f}{sure}"


def number(value: float, digits: int = 3) -> str:
    """A number with so many digits, or words for what is none.

    >>> number(12.3456), number(math.inf), number(math.nan), number(1234.5)
    ('12.3', '∞', '–', '1234')
    """
    if math.isnan(value):
        return NOTHING
    if math.isinf(value):
        return "∞"
    return f"{value:.{max(0, digits - 1 - math.floor(math.log10(abs(value))))}f}" if value else "0"
