"""What the experiments share: how a claim is judged, and numbers in words."""

import statistics
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..reading import Record

Figure = Any  # matplotlib's, which is imported only to draw


class Verdict(NamedTuple):
    """Whether a claim held (None: these records cannot tell), and the numbers."""

    held: bool | None
    text: str

    @property
    def word(self) -> str:
        """Whether it held, for readers."""
        return {True: "held", False: "did not hold", None: "undecided"}[self.held]


class NotRun(Exception):
    """The records that a claim is judged by are missing."""


@dataclass(frozen=True)
class Claim:
    """A claim of the paper, where it is made, and the function that judges it."""

    section: str
    text: str
    verdict: Callable[[list[Record]], Verdict]

    def judge(self, records: list[Record]) -> Verdict:
        """Whether it held; undecided where its records are missing."""
        try:
            return self.verdict(records)
        except NotRun:
            return Verdict(None, "Not run.")


def claim(section: str, *lines: str) -> Callable[[Callable[[list[Record]], Verdict]], Claim]:
    """Turn a function that judges a claim into the claim."""
    return lambda verdict: Claim(section, " ".join(lines), verdict)


@contextmanager
def failures_expected() -> Iterator[None]:
    """Silence the optimizers' warning of a gradient that is not finite: too large stepsizes are tried on purpose."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*a gradient is not finite")
        yield


def below(lower: Sequence[float], upper: Sequence[float]) -> bool | None:
    """Whether every seed of one is below every seed of the other; None if they overlap or one is empty.

    >>> below([1.0, 2.0], [3.0]), below([3.0], [1.0, 2.0]), below([1.0, 3.0], [2.0])
    (True, False, None)
    """
    if not lower or not upper:
        return None
    return True if max(lower) < min(upper) else False if min(lower) > max(upper) else None


def spread(values: Sequence[float], digits: int = 3) -> str:
    """Mean and, of several, standard deviation.

    >>> spread([0.5]), spread([0.5, 0.7]), spread([])
    ('0.500', '0.600 ± 0.141', 'nothing')
    """
    if not values:
        return "nothing"
    mean = f"{statistics.fmean(values):.{digits}f}"
    return f"{mean} ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else mean
