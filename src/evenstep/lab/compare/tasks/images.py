"""Tasks on images."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from evenstep.lab.usage import UsageError

from .task import Splits, Task, carved

if TYPE_CHECKING:
    from evenstep.lab.data import Arrays


@dataclass(frozen=True)
class ImageTask(Task):
    """Classes of images, standardized, with a random crop and flip of each if `augment`."""

    augment: bool = True
    kind: str = "cifar"  # CIFAR-10, or "folder": Tiny-ImageNet as an ImageFolder

    @property
    def source(self) -> tuple[Any, ...]:
        """The data set, and how it is split."""
        return (*super().source, self.kind)

    def load(self, folder: Path | None, device: torch.device) -> Splits:
        """Images and labels; a tenth of the training set validates."""
        return self.splits((images(folder, self.kind) if folder else noise(self.kind)).to(device))

    def splits(self, arrays: "Arrays") -> Splits:
        """Training, validation and test images with labels."""
        train = arrays.normalize(arrays.train_x), arrays.train_y
        found: Splits = {"train": train, "test": (arrays.normalize(arrays.test_x), arrays.test_y)}
        if self.validated:
            found["train"], found["validation"] = carved(*train)
        return found

    def augmented(self, x: Tensor, generator: torch.Generator) -> Tensor:
        """Cropped and flipped, if wanted."""
        return cropped(x, generator) if self.augment else x


def images(folder: Path, kind: str) -> "Arrays":
    """The image set of that kind in a folder, or in a folder below it."""
    from evenstep.lab import data  # needs extras

    path = data.find(folder, kind)
    if path is None:
        wanted = {"cifar": "cifar-10-batches-py", "folder": "Tiny-ImageNet as train/ and val/ with a folder per class"}
        raise UsageError(f"--data {folder}: {wanted[kind]} is not there, nor in a folder below")
    found = data.load(path, prefer=(kind, *(k for k in data.loading.KINDS if k != kind)))
    assert isinstance(found, data.Arrays)
    return found


def noise(kind: str) -> "Arrays":
    """Random images in the shape of the set."""
    from evenstep.lab.data import Arrays

    generator, classes = torch.Generator().manual_seed(0), 10 if kind == "cifar" else 200
    x = torch.randint(256, (96, 3, 32, 32), generator=generator, dtype=torch.uint8)
    y = torch.randint(classes, (96,), generator=generator)
    return Arrays(x[:64], y[:64], x[64:], y[64:], "noise", tuple(map(str, range(classes))))


def cropped(x: Tensor, generator: torch.Generator) -> Tensor:
    """A crop by 4 with reflection, and a flip, drawn for each image."""
    count, device = len(x), x.device
    padded = F.pad(x, (4, 4, 4, 4), mode="reflect")
    places = torch.randint(9, (2, count, 1), generator=generator, device=device) + torch.arange(32, device=device)
    flips = torch.rand(count, 1, generator=generator, device=device) < 0.5
    rows, columns = places[0], torch.where(flips, places[1].flip(1), places[1])
    index = torch.arange(count, device=device)
    return padded[index[:, None, None], :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2).contiguous()
