"""Batches of one epoch: shuffled, normalized and augmented on the device that holds the data."""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from .data import Text
from .evaluate import CONTEXT
from .user_task import Data, UserTask

AUGMENTATIONS = ("crop", "flip", "cutout")
TEXT_STEPS = 250  # steps that count as an epoch of text, whose windows are drawn at random


def steps_per_epoch(data: Data, batch_size: int) -> int:
    """The number of batches in an epoch; the last one of images may be smaller. A user's task knows its own."""
    if isinstance(data, UserTask):
        return data.steps_per_epoch()
    return TEXT_STEPS if isinstance(data, Text) else math.ceil(len(data.train_y) / batch_size)


def epoch_batches(
    data: Data,
    batch_size: int,
    generator: torch.Generator,
    device: torch.device | str = "cpu",
    augment: bool | str = False,
) -> Iterator[tuple[Any, Any]]:
    """Inputs and targets of one epoch in a random order; of a user's task batches, and None.

    All random numbers are drawn on the CPU from `generator`: every device sees the same batches.
    """
    data = data.to(device)
    if isinstance(data, UserTask):
        yield from ((batch, None) for batch in data.epoch(generator))
        return
    if isinstance(data, Text):
        offsets = torch.arange(CONTEXT + 1, device=device)
        last = len(data.train) - len(offsets)
        starts = torch.randint(0, last, (TEXT_STEPS, batch_size, 1), generator=generator)
        for start in sent(starts, device):
            window = data.train[start + offsets]
            yield window[:, :-1], window[:, 1:]
        return
    order = torch.randperm(len(data.train_y), generator=generator)
    for rows in sent(order, device).split(batch_size):
        yield augmented(data.normalize(data.train_x[rows]), generator, augment), data.train_y[rows]


def sent(drawn: Tensor, device: torch.device | str) -> Tensor:
    """A tensor from the CPU on the device; the copy to a GPU does not block."""
    if torch.device(device).type != "cuda":
        return drawn.to(device)
    return drawn.pin_memory().to(device, non_blocking=True)


def augmented(x: Tensor, generator: torch.Generator, how: bool | str = True) -> Tensor:
    """Normalized images after the augmentations that `how` names, joined by "+"; True is "crop+flip".

    >>> augmented(torch.ones(1, 1, 4, 4), torch.Generator(), False).sum()
    tensor(16.)
    """
    names = set(how.split("+")) if isinstance(how, str) else {"crop", "flip"} if how else set()
    if unknown := names.difference(AUGMENTATIONS):
        raise ValueError(f"augment must join some of {', '.join(AUGMENTATIONS)} by '+'; got {sorted(unknown)[0]!r}.")
    if names & {"crop", "flip"}:
        x = crop_and_flip(x, generator, margin=4 if "crop" in names else 0, flip="flip" in names)
    return cutout(x, generator) if "cutout" in names else x


def crop_and_flip(x: Tensor, generator: torch.Generator, margin: int = 4, flip: bool = True) -> Tensor:
    """Each image shifted by up to `margin` pixels both ways, and (`flip`) mirrored half of the time.

    What moves in is the image's own reflection: a border of one colour would be there in training alone.
    """
    count, _, height, width = x.shape
    shift = sent(torch.randint(0, 2 * margin + 1, (2, count, 1), generator=generator), x.device)
    mirrored = sent(torch.randint(0, 2 if flip else 1, (count, 1), generator=generator).bool(), x.device)
    rows = torch.arange(height, device=x.device) + shift[0]
    columns = torch.arange(width, device=x.device) + shift[1]
    columns = torch.where(mirrored, columns.flip(1), columns)
    padded = functional.pad(x, (margin, margin, margin, margin), mode="reflect")
    image = torch.arange(count, device=x.device)[:, None, None]
    return padded.movedim(1, -1)[image, rows[:, :, None], columns[:, None, :]].movedim(-1, 1).contiguous()


def cutout(x: Tensor, generator: torch.Generator, side: int = 8) -> Tensor:
    """Each image with one square of `side` pixels set to zero; its centre is any pixel, so borders may cut it."""
    count, _, height, width = x.shape
    top = sent(torch.randint(0, height, (count, 1), generator=generator), x.device) - side // 2
    left = sent(torch.randint(0, width, (count, 1), generator=generator), x.device) - side // 2
    rows, columns = torch.arange(height, device=x.device), torch.arange(width, device=x.device)
    in_rows, in_columns = (rows >= top) & (rows < top + side), (columns >= left) & (columns < left + side)
    return x.masked_fill((in_rows[:, :, None] & in_columns[:, None, :])[:, None], 0)
