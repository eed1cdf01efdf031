"""One trial: a method at one stepsize and one seed, from the first weights to its record."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from . import records
from .evaluate import evaluate
from .identity import described
from .method_names import find
from .models import MODELS
from .parallel_trials import Work
from .reading import Record
from .train import Epoch, Training, linear_decay
from .user_task import Data, UserTask

OnEpoch = Callable[["Trial", Epoch], None]


@dataclass(frozen=True)
class Trial:
    """The definition of a run. `options` go to the optimizer beside lr, `model_options` to the network.

    `augment` is as in `data.augmented`: True for crop and flip, or names joined by "+".
    """

    method: str
    lr: float
    seed: int = 0
    epochs: int = 10
    batch_size: int = 64  # 0: as in the user's file
    model: str = "paper_cnn"
    augment: bool | str = False
    decay_lr: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    model_options: dict[str, Any] = field(default_factory=dict)


def config(trial: Trial, data: Data) -> dict[str, Any]:
    """The configuration that a record states."""
    return {**asdict(trial), **described(data)}


def start(
    trial: Trial, data: Data, device: torch.device | str = "cpu", *, capture: bool = False, model: Any = None
) -> Training:
    """The trial's training before its first step; `trial.seed` gives every method the same weights.

    With `capture` its steps run as CUDA graphs where the device and the method allow it. `model` replaces the network.
    """
    method, device, options = find(trial.method), torch.device(device), trial.options
    lr: float | Tensor = trial.lr
    torch.manual_seed(trial.seed)
    if isinstance(data, UserTask):
        model, capture = data.model(), False
    elif model is None:
        model = MODELS[trial.model](data.channels, batch_norm=method.batch_norm, **trial.model_options)
    capture = capture and device.type == "cuda" and method.capture_options is not None
    if capture:
        options = {**(method.capture_options or {}), **options}
        lr = torch.tensor(lr, device=device) if trial.decay_lr else lr  # a graph reads a schedule's lr from a tensor
    optimizer = method.optimizer(model.to(device), lr=lr, **options)
    return Training(
        model,
        optimizer,
        data,
        epochs=trial.epochs,
        batch_size=trial.batch_size,
        seed=trial.seed,
        device=device,
        augment=trial.augment,
        schedule=linear_decay if trial.decay_lr else None,
        capture=capture,
    )


def work(trial: Trial, data: Data, device: torch.device | str, on_epoch: OnEpoch | None = None) -> Work[Record]:
    """The trial in steps, for `round_robin`; ends with its record."""
    training = start(trial, data, device, capture=True)
    first = first_loss(training)
    yield from training.run(on_epoch and partial(on_epoch, trial))
    return recorded(trial, training, first)


def recorded(trial: Trial, training: Training, first: float | None) -> Record:
    """The record of a finished training that began at the loss `first`."""
    record = records.make(config(trial, training.data), trial.seed, training.rows, training.device)
    return record if first is None else {**record, "initial_loss": first}


def first_loss(training: Training) -> float | None:
    """The held-out loss before the first step, of a user's task, whose loss may be on any scale."""
    return evaluate(training.model, training.data)["test_loss"] if isinstance(training.data, UserTask) else None
