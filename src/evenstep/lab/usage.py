"""Checks of what the command line was given; a failure is one line for the user, never a traceback."""

from pathlib import Path

import torch


class UsageError(Exception):
    """Something the user asked for cannot be done; the message says what, why and the way out."""


def usable_device(name: str) -> torch.device:
    """The device called `name`, if this torch and this machine have it."""
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).add_(1).item()  # does it compute, and give back what it computed?
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UsageError(f"--device {name} cannot be used here ({reason}); try --device cpu") from error
    return device


def writable_folder(path: Path) -> Path:
    """`path`, made if need be, with the assurance that a file can be written there."""
    probe = path / ".writable"
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UsageError(f"--out {path} cannot be written ({error.strerror}); choose another folder") from error
    return path


def in_range(value: int, lowest: int, highest: int, flag: str) -> int:
    """`value`, if it lies between the bounds, both included."""
    if not lowest <= value <= highest:
        raise UsageError(f"{flag} must be between {lowest} and {highest}; got {value}")
    return value
