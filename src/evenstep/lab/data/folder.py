"""Folders of images: a folder per class below train/, and below val/ or test/."""

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
    train, test = _classes(folder / "train"), _classes(held_out)
    if empty := [name for name, images in train.items() if not images]:
        raise ValueError(f"{folder / 'train' / empty[0]}: no image in it ({', '.join(SUFFIXES)}).")
    if unknown := [name for name in test if name not in train]:
        raise ValueError(f"{held_out / unknown[0]}: no class of that name in train/; its images cannot be labelled.")
    if not any(test.values()):
        raise ValueError(f"{held_out}: no image in it ({', '.join(SUFFIXES)}).")
    name, numbers = folder.resolve().name, {name: k for k, name in enumerate(train)}
    halves = [_decoded([(p, numbers[c]) for c in half for p in half[c]], size) for half in (train, test)]
    return Arrays(*halves[0], *halves[1], f"{name} ({len(train)} classes, {size}x{size})", tuple(train))


def _classes(split: Path) -> dict[str, list[Path]]:
    """The images of each class, hidden files left out, in alphabetical order."""
    if not split.is_dir():
        raise FileNotFoundError(f"{split}: no such folder; it should have one folder of images per class.")
    folders = sorted(entry for entry in split.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    if len(folders) < 2:
        raise ValueError(f"{split}: at least two folders of images are needed, one per class; found {len(folders)}.")
    return {
        folder.name: sorted(p for p in folder.rglob("*") if p.suffix.lower() in SUFFIXES and not p.name.startswith("."))
        for folder in folders
    }


def _decoded(images: list[tuple[Path, int]], size: int) -> tuple[Tensor, Tensor]:
    """Images as bytes [N, 3, size, size], decoded in threads, and their labels."""
    with ThreadPoolExecutor() as pool:
        pixels = list(pool.map(lambda image: _decode(image[0], size), images))
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
