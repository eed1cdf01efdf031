"""A data set in memory: images as bytes, or a text as numbers of its characters."""

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

SHORTEST = 10_000  # characters of a text


@dataclass(frozen=True, eq=False)
class Arrays:
    """A whole image set: bytes [N, C, H, W] and class numbers [N], for training and for test."""

    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor
    name: str
    classes: tuple[str, ...]

    @property
    def channels(self) -> int:
        """Number of image channels."""
        return self.train_x.shape[1]

    @cached_property
    def mean_std(self) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of each channel over the training set, both [C, 1, 1], exact up to rounding.

        Computed from a histogram of the 256 byte values, without a float copy of the set.
        """
        channels = self.train_x.cpu().unbind(1)
        counts = torch.stack([torch.bincount(channel.flatten(), minlength=256) for channel in channels]).double()
        share = counts / counts.sum(1, keepdim=True)
        values = torch.arange(256, dtype=torch.float64)
        mean = share @ values
        variance = (share * (values - mean[:, None]) ** 2).sum(1)
        std = torch.where(variance > 0, variance.sqrt(), 1.0)
        device = self.train_x.device
        return mean.float()[:, None, None].to(device), std.float()[:, None, None].to(device)

    def normalize(self, x: Tensor) -> Tensor:
        """Bytes to floats of mean 0 and variance 1 per channel, as measured on the training set."""
        mean, std = self.mean_std
        return (x.float() - mean) / std

    def to(self, device: torch.device | str) -> "Arrays":
        """The same set with its tensors on `device`."""
        if self.train_x.to(device) is self.train_x:
            return self
        moved = {name: getattr(self, name).to(device) for name in ("train_x", "train_y", "test_x", "test_y")}
        return replace(self, **moved)

    def subset(self, count: int, seed: int = 0) -> "Arrays":
        """`count` training images drawn at random, the same for the same seed; the test set stays whole."""
        if not 0 < count <= len(self.train_y):
            raise ValueError(f"{self.name}: a subset has between 1 and {len(self.train_y)} images; got {count}.")
        if count == len(self.train_y):
            return self
        rows = torch.randperm(len(self.train_y), generator=torch.Generator().manual_seed(seed))[:count]
        rows = rows.to(self.train_x.device)
        name = f"{self.name}, {count:,} of {len(self.train_y):,}"
        return replace(self, train_x=self.train_x[rows], train_y=self.train_y[rows], name=name)


@dataclass(frozen=True, eq=False)
class Text:
    """A text as numbers of its characters, the last tenth held out."""

    train: Tensor
    test: Tensor
    name: str
    vocabulary: str

    @property
    def channels(self) -> int:
        """Number of different characters, the size of a network's vocabulary."""
        return len(self.vocabulary)

    def to(self, device: torch.device | str) -> "Text":
        """The same text with its tensors on `device`."""
        return replace(self, train=self.train.to(device), test=self.test.to(device))


def text_file(path: Path | str) -> Text:
    """A text file in UTF-8, by character."""
    path = Path(path)
    try:
        content = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not a text in UTF-8: {error}.") from error
    if len(content) < SHORTEST:
        raise ValueError(f"{path}: a text of at least {SHORTEST:,} characters is needed; this one has {len(content)}.")
    number = {character: k for k, character in enumerate(sorted(set(content)))}
    tokens = torch.tensor([number[character] for character in content])
    split = len(tokens) * 9 // 10
    return Text(tokens[:split], tokens[split:], path.stem, "".join(number))
