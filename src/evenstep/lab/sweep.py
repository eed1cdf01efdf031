"""Many trials into one file of records: a trial whose record is there already is not run again."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import torch

from . import records
from .identity import by_key
from .parallel_trials import AT_ONCE, round_robin
from .reading import Record
from .records import dumps
from .trial import OnEpoch, Trial, config, work
from .usage import UsageError
from .user_task import Data, UserTask

OnRecord = Callable[[Record], None]


def sweep(
    trials: Sequence[Trial],
    data: Data,
    out: Path,
    *,
    device: torch.device | str = "cpu",
    on_record: OnRecord | None = None,
    on_epoch: OnEpoch | None = None,
    on_begin: Callable[[Trial], None] | None = None,
    at_once: int | None = None,
    warn: Callable[[str], None] = warnings.warn,
) -> list[Record]:
    """The records of all `trials`, in their order; missing ones are run and added to `out`, each as it ends.

    On a GPU up to `at_once` trials train side by side; elsewhere one, and also of a user's file, whose network may be
    large. A sweep that was stopped or killed goes on where it was: only the trials that were running begin again. A
    failing trial stops no other; its exception is raised at the end. `on_begin` is called before each trial and may
    raise to begin no further one. `warn` receives a line if the file had to be repaired.
    """
    found = known(out, data, warn)
    missing = {key: t for t in trials if (key := dumps(config(t, data))) not in found}

    def to_run() -> Iterator[Trial]:
        for key, trial in missing.items():
            found.update(known(out, data))  # another process may share the file
            if key not in found:
                if on_begin is not None:
                    on_begin(trial)
                yield trial

    for record in side_by_side(to_run(), data, device, at_once, on_epoch):
        kept = records.append(out, record, once=True)
        found[dumps(kept["config"])] = kept
        if on_record is not None:
            on_record(kept)
    return [found[dumps(config(trial, data))] for trial in trials]


def side_by_side(
    trials: Iterable[Trial],
    data: Data,
    device: torch.device | str = "cpu",
    at_once: int | None = None,
    on_epoch: OnEpoch | None = None,
) -> Iterator[Record]:
    """The record of each trial as soon as it ends; `environment.at_once` says how many may have shared the device."""
    at_once = at_once or (1 if isinstance(data, UserTask) else AT_ONCE.get(torch.device(device).type, 1))
    data = data.to(device)
    for record in round_robin((work(trial, data, device, on_epoch) for trial in trials), device, at_once):
        record["environment"]["at_once"] = at_once
        yield record


def finished(out: Path, warn: Callable[[str], None] = warnings.warn) -> list[Record]:
    """The records in a file; a line that is none is a UsageError.

    A last line that a killed run left half-written is repaired first, which `warn` is told.
    """
    if not out.exists():
        return []
    if message := records.mend(out):
        warn(message)
    try:
        return records.read(out)
    except ValueError as error:
        raise UsageError(f"{error}; remove that line, or choose another --out") from error


def known(out: Path, data: Data, warn: Callable[[str], None] = warnings.warn) -> dict[str, Record]:
    """The records in a file by configuration; runs on other data of the same name are a UsageError."""
    return by_key(finished(out, warn), data, out)


def recorded(
    trials: Sequence[Trial], data: Data, out: Path, warn: Callable[[str], None] = warnings.warn
) -> list[Record]:
    """The records of those trials that are in the file, in the trials' order."""
    found = known(out, data, warn)
    return [found[key] for trial in trials if (key := dumps(config(trial, data))) in found]
