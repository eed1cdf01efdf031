"""`evenstep train`: one training, with a checkpoint after each epoch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from .. import usage
from ..method_names import NAMES, default_lr, find
from ..train import Epoch, Training
from ..trial import Trial
from . import shared


@dataclass(frozen=True)
class Options(shared.Setting):
    """Train one network by one method; a checkpoint follows each epoch, and the same command continues from it."""

    method: Annotated[str, f"Class to train by: {NAMES}."] = "EvenStep"
    lr: Annotated[str | None, "Stepsize (default: that of the class).", "NUMBER"] = None
    seed: Annotated[int, "Seed of the first weights and of the order of the data."] = 0
    out: Annotated[Path | None, "Folder for checkpoint, record and report (default: runs/train, or runs/FILE)."] = None


def main(options: Options) -> int:
    """Train from the last checkpoint on, and report; the exit code."""
    from .. import records, running, sweep, trial

    lr = default_lr(find(options.method)) if options.lr is None else usage.stepsize(options.lr, "--lr")
    wanted = shared.trial(options, options.method, lr, options.seed)
    device = usage.usable_device(options.device)
    arrays = shared.load(options)
    wanted = shared.fitted(wanted, arrays)
    shared.try_out(wanted, arrays, device)
    out = usage.writable_folder(shared.folder(options, "train"))
    path = out / "records.jsonl"
    finished = sweep.recorded([wanted], arrays, path, print)
    with running.one_thread(arrays):
        training = trial.start(wanted, arrays, device)
        first = None if finished else trial.first_loss(training)
        if stopped := carry_out(training, wanted, out / "checkpoint.pt"):
            return 130
        if not finished:
            records.append(path, trial.recorded(wanted, training, first), once=True)
    return running.conclude(path, stopped)


def carry_out(training: Training, trial: Trial, path: Path) -> bool:
    """Train from the checkpoint to the end behind a progress bar; whether the user stopped it (Ctrl-C)."""
    from .. import checkpoint, display
    from ..labels import method_label
    from ..trial import config

    what = config(trial, training.data)
    if checkpoint.restore(training, what, path):
        print(f"Going on after epoch {len(training.rows)}, from {path}.")
    with display.Bar(trial.epochs, len(training.rows)) as bar:
        bar.say(f"{method_label(trial.method)}, lr {trial.lr:g}")

        def keep(row: Epoch) -> None:
            checkpoint.save(training, what, path)
            bar.advance(display.epoch_line(row))

        try:
            training.finish(keep)
        except KeyboardInterrupt:
            kept = f"{len(training.rows)} of {trial.epochs} epochs"
            print(f"Stopped: {kept} are kept; the same command goes on from there.")
            return True
    return False
