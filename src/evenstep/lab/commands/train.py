"""`evenstep train`: one training, with a checkpoint after each epoch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from evenstep.lab import data, usage
from evenstep.lab.commands import shared
from evenstep.lab.methods import METHODS


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
    """Train from the last checkpoint on, and report; the exit code."""
    from rich.console import Console

    from evenstep.lab import progress, records, resumable, running, showing

    trial = shared.trial(options, options.method, usage.stepsize(options.lr, "--lr"), options.seed)
    device = usage.usable_device(options.device)
    arrays = shared.load(options)
    if not isinstance(arrays, data.Arrays):
        raise usage.UsageError(f"--data {options.data} is a text; evenstep train takes images")
    shared.try_out(trial, arrays)
    out = usage.writable_folder(options.out)
    path, checkpoint, console = out / "records.jsonl", out / "checkpoint.pt", Console()
    training = resumable.Training(trial, arrays, device)
    with running.one_thread():
        if resumable.go_on(training, checkpoint):
            console.print(
                f"Going on after epoch {len(training.rows)}, from {checkpoint}.", soft_wrap=True, highlight=False
            )
        with progress.bar(console, trial.epochs, len(training.rows)) as bar:
            bar.say(f"{trial.method}, stepsize {trial.lr:g}")
            try:
                record = resumable.run(training, checkpoint, lambda row: bar.advance(progress.epoch(row)))
            except KeyboardInterrupt:
                kept = f"{len(training.rows)} of {trial.epochs} epochs are kept"
                console.print(f"Stopped: {kept}; the same command goes on from there.", highlight=False)
                return 130
    if not running.finished([trial], arrays, path):
        records.append(path, record)
    return showing.conclude(path, console, stopped=False)
