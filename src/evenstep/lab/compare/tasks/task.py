"""A task: a network, its batches, its schedule, and what is measured on held-out data."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Part = tuple[Tensor, ...]
Splits = dict[str, Part]  # "train", "test", and "validation" unless the task has none
Batches = Iterator[tuple[Tensor, Tensor]]
Predict = Callable[[Tensor], Tensor]
Build = Callable[[], nn.Module]

ACCURACY, LOSS = "held_out_accuracy", "held_out_loss"
HELD_OUT = 0.1  # share of the training images that is the validation split


@dataclass(frozen=True)
class Task(ABC):
    """A network and its training: `steps` with linear decay to zero (unless `constant`) after `warm_up` steps.

    `small` is a tiny network for --smoke, `normalized` the same network with batch norm. `seen` tells what of the task
    EvenStep's rule was designed on. Without `validated`, all training data train and the test split chooses, too.
    """

    build: Build
    steps: int
    batch: int
    small: Build
    warm_up: int = 0
    constant: bool = False
    mixed: bool = False
    normalized: Build | None = None
    seen: str = ""
    validated: bool = True
    metric: ClassVar[str] = ACCURACY

    @property
    def higher(self) -> bool:
        """Whether the metric is better when it is higher."""
        return self.metric == ACCURACY

    def network(self, batch_norm: bool = False) -> nn.Module:
        """The network with its first weights."""
        if not batch_norm:
            return self.build()
        if self.normalized is None:
            raise ValueError("the task has no version of its network with batch norm")
        return self.normalized()

    def rate(self, step: int, steps: int, decay: bool = True) -> float:
        """What lr is multiplied by at a step, counted from 0, of `steps`."""
        warm_up = min(self.warm_up, steps // 2)
        down = (steps - step) / (steps - warm_up) if decay and not self.constant else 1.0
        return min((step + 1) / warm_up, down) if warm_up else down

    def tiny(self) -> "Task":
        """The same task with a small network, small batches and few steps, to see that a method runs."""
        normalized = None if self.normalized is None else self.small
        return replace(self, build=self.small, steps=4, batch=8, warm_up=min(1, self.warm_up), normalized=normalized)

    @property
    def source(self) -> tuple[Any, ...]:
        """What the data depend on: tasks with equal sources share them."""
        return (type(self), self.validated)

    @abstractmethod
    def load(self, folder: Path | None, device: torch.device) -> Splits:
        """The data on the device, made up if there is no folder."""

    def batches(self, part: Part, generator: torch.Generator) -> Batches:
        """Training batches without end."""
        x, y = part
        while True:
            order = torch.randperm(len(x), generator=generator, device=x.device)
            for rows in order[: len(x) // self.batch * self.batch].split(self.batch):
                yield self.augmented(x[rows], generator), y[rows]

    def augmented(self, x: Tensor, generator: torch.Generator) -> Tensor:
        """A training batch with random changes, if the task has any."""
        return x

    def pieces(self, part: Part) -> Batches:
        """A held-out part in pieces that fit into memory."""
        yield from zip(*(tensor.split(1000) for tensor in part), strict=True)

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        """The training loss."""
        return F.cross_entropy(output.flatten(0, -2), y.flatten())

    def score(self, output: Tensor, y: Tensor) -> Tensor:
        """The metric on a piece: the share of right answers, or the loss."""
        return (output.argmax(-1) == y).float().mean() if self.higher else self.loss(output, y)

    def held_out(self, predict: Predict, part: Part) -> Tensor:
        """The metric on a held-out part, without waiting for the device."""
        scores = [(self.score(predict(x), y) * len(x), len(x)) for x, y in self.pieces(part)]
        return torch.stack([score for score, _ in scores]).sum() / sum(count for _, count in scores)


def carved(x: Tensor, y: Tensor, share: float = HELD_OUT) -> tuple[Part, Part]:
    """Training examples as those to train on and those to validate on, drawn once, the same for all time."""
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0)).to(x.device)
    held = order[: round(share * len(x))]
    rest = order[round(share * len(x)) :]
    return (x[rest], y[rest]), (x[held], y[held])
