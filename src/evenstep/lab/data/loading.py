"""`load`: a data set from a name or a path, whose kind is recognised."""

import difflib
import tarfile
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from ..usage import UsageError
from .arrays import Arrays, Text, text_file
from .cifar import CIFAR_FOLDER, TRAIN, cifar10
from .fashion import fashion_mnist, fashion_mnist_subset, idx_file
from .folder import HELD_OUT, image_folder

LAYOUTS = f"{CIFAR_FOLDER}, MNIST's idx files, or train/ with val/ or test/"
KINDS = ("cifar", "idx", "folder", "text", "archive")  # archive: a packed file that is no tar file
ARCHIVES = (".tar", ".gz", ".tgz", ".bz2", ".xz", ".zip")


def load(
    source: str | Path, *, size: int = 32, name: str | None = None, prefer: Sequence[str] = KINDS
) -> Arrays | Text:
    """The data set of the name or path `source`.

    A folder may be or contain cifar-10-batches-py, contain MNIST's four idx files, or be an ImageFolder (resized to
    `size` pixels); a file may be the archive of CIFAR-10, or a text. `name` is the name of CIFAR-10 in figures, for a
    copy that differs from the original. A folder of several kinds is read as the first one in `prefer`. A UsageError
    names a file that cannot be read, and why.
    """
    if str(source) == "fashion":
        return fashion_mnist_subset()
    path = Path(source)
    try:
        if not path.exists():
            raise UsageError(_unknown(path))
        kinds = sorted(recognise(path), key=list(prefer).index)
    except OSError as error:
        raise UsageError(f"--data {path}: {error.strerror or error}") from error
    if not kinds:
        raise UsageError(f"--data {path}: nothing known is there; a folder should hold {LAYOUTS}")
    readers: dict[str, Callable[[Path], Arrays | Text]] = {
        "idx": fashion_mnist, "folder": partial(image_folder, size=size), "text": text_file,
    }  # fmt: skip
    try:
        return readers.get(kinds[0], partial(cifar10, name=name))(path)
    except (ValueError, OSError) as error:
        raise UsageError(f"--data {path}: {str(error).removeprefix(f'{path}: ')}") from error


def find(source: str | Path, kind: str) -> Path | None:
    """The path of a set of that kind (see KINDS): `source` itself, or a child of that folder; None if there is none."""
    path = Path(source)
    children = sorted(path.iterdir()) if path.is_dir() else []
    return next((p for p in [path, *children] if p.exists() and kind in recognise(p)), None)


def recognise(path: Path) -> list[str]:
    """The kinds of data set that a path looks like."""
    if path.is_file():
        packed = "archive" if path.suffix.lower() in ARCHIVES else "text"
        try:
            return ["cifar" if tarfile.is_tarfile(path) else packed]
        except (EOFError, zlib.error):  # compressed, and damaged
            return ["archive"]
    looks = {
        "cifar": (path / CIFAR_FOLDER).is_dir() or any((path / batch).is_file() for batch in TRAIN),
        "idx": any(idx_file(path, f"{half}-images-idx3-ubyte") for half in ("train", "t10k")),
        "folder": (path / "train").is_dir() and any((path / held_out).is_dir() for held_out in HELD_OUT),
    }
    return [kind for kind, yes in looks.items() if yes]


def _unknown(path: Path) -> str:
    """The error for a missing path, with a suggestion."""
    beside = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, ["fashion", *beside], n=1)
    hint = f"did you mean {str(path.with_name(near[0]) if near[0] in beside else near[0])!r}?" if near else ""
    return f"--data {path}: no such file or folder, and no set of that name; {hint or 'known: fashion'}"
