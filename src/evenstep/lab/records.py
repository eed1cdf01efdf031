"""Records: one JSON line per run with its configuration, machine and metrics. Figures and tables are made from them."""

import io
import json
import math
import os
import platform
import subprocess
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import IO, Any

import torch

from .reading import FORMAT, Record, lines, parse


def make(config: dict[str, Any], seed: int, metrics: Any, device: torch.device | str = "cpu") -> Record:
    """A record of one finished run; numbers that are not finite become null, since JSON has no others."""
    return {
        "format": FORMAT,
        "config": plain(config),
        "seed": seed,
        "metrics": plain(metrics),
        "environment": environment(device),
        "commit": commit(),
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def environment(device: torch.device | str = "cpu") -> dict[str, Any]:
    """Versions, device and threads, by which a reader can judge a timing."""
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": device_name(torch.device(device)),
        "threads": torch.get_num_threads(),
    }


def device_name(device: torch.device) -> str:
    """Trade name of the GPU or CPU, if the system tells it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    texts = cpuinfo.read_text().splitlines() if device.type == "cpu" and cpuinfo.is_file() else []
    names = [text.partition(":")[2].strip() for text in texts if text.startswith("model name")]
    return names[0] if names else f"{device.type} ({platform.machine()})"


def commit(root: Path = Path(__file__).parents[3], variable: str = "EVENSTEP_COMMIT") -> str | None:
    """Commit of the checkout in `root`, "-dirty" if files were changed since; by default the one this file belongs to.

    An environment variable can name it where the files came without their history; None if neither does.
    """
    if variable in os.environ:
        return os.environ[variable]
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def plain(value: Any) -> Any:
    """`value` with tuples as lists and numbers that are not finite as None."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def dumps(value: dict[str, Any]) -> str:
    """`value` as a line of JSON with sorted keys: equal values give equal lines."""
    return json.dumps(plain(value), allow_nan=False, sort_keys=True)


def read(path: Path) -> list[Record]:
    """All records of a file, in order; a malformed line is a ValueError that names it."""
    return _records(path, io.BytesIO(path.read_bytes()))


def _records(path: Path, file: Iterable[bytes]) -> list[Record]:
    records = []
    for number, line in lines(file):
        try:
            records.append(parse(line))
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: not a record: {error}") from error
    return records


def append(path: Path, record: Record, *, once: bool = False) -> Record:
    """Add `record` to the file as one line that is on the disk when this returns; processes may share the file.

    With `once`, a record of the same configuration that the file has already is returned instead.
    """
    with locked(path) as file:
        if message := _mend(path, file):
            warnings.warn(message, stacklevel=2)
        if once:
            file.seek(0)
            same = [r for r in _records(path, file) if dumps(r["config"]) == dumps(record["config"])]
            if same:
                return same[0]
        _write(file, json.dumps(record, allow_nan=False).encode() + b"\n")
    return record


def mend(path: Path) -> str | None:
    """Move an incomplete last line, whose writer was killed, to a file ending in `.damaged`; a message, or None.

    A complete record that lacks only its line end gets one.
    """
    if not path.exists() or path.read_bytes()[-1:] in (b"", b"\n"):  # a whole file may be read-only
        return None
    with locked(path) as file:
        return _mend(path, file)


def _mend(path: Path, file: IO[bytes]) -> str | None:
    content = file.read()
    start, number = content.rfind(b"\n") + 1, content.count(b"\n") + 1
    if not content[start:].strip():
        return None
    try:
        json.loads(content[start:].decode("utf-8"))
    except (ValueError, RecursionError):
        damaged = path.with_name(path.name + ".damaged")
        with damaged.open("ab") as side:
            _write(side, content[start:] + b"\n")
        file.truncate(start)
        return f"{path}, line {number} was not written whole; it was moved to {damaged.name} and counts as not run"
    _write(file, b"\n")
    return f"{path}, line {number} had no line end; it was added"


def _write(file: IO[bytes], content: bytes) -> None:
    """Write at the end of the file, through to the disk."""
    file.seek(0, os.SEEK_END)
    file.write(content)
    file.flush()
    os.fsync(file.fileno())


@contextmanager
def locked(path: Path) -> Iterator[IO[bytes]]:
    """The file, created if need be, open for reading and writing by one process at a time (on POSIX systems)."""
    try:
        with open(os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o666), "r+b") as file:
            with suppress(ImportError):
                import fcntl

                fcntl.flock(file, fcntl.LOCK_EX)  # released when the file is closed, or its process ends
            yield file
    except OSError as error:
        if error.filename is None:  # as when the disk is full
            error.filename = str(path)
        raise
