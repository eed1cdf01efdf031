"""Fashion-MNIST: the 5,000 images in the package, and the full set or any other in MNIST's idx files."""

import gzip
import hashlib
import io
import math
import struct
import zlib
from importlib import resources
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from .arrays import Arrays

FASHION_FILE = "fashion-mnist-5000.npz.xz"
FASHION_SHA256 = "cd5d79da25a9b026e6b1eb283d920cf53447189e511471269a59a33b3b57cb67"
FASHION_NAME = "Fashion-MNIST (4,000 training images)"
FASHION_CLASSES = ("T-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot")
FASHION_BEGINS = [9, 0, 0, 3, 0, 2, 7, 2, 5, 5]  # its first labels: the file names are those of MNIST
SIDE = 32


def fashion_mnist_subset(path: Path | None = None) -> Arrays:
    """The 4,000 + 1,000 Fashion-MNIST images inside the package, padded with zeros from 28x28 to 32x32.

    Class-balanced: the first 400 of each class of the training set and the first 100 of each class of the
    test set, in file order (`scripts/make_fashion_subset.py` makes the file).
    """
    source = resources.files("evenstep.lab").joinpath("assets", FASHION_FILE) if path is None else path
    packed = source.read_bytes()
    if (found := hashlib.sha256(packed).hexdigest()) != FASHION_SHA256:
        raise ValueError(f"{source}: sha256 is {found}, not {FASHION_SHA256}: the file is damaged; reinstall evenstep.")
    import lzma  # some builds of Python lack it

    with np.load(io.BytesIO(lzma.decompress(packed)), allow_pickle=False) as arrays:
        x, y = ([torch.from_numpy(arrays[f"{half}_{key}"]) for half in ("train", "test")] for key in "xy")
    return Arrays(_padded(x[0]), y[0].long(), _padded(x[1]), y[1].long(), FASHION_NAME, FASHION_CLASSES)


def fashion_mnist(folder: Path | str) -> Arrays:
    """The full set from a folder of idx files, gzipped or not, padded with zeros to 32x32.

    MNIST and its other relatives have the same four files; they are named after their folder.
    """
    folder = Path(folder)
    train_x, train_y = _split(folder, "train")
    test_x, test_y = _split(folder, "t10k")
    if train_y[:10].tolist() == FASHION_BEGINS:
        return Arrays(train_x, train_y, test_x, test_y, "Fashion-MNIST", FASHION_CLASSES)
    return Arrays(train_x, train_y, test_x, test_y, folder.resolve().name, tuple("0123456789"))


def idx_file(folder: Path, name: str) -> Path | None:
    """The file called `name` in `folder`, or its gzipped form; None if neither is there."""
    return next((p for p in (folder / name, folder / f"{name}.gz") if p.is_file()), None)


def _split(folder: Path, prefix: str) -> tuple[Tensor, Tensor]:
    """Images [N, 1, 32, 32] and labels [N] of one half of the set."""
    images_path, images = _read(folder, f"{prefix}-images-idx3-ubyte", 3)
    labels_path, labels = _read(folder, f"{prefix}-labels-idx1-ubyte", 1)
    if 0 in images.shape or max(images.shape[1:]) > SIDE:
        got = "x".join(map(str, images.shape))
        raise ValueError(f"{images_path}: images of at most {SIDE}x{SIDE} pixels are needed; got {got}.")
    if len(labels) != len(images):
        raise ValueError(f"{labels_path}: {len(images)} labels are needed, one per image; got {len(labels)}.")
    if labels.max() > 9:
        raise ValueError(f"{labels_path}: labels should be from 0 to 9; found {labels.max()}.")
    return _padded(torch.from_numpy(images)), torch.from_numpy(labels).long()


def _read(folder: Path, name: str, dimensions: int) -> tuple[Path, np.ndarray]:
    """The path of an idx file, and its bytes as an array."""
    path = idx_file(folder, name)
    if path is None:
        raise FileNotFoundError(f"{folder / name}: no such file, nor {name}.gz; it should be one of MNIST's idx files.")
    raw = path.read_bytes()
    if raw[:2] == b"\x1f\x8b":
        try:
            raw = gzip.decompress(raw)
        except (OSError, EOFError, zlib.error) as error:
            raise ValueError(f"{path}: not a readable gzip file: {error}.") from error
    start = 4 + 4 * dimensions
    if raw[:4] != bytes((0, 0, 8, dimensions)) or len(raw) < start:
        raise ValueError(f"{path}: not an idx file of bytes with {dimensions} dimensions; it begins {raw[:4].hex()!r}.")
    shape = struct.unpack(f">{dimensions}I", raw[4:start])
    if len(raw) - start != math.prod(shape):
        raise ValueError(f"{path}: {math.prod(shape)} bytes should follow its head; {len(raw) - start} do.")
    return path, np.frombuffer(raw, np.uint8, offset=start).reshape(shape).copy()


def _padded(x: Tensor) -> Tensor:
    """Images [N, H, W] in the middle of [N, 1, 32, 32] zeros."""
    high, wide = SIDE - x.shape[1], SIDE - x.shape[2]
    return functional.pad(x[:, None], (wide // 2, (wide + 1) // 2, high // 2, (high + 1) // 2))
