"""Trials behind a progress bar: what a file of records has already is not run again, and Ctrl-C keeps what is done."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from evenstep.lab import progress, reading, sweep
from evenstep.lab.records import Record
from evenstep.lab.trial import Trial

Runner = Callable[..., list[Record]]


def run_trials(
    trials: Sequence[Trial],
    arrays: Any,
    path: Path,
    device: torch.device,
    console: Console,
    runner: Runner | None = None,
) -> bool:
    """Run the trials that `path` lacks, a line and a record each; whether the user stopped them (Ctrl-C).

    `runner` is called as `sweep.sweep` is, which it is if not given.
    """
    have = len(finished(trials, arrays, path))
    if have:
        console.print(f"{have} of {len(trials)} runs are in {path} already.", soft_wrap=True, highlight=False)
    with progress.bar(console, len(trials), have) as bar:
        bar.say("training")
        try:
            (runner or sweep.sweep)(
                trials, arrays, path, device=device, on_record=lambda r: bar.advance(progress.finished(r))
            )
        except KeyboardInterrupt:
            return True
    return False


def finished(trials: Sequence[Trial], arrays: Any, path: Path) -> list[Record]:
    """The records that the file has of the trials, in their order."""
    found = reading.Reading()
    if path.exists():
        reading.read_file(path, path.name, found)
    known = {sweep.key(run["config"]): run for run in found.runs}
    keys = [sweep.key(sweep.config(trial, arrays)) for trial in trials]
    return [known[key] for key in keys if key in known]


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch use one CPU thread for a while.

    On batches this small a second thread saves a third of the time at best. On two cores with another torch
    program running, the threads of both wait for each other, and an epoch took 40 times as long. The sums, and
    so the figure, also do not depend on the number of cores then.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
