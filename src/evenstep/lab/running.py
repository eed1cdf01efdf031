"""Trials behind a progress bar: what a file of records has already is not run again, and Ctrl-C keeps what is done."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from rich.console import Console

from . import identity, progress, reading, records, sweep
from .data import Arrays, Text
from .experiments.common import failures_expected
from .records import Record
from .trial import Trial, config
from .usage import UsageError

Runner = Callable[..., list[Record]]


def run_trials(
    trials: Sequence[Trial],
    arrays: Arrays | Text,
    path: Path,
    device: torch.device,
    console: Console,
    runner: Runner | None = None,
) -> bool:
    """Run the trials that `path` lacks, a line and a record each; whether the user stopped them (Ctrl-C).

    `runner` is called as `study.run` is but for the study; without it `sweep.sweep` runs them.
    """

    def warn(message: str) -> None:
        console.print(message, soft_wrap=True, highlight=False, markup=False)

    check(path, warn)
    have = finished(trials, arrays, path)
    if have:
        warn(f"{len(have)} of {len(trials)} runs are in {path} already.")
    with progress.bar(console, sum(t.epochs for t in trials), sum(r["config"]["epochs"] for r in have)) as bar:
        runs = progress.Runs(bar, len(trials), len(have))
        try:
            go: Runner = sweep.sweep
            if runner is not None:
                go = partial(runner, on_other=runs.finished, on_wait=runs.waits)
            with failures_expected():
                go(trials, arrays, path, device=device, on_record=runs.finished, on_epoch=runs.epoch, warn=warn)
        except KeyboardInterrupt:
            return True
    return False


def finished(trials: Sequence[Trial], arrays: Arrays | Text, path: Path) -> list[Record]:
    """The records that the file has of the trials, in their order; a line that is no record is a UsageError."""
    known = identity.by_key(_read(path).runs, arrays, path)
    keys = [sweep.key(config(trial, arrays)) for trial in trials]
    return [known[key] for key in keys if key in known]


def check(path: Path, warn: Callable[[str], None]) -> None:
    """Refuse a file that no record can be added to; `warn` gets one line if its last line had to be mended."""
    if said := records.mend(path):
        warn(said)
    _read(path)
    if path.exists():
        with path.open("r+b"):
            pass


def _read(path: Path) -> reading.Reading:
    found = reading.Reading()
    if path.exists():
        reading.read_file(path, str(path), found)
    if found.faults:
        raise UsageError(f"{found.faults[0]}; remove that line, or choose another --out")
    return found


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
