"""Folders of images, a folder per class below train/ and below val/ or test/: any ImageFolder, and Tiny-ImageNet."""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

from . import cache
from .arrays import Arrays

SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
HELD_OUT = ("val", "valid", "validation", "test")
ANNOTATIONS = "val_annotations.txt"  # beside the validation images of the original Tiny-ImageNet
BLOCK = 500  # images per task of a thread
VERSION = 1  # raise it when the same files would be decoded to other bytes

Labelled = list[tuple[Path, int]]


def image_folder(folder: Path | str, size: int = 32, cache_folder: Path | None = None) -> Arrays:
    """Images below train/<class>/ and val/<class>/ (or test/), as RGB, cut to a square and resized to `size` pixels.

    Classes are train's folders, in order of their names. Decoded once into a file in `cache_folder` (by default
    `cache.folder()`) under a key made of the images' names, sizes and times; a file that is not an image is an error
    that names it, and then nothing is kept.
    """
    folder = Path(folder)
    held_out = next((folder / name for name in HELD_OUT if (folder / name).is_dir()), None)
    if held_out is None:
        raise FileNotFoundError(f"{folder}: val/ or test/ is needed beside train/; neither is there.")
    classes = _class_folders(folder / "train")
    numbers = {name: k for k, name in enumerate(classes)}
    train, test = _labelled(folder / "train", numbers), _held_out(held_out, numbers)
    stamp = cache.key([VERSION, size, classes, _facts(folder, train), _facts(folder, test)])
    path = (cache.folder() if cache_folder is None else cache_folder) / f"images-{stamp}.npz"
    found = cache.remembered(path, lambda: {"train": _decoded(train, size), "test": _decoded(test, size)})
    return Arrays(
        torch.from_numpy(found["train"]),
        torch.tensor([label for _, label in train]),
        torch.from_numpy(found["test"]),
        torch.tensor([label for _, label in test]),
        f"{folder.resolve().name} ({len(classes)} classes, {size}x{size})",
        tuple(classes),
    )


def _class_folders(split: Path) -> list[str]:
    """The names of the classes."""
    if not split.is_dir():
        raise FileNotFoundError(f"{split}: no such folder; it should have one folder of images per class.")
    names = sorted(entry.name for entry in split.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    if len(names) < 2:
        raise ValueError(f"{split}: at least two folders of images are needed, one per class; found {len(names)}.")
    return names


def _labelled(split: Path, numbers: dict[str, int], complete: bool = True) -> Labelled:
    """The images below each class folder with the number of their class; `complete` allows no empty class."""
    found: Labelled = []
    for name in _class_folders(split):
        if name not in numbers:
            raise ValueError(f"{split / name}: no class of that name in train/; what is in it cannot be labelled.")
        images = _images(split / name)
        if complete and not images:
            raise ValueError(f"{split / name}: no image in it ({', '.join(SUFFIXES)}).")
        found += [(path, numbers[name]) for path in images]
    if not found:
        raise ValueError(f"{split}: no image in it ({', '.join(SUFFIXES)}).")
    return found


def _images(folder: Path) -> list[Path]:
    """Every image below `folder`, in order of names; hidden files and other kinds are passed over."""
    paths = [Path(where, name) for where, _, names in os.walk(folder) for name in names]
    return sorted(p for p in paths if p.suffix.lower() in SUFFIXES and not p.name.startswith("."))


def _held_out(split: Path, numbers: dict[str, int]) -> Labelled:
    """The held-out images: by class folder, or as the original Tiny-ImageNet lists them."""
    listing = split / ANNOTATIONS
    if not listing.is_file():
        return _labelled(split, numbers, complete=False)
    found: Labelled = []
    for number, line in enumerate(listing.read_text(encoding="utf-8").splitlines(), start=1):
        name, _, rest = line.partition("\t")
        label, path = rest.partition("\t")[0], split / "images" / name
        if label not in numbers:
            raise ValueError(f"{listing}, line {number}: no class {label!r} in train/.")
        if not path.is_file():
            raise ValueError(f"{listing}, line {number}: {path} is not there.")
        found.append((path, numbers[label]))
    return found


def _facts(folder: Path, images: Labelled) -> list[tuple[str, int, int, int]]:
    """What tells a changed image from the one that was decoded: place, class, size and time."""
    stats = [(path, label, path.stat()) for path, label in images]
    return [(path.relative_to(folder).as_posix(), label, s.st_size, s.st_mtime_ns) for path, label, s in stats]


def _decoded(images: Labelled, size: int) -> np.ndarray:
    """All images as bytes [N, 3, size, size], decoded by as many threads as there are cores."""
    blocks = [[path for path, _ in images[k : k + BLOCK]] for k in range(0, len(images), BLOCK)]
    pool = ThreadPoolExecutor(os.cpu_count())
    try:
        return np.concatenate(list(pool.map(lambda paths: _decode(paths, size), blocks)))
    finally:
        pool.shutdown(cancel_futures=True)


def _decode(paths: Sequence[Path], size: int) -> np.ndarray:
    """Some images as bytes [N, 3, size, size]: the largest square in the middle, resized."""
    from PIL import Image, ImageOps

    pixels = np.empty((len(paths), 3, size, size), np.uint8)
    for row, path in zip(pixels, paths, strict=True):
        try:
            with Image.open(path) as image:
                fitted = ImageOps.fit(image.convert("RGB"), (size, size), Image.Resampling.BILINEAR)
        except Exception as error:  # a damaged image can raise nearly anything
            raise ValueError(f"{path}: not a readable image: {error}.") from error
        row[:] = np.asarray(fitted).transpose(2, 0, 1)
    return pixels
