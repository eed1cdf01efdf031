"""Many trials into one file of records: what is there already is not run again."""

import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from . import records
from .data import Arrays, Text
from .identity import by_key
from .together import OnEpoch, alike, run_interleaved, why_alone
from .trial import Trial, config, run
from .turns import Work, in_turn

MEMBERS = {"cuda": 24}  # of one ensemble, by device
MEMBERS_ELSEWHERE = 8

OnRecord = Callable[[records.Record], None]


def sweep(
    trials: Sequence[Trial],
    arrays: Arrays | Text,
    out: Path,
    *,
    device: torch.device | str = "cpu",
    on_record: OnRecord | None = None,
    on_epoch: OnEpoch | None = None,
    members: int | None = None,
    at_once: int | None = None,
    budget: float | None = None,
    warn: Callable[[str], None] = warnings.warn,
) -> list[records.Record]:
    """The records of all `trials`, in their order; those that `out` lacks are run and added to it, each as it ends.

    Trials that differ in stepsize, seed and L2 alone run together, up to `members` at a time (1: each alone); on a GPU
    several such ensembles run at the same time, `at_once` of them (elsewhere one). A sweep that was stopped, by Ctrl-C
    or by force, goes on where it was: finished runs are in the file, those that ran at the moment begin again. After
    `budget` seconds nothing more is begun, and only what is finished comes back. What fails stops nothing else, and its
    exception is raised in the end. `warn` gets one line if the file had to be mended.
    """
    start = time.monotonic()
    if said := records.mend(out):
        warn(said)
    found = known(out, arrays)
    missing = {key(config(t, arrays)): t for t in trials if key(config(t, arrays)) not in found}

    def begun(parts: Iterable[list[Trial]]) -> Iterator[list[Trial]]:
        for part in parts:
            if budget is not None and time.monotonic() - start > budget:
                return
            found.update(known(out, arrays))  # another process may share the file
            if left := [t for t in part if key(config(t, arrays)) not in found]:
                yield left

    parts = chunks(list(missing.values()), arrays, device, members)
    for finished in run_chunks(parts, arrays, device, on_epoch, at_once=at_once, begun=begun):
        for record in finished:
            kept = records.append(out, record, once=True)
            found[key(kept["config"])] = kept
            if on_record is not None:
                on_record(kept)
    wanted = [key(config(trial, arrays)) for trial in trials]
    return [found[k] for k in wanted if k in found]


def known(out: Path, arrays: Arrays | Text) -> dict[str, records.Record]:
    """The records in a file by their configuration; runs on other data of the same name are a UsageError."""
    return by_key(records.read(out) if out.exists() else [], arrays, out)


class Chunks(NamedTuple):
    """Trials in parts: ensembles, and those that run alone."""

    ensembles: list[list[Trial]]
    alone: list[Trial]


def chunks(
    trials: Sequence[Trial], arrays: Arrays | Text, device: torch.device | str, members: int | None = None
) -> Chunks:
    """Ensembles of trials that differ in stepsize, seed and L2 alone, and the trials that should not be members of one.

    On a GPU an ensemble may have one member: its steps are graphs.
    """
    most, fewest = most_members(device, members), 1 if torch.device(device).type == "cuda" else 2
    groups: dict[str, list[Trial]] = {}
    for trial in trials:
        groups.setdefault(alike(trial), []).append(trial)
    found = Chunks([], [])
    for group in groups.values():
        if min(most, len(group)) < fewest or why_alone(group[0], arrays, device):
            found.alone.extend(group)
        else:
            found.ensembles.extend(group[k : k + most] for k in range(0, len(group), most))
    return found


def most_members(device: torch.device | str, members: int | None = None) -> int:
    """How many members an ensemble has at most: as asked for, or what is fast on the device."""
    return members or MEMBERS.get(torch.device(device).type, MEMBERS_ELSEWHERE)


def run_chunks(
    parts: Chunks,
    arrays: Arrays | Text,
    device: torch.device | str,
    on_epoch: OnEpoch | None = None,
    *,
    at_once: int | None = None,
    begun: Callable[[Iterable[list[Trial]]], Iterable[list[Trial]]] = iter,
) -> Iterator[list[records.Record]]:
    """The records of each part as soon as it is finished: ensembles, `at_once` of them, then each trial that is alone.

    `begun` may leave out parts when their turn comes. What fails stops nothing else, and is raised in the end.
    """

    def alone(trial: Trial) -> Work[list[records.Record]]:
        yield
        return [run(trial, arrays, device, None if on_epoch is None else partial(on_epoch, trial))]

    failed: list[Exception] = []
    for finished in (
        run_interleaved(begun(parts.ensembles), arrays, device, at_once=at_once, on_epoch=on_epoch),
        in_turn((alone(trial) for part in begun([[t] for t in parts.alone]) for trial in part), device, 1),
    ):
        try:
            yield from finished
        except Exception as error:
            failed.append(error)
    if failed:
        raise failed[0]


def key(config: dict) -> str:
    """A configuration as text, the same for equal ones."""
    return records.dumps(config)
