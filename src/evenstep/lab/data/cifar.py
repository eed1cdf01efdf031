"""CIFAR-10 from its python batches, in a folder or in the archive; no code in them is executed."""

import hashlib
import tarfile
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .. import safe_pickle
from ..usage import first_line
from .arrays import Arrays

CIFAR_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
CIFAR_PIXELS = 3 * 32 * 32
CIFAR_FOLDER = "cifar-10-batches-py"
TRAIN, TEST = tuple(f"data_batch_{k}" for k in range(1, 6)), "test_batch"
ORIGINAL_TEST_MD5 = "40351d587109b95175f43aff81a1287e"


def cifar10(source: Path | str, name: str | None = None) -> Arrays:
    """CIFAR-10 from a `cifar-10-batches-py` folder, from its parent folder, or from the .tar.gz archive.

    The files are pickles, read by an unpickler that can build arrays and nothing else. `name` is for figures; a copy
    whose test batch differs from the original is called "CIFAR-10 (altered copy)" unless it has a `name`.
    """
    source = Path(source)
    files = _from_archive(source) if source.is_file() else _from_folder(source)
    if name is None:
        digest = hashlib.md5(files[TEST][1], usedforsecurity=False).hexdigest()
        name = "CIFAR-10" if digest == ORIGINAL_TEST_MD5 else "CIFAR-10 (altered copy)"
    train = [_batch(*files[key]) for key in TRAIN]
    test_x, test_y = _batch(*files[TEST])
    train_x, train_y = (torch.cat(parts) for parts in zip(*train, strict=True))
    return Arrays(train_x, train_y, test_x, test_y, name, CIFAR_CLASSES)


def _from_folder(folder: Path) -> dict[str, tuple[str, bytes]]:
    """The path and the content of each batch file."""
    inner = folder / CIFAR_FOLDER
    paths = {key: (inner if inner.is_dir() else folder) / key for key in (*TRAIN, TEST)}
    if missing := [path for path in paths.values() if not path.is_file()]:
        raise FileNotFoundError(f"{missing[0]}: no such file; it should be one of CIFAR-10's python batches.")
    return {key: (str(path), path.read_bytes()) for key, path in paths.items()}


def _from_archive(path: Path) -> dict[str, tuple[str, bytes]]:
    """The same from a tar archive, compressed or not, without writing to disk."""
    files: dict[str, tuple[str, bytes]] = {}
    try:
        with tarfile.open(path) as archive:
            for member in archive:
                inside = PurePosixPath(member.name)
                content = archive.extractfile(member) if inside.parent.name == CIFAR_FOLDER else None
                if content is not None:
                    files[inside.name] = f"{path}, {member.name}", content.read()
            while archive.fileobj is not None and archive.fileobj.read(1 << 20):
                pass  # read to the end, where the checksum is
    except Exception as error:  # a damaged archive can raise nearly anything
        raise ValueError(f"{path}: not a readable archive: {first_line(error)}.") from error
    if missing := [key for key in (*TRAIN, TEST) if key not in files]:
        raise ValueError(f"{path}: {CIFAR_FOLDER}/{missing[0]} is not in the archive; is it CIFAR-10's python version?")
    return files


def _batch(where: str, content: bytes) -> tuple[Tensor, Tensor]:
    """Images [N, 3, 32, 32] and labels [N] of one batch file."""
    batch = safe_pickle.loads(content, where)
    if not isinstance(batch, dict) or not {b"data", b"labels"} <= batch.keys():
        raise ValueError(f"{where}: not a CIFAR-10 batch: it should be a dict with b'data' and b'labels'.")
    data, labels = batch[b"data"], batch[b"labels"]
    if not (isinstance(data, np.ndarray) and data.dtype == np.uint8 and data.shape[1:] == (CIFAR_PIXELS,)):
        raise ValueError(f"{where}: b'data' should be bytes of shape [N, {CIFAR_PIXELS}]; got {_describe(data)}.")
    if not isinstance(labels, list) or not labels or len(labels) != len(data):
        raise ValueError(f"{where}: b'labels' should be a list of {len(data)} numbers; got {_describe(labels)}.")
    if wrong := [label for label in labels if not (isinstance(label, int | np.integer) and 0 <= label < 10)]:
        raise ValueError(f"{where}: labels should be whole numbers from 0 to 9; found {wrong[0]!r}.")
    return torch.from_numpy(data.reshape(-1, 3, 32, 32).copy()), torch.tensor([int(label) for label in labels])


def _describe(value: Any) -> str:
    """A wrong value in a few words."""
    if isinstance(value, np.ndarray):
        return f"{value.dtype} of shape {list(value.shape)}"
    return f"{type(value).__name__} of length {len(value)}" if hasattr(value, "__len__") else type(value).__name__
