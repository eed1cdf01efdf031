"""One run of an experiment: the options of its reader, its data, and the file of its records."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from .. import data, reading, records, sweep
from ..identity import by_key, described
from ..reading import Record
from ..sweep import finished
from ..trial import Trial, config
from ..usage import UsageError
from .common import failures_expected

QUICK_IMAGES = 320  # training images of a quick run: five steps of 64; and one test image in ten
TRIAL = {field.name for field in fields(Trial)} | {"data"}  # what a trial's configuration contains

Progress = Callable[[str, int, int], None]
"""Called before each piece of work with its name, and how many of how many runs are finished.

All finished runs are in the file by then: raising from it is the way to stop early.
"""


@dataclass(frozen=True)
class Options:
    """The choices of a reader.

    `data` is a set as `data.load` takes it, or a folder with several (CIFAR-10, and an ImageFolder for the experiment
    that wants many images); without it the images in the package serve. `data_name` is what figures call a copy of
    CIFAR-10 that differs from the original. `quick` runs in seconds on a CPU, on a few images, and only shows that
    everything runs.
    """

    quick: bool = False
    data: str | Path | None = None
    data_name: str | None = None
    seed: int = 0


@dataclass(frozen=True)
class Session:
    """One run of an experiment: the reader's options, the file of its records, and where it trains."""

    options: Options
    out: Path
    device: torch.device | str = "cpu"
    progress: Progress = lambda what, done, total: None

    def images(self, count: int | None = None, *, many: bool = False) -> data.Arrays:
        """The image set on the device, at most `count` of it; records on other data in the file are a UsageError."""
        arrays = images(self.options, self.device, many=many)
        arrays = arrays if count is None else arrays.subset(min(count, len(arrays.train_y)))
        self.only(arrays)
        return arrays

    def only(self, *sets: data.Arrays) -> None:
        """Refuse a file with records of other data, also of the same name: they would be taken for these."""
        names, found = {arrays.name for arrays in sets}, finished(self.out)
        if other := {r["config"]["data"] for r in found if "data" in r["config"]} - names:
            raise UsageError(
                f"{self.out} holds records on {min(other)}, this run is on {min(names)}; choose another --out"
            )
        for arrays in sets:
            by_key(found, arrays, self.out)

    def stored(
        self, which: dict[str, Any], make: Callable[[], list[dict[str, Any]]], arrays: data.Arrays | None = None
    ) -> Record:
        """The record of the configuration `which` from the file; if missing, `make` makes it.

        It belongs to `arrays`; without them it needs no data, and no other device than the CPU.
        """
        which = {"seed": self.options.seed, **which}
        if arrays is None:
            found = {records.dumps(r["config"]): r for r in finished(self.out)}
        else:
            which, found = {**which, **described(arrays)}, by_key(finished(self.out), arrays, self.out)
        if (wanted := records.dumps(which)) in found:
            return found[wanted]
        record = records.make(which, which["seed"], make(), "cpu" if arrays is None else self.device)
        return records.append(self.out, record)

    def train(self, trials: Sequence[Trial], arrays: data.Arrays) -> list[Record]:
        """The records of all trials, in order; `progress` is called before each missing one."""
        have = by_key(finished(self.out), arrays, self.out)
        keys = [records.dumps(config(trial, arrays)) for trial in trials]
        missing = {key: trial for key, trial in zip(keys, trials, strict=True) if key not in have}
        done = len(trials) - len(missing)

        def begin(trial: Trial) -> None:
            nonlocal done
            self.progress(f"{trial.method}, stepsize {trial.lr:g}", done, len(trials))
            done += 1

        with failures_expected():
            made = sweep.sweep(list(missing.values()), arrays, self.out, device=self.device, on_begin=begin)
        have |= dict(zip(missing, made, strict=True))
        return [have[key] for key in keys]


def images(options: Options, device: torch.device | str = "cpu", *, many: bool = False) -> data.Arrays:
    """The image set on the device; with `many`, an ImageFolder is preferred where there is one."""
    if options.quick or options.data is None:
        shipped = data.fashion_mnist_subset().to(device)
        if not options.quick:
            return shipped
        return replace(shipped.subset(QUICK_IMAGES), test_x=shipped.test_x[::10], test_y=shipped.test_y[::10])
    order = ("folder", "cifar", "idx") if many else ("cifar", "idx", "folder")
    places = [data.find(options.data, kind) for kind in order] if Path(options.data).is_dir() else []
    source = next((p for p in places if p), options.data)
    loaded = data.load(source, name=options.data_name, prefer=(*order, "text", "archive"))
    if not isinstance(loaded, data.Arrays):
        raise UsageError(f"--data {options.data}: the experiments need images; this is a text")
    return loaded.to(device)


def kept(name: str, out: Path, warn: Callable[[str], None] = warnings.warn) -> list[Record]:
    """The records of the experiment `name` in the folder `out`; foreign ones are a UsageError."""
    path = out / f"{name}.jsonl"
    found = finished(path, warn)
    if not all(belongs(record, name) for record in found):
        raise UsageError(f"{path} holds records that are not of {name}; move it away, or choose another --out")
    return found


def belongs(record: Record, name: str) -> bool:
    """Whether a record has what the judges, tables and figures of the experiment `name` read."""
    machine, rows, config = record.get("environment"), record.get("metrics"), record["config"]
    if not isinstance(machine, dict) or not {"device", "torch"} <= machine.keys() or "commit" not in record:
        return False
    if not isinstance(record.get("seed"), int) or not isinstance(rows, list) or not rows:
        return False
    return config.get("experiment") == name or (reading.is_run(record) and config.keys() >= TRIAL)
