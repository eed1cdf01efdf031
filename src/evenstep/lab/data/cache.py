"""Arrays kept between runs: whole or not at all, under a key that changes with what they were made from."""

import hashlib
import json
import os
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["folder", "key", "remembered"]


def folder() -> Path:
    """The folder kept between runs: EVENSTEP_CACHE, else evenstep/ in the user's cache folder."""
    if os.environ.get("EVENSTEP_CACHE"):
        return Path(os.environ["EVENSTEP_CACHE"])
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "evenstep"


def key(facts: Any) -> str:
    """A name that is the same for equal facts alone.

    >>> key([1, "a"]) == key([1, "a"]) != key([1, "b"])
    True
    """
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:24]


def remembered(path: Path, make: Callable[[], dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """The arrays in the .npz file `path`, or those that `make` gives, which are then written there.

    An error in `make` leaves no file. A file that cannot be read is made anew; one that cannot be written is a warning.
    """
    found = _read(path)
    if found is None:
        found = make()
        try:
            _write(path, found)
        except OSError as error:
            warnings.warn(f"{path}: decoded images are not kept ({error}); set EVENSTEP_CACHE.", stacklevel=2)
    return found


def _read(path: Path) -> dict[str, np.ndarray] | None:
    """All arrays of the file; None if there is none, or none that can be read."""
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            return {name: archive[name] for name in archive.files}
    except Exception:  # a damaged file can raise nearly anything, and is replaced
        return None


def _write(path: Path, arrays: dict[str, np.ndarray]) -> None:
    """Write beside `path` first, then move there: a reader sees the whole file or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
