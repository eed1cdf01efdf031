"""Checks of command line arguments; a failure is one line for the user, never a traceback."""

import difflib
import io
import json
import math
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

T = TypeVar("T")


class UsageError(Exception):
    """A request that cannot be carried out; the message says which, why and the way out."""


def usable_device(name: str) -> torch.device:
    """The device called `name`, if this torch and this machine have it; a GPU is prepared for many streams."""
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # read at the first use of the GPU
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).add_(1).item()  # does it compute and return results?
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise UsageError(f"--device {name} cannot be used here ({first_line(error)}); try --device cpu") from error
    return device


def of_file(error: OSError) -> str:
    """The system's error about a file in a few words: its name and the reason."""
    reason = error.strerror or str(error) or type(error).__name__
    return reason if error.filename is None else f"{error.filename}: {reason}"


def first_line(error: BaseException) -> str:
    """The first line of an exception's message, or its name."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def writable_folder(path: Path, flag: str = "--out") -> Path:
    """`path`, created if missing, after a check that files can be written there."""
    probe = path / ".writable"
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UsageError(f"{flag} {path} cannot be written ({error.strerror}); choose another folder") from error
    return path


def in_range(value: int, lowest: int, highest: int, flag: str) -> int:
    """`value`, if it is between the bounds, both included."""
    if not lowest <= value <= highest:
        raise UsageError(f"{flag} must be between {lowest} and {highest}; got {value}")
    return value


def known_name(name: str, known: Iterable[str], what: str) -> str:
    """`name`, if it is known; the error suggests the nearest name."""
    known = list(known)
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(known)}"
        raise UsageError(f"no {what} is called {name!r}; {hint}")
    return name


def budget(seconds: float | None) -> float | None:
    """`seconds`, if 0 or more; None is no limit."""
    if seconds is not None and not seconds >= 0:  # also refuses nan
        raise UsageError(f"--budget takes seconds, 0 or more; got {seconds:g}")
    return seconds


def some(values: Sequence[T], flag: str) -> Sequence[T]:
    """`values`, if there are any."""
    if not values:
        raise UsageError(f"{flag} is empty, so there is nothing to run; give it at least one value")
    return values


def stepsize(text: str, flag: str) -> float:
    """A positive, finite number."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise UsageError(f"{flag} takes positive numbers; got {text!r}")
    return value


def pairs(words: Iterable[str], flag: str) -> dict[str, Any]:
    """A dict from words NAME=VALUE; a value is read as JSON (0.1, true, null), or else as text.

    >>> pairs(["damping=0.1", "trust=null", "base=Adam"], "--options")
    {'damping': 0.1, 'trust': None, 'base': 'Adam'}
    """
    found: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not (name.isidentifier() and equals):
            raise UsageError(f"{flag} takes NAME=VALUE, such as damping=0.1 or trust=null; got {word!r}")
        try:
            found[name] = json.loads(value)
        except json.JSONDecodeError:
            found[name] = value
    return found


def any_terminal() -> None:
    """Write characters that the terminal lacks as escapes, instead of ending the command with an error."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
