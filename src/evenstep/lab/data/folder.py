"""Folders of images: a folder per class below train/, and below val/ or test/."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from .arrays import Arrays

SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
HELD_OUT = ("val", "valid", "validation", "test")


def image_folder(folder: Path | str, size: int = 32) -> Arrays:
    """Images below train/<class>/ and val/<class>/ (or test/), as RGB, cut to a square and resized to `size` pixels.

    Classes are train's folders in alphabetical order.
    """
    folder = Path(folder)
    held_out = next((folder / name for name in HELD_OUT if (folder / name).is_dir()), None)
    if held_out is None:
        raise FileNotFoundError(f"{folder}: val/ or test/ is needed beside train/; neither is there.")
    classes = _class_folders(folder / "train")
    numbers = {name: k for k, name in enumerate(classes)}
    train, test = _labelled(folder / "train", numbers), _labelled(held_out, numbers, complete=False)
    name = f"{folder.resolve().name} ({len(classes)} classes, {size}x{size})"
    return Arrays(*_decoded(train, size), *_decoded(test, size), name, tuple(classes))


def _class_folders(split: Path) -> list[str]:
    """The names of the classes."""
    if not split.is_dir():
        raise FileNotFoundError(f"{split}: no such folder; it should have one folder of images per class.")
    names = sorted(entry.name for entry in split.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    if len(names) < 2:
        raise ValueError(f"{split}: at least two folders of images are needed, one per class; found {len(names)}.")
    return names


def _labelled(split: Path, numbers: dict[str, int], complete: bool = True) -> list[tuple[Path, int]]:
    """The images below each class folder with the number of their class; `complete` allows no empty class."""
    found: list[tuple[Path, int]] = []
    for name in _class_folders(split):
        if name not in numbers:
            raise ValueError(f"{split / name}: no class of that name in train/; its images cannot be labelled.")
        images = _images(split / name)
        if complete and not images:
            raise ValueError(f"{split / name}: no image in it ({', '.join(SUFFIXES)}).")
        found += [(path, numbers[name]) for path in images]
    if not found:
        raise ValueError(f"{split}: no image in it ({', '.join(SUFFIXES)}).")
    return found


def _images(folder: Path) -> list[Path]:
    """Every image below `folder` in alphabetical order, without hidden files."""
    paths = [Path(where, name) for where, _, names in os.walk(folder) for name in names]
    return sorted(p for p in paths if p.suffix.lower() in SUFFIXES and not p.name.startswith("."))


def _decoded(images: list[tuple[Path, int]], size: int) -> tuple[Tensor, Tensor]:
    """Images as bytes [N, 3, size, size], decoded by as many threads as there are cores, and their labels."""
    pool = ThreadPoolExecutor(os.cpu_count())
    try:
        pixels = list(pool.map(lambda image: _decode(image[0], size), images))
    finally:
        pool.shutdown(cancel_futures=True)
    return torch.from_numpy(np.stack(pixels)), torch.tensor([label for _, label in images])


def _decode(path: Path, size: int) -> np.ndarray:
    """One image as bytes [3, size, size]: the largest square in the middle, resized."""
    from PIL import Image, ImageOps

    try:
        with Image.open(path) as image:
            fitted = ImageOps.fit(image.convert("RGB"), (size, size), Image.Resampling.BILINEAR)
    except Exception as error:  # a damaged image can raise nearly anything
        raise ValueError(f"{path}: not a readable image: {error}.") from error
    return np.asarray(fitted).transpose(2, 0, 1)
