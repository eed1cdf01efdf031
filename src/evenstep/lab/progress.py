"""Progress of many runs: a bar with the time left, and a line for each run that is finished."""

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

REMEMBERED = 3600.0  # seconds of progress that the time left is estimated from: one run may take minutes


class Bar:
    """A bar that counts finished pieces of work."""

    def __init__(self, progress: Progress, total: int, done: int) -> None:
        self._progress = progress
        self._task = progress.add_task("", total=total, completed=done)

    def say(self, what: str) -> None:
        """What is under way."""
        self._progress.update(self._task, description=what)

    def advance(self, line: str | None = None, by: int = 1) -> None:
        """So many more are finished; `line` is kept above the bar."""
        self._progress.update(self._task, advance=by)
        if line is not None:
            self._progress.console.print(Text(line), soft_wrap=True)

    def at(self, done: int, total: int) -> None:
        """So many of so many are finished."""
        self._progress.update(self._task, completed=done, total=total)


class Runs:
    """Moves a bar of epochs as trials go on, and names each run that is finished."""

    def __init__(self, bar: Bar, total: int, done: int) -> None:
        self._bar, self._total, self._done = bar, total, done
        self._left: dict[str, int] = {}  # epochs to come, by configuration
        self._waits = False
        self._say()

    def _say(self, waiting: str = ", ") -> None:
        self._bar.say(f"{self._done} of {self._total} runs{waiting}epochs")

    def waits(self, what: str) -> None:
        """What is waited for, nothing if it is over; the first words of it are kept above the bar."""
        if what and not self._waits:
            self._bar.advance(f"Waiting: {what}.", by=0)
        self._waits = bool(what)
        self._say(f"; {what}; " if what else ", ")

    def epoch(self, trial: Trial, row: Epoch) -> None:
        """One epoch of a trial is finished."""
        self._left[_name(asdict(trial))] = trial.epochs - row["epoch"]
        self._bar.advance()

    def finished(self, record: Record) -> None:
        """A run is finished; epochs that it never began, as it diverged, are not left to do."""
        self._done += 1
        left = self._left.pop(_name(record["config"]), record["config"]["epochs"])
        self._bar.advance(finished(record), left)
        self._say()


def _name(config: dict[str, Any]) -> str:
    """A trial's configuration as text, whatever its data."""
    return dumps({key: value for key, value in config.items() if key not in ("data", DIGEST)})


@contextmanager
def bar(console: Console, total: int, done: int = 0) -> Iterator[Bar]:
    """A bar of `total` pieces of work, `done` of which were finished before."""
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeLeft(),
    )
    with Progress(*columns, console=console, speed_estimate_period=REMEMBERED) as progress:
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
