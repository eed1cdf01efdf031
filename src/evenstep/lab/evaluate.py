"""Loss and accuracy of a network on the held-out part of the data, and the share of its dead hidden units."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from .data import Arrays, Text
from .user_task import Data, UserTask

CONTEXT = 128  # characters of text that a network sees
IMAGES, IMAGES_ON_GPU, WINDOWS = 500, 2000, 64  # examples in a batch


@torch.no_grad()
def evaluate(model: nn.Module, data: Data, batch_size: int | None = None) -> dict[str, Any]:
    """Mean loss and accuracy on the held-out part, and the share of dead hidden units, in eval mode.

    A unit is an output of a ReLU module, behind a convolution a whole channel; it is dead if it is zero on every
    example. Text is read in whole windows, and counted by characters. `data` must be on the model's device. The model's
    mode is restored.
    """
    if isinstance(data, UserTask):
        return data.held_out(model)
    was_training = model.training
    model.eval()
    sums = []
    with _alive_units(model) as alive:
        usual = WINDOWS if isinstance(data, Text) else IMAGES_ON_GPU if data.test_x.is_cuda else IMAGES
        for x, y in _batches(data, batch_size or usual):
            output = model(x).flatten(0, -2)
            loss = functional.cross_entropy(output, y.flatten(), reduction="sum")
            sums.append(torch.stack([loss, (output.argmax(1) == y.flatten()).sum().to(loss)]))
    model.train(was_training)
    units = torch.cat([*alive.values(), sums[0].new_ones(0 if alive else 1)])
    loss, correct, share = torch.cat([torch.stack(sums).sum(0), units.mean()[None]]).tolist()  # one transfer from a GPU
    count = _windows(data) * CONTEXT if isinstance(data, Text) else len(data.test_y)
    return {"test_loss": loss / count, "test_accuracy": correct / count, "dead_share": 1 - share}


def _batches(data: Arrays | Text, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Inputs and targets of the held-out part."""
    if isinstance(data, Text):
        windows = _windows(data)
        x = data.test[: windows * CONTEXT].view(windows, CONTEXT).long()
        y = data.test[1 : windows * CONTEXT + 1].view(windows, CONTEXT).long()
        yield from zip(x.split(batch_size), y.split(batch_size), strict=True)
        return
    for images, labels in zip(data.test_x.split(batch_size), data.test_y.split(batch_size), strict=True):
        yield data.normalize(images), labels


def _windows(text: Text) -> int:
    return (len(text.test) - 1) // CONTEXT


@contextmanager
def _alive_units(model: nn.Module) -> Iterator[dict[nn.Module, Tensor]]:
    """For each ReLU module that runs, 1.0 for every unit that was not zero at least once."""
    alive: dict[nn.Module, Tensor] = {}

    def look(module: nn.Module, _: tuple, output: Tensor) -> None:
        nonzero = (output.transpose(0, 1).flatten(1) != 0).any(1).float()
        alive[module] = torch.maximum(alive[module], nonzero) if module in alive else nonzero

    handles = [m.register_forward_hook(look) for m in model.modules() if isinstance(m, nn.ReLU)]
    try:
        yield alive
    finally:
        for handle in handles:
            handle.remove()
