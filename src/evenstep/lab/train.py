"""The training loop of all experiments: what the paper's figures measure, and nothing else."""

import math
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

from . import distributed, feed
from .data import Arrays, Text
from .evaluate import evaluate

Epoch = dict[str, Any]
CHECK_EVERY = 25  # steps between two looks at the loss: a look makes a GPU wait


def train(
    model: nn.Module,
    optimizer: Optimizer,
    arrays: Arrays | Text,
    *,
    epochs: int,
    batch_size: int,
    seed: int,
    device: torch.device | str = "cpu",
    on_epoch: Callable[[Epoch], None] | None = None,
    on_step: Callable[[int, Tensor], None] | None = None,
    augment: bool | str = False,
    schedule: Callable[[float], float] | None = None,
) -> list[Epoch]:
    """Train by cross-entropy and return a row per epoch.

    A row has `train_loss`, the mean loss of the epoch's batches as they were met (the paper's figure 2),
    `test_loss`, `test_accuracy` and `dead_share` at the epoch's end, `seconds` and `steps` of training, and `diverged`.
    Training stops after the epoch in which the loss ceases to be finite. `seed` fixes the order of the data;
    `schedule` gives the factor on every group's lr from the share of training that is done; `on_step` gets
    the number of the step and its loss (detached). Processes that were joined (`distributed.joined`) share every
    batch and give the same rows.
    """
    model.to(device).train()
    arrays = arrays.to(device)
    network = distributed.wrapped(model, device)
    generator = torch.Generator().manual_seed(seed)
    steps = feed.steps_per_epoch(arrays, batch_size)
    rates = [group["lr"] for group in optimizer.param_groups]
    rows: list[Epoch] = []

    def before_step(step: int) -> None:
        if schedule is not None:
            factor = schedule((len(rows) * steps + step) / (epochs * steps))
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * factor

    def after_step(step: int, loss: Tensor) -> None:
        if on_step is not None:
            on_step(len(rows) * steps + step, loss)

    while len(rows) < epochs and not (rows and rows[-1]["diverged"]):
        data = feed.epoch(arrays, batch_size, generator, device, augment)
        start = time.perf_counter()
        loss = _train_epoch(network, optimizer, data, before_step, after_step)
        row = {"epoch": len(rows) + 1, "train_loss": loss, "seconds": time.perf_counter() - start}
        row |= {"steps": steps, "diverged": not math.isfinite(loss), **evaluate(model, arrays)}
        rows.append(row)
        if on_epoch is not None:
            on_epoch(row)
    return rows


def _train_epoch(
    model: nn.Module,
    optimizer: Optimizer,
    data: Iterable[tuple[Tensor, Tensor]],
    before_step: Callable[[int], None],
    after_step: Callable[[int, Tensor], None],
) -> float:
    """Mean loss over one pass of `data`, or over its beginning if that is not finite: then the pass ends early."""
    total, count = torch.zeros(()), 0
    for step, (x, y) in enumerate(data):
        before_step(step)
        optimizer.zero_grad()
        loss = mean_loss(model, x, y)
        loss.backward()
        optimizer.step()
        loss = distributed.mean(loss)
        after_step(step, loss)
        total = total.to(loss.device) + loss * len(y)
        count += len(y)
        if step % CHECK_EVERY == 0 and not math.isfinite(total.item()):
            break
    return total.item() / count


def mean_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Cross-entropy of this process's share of the batch, such that the mean over processes is that of the batch."""
    mine = distributed.share(y).flatten()
    output = model(distributed.share(x)).flatten(0, -2)
    if distributed.size() == 1:
        return functional.cross_entropy(output, mine)
    return functional.cross_entropy(output, mine, reduction="sum") * (distributed.size() / y.numel())


def linear_decay(done: float) -> float:
    """Schedule: from the full stepsize to zero in a straight line."""
    return 1 - done
