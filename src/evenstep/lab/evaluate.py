"""How good networks are on the held-out part of the data, and how many of their hidden units are dead."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn import functional

from .data import Arrays, Text

CONTEXT = 128  # characters of text that a network sees
IMAGES, WINDOWS = 500, 64  # in a batch
AT_ONCE = 20_000  # images on a GPU, of all members that are looked at together

Weights = Mapping[str, Tensor]
Sums = tuple[Tensor, Tensor, Tensor]  # loss, right answers, and 1.0 for each unit that was not zero at least once


@torch.no_grad()
def evaluate(model: nn.Module, data: Arrays | Text, batch_size: int | None = None) -> dict[str, float]:
    """Mean loss and accuracy on the held-out part, share of dead hidden units, in eval mode; the mode is restored.

    A unit is an output of a ReLU module, a whole channel behind a convolution. It is dead if it is zero on every
    example. Text is met in whole windows, and counted by characters. `data` must be on the model's device.
    """
    was_training = model.training
    model.eval()
    sums = _sums(partial(_look, model, {}), data, batch_size or _batch_size(data, 1))
    model.train(was_training)
    return _scores([sums], data)[0]


@torch.no_grad()
def evaluate_members(
    model: nn.Module, members: Weights, data: Arrays | Text, *, at_once: bool = False
) -> list[dict[str, float]]:
    """What `evaluate` gives for each member: `model`, in eval mode, with a row of the stacked parameters and buffers.

    With `at_once` all members meet a batch together, under `vmap`.
    """
    count = len(next(iter(members.values())))
    if at_once:
        look = vmap(partial(_look, model), in_dims=(0, None, None))
        found = _sums(partial(look, members), data, _batch_size(data, count))
        return _scores(list(zip(*found, strict=True)), data)
    each = [{name: stacked[e] for name, stacked in members.items()} for e in range(count)]
    return _scores([_sums(partial(_look, model, one), data, _batch_size(data, 1)) for one in each], data)


def _batch_size(data: Arrays | Text, members: int) -> int:
    """As many examples as fill a GPU; few elsewhere, where memory is slow."""
    if isinstance(data, Text):
        return WINDOWS
    return max(IMAGES, min(AT_ONCE // members, AT_ONCE // 10)) if data.test_x.is_cuda else IMAGES


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


def _look(model: nn.Module, weights: Weights, x: Tensor, y: Tensor) -> Sums:
    """One batch."""
    with _watch_relus(model) as alive:
        output = functional_call(model, dict(weights), (x,)).flatten(0, -2)
    loss = functional.cross_entropy(output, y.flatten(), reduction="sum")
    return loss, (output.argmax(1) == y.flatten()).sum(), torch.cat([*alive.values(), output.new_zeros(0)])


def _sums(look: Callable[[Tensor, Tensor], Sums], data: Arrays | Text, batch_size: int) -> Sums:
    """All batches; nothing waits for a GPU."""
    found = [look(x, y) for x, y in _batches(data, batch_size)]
    losses, correct, alive = (torch.stack(column) for column in zip(*found, strict=True))
    return losses.sum(0), correct.sum(0), alive.amax(0)


def _scores(found: list[Sums], data: Arrays | Text) -> list[dict[str, float]]:
    """Means of each member, by one transfer."""
    count = _windows(data) * CONTEXT if isinstance(data, Text) else len(data.test_y)
    columns = [(loss, correct.to(loss), _share(alive)) for loss, correct, alive in found]
    rows = torch.stack([torch.stack(column) for column in columns]).tolist()
    return [
        {"test_loss": loss / count, "test_accuracy": correct / count, "dead_share": 1 - share}
        for loss, correct, share in rows
    ]


def _share(alive: Tensor) -> Tensor:
    """Of the units that are alive; all, if there are none."""
    return alive.mean() if len(alive) else alive.new_ones(())


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
