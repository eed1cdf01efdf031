"""Many trials into one file of records: what is there already is not run again."""

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch

from evenstep.lab import records
from evenstep.lab.data import Arrays, Text
from evenstep.lab.together import alike, run_together, why_alone
from evenstep.lab.train import Epoch
from evenstep.lab.trial import Trial, run

MEMBERS = {"cuda": 24}  # of one ensemble, by device
MEMBERS_ELSEWHERE = 8

OnRecord = Callable[[records.Record], None]
OnEpoch = Callable[[Trial, Epoch], None]


def sweep(
    trials: Sequence[Trial],
    arrays: Arrays | Text,
    out: Path,
    *,
    device: torch.device | str = "cpu",
    on_record: OnRecord | None = None,
    on_epoch: OnEpoch | None = None,
    members: int | None = None,
    budget: float | None = None,
    warn: Callable[[str], None] = warnings.warn,
) -> list[records.Record]:
    """The records of all `trials`, in their order; those that `out` lacks are run and added to it, each as it ends.

    Trials that differ in stepsize and seed alone run together, up to `members` at a time (1: each alone). A sweep that
    was stopped, by Ctrl-C or by force, goes on where it was: finished runs are in the file, those that ran at the
    moment begin again. After `budget` seconds nothing more is begun, and only what is finished comes back. `warn` gets
    one line if the file had to be mended.
    """
    start = time.monotonic()
    if said := records.mend(out):
        warn(said)
    found = known(out)
    missing = {key(config(t, arrays)): t for t in trials if key(config(t, arrays)) not in found}
    for chunk in chunks(list(missing.values()), arrays, device, members):
        if budget is not None and time.monotonic() - start > budget:
            break
        found |= known(out)  # another process may share the file
        for record in run_chunk([t for t in chunk if key(config(t, arrays)) not in found], arrays, device, on_epoch):
            kept = records.append(out, record, once=True)
            found[key(kept["config"])] = kept
            if on_record is not None:
                on_record(kept)
    wanted = [key(config(trial, arrays)) for trial in trials]
    return [found[k] for k in wanted if k in found]


def known(out: Path) -> dict[str, records.Record]:
    """The records in a file by their configuration."""
    return {key(r["config"]): r for r in (records.read(out) if out.exists() else [])}


def chunks(
    trials: Sequence[Trial], arrays: Arrays | Text, device: torch.device | str, members: int | None = None
) -> Iterator[list[Trial]]:
    """The trials in parts that run together; one that cannot be a member of an ensemble stands alone."""
    most = most_members(device, members)
    groups: dict[str, list[Trial]] = {}
    for trial in trials:
        groups.setdefault(alike(trial), []).append(trial)
    for group in groups.values():
        size = 1 if len(group) == 1 or why_alone(group[0], arrays, device) else most
        yield from (group[k : k + size] for k in range(0, len(group), size))


def most_members(device: torch.device | str, members: int | None = None) -> int:
    """How many members an ensemble has at most: as asked for, or what is fast on the device."""
    return members or MEMBERS.get(torch.device(device).type, MEMBERS_ELSEWHERE)


def run_chunk(
    trials: Sequence[Trial], arrays: Arrays | Text, device: torch.device | str, on_epoch: OnEpoch | None = None
) -> list[records.Record]:
    """Records of trials that `chunks` put together."""
    graph = torch.device(device).type == "cuda" and trials and not why_alone(trials[0], arrays, device)
    if len(trials) > 1 or graph:
        return run_together(trials, arrays, device, on_epoch=on_epoch)
    return [run(t, arrays, device, None if on_epoch is None else partial(on_epoch, t)) for t in trials]


def config(trial: Trial, arrays: Arrays | Text) -> dict:
    """What a record says was run."""
    return {**asdict(trial), "data": arrays.name}


def key(config: dict) -> str:
    """A configuration as text, the same for equal ones."""
    return records.dumps(config)
