"""Processes that share a study: whether one is alive, and an orderly end."""

import os
import platform
import signal
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


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
