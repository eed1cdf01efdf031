"""One trial: a method at one stepsize and one seed, from the first weights to its record."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from . import distributed, records
from .data import Arrays, Text
from .identity import described
from .methods import METHODS
from .models import MODELS
from .train import Epoch, linear_decay, train


@dataclass(frozen=True)
class Trial:
    """What defines a run. `options` go to the optimizer beside lr, `model_options` to the network.

    `augment` is as in `data.augmented`: True for crop and flip, or names joined by "+".
    """

    method: str
    lr: float
    seed: int = 0
    epochs: int = 10
    batch_size: int = 64
    model: str = "paper_cnn"
    augment: bool | str = False
    decay_lr: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    model_options: dict[str, Any] = field(default_factory=dict)


def config(trial: Trial, arrays: Arrays | Text) -> dict[str, Any]:
    """What a record says was run."""
    return {**asdict(trial), **described(arrays)}


def run(
    trial: Trial,
    arrays: Arrays | Text,
    device: torch.device | str = "cpu",
    on_epoch: Callable[[Epoch], None] | None = None,
) -> records.Record:
    """Train from the weights that `trial.seed` gives (the same for every method) and return the record."""
    method = METHODS[trial.method]
    torch.manual_seed(trial.seed)
    model = MODELS[trial.model](arrays.channels, batch_norm=method.batch_norm, **trial.model_options).to(device)
    rows = train(
        model,
        method.optimizer(model, lr=trial.lr, **trial.options),
        arrays,
        epochs=trial.epochs,
        batch_size=trial.batch_size,
        seed=trial.seed,
        device=device,
        on_epoch=on_epoch,
        augment=trial.augment,
        schedule=linear_decay if trial.decay_lr else None,
    )
    return records.make(config(trial, arrays), trial.seed, rows, device)


def run_recorded(
    trial: Trial,
    arrays: Arrays | Text,
    out: Path,
    device: torch.device | str = "cpu",
    on_epoch: Callable[[Epoch], None] | None = None,
) -> records.Record:
    """Run the trial and add its record to `out`: in this process, or under torchrun in all of its processes.

    The first process alone writes, and alone calls `on_epoch`.
    """
    with distributed.joined(device) as mine:
        first = distributed.rank() == 0
        record = run(trial, arrays, mine, on_epoch if first else None)
        record["environment"]["processes"] = distributed.size()
        if first:
            records.append(out, record)
    return record
