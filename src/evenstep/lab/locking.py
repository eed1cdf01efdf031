"""One process at a time in a file."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

STALE = 60.0  # seconds after which a lock file counts as abandoned


@contextmanager
def locked(path: Path) -> Iterator[IO[bytes]]:
    """The file, created if need be, open for reading and writing by one process at a time."""
    flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0)
    try:
        with open(os.open(path, flags, 0o666), "r+b") as file:
            try:
                import fcntl
            except ImportError:  # not a POSIX system
                with lock_file(path):
                    yield file
                return
            fcntl.flock(file, fcntl.LOCK_EX)  # released when the file is closed, or its process ends
            yield file
    except OSError as error:
        if error.filename is None:  # as when the disk is full
            error.filename = str(path)
        raise


@contextmanager
def lock_file(path: Path) -> Iterator[None]:
    """Hold the file `path`.lock, which only one process can create."""
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
