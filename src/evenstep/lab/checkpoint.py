"""Checkpoints of a training: written whole after each epoch, and a training continues from them bit for bit."""

import copy
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import records
from .identity import DIGEST, without_digest
from .train import Training
from .usage import UsageError, first_line

COLUMNS = {"epoch", "train_loss", "seconds", "steps", "diverged", "test_accuracy"}  # that a row must have
Config = dict[str, Any]
WORDS = {DIGEST: "digest of the data, or of the text of your file"}


def save(training: Training, config: Config, path: Path) -> None:
    """Write everything the next epoch depends on, whole or not at all."""
    partial = path.with_suffix(".partial")
    try:
        torch.save({"config": records.dumps(config), **_state(training)}, partial)
        os.replace(partial, path)
    except BaseException as error:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        if isinstance(error, RuntimeError):  # torch's error for a full disk
            raise UsageError(f"{path} cannot be written ({first_line(error)}); is the disk full?") from error
        raise


def restore(training: Training, config: Config, path: Path) -> bool:
    """Continue from the checkpoint `path`, if it exists and is of this configuration; whether it exists.

    A checkpoint that does not fit is a UsageError and leaves the training as it was.
    """
    if not path.exists():
        return False
    saved, before = _load(path, config), copy.deepcopy(_state(training))
    try:
        _set_state(training, saved)
    except Exception as error:  # of any kind: the file may contain anything
        _set_state(training, before)
        raise _unfit(path, error) from error
    return True


def _state(training: Training) -> dict[str, Any]:
    return {
        "model": training.model.state_dict(),
        "optimizer": training.optimizer.state_dict(),
        "order": training.order.get_state(),
        "random": torch.get_rng_state(),
        "rows": training.rows,
    }


def _set_state(training: Training, saved: dict[str, Any]) -> None:
    """Restore the training; an exception if something is missing or has another shape."""
    optimizer, rows = training.optimizer, saved["rows"]
    names = [set(group) for group in optimizer.param_groups]
    training.model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    training.order.set_state(saved["order"])
    torch.set_rng_state(saved["random"])
    for wanted, group in zip(names, optimizer.param_groups, strict=True):
        if missing := wanted - set(group):
            raise ValueError(f"the optimizer's {min(missing)} is missing")
    if type(optimizer).__module__.startswith("torch."):  # torch does not check shapes, our optimizers do
        for p, state in optimizer.state.items():
            for name, value in state.items():
                if isinstance(value, Tensor) and value.dim() and value.shape != p.shape:
                    raise ValueError(f"the optimizer's {name} has the shape {list(value.shape)}")
    if not isinstance(rows, list) or len(rows) > training.epochs:
        raise ValueError("its rows are not those of the epochs")
    if missing := set().union(*(COLUMNS - set(row) for row in rows)):
        raise ValueError(f"{min(missing)} is missing in a row")
    training.rows = rows


def _load(path: Path, config: Config) -> dict[str, Any]:
    """The checkpoint in `path` if it is of this configuration; no code in it is run."""
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
        there = saved["config"]
    except Exception as error:  # torch raises many kinds for damaged and foreign files
        message = f"{path} is not a checkpoint ({first_line(error)}); remove it, or choose another --out"
        raise UsageError(message) from error
    if there in (records.dumps(config), records.dumps(without_digest(config))):  # the second: from before digests
        return saved
    try:
        other, here = json.loads(there), json.loads(records.dumps(config))
        names = [name for name in {**other, **here} if other.get(name) != here.get(name)]
    except (TypeError, ValueError, RecursionError) as error:
        raise _unfit(path, error) from error
    difference = ", ".join(f"{WORDS.get(name, name)}: {other.get(name)} there, {here.get(name)} here" for name in names)
    raise UsageError(f"{path} is of another configuration ({difference}); choose another --out, or remove it")


def _unfit(path: Path, error: Exception) -> UsageError:
    """The error for a checkpoint with unexpected content."""
    reason = f"{error} is missing" if isinstance(error, KeyError) else first_line(error)
    return UsageError(f"{path} is not a checkpoint of this version ({reason}); remove it, or choose another --out")
