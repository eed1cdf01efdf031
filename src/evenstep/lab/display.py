"""Progress on the terminal: a bar where rich is installed, plain lines elsewhere."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from .records import Record
from .train import Epoch
from .trial import Trial


class PlainBar:
    """Progress as lines of text, for terminals without rich; with `quiet` nothing is printed."""

    def __init__(self, quiet: bool = False) -> None:
        self.write: Callable[[str], None] = (lambda line: None) if quiet else lambda line: print(line, flush=True)
        self.last = ""

    def say(self, what: str) -> None:
        """Print what is under way, once."""
        if what != self.last:
            self.last = what
            self.write(what)

    def advance(self, line: str | None = None, by: int = 1) -> None:
        """Print a finished piece of work."""
        if line is not None:
            self.write(line)

    def at(self, done: int, total: int) -> None:
        """Nothing to move."""


@contextmanager
def bar(total: int, done: int = 0, *, quiet: bool = False) -> Iterator[Any]:
    """A progress bar of `total` pieces of work, `done` of them finished; it has the methods of `PlainBar`."""
    try:
        from rich.console import Console

        from . import progress
    except ModuleNotFoundError:
        yield PlainBar(quiet)
        return
    with progress.bar(Console(quiet=quiet), total, done) as moving:
        yield moving


class PlainRuns:
    """Progress of a sweep as lines of text: a line for each finished run."""

    def __init__(self, moving: PlainBar, total: int, done: int) -> None:
        self.bar, self.total, self.done = moving, total, done

    def waits(self, what: str) -> None:
        """Print what is waited for."""
        if what:
            self.bar.say(f"Waiting: {what.split(' last heard', maxsplit=1)[0]}.")

    def epoch(self, trial: Trial, row: Epoch) -> None:
        """Epochs are too many for lines."""

    def finished(self, record: Record) -> None:
        """Print a finished run."""
        config, loss = record["config"], record["metrics"][-1]["train_loss"]
        self.done += 1
        end = "diverged" if loss is None else f"training loss {loss:.3f}"
        head = f"{self.done} of {self.total} runs: {config['method']}, stepsize {config['lr']:g}"
        self.bar.write(f"{head}, seed {config['seed']}, {end}")


def runs(moving: Any, total: int, done: int) -> Any:
    """Progress of `total` runs on a bar of epochs, `done` of them finished."""
    if isinstance(moving, PlainBar):
        return PlainRuns(moving, total, done)
    from . import progress

    return progress.Runs(moving, total, done)


def epoch_line(row: Epoch) -> str:
    """One epoch in a line."""
    if row["diverged"]:
        return f"epoch {row['epoch']:>3}  diverged"
    return f"epoch {row['epoch']:>3}  training loss {row['train_loss']:.3f}   test accuracy {row['test_accuracy']:.1%}"
