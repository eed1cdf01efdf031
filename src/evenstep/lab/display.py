"""Progress on the terminal: lines that stay, and below them the finished share of the work with the time left."""

import shutil
import sys
import time
from dataclasses import asdict, fields
from datetime import timedelta
from typing import Any

from .labels import method_label, number
from .reading import Record
from .records import dumps
from .summary import judged_by
from .train import Epoch
from .trial import Trial


class Bar:
    """A count of finished pieces of work, as a context; where the output is no terminal it is shown at the end."""

    def __init__(self, total: int, done: int = 0) -> None:
        self.what = ""
        self._begin(total, done)

    def _begin(self, total: int, done: int) -> None:
        """Estimate the time left from what is finished from now on."""
        self.total, self.done, self.first, self.start = total, done, done, time.monotonic()

    def __enter__(self) -> "Bar":
        return self

    def __exit__(self, *_: object) -> None:
        self.print(self.status())

    def say(self, what: str, *, keep: bool = True) -> None:
        """Show the current work; where the output is no terminal, as a line of its own if `keep`."""
        if keep and what != self.what and not sys.stdout.isatty():
            self.print(what)
        self.what = what
        self._draw()

    def advance(self, line: str | None = None, by: int = 1) -> None:
        """Count `by` more pieces as finished, and print `line`."""
        self.done += by
        if line is not None:
            self.print(line)
        self._draw()

    def at(self, done: int, total: int) -> None:
        """Set the number of finished pieces and of all."""
        if total != self.total:
            self._begin(total, done)
        self.done = done
        self._draw()

    def status(self) -> str:
        """The current work, the count, the time taken and the time left."""
        taken, count, missing = time.monotonic() - self.start, self.done - self.first, self.total - self.done
        left = f", {timedelta(seconds=round(taken / count * missing))} left" if count > 0 and missing > 0 else ""
        return f"{self.what}  {self.done}/{self.total}  {timedelta(seconds=round(taken))}{left}".lstrip()

    def print(self, line: str) -> None:
        """Print a line above the status."""
        print(("\r\x1b[K" if sys.stdout.isatty() else "") + line, flush=True)

    def _draw(self) -> None:
        if sys.stdout.isatty():
            status = self.status()[: shutil.get_terminal_size().columns - 1]
            print(f"\r\x1b[K{status}", end="", flush=True)


class Runs:
    """Moves a bar of epochs as trials proceed, and prints each finished run."""

    def __init__(self, bar: Bar, total: int, done: int) -> None:
        self._bar, self._total, self._done = bar, total, done
        self._left: dict[str, int] = {}  # epochs to come, by configuration
        self._describe()

    def _describe(self) -> None:
        self._bar.say(f"{self._done} of {self._total} runs, epochs", keep=False)

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
    return dumps({field.name: config.get(field.name) for field in fields(Trial)})


def epoch_line(row: Epoch) -> str:
    """One epoch in a line."""
    if row["diverged"]:
        return f"epoch {row['epoch']:>3}  diverged"
    return f"epoch {row['epoch']:>3}  training loss {row['train_loss']:.3f}{_held_out(row)}"


def run_line(record: Record) -> str:
    """One finished run in a line."""
    config, last = record["config"], record["metrics"][-1]
    label = f"{method_label(config['method']):<16} stepsize {config['lr']:<8g} seed {record['seed']:<3}"
    if last["diverged"]:
        return f"{label} diverged in epoch {last['epoch']}"
    return f"{label} training loss {last['train_loss']:.3f}{_held_out(last, judged_by(config))}"


def _held_out(row: Epoch, loss: str = "train_loss") -> str:
    """The accuracy on held-out examples; where there is none, or runs are judged by it, the loss."""
    if row.get("test_accuracy") is not None and loss == "train_loss":
        return f"   test accuracy {row['test_accuracy']:.1%}"
    return f"   held-out loss {number(row['test_loss'])}" if row.get("test_loss") is not None else ""
