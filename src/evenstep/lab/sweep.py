"""Many trials into one file of records: what is there already is not run again."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from evenstep.lab import records
from evenstep.lab.data import Arrays
from evenstep.lab.trial import Trial, run


def sweep(
    trials: Sequence[Trial],
    arrays: Arrays,
    out: Path,
    *,
    device: torch.device | str = "cpu",
    on_record: Callable[[records.Record], None] | None = None,
) -> list[records.Record]:
    """The records of all `trials`, in their order; those that `out` lacks are run and added to it, each as it ends."""
    found = {key(r["config"]): r for r in (records.read(out) if out.exists() else [])}
    for trial in trials:
        wanted = key(config(trial, arrays))
        if wanted not in found:
            found[wanted] = run(trial, arrays, device)
            records.append(out, found[wanted])
            if on_record is not None:
                on_record(found[wanted])
    return [found[key(config(trial, arrays))] for trial in trials]


def config(trial: Trial, arrays: Arrays) -> dict:
    """What a record says was run."""
    return {**asdict(trial), "data": arrays.name}


def key(config: dict) -> str:
    """A configuration as text, the same for equal ones."""
    return records.dumps(config)
