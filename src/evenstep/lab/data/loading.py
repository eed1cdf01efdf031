"""`load`: a data set from a name or a path, whatever the path holds."""

import difflib
import tarfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

from ..usage import UsageError
from .arrays import Arrays, Text
from .cifar import CIFAR_FOLDER, TRAIN, cifar10
from .fashion import fashion_mnist, fashion_mnist_subset, idx_file
from .folder import HELD_OUT, image_folder
from .text import text_file

NAMES = ("fashion",)  # sets that need no path: the images inside the package
LAYOUTS = f"{CIFAR_FOLDER}, MNIST's idx files, or train/ with val/ or test/"
KINDS = ("cifar", "idx", "folder", "text", "archive")  # the last: one that is no tar file
ARCHIVES = (".tar", ".gz", ".tgz", ".bz2", ".xz", ".zip")


def load(
    source: str | Path, *, size: int = 32, name: str | None = None, prefer: Sequence[str] = KINDS
) -> Arrays | Text:
    """The data set called `source` (see NAMES), or that lies there.

    A folder may be or hold cifar-10-batches-py, hold MNIST's four idx files, or be an ImageFolder (resized to `size`
    pixels); a file may be the archive of CIFAR-10, or a text. `name` is what figures call CIFAR-10 where the copy is
    not the original, `prefer` the order in which kinds are taken where a folder is several. What cannot be read is a
    UsageError that names the file and says why.
    """
    if str(source) in NAMES:
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
    readers: dict[str, Callable[[], Arrays | Text]] = {
        "cifar": lambda: cifar10(path, name),
        "idx": lambda: fashion_mnist(path),
        "folder": lambda: image_folder(path, size),
        "text": lambda: text_file(path),
        "archive": lambda: cifar10(path, name),
    }
    try:
        return readers[kinds[0]]()
    except (ValueError, OSError) as error:
        raise UsageError(f"--data {path}: {str(error).removeprefix(f'{path}: ')}") from error


def find(source: str | Path, kind: str) -> Path | None:
    """Where a set of that kind (see KINDS) lies: `source` itself, or a child of that folder; None if nowhere."""
    path = Path(source)
    children = sorted(path.iterdir()) if path.is_dir() else []
    return next((p for p in [path, *children] if p.exists() and kind in recognise(p)), None)


def recognise(path: Path) -> list[str]:
    """The kinds of data set that a path looks like, none if it looks like no known one."""
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
    """Nothing of that name: what to try instead."""
    beside = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, [*NAMES, *beside], n=1)
    hint = f"did you mean {str(path.with_name(near[0]) if near[0] in beside else near[0])!r}?" if near else ""
    return f"--data {path}: no such file or folder, and no set of that name; {hint or 'known: ' + ', '.join(NAMES)}"
