"""Image sets as tensors in memory: Fashion-MNIST (5,000 images, shipped), CIFAR-10 (a folder of yours)."""

import hashlib
import io
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from evenstep.lab import safe_pickle

FASHION_FILE = "fashion-mnist-5000.npz.xz"
FASHION_SHA256 = "cd5d79da25a9b026e6b1eb283d920cf53447189e511471269a59a33b3b57cb67"
FASHION_NAME = "Fashion-MNIST (4,000 training images)"
FASHION_CLASSES = ("T-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot")
CIFAR_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
CIFAR_PIXELS = 3 * 32 * 32


@dataclass(frozen=True, eq=False)
class Arrays:
    """A whole image set: bytes [N, C, 32, 32] and class numbers [N], for training and for test."""

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

        They come from a histogram of the 256 byte values, so no float copy of the set is made.
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


@dataclass(frozen=True, eq=False)
class Text:
    """A text as numbers of its characters, the last tenth held out."""

    train: Tensor
    test: Tensor
    name: str
    vocabulary: str

    @property
    def channels(self) -> int:
        """Number of different characters: what a network must know of the text."""
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
    if len(content) < 10_000:
        raise ValueError(f"{path}: a text of at least 10,000 characters is needed; this one has {len(content)}.")
    vocabulary = "".join(sorted(set(content)))
    number = {character: k for k, character in enumerate(vocabulary)}
    tokens = torch.tensor([number[character] for character in content])
    split = len(tokens) * 9 // 10
    return Text(tokens[:split], tokens[split:], path.stem, vocabulary)


def fashion_mnist_subset(path: Path | None = None) -> Arrays:
    """The 4,000 + 1,000 Fashion-MNIST images inside the package, padded with zeros from 28x28 to 32x32.

    Class-balanced: the first 400 of each class of the training set and the first 100 of each class of the
    test set, in file order (`scripts/make_fashion_subset.py` makes the file).
    """
    source = resources.files("evenstep.lab").joinpath("assets", FASHION_FILE) if path is None else path
    packed = source.read_bytes()
    if (found := hashlib.sha256(packed).hexdigest()) != FASHION_SHA256:
        raise ValueError(f"{source}: sha256 is {found}, not {FASHION_SHA256}: the file is damaged; reinstall evenstep.")
    import lzma  # here, since some builds of Python come without it

    with np.load(io.BytesIO(lzma.decompress(packed)), allow_pickle=False) as arrays:
        train_x, train_y, test_x, test_y = (
            torch.from_numpy(arrays[key]) for key in ("train_x", "train_y", "test_x", "test_y")
        )
    train_x, test_x = (functional.pad(x[:, None], (2, 2, 2, 2)) for x in (train_x, test_x))
    return Arrays(train_x, train_y.long(), test_x, test_y.long(), FASHION_NAME, FASHION_CLASSES)


def cifar10(folder: Path | str, name: str = "CIFAR-10") -> Arrays:
    """CIFAR-10 from a `cifar-10-batches-py` folder, or from the folder that holds it.

    The files are pickles, read by an unpickler that can build arrays and nothing else. `name` is for figures:
    give "CIFAR-10 (JPEG)" if yours is a re-encoded copy.
    """
    folder = Path(folder)
    if (folder / "cifar-10-batches-py").is_dir():
        folder = folder / "cifar-10-batches-py"
    train = [_cifar_batch(folder / f"data_batch_{k}") for k in range(1, 6)]
    test_x, test_y = _cifar_batch(folder / "test_batch")
    train_x, train_y = (torch.cat(parts) for parts in zip(*train, strict=True))
    return Arrays(train_x, train_y, test_x, test_y, name, CIFAR_CLASSES)


def _cifar_batch(path: Path) -> tuple[Tensor, Tensor]:
    """Images [N, 3, 32, 32] and labels [N] of one CIFAR-10 batch file."""
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; it should be one of CIFAR-10's python batches.")
    batch = safe_pickle.load(path)
    if not isinstance(batch, dict) or not {b"data", b"labels"} <= batch.keys():
        raise ValueError(f"{path}: not a CIFAR-10 batch: it should be a dict with b'data' and b'labels'.")
    data, labels = batch[b"data"], batch[b"labels"]
    if not (isinstance(data, np.ndarray) and data.dtype == np.uint8 and data.shape[1:] == (CIFAR_PIXELS,)):
        raise ValueError(f"{path}: b'data' should be bytes of shape [N, {CIFAR_PIXELS}]; got {_describe(data)}.")
    if not isinstance(labels, list) or len(labels) != len(data):
        raise ValueError(f"{path}: b'labels' should be a list of {len(data)} numbers; got {_describe(labels)}.")
    wrong = [label for label in labels if not (isinstance(label, int | np.integer) and 0 <= label < 10)]
    if wrong:
        raise ValueError(f"{path}: labels should be whole numbers from 0 to 9; found {wrong[0]!r}.")
    return torch.from_numpy(data.reshape(-1, 3, 32, 32).copy()), torch.tensor([int(label) for label in labels])


def _describe(value: Any) -> str:
    """What came instead, in a few words."""
    if isinstance(value, np.ndarray):
        return f"{value.dtype} of shape {list(value.shape)}"
    return f"{type(value).__name__} of length {len(value)}" if hasattr(value, "__len__") else type(value).__name__


def batches(
    arrays: Arrays,
    batch_size: int,
    generator: torch.Generator,
    device: torch.device | str = "cpu",
    augment: bool = False,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Normalized training batches of one epoch in a random order; the last may be smaller.

    The order, and the crops and flips if `augment`, are drawn on the CPU from `generator`: the same on every device.
    """
    arrays = arrays.to(device)
    order = torch.randperm(len(arrays.train_y), generator=generator).to(device)
    for rows in order.split(batch_size):
        x = arrays.normalize(arrays.train_x[rows])
        yield crop_and_flip(x, generator) if augment else x, arrays.train_y[rows]


def crop_and_flip(x: Tensor, generator: torch.Generator, margin: int = 4) -> Tensor:
    """Each image shifted by up to `margin` pixels both ways, and mirrored half of the time.

    What moves in is the image's own reflection: a border of one colour would be there in training alone.
    """
    count, _, height, width = x.shape
    shift = torch.randint(0, 2 * margin + 1, (2, count, 1), generator=generator).to(x.device)
    mirrored = torch.randint(0, 2, (count, 1), generator=generator).bool().to(x.device)
    rows = torch.arange(height, device=x.device) + shift[0]
    columns = torch.arange(width, device=x.device) + shift[1]
    columns = torch.where(mirrored, columns.flip(1), columns)
    padded = functional.pad(x, (margin, margin, margin, margin), mode="reflect")
    image = torch.arange(count, device=x.device)[:, None, None]
    return padded.movedim(1, -1)[image, rows[:, :, None], columns[:, None, :]].movedim(-1, 1).contiguous()
