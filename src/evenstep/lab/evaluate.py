"""How good a network is on the test set, and how many of its hidden units are dead."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional

from evenstep.lab.data import Arrays, Text


@torch.no_grad()
def evaluate(model: nn.Module, arrays: Arrays, batch_size: int = 500) -> dict[str, float]:
    """Mean loss, accuracy and share of dead hidden units over the test set, in eval mode; the mode is restored.

    A unit is an output of a ReLU module, a whole channel behind a convolution. It is dead if it is zero
    on every test image. `arrays` must be on the model's device.
    """
    was_training = model.training
    model.eval()
    loss, correct = torch.zeros((), device=arrays.test_y.device), torch.zeros((), device=arrays.test_y.device)
    with _watch_relus(model) as alive:
        for x, y in zip(arrays.test_x.split(batch_size), arrays.test_y.split(batch_size), strict=True):
            output = model(arrays.normalize(x))
            loss += functional.cross_entropy(output, y, reduction="sum")
            correct += (output.argmax(1) == y).sum()
    model.train(was_training)
    count, units = len(arrays.test_y), torch.cat([*alive.values(), torch.ones(0, device=loss.device)])
    return {
        "test_loss": loss.item() / count,
        "test_accuracy": correct.item() / count,
        "dead_share": 1 - units.mean().item() if len(units) else 0.0,
    }


@torch.no_grad()
def evaluate_text(model: nn.Module, text: Text, context: int = 128, batch_size: int = 64) -> dict[str, float]:
    """Mean loss and accuracy per character on the held-out text, in whole windows; the mode is restored."""
    was_training = model.training
    model.eval()
    windows = (len(text.test) - 1) // context
    x = text.test[: windows * context].view(windows, context).long()
    y = text.test[1 : windows * context + 1].view(windows, context).long()
    loss, correct = torch.zeros((), device=y.device), torch.zeros((), device=y.device)
    for tokens, following in zip(x.split(batch_size), y.split(batch_size), strict=True):
        output = model(tokens)
        loss += functional.cross_entropy(output.flatten(0, 1), following.flatten(), reduction="sum")
        correct += (output.argmax(-1) == following).sum()
    model.train(was_training)
    return {"test_loss": loss.item() / y.numel(), "test_accuracy": correct.item() / y.numel(), "dead_share": 0.0}


@contextmanager
def _watch_relus(model: nn.Module) -> Iterator[dict[nn.Module, Tensor]]:
    """Collect, per ReLU module, 1.0 for each unit that was not zero at least once; the hooks go at the end."""
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
