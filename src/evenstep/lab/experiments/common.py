"""What the experiments share: their options, their data, their records, and how a claim is judged."""

import json
import statistics
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .. import data, reading, records, sweep
from ..identity import by_key, described, may_be_of
from ..records import Record
from ..trial import Trial
from ..usage import UsageError

Figure = Any  # matplotlib's, which is imported only to draw
QUICK_IMAGES = 320  # training images of a quick run: five steps of 64; and one test image in ten
TRIAL = {field.name for field in fields(Trial)} | {"data"}  # what a trial's configuration contains

Progress = Callable[[str, int, int], None]
"""Called before each piece of work with its name, and how many of how many runs are finished.

All finished runs are in the file by then: raising from it is the way to stop early.
"""


class Verdict(NamedTuple):
    """Whether a claim held (None: these records cannot tell), and the numbers."""

    held: bool | None
    text: str


NOT_RUN = Verdict(None, "Not run.")


@dataclass(frozen=True)
class Claim:
    """A claim of the paper, where it is made, and the function that judges it."""

    section: str
    text: str
    judge: Callable[[list[Record]], Verdict]


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


def silent(what: str, done: int, total: int) -> None:
    """Show no progress."""


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


@contextmanager
def failures_expected() -> Iterator[None]:
    """Silence the optimizers' warning of a gradient that is not finite: too large stepsizes are tried on purpose."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*a gradient is not finite")
        yield


def finished(out: Path, warn: Callable[[str], None] = warnings.warn) -> list[Record]:
    """The records in the file, under the names of this version."""
    return [{**record, "config": renamed(record["config"])} for record in sweep.finished(out, warn)]


def renamed(config: dict[str, Any]) -> dict[str, Any]:
    """A configuration in which version 0.1 said EvenStep, which is UnitStep now.

    >>> renamed({"method": "evenstep", "name": "then EvenStep"})
    {'method': 'unitstep', 'name': 'then UnitStep'}
    """
    text = json.dumps(config)
    return json.loads(text.replace('"evenstep"', '"unitstep"').replace("EvenStep", "UnitStep"))


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


def stored(
    out: Path,
    config: dict[str, Any],
    seed: int,
    make: Callable[[], list[dict[str, Any]]],
    device: torch.device | str,
    arrays: data.Arrays | None = None,
) -> Record:
    """The record of `config`, on `arrays` if it needs data, from the file; if missing, `make` makes it."""
    config = {**config, "seed": seed}
    if arrays is None:
        found = {records.dumps(r["config"]): r for r in finished(out)}
    else:
        config, found = {**config, **described(arrays)}, by_key(finished(out), arrays, out)
    if (wanted := records.dumps(config)) in found:
        return found[wanted]
    record = records.make(config, seed, make(), device)
    records.append(out, record)
    return record


def borrow(out: Path, other: str, wanted: Callable[[list[Record]], list[Record]], arrays: data.Arrays) -> None:
    """Copy to `out` the `wanted` records of another experiment in the same folder, on these data, that `out` lacks."""
    have = by_key(finished(out), arrays, out)
    theirs = wanted([r for r in kept(other, out.parent) if may_be_of(r["config"], arrays)])
    for key, record in by_key(theirs, arrays, out.with_name(f"{other}.jsonl")).items():
        if key not in have:
            records.append(out, record)


def only(out: Path, sets: Sequence[data.Arrays]) -> None:
    """Refuse a file with records of other data, also of the same name: they would be taken for these."""
    names, found = {arrays.name for arrays in sets}, finished(out)
    other = {r["config"]["data"] for r in found if "data" in r["config"]} - names
    if other:
        raise UsageError(f"{out} holds records on {min(other)}, this run is on {min(names)}; choose another --out")
    for arrays in sets:
        by_key(found, arrays, out)


def below(lower: Sequence[float], upper: Sequence[float]) -> bool | None:
    """Whether every seed of one is below every seed of the other; None if they overlap or one is empty.

    >>> below([1.0, 2.0], [3.0]), below([3.0], [1.0, 2.0]), below([1.0, 3.0], [2.0])
    (True, False, None)
    """
    if not lower or not upper:
        return None
    return True if max(lower) < min(upper) else False if min(lower) > max(upper) else None


def spread(values: Sequence[float], digits: int = 3) -> str:
    """Mean and, of several, standard deviation.

    >>> spread([0.5]), spread([0.5, 0.7]), spread([])
    ('0.500', '0.600 ± 0.141', 'nothing')
    """
    if not values:
        return "nothing"
    mean = f"{statistics.fmean(values):.{digits}f}"
    return f"{mean} ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else mean
