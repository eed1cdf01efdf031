"""One training that can be stopped at any time: its state is kept after each epoch, and it goes on bit for bit.

Under torchrun (`distributed.joined`) all processes train it together, and the first one keeps it.
"""

import copy
import json
import math
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from . import distributed, feed, records
from .data import Arrays, Text
from .evaluate import evaluate
from .identity import without_digest
from .methods import METHODS
from .models import MODELS
from .train import Epoch, linear_decay, mean_loss
from .trial import Trial, config
from .usage import UsageError, first_line

Checkpoint = dict[str, Any]
COLUMNS = {"epoch", "train_loss", "seconds", "steps", "diverged", "test_accuracy"}  # of a row


class Training:
    """A trial under way: its network, optimizer, order of the data, and the rows of its finished epochs."""

    def __init__(self, trial: Trial, arrays: Arrays | Text, device: torch.device | str = "cpu") -> None:
        method = METHODS[trial.method]
        self.trial, self.arrays, self.device = trial, arrays.to(device), torch.device(device)
        torch.manual_seed(trial.seed)
        model = MODELS[trial.model](arrays.channels, batch_norm=method.batch_norm, **trial.model_options)
        self.model: nn.Module = model.to(device).train()
        self.optimizer: Optimizer = method.optimizer(self.model, lr=trial.lr, **trial.options)
        self.network = distributed.wrapped(self.model, device)
        self.rates = [group["lr"] for group in self.optimizer.param_groups]
        self.order = torch.Generator().manual_seed(trial.seed)
        self.rows: list[Epoch] = []

    @property
    def config(self) -> dict[str, Any]:
        """What is trained, as records say it."""
        return config(self.trial, self.arrays)

    @property
    def done(self) -> bool:
        """Whether nothing is left to train."""
        return len(self.rows) >= self.trial.epochs or bool(self.rows and self.rows[-1]["diverged"])

    def epoch(self) -> Epoch:
        """Train one pass over the data and add its row: the same numbers as `train.train` gives."""
        trial, start = self.trial, time.perf_counter()
        steps, total, count = feed.steps_per_epoch(self.arrays, trial.batch_size), torch.zeros(()), 0
        data = feed.epoch(self.arrays, trial.batch_size, self.order, self.device, trial.augment)
        for step, (x, y) in enumerate(data, start=len(self.rows) * steps):
            if trial.decay_lr:
                for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
                    group["lr"] = rate * linear_decay(step / (trial.epochs * steps))
            self.optimizer.zero_grad()
            loss = mean_loss(self.network, x, y)
            loss.backward()
            self.optimizer.step()
            total = total.to(self.device) + distributed.mean(loss) * len(y)
            count += len(y)
        mean = total.item() / count
        row = {"epoch": len(self.rows) + 1, "train_loss": mean, "seconds": time.perf_counter() - start}
        row |= {"steps": steps, "diverged": not math.isfinite(mean), **evaluate(self.model, self.arrays)}
        self.rows.append(row)
        return row

    def record(self) -> records.Record:
        """The record of what was trained."""
        made = records.make(self.config, self.trial.seed, self.rows, self.device)
        made["environment"]["processes"] = distributed.size()
        return made

    def checkpoint(self) -> Checkpoint:
        """All that the next epoch depends on: tensors, numbers and texts alone."""
        return {
            "config": records.dumps(self.config),
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "order": self.order.get_state(),
            "random": torch.get_rng_state(),
            "rows": self.rows,
        }

    def restore(self, saved: Checkpoint) -> None:
        """Go on from a checkpoint of the same configuration; if it does not fit, an exception, and all is as before."""
        before = copy.deepcopy(self.checkpoint())
        try:
            self._restore(saved)
        except Exception:
            self._restore(before)
            raise

    def _restore(self, saved: Checkpoint) -> None:
        names = [set(group) for group in self.optimizer.param_groups]
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.order.set_state(saved["order"])
        torch.set_rng_state(saved["random"])
        self.rows = saved["rows"]
        if any(missing := wanted - set(g) for wanted, g in zip(names, self.optimizer.param_groups, strict=True)):
            raise ValueError(f"the optimizer's {min(missing)} is missing")
        if type(self.optimizer).__module__.startswith("torch."):  # which does not look; ours do
            for p, state in self.optimizer.state.items():
                for name, value in state.items():
                    if isinstance(value, Tensor) and value.dim() and value.shape != p.shape:
                        raise ValueError(f"the optimizer's {name} has the shape {list(value.shape)}")
        if not isinstance(self.rows, list) or len(self.rows) > self.trial.epochs:
            raise ValueError("its rows are not those of the epochs")
        for row in self.rows:
            if missing := COLUMNS - set(row):
                raise ValueError(f"{min(missing)} is missing in a row")


def go_on(training: Training, path: Path) -> bool:
    """Restore the training from the checkpoint `path`; False if there is none."""
    if not path.exists():
        return False
    saved = load(path, training)
    try:
        training.restore(saved)
    except Exception as error:  # of any kind: what is inside may be anything
        raise unfit(path, error) from error
    return True


def unfit(path: Path, error: Exception) -> UsageError:
    """What is said of a checkpoint that has something else inside."""
    reason = f"{error} is missing" if isinstance(error, KeyError) else first_line(error)
    return UsageError(f"{path} is not a checkpoint of this version ({reason}); remove it, or choose another --out")


def run(training: Training, path: Path, on_epoch: Callable[[Epoch], None]) -> records.Record:
    """Train to the end, and write the checkpoint `path` after each epoch; the record."""
    while not training.done:
        row = training.epoch()
        if distributed.rank() == 0:
            save(path, training.checkpoint())
        on_epoch(row)
    return training.record()


def load(path: Path, training: Training) -> Checkpoint:
    """The checkpoint in `path`, if it is one of this configuration; no code in it is run."""
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
        there = saved["config"]
    except Exception as error:  # torch names many kinds, for files that are damaged or something else
        raise UsageError(
            f"{path} is not a checkpoint ({first_line(error)}); remove it, or choose another --out"
        ) from error
    here = training.config
    if there in (records.dumps(here), records.dumps(without_digest(here))):  # the second: an older one
        return saved
    try:
        other = difference(there, here)
    except (TypeError, ValueError, AttributeError, RecursionError) as error:
        raise unfit(path, error) from error
    raise UsageError(f"{path} is of another configuration ({other}); choose another --out, or remove it")


def difference(saved: str, config: dict[str, Any]) -> str:
    """What two configurations differ in, in a few words."""
    there, here = json.loads(saved), json.loads(records.dumps(config))
    names = [name for name in {**there, **here} if there.get(name) != here.get(name)]
    return ", ".join(f"{name}: {there.get(name)} there, {here.get(name)} here" for name in names)


def save(path: Path, checkpoint: Checkpoint) -> None:
    """Write the checkpoint whole or not at all."""
    partial = path.with_suffix(".partial")
    try:
        torch.save(checkpoint, partial)
        os.replace(partial, path)
    except BaseException as error:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        if isinstance(error, RuntimeError):  # what torch makes of a full disk
            raise UsageError(f"{path} cannot be written ({first_line(error)}); is the disk full?") from error
        raise
