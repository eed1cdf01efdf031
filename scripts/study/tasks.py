"""Tasks of the study: a network, its batches, and what is measured on held-out data."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from evenstep.lab.data import Arrays
from evenstep.lab.data.cifar import CIFAR_CLASSES, cifar10
from evenstep.lab.models import paper_cnn

from .networks import GPT, ViT, deep, resnet

Batches = Iterator[tuple[Tensor, Tensor]]
Predict = Callable[[Tensor], Tensor]


@dataclass
class Task:
    """A network and its training: `steps` with linear decay to zero (unless `constant`) after `warm_up` steps."""

    build: Callable[[], nn.Module]
    steps: int
    batch: int
    warm_up: int = 0
    constant: bool = False
    mixed: bool = False
    metric: ClassVar[str]

    def rate(self, step: int, steps: int) -> float:
        """What lr is multiplied by at a step, counted from 0, of `steps`."""
        warm_up = min(self.warm_up, steps // 2)
        decay = 1.0 if self.constant else (steps - step) / (steps - warm_up)
        return min((step + 1) / warm_up, decay) if warm_up else decay

    def load(self, data: Path | None, device: torch.device) -> tuple[Tensor, ...]:
        """The data on the device, made up if there is no folder."""
        raise NotImplementedError

    def batches(self, data: tuple[Tensor, ...], generator: torch.Generator) -> Batches:
        """Training batches without end."""
        raise NotImplementedError

    def held_out(self, predict: Predict, data: tuple[Tensor, ...]) -> float:
        """The metric on held-out data."""
        raise NotImplementedError


@dataclass
class ImageTask(Task):
    """CIFAR-10, standardized, with a random crop and flip of each image if `augment`; accuracy on the test set."""

    augment: bool = True
    metric = "held_out_accuracy"

    def load(self, data: Path | None, device: torch.device) -> tuple[Tensor, ...]:
        arrays = cifar10(data) if data else noise()
        arrays = arrays.to(device)
        return arrays.normalize(arrays.train_x), arrays.train_y, arrays.normalize(arrays.test_x), arrays.test_y

    def batches(self, data: tuple[Tensor, ...], generator: torch.Generator) -> Batches:
        x, y, size = data[0], data[1], self.batch
        while True:
            order = torch.randperm(len(x), generator=generator, device=x.device)
            for rows in order[: len(x) // size * size].split(size):
                yield (augmented(x[rows], generator) if self.augment else x[rows]), y[rows]

    def held_out(self, predict: Predict, data: tuple[Tensor, ...]) -> float:
        x, y = data[2:]
        right = [(predict(a).argmax(1) == b).sum() for a, b in zip(x.split(1000), y.split(1000), strict=True)]
        return float(torch.stack(right).sum()) / len(y)


@dataclass
class TextTask(Task):
    """Bytes of Python source; the mean loss of windows end to end in its last fiftieth."""

    context: int = 256
    windows: int = 512
    metric = "held_out_loss"

    def load(self, data: Path | None, device: torch.device) -> tuple[Tensor, ...]:
        path = data / "python-source.txt" if data else Path(__file__)
        return (torch.from_numpy(np.fromfile(path, dtype=np.uint8)).to(device),)

    def cut(self, source: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
        """Windows that begin at these places, and the bytes that follow each of theirs."""
        tokens = source[starts[:, None] + torch.arange(self.context + 1, device=source.device)].long()
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def batches(self, data: tuple[Tensor, ...], generator: torch.Generator) -> Batches:
        (source,) = data
        last = len(source) * 49 // 50 - self.context - 1
        while True:
            yield self.cut(source, torch.randint(last, (self.batch,), generator=generator, device=source.device))

    def held_out(self, predict: Predict, data: tuple[Tensor, ...]) -> float:
        (source,) = data
        starts = len(source) * 49 // 50 + torch.arange(self.windows, device=source.device) * self.context
        pairs = [self.cut(source, part) for part in starts.split(64)]
        losses = [F.cross_entropy(predict(x).flatten(0, -2), y.flatten()) * len(x) for x, y in pairs]
        return float(torch.stack(losses).sum()) / self.windows


def gpt(width: int, depth: int, steps: int = 800) -> TextTask:
    """A byte GPT with a tenth of its steps as warm-up."""
    return TextTask(partial(GPT, width, depth, 256), steps, batch=64, warm_up=steps // 10, mixed=True)


def crops(build: Callable[[], nn.Module]) -> ImageTask:
    """Five epochs of CIFAR-10 in batches of 128."""
    return ImageTask(build, 5 * 390, batch=128)


def paper(batch_norm: bool = False, constant: bool = True) -> ImageTask:
    """The paper's CNN as in its figure 2: 40 epochs in batches of 64, a constant stepsize, no augmentation."""
    build = partial(paper_cnn, batch_norm=batch_norm)
    return ImageTask(build, 40 * 781, batch=64, constant=constant, augment=False)


TASKS: dict[str, Task] = {
    "gpt": gpt(384, 6),
    "gpt-1024": gpt(1024, 8, steps=1500),
    "resnet-bn": crops(partial(resnet, True)),
    "resnet": crops(partial(resnet, False)),
    "deep": crops(deep),
    "vit": ImageTask(ViT, 20 * 390, batch=128, warm_up=390, mixed=True),
    "paper-cnn": paper(),
    "paper-cnn-decay": paper(constant=False),
    "paper-cnn-bn": paper(batch_norm=True),
    "gpt-128": gpt(128, 6),
    "gpt-192": gpt(192, 6),
}


def tiny(name: str) -> Task:
    """A task of the same kind with a small network and small batches, to see that a method runs."""
    task = TASKS[name]
    if isinstance(task, TextTask):
        return TextTask(partial(GPT, 24, 1, 16), 3, batch=4, warm_up=1, mixed=True, context=16, windows=4)
    builds = {
        "resnet-bn": partial(resnet, True, width=4),
        "resnet": partial(resnet, False, width=4),
        "deep": partial(deep, width=4),
        "vit": partial(ViT, width=24, depth=1),
    }
    assert isinstance(task, ImageTask)
    build = builds.get(name, task.build)
    return ImageTask(build, 3, 8, min(1, task.warm_up), task.constant, task.mixed, task.augment)


def noise() -> Arrays:
    """Random images in CIFAR-10's shape."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(256, (96, 3, 32, 32), generator=generator, dtype=torch.uint8)
    y = torch.randint(10, (96,), generator=generator)
    return Arrays(x[:64], y[:64], x[64:], y[64:], "noise", CIFAR_CLASSES)


def augmented(x: Tensor, generator: torch.Generator) -> Tensor:
    """A crop by 4 with reflection, and a flip, drawn for each image."""
    count, device = len(x), x.device
    padded = F.pad(x, (4, 4, 4, 4), mode="reflect")
    places = torch.randint(9, (2, count, 1), generator=generator, device=device) + torch.arange(32, device=device)
    flips = torch.rand(count, 1, generator=generator, device=device) < 0.5
    rows, columns = places[0], torch.where(flips, places[1].flip(1), places[1])
    index = torch.arange(count, device=device)
    return padded[index[:, None, None], :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2).contiguous()
