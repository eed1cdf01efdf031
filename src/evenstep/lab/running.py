"""Trials behind a progress bar: finished ones are not run again, and Ctrl-C keeps the finished ones."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from . import display, reading, sweep, tables
from .comparison import comparisons
from .experiments.common import failures_expected
from .trial import Trial
from .user_task import Data, UserTask


def run_trials(
    trials: Sequence[Trial],
    data: Data,
    path: Path,
    device: torch.device,
    runner: Callable[..., object] | None = None,
) -> bool:
    """Run the trials that `path` lacks, a line and a record each; whether the user stopped them (Ctrl-C).

    `runner` is `study.run` with its study, or None for a sweep of this process alone.
    """
    have = sweep.recorded(trials, data, path, print)
    if have:
        print(f"{len(have)} of {len(trials)} runs are in {path} already.")
    with display.Bar(sum(t.epochs for t in trials), sum(r["config"]["epochs"] for r in have)) as bar:
        runs = display.Runs(bar, len(trials), len(have))
        try:
            with failures_expected():
                go = runner or sweep.sweep
                go(trials, data, path, device=device, on_record=runs.finished, on_epoch=runs.epoch, warn=bar.print)
        except KeyboardInterrupt:
            return True
    return False


def conclude(path: Path, stopped: bool, table: bool = True) -> int:
    """Print the best of each method (`table`) and write the report, also for the runs before a stop; the exit code."""
    found = reading.Reading()
    if path.exists():
        reading.read_file(path, path.name, found)
    if not found.runs:
        why = "Stopped before the first run was finished" if stopped else "No run is finished"
        print(f"{why}: nothing to report.")
        return 130 if stopped else 1
    if stopped:
        print("Stopped: this is from the runs that are finished; the same command goes on with the others.")
    for compared in comparisons(found.runs) if table else []:
        print(f"\n{tables.best(compared)}\n")
    print(f"Records: {path}")
    with optional(f"report of {path}"):
        from . import report

        print(f"Report: {report.write(path.parent)}")
    return 130 if stopped else 0


@contextmanager
def optional(what: str) -> Iterator[None]:
    """Skip `what`, with a line that says what to install, where a package for it is missing."""
    from .cli import missing

    try:
        yield
    except ModuleNotFoundError as error:
        print(f"No {what}: {missing(error)}")


@contextmanager
def one_thread(data: Data | None = None) -> Iterator[None]:
    """Let torch use one CPU thread, except for the networks of a user's file.

    On batches this small a second thread saves a third of the time at best; with another torch program on the same two
    cores the threads of both wait for each other, and an epoch took 40 times as long. The sums, and so the figures,
    then do not depend on the number of cores either.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(before if isinstance(data, UserTask) else 1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
