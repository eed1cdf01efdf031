"""Processes that share a study: who is alive, an orderly end, and the lock on their journal."""

import os
import platform
import signal
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import IO

from . import records
from .locking import locked
from .usage import UsageError

JOURNAL = b'{"op_code":'  # the beginning of an Optuna journal


def host() -> str:
    """A name shared by the processes that can see each other, and by no others."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{platform.node()} {boot} {os.readlink('/proc/self/ns/pid')}"  # a container numbers its own processes
    except OSError:
        return f"{platform.node()} {uuid.getnode():x}"


def is_gone(where: str, pid: int) -> bool:
    """Whether a process of the host `where` has ended; False if this process cannot know."""
    if os.name == "posix" and where == host():
        try:
            os.kill(pid, 0)  # signal 0 only asks
        except ProcessLookupError:
            return True
        except OSError:
            pass
    return False


@contextmanager
def terminable() -> Iterator[None]:
    """Let SIGTERM raise SystemExit, so that the process can put things in order."""

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


class JournalLock:
    """Optuna's interface to a lock, on a journal: a line that a killed process left half-written is cut off first.

    Optuna reads only lines with an end, so nobody has read that line. Its text goes to a file beside the journal.
    """

    def __init__(self, path: Path, warn: Callable[[str], None]) -> None:
        self.path, self.warn = path, warn
        self.held: AbstractContextManager[IO[bytes]] | None = None

    def acquire(self) -> bool:
        """Wait for the lock."""
        held = locked(self.path)
        file = held.__enter__()
        try:
            self._repair(file)
        except BaseException:
            held.__exit__(None, None, None)
            raise
        self.held = held
        return True

    def release(self) -> None:
        """Let others in."""
        held, self.held = self.held, None
        if held is not None:
            held.__exit__(None, None, None)

    def _repair(self, file: IO[bytes]) -> None:
        begin = file.read(len(JOURNAL))
        if not JOURNAL.startswith(begin):
            raise UsageError(f"--study {self.path} is not a journal of Optuna; choose a file that does not exist yet")
        if begin and (file.seek(-1, os.SEEK_END), file.read(1))[1] != b"\n":
            file.seek(0)
            self.warn(records.cut(self.path, file, file.read().rfind(b"\n") + 1))
