"""`evenstep train`: one training, with a checkpoint after each epoch."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from .. import usage
from ..methods import METHODS
from . import shared

if TYPE_CHECKING:
    from rich.console import Console

    from ..resumable import Training


@dataclass(frozen=True)
class Options(shared.Setting):
    """Train one network by one method; a checkpoint is kept after each epoch, and the same command goes on from it."""

    method: Annotated[str, tyro.conf.arg(help=f"Method to train by: {', '.join(METHODS)}.")] = "evenstep"
    lr: Annotated[str, tyro.conf.arg(metavar="NUMBER")] = "0.05"
    """Stepsize."""
    seed: int = 0
    """Seed of the first weights and of the order of the data."""
    out: Path = Path("runs/train")
    """Folder for the checkpoint, the record and the report."""


def main(options: Options) -> int:
    """Train from the last checkpoint on, and report; the exit code. Under torchrun the first process alone speaks."""
    from rich.console import Console

    from .. import distributed, records, resumable, running, showing

    trial = shared.trial(options, options.method, usage.stepsize(options.lr, "--lr"), options.seed)
    device = usage.usable_device(options.device)
    arrays = shared.load(options)
    trial = shared.fitted(trial, arrays)
    shared.try_out(trial, arrays, device)
    out = usage.writable_folder(options.out)
    path = out / "records.jsonl"
    said: list[str] = []
    running.check(path, said.append)
    have = running.finished([trial], arrays, path)
    with running.one_thread(), distributed.joined(device) as mine:
        first = distributed.rank() == 0
        console = Console(quiet=not first)
        for line in said:
            console.print(line, soft_wrap=True, highlight=False, markup=False)
        training = resumable.Training(trial, arrays, mine)
        if stopped := train(training, out / "checkpoint.pt", console):
            console.print(f"Stopped: {stopped} are kept; the same command goes on from there.", highlight=False)
            return 130
        if not first:
            return 0
        if not have:
            records.append(path, training.record(), once=True)
    return showing.conclude(path, console, stopped=False)


def train(training: "Training", checkpoint: Path, console: "Console") -> str:
    """Train from the checkpoint to the end behind a progress bar; what is kept, if the user stopped it (Ctrl-C)."""
    from .. import progress, resumable

    trial = training.trial
    if resumable.go_on(training, checkpoint):
        console.print(f"Going on after epoch {len(training.rows)}, from {checkpoint}.", soft_wrap=True)
    with progress.bar(console, trial.epochs, len(training.rows)) as bar:
        bar.say(f"{trial.method}, stepsize {trial.lr:g}")
        try:
            resumable.run(training, checkpoint, lambda row: bar.advance(progress.epoch(row)))
        except KeyboardInterrupt:
            return f"{len(training.rows)} of {trial.epochs} epochs"
    return ""
