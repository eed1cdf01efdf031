"""Progress on the terminal: a bar with the time left where rich is installed, plain lines elsewhere."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from .identity import DIGEST
from .labels import method_label
from .records import Record, dumps
from .train import Epoch
from .trial import Trial

HISTORY = 3600.0  # seconds of progress from which the time left is estimated: one run may take minutes


class PlainBar:
    """Progress as lines of text; with `quiet` nothing is printed."""

    def __init__(self, quiet: bool = False) -> None:
        self.quiet, self.last = quiet, ""

    def say(self, what: str) -> None:
        """Print the current work, once."""
        if what != self.last:
            self.last = what
            self.advance(what)

    def show(self, what: str) -> None:
        """Show counts that change too often for lines."""

    def advance(self, line: str | None = None, by: int = 1) -> None:
        """Count `by` more pieces as finished, and print `line`."""
        if line is not None and not self.quiet:
            print(line, flush=True)

    def at(self, done: int, total: int) -> None:
        """Set the number of finished pieces and of all."""


class RichBar(PlainBar):
    """Progress as a bar of rich's, below the printed lines."""

    def __init__(self, progress: Any, total: int, done: int) -> None:
        super().__init__()
        self._progress, self._task = progress, progress.add_task("", total=total, completed=done)

    def say(self, what: str) -> None:
        """Show the current work beside the bar."""
        self._progress.update(self._task, description=what)

    show = say

    def advance(self, line: str | None = None, by: int = 1) -> None:
        """Count `by` more pieces as finished, and print `line` above the bar."""
        self._progress.update(self._task, advance=by)
        if line is not None:
            self._progress.console.print(line, soft_wrap=True, markup=False, highlight=False)

    def at(self, done: int, total: int) -> None:
        """Set the number of finished pieces and of all."""
        self._progress.update(self._task, completed=done, total=total)


@contextmanager
def bar(total: int, done: int = 0, *, quiet: bool = False) -> Iterator[PlainBar]:
    """A progress bar of `total` pieces of work, `done` of them finished."""
    try:
        from rich import progress as rich
        from rich.console import Console
    except ModuleNotFoundError:
        yield PlainBar(quiet)
        return
    columns = (
        rich.SpinnerColumn(),
        rich.TextColumn("{task.description}", markup=False),
        rich.BarColumn(),
        rich.MofNCompleteColumn(),
        rich.TimeElapsedColumn(),
        rich.TextColumn("left"),
        rich.TimeRemainingColumn(),
    )
    with rich.Progress(*columns, console=Console(quiet=quiet), speed_estimate_period=HISTORY) as progress:
        yield RichBar(progress, total, done)


class Runs:
    """Moves a bar of epochs as trials proceed, and prints each finished run."""

    def __init__(self, bar: PlainBar, total: int, done: int) -> None:
        self._bar, self._total, self._done = bar, total, done
        self._left: dict[str, int] = {}  # epochs to come, by configuration
        self._waiting = False
        self._describe()

    def _describe(self, waiting: str = ", ") -> None:
        self._bar.show(f"{self._done} of {self._total} runs{waiting}epochs")

    def waits(self, what: str) -> None:
        """Show what is waited for, nothing if the wait is over; the beginning of a wait is printed."""
        if what and not self._waiting:
            self._bar.advance(f"Waiting: {what}.", by=0)
        self._waiting = bool(what)
        self._describe(f"; {what}; " if what else ", ")

    def epoch(self, trial: Trial, row: Epoch) -> None:
        """Count one finished epoch of a trial."""
        self._left[_name(asdict(trial))] = trial.epochs - row["epoch"]
        self._bar.advance()

    def finished(self, record: Record) -> None:
        """Count a finished run, with the epochs that it never began because it diverged."""
        self._done += 1
        left = self._left.pop(_name(record["config"]), record["config"]["epochs"])
        self._bar.advance(run_line(record), left)
        self._describe()


def _name(config: dict[str, Any]) -> str:
    """A trial's configuration, without its data, as text."""
    return dumps({key: value for key, value in config.items() if key not in ("data", DIGEST)})


def epoch_line(row: Epoch) -> str:
    """One epoch in a line."""
    if row["diverged"]:
        return f"epoch {row['epoch']:>3}  diverged"
    return f"epoch {row['epoch']:>3}  training loss {row['train_loss']:.3f}   test accuracy {row['test_accuracy']:.1%}"


def run_line(record: Record) -> str:
    """One finished run in a line."""
    config, last = record["config"], record["metrics"][-1]
    label = f"{method_label(config['method']):<16} stepsize {config['lr']:<8g} seed {record['seed']:<3}"
    if last["diverged"]:
        return f"{label} diverged in epoch {last['epoch']}"
    accuracy = f"   test accuracy {last['test_accuracy']:.1%}" if last.get("test_accuracy") is not None else ""
    return f"{label} training loss {last['train_loss']:.3f}{accuracy}"
