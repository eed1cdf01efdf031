"""One process at a time in a file."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

STALE = 60.0  # seconds after which a lock file is taken for one that its owner left behind


@contextmanager
def locked(path: Path) -> Iterator[IO[bytes]]:
    """The file, made if need be, open for reading and writing, and nobody else in here until it is closed."""
    flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0)
    try:
        with open(os.open(path, flags, 0o666), "r+b") as file:
            try:
                import fcntl
            except ImportError:  # not a POSIX system
                with beside(path):
                    yield file
                return
            fcntl.flock(file, fcntl.LOCK_EX)  # goes when the file is closed, or its process ends
            yield file
    except OSError as error:
        if error.filename is None:  # as when the disk is full
            error.filename = str(path)
        raise


@contextmanager
def beside(path: Path) -> Iterator[None]:
    """Hold a file named like `path` with `.lock` behind it, which only one process can make."""
    lock = path.with_name(path.name + ".lock")
    while True:
        try:
            os.close(os.open(lock, os.O_CREAT | os.O_EXCL))
            break
        except FileExistsError:
            with suppress(FileNotFoundError):
                if time.time() - lock.stat().st_mtime > STALE:
                    lock.unlink()
            time.sleep(0.01)
    try:
        yield
    finally:
        lock.unlink(missing_ok=True)
