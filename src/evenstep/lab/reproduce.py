"""The paper's experiments, one after the other, within a budget of time.

`python -m evenstep.lab.reproduce …` is `evenstep reproduce …`. Records go to OUT/<experiment>.jsonl as runs end; run it
again to go on where it stopped.
"""

import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from . import usage
from .experiments import EXPERIMENTS, Options, Progress, Session
from .experiments.session import kept, silent
from .records import Record


class OutOfTime(Exception):
    """The budget does not allow another piece of work."""


class Clock:
    """Progress that stops an experiment before a piece of work that is likely to end after the budget.

    A piece is expected to take as long as the longest one so far; the first one always starts.
    """

    def __init__(self, budget: float | None, show: Progress) -> None:
        self.budget, self.show = budget, show
        self.start = self.last = time.perf_counter()
        self.longest, self.begun = 0.0, False

    def __call__(self, what: str, done: int, total: int) -> None:
        """Begin a piece of work; with a `total` of 0 an experiment, which is none."""
        now = time.perf_counter()
        self.longest, self.last = max(self.longest, now - self.last), now
        if self.begun and self.budget is not None and now - self.start + self.longest > self.budget:
            raise OutOfTime
        self.begun |= total > 0
        self.show(what, done, total)


def reproduce(
    names: Sequence[str],
    options: Options,
    out: Path,
    device: torch.device | str = "cpu",
    budget: float | None = None,
    show: Progress = silent,
    warn: Callable[[str], None] = warnings.warn,
) -> list[str]:
    """Run the experiments into `out`; the names of those that the budget left unfinished.

    A damaged or foreign file of one of them is refused before anything runs; `warn` receives a line if a file was
    repaired.
    """
    clock = Clock(budget, show)
    usage.writable_folder(out)
    for name in names:
        kept(name, out, warn)
    for number, name in enumerate(names):
        try:
            clock(name, 0, 0)
            EXPERIMENTS[name].run(Session(options, out / f"{name}.jsonl", device, clock))
        except OutOfTime:
            return list(names[number:])
    return []


def everything(out: Path, warn: Callable[[str], None] = warnings.warn) -> dict[str, list[Record]]:
    """The records of every experiment that has some in `out`; `warn` is told of files that cannot be used."""
    found: dict[str, list[Record]] = {}
    for name in EXPERIMENTS:
        try:
            found[name] = kept(name, out, warn)
        except (usage.UsageError, OSError) as error:
            warn(f"{name} is left out: {usage.of_file(error) if isinstance(error, OSError) else error}")
    return {name: records for name, records in found.items() if records}


def fast_cuda() -> None:
    """Let a GPU multiply in TF32 and look for its fastest convolutions."""
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.benchmark = True


if __name__ == "__main__":
    from .cli import main

    main(["reproduce", *sys.argv[1:]])
