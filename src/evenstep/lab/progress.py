"""Progress of many runs: a bar with the time left, and a line for each finished run."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.progress import TimeRemainingColumn as TimeLeft
from rich.text import Text

from .identity import DIGEST
from .labels import method_label
from .records import Record, dumps
from .train import Epoch
from .trial import Trial

HISTORY = 3600.0  # seconds of progress from which the time left is estimated: one run may take minutes


class Bar:
    """A bar that counts finished pieces of work."""

    def __init__(self, progress: Progress, total: int, done: int) -> None:
        self._progress = progress
        self._task = progress.add_task("", total=total, completed=done)

    def say(self, what: str) -> None:
        """Set the description of the current work."""
        self._progress.update(self._task, description=what)

    def advance(self, line: str | None = None, by: int = 1) -> None:
        """Count `by` more pieces as finished, and print `line` above the bar."""
        self._progress.update(self._task, advance=by)
        if line is not None:
            self._progress.console.print(Text(line), soft_wrap=True)

    def at(self, done: int, total: int) -> None:
        """Set the number of finished pieces and of all."""
        self._progress.update(self._task, completed=done, total=total)


class Runs:
    """Moves a bar of epochs as trials proceed, and prints each finished run."""

    def __init__(self, bar: Bar, total: int, done: int) -> None:
        self._bar, self._total, self._done = bar, total, done
        self._left: dict[str, int] = {}  # epochs to come, by configuration
        self._waiting = False
        self._describe()

    def _describe(self, waiting: str = ", ") -> None:
        self._bar.say(f"{self._done} of {self._total} runs{waiting}epochs")

    def waits(self, what: str) -> None:
        """Show what is waited for, nothing if the wait is over; the beginning of a wait is printed above the bar."""
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
        self._bar.advance(finished(record), left)
        self._describe()


def _name(config: dict[str, Any]) -> str:
    """A trial's configuration, without its data, as text."""
    return dumps({key: value for key, value in config.items() if key not in ("data", DIGEST)})


@contextmanager
def bar(console: Console, total: int, done: int = 0) -> Iterator[Bar]:
    """A bar of `total` pieces of work, `done` of which are finished."""
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeLeft(),
    )
    with Progress(*columns, console=console, speed_estimate_period=HISTORY) as progress:
        yield Bar(progress, total, done)


def epoch(row: Epoch) -> str:
    """One epoch in a line."""
    if row["diverged"]:
        return f"epoch {row['epoch']:>3}  diverged"
    return f"epoch {row['epoch']:>3}  training loss {row['train_loss']:.3f}   test accuracy {row['test_accuracy']:.1%}"


def finished(record: Record) -> str:
    """One finished run in a line."""
    config, last = record["config"], record["metrics"][-1]
    label = f"{method_label(config['method']):<16} stepsize {config['lr']:<8g} seed {record['seed']:<3}"
    if last["diverged"]:
        return f"{label} diverged in epoch {last['epoch']}"
    accuracy = f"   test accuracy {last['test_accuracy']:.1%}" if last.get("test_accuracy") is not None else ""
    return f"{label} training loss {last['train_loss']:.3f}{accuracy}"
