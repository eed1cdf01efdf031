"""Batches of one epoch, for images and for text alike."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from .data import Arrays, Text, batches, sent
from .evaluate import CONTEXT

TEXT_STEPS = 250  # what counts as an epoch of text, whose windows are drawn at random


def steps_per_epoch(data: Arrays | Text, batch_size: int) -> int:
    """How many batches an epoch has; the last of images may be smaller."""
    return TEXT_STEPS if isinstance(data, Text) else math.ceil(len(data.train_y) / batch_size)


def epoch(
    data: Arrays | Text, batch_size: int, generator: torch.Generator, device: torch.device | str, augment: bool | str
) -> Iterator[tuple[Tensor, Tensor]]:
    """Inputs and targets of one epoch, drawn on the CPU from `generator`: the same on every device."""
    if not isinstance(data, Text):
        yield from batches(data, batch_size, generator, device, augment)
        return
    text = data.train.to(device)
    offsets = torch.arange(CONTEXT + 1, device=text.device)
    last = len(text) - len(offsets)
    starts = torch.randint(0, last, (TEXT_STEPS, batch_size, 1), generator=generator)
    for start in sent(starts, text.device):
        window = text[start + offsets]
        yield window[:, :-1], window[:, 1:]
