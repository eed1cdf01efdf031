"""What all experiments share: what a reader may choose, which data they run on, and how a claim is judged."""

import statistics
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from .. import data, reading, records
from ..identity import by_key, described, may_be_of
from ..records import Record
from ..trial import Trial
from ..usage import UsageError

QUICK_IMAGES = 320  # training images of a quick run: five steps of 64; and one test image in ten
TRIAL = {field.name for field in fields(Trial)} | {"data"}  # what a training's configuration says


class Progress(Protocol):
    """Told between two pieces of work what is under way, and how many of how many runs are done.

    All finished runs are in the file by then, so raising from it is the way to stop early.
    """

    def __call__(self, what: str, done: int, total: int, seconds: float | None = None) -> None:
        """`seconds` is how long the piece is expected to take, where that is known."""


class Verdict(NamedTuple):
    """Whether a claim held (None: it cannot be said from these records), and what came out."""

    held: bool | None
    text: str


@dataclass(frozen=True)
class Claim:
    """One thing that the paper says, where, and the judge of it."""

    section: str
    text: str
    judge: Callable[[list[Record]], Verdict]


@dataclass(frozen=True)
class Options:
    """What a reader may choose.

    `data` is a set as `data.load` takes it, or a folder that holds several (CIFAR-10, and an ImageFolder for the
    experiment that wants many images); without it the shipped images serve. `data_name` is what figures call a copy
    of CIFAR-10 that is not the original. `quick` runs in seconds on a CPU, on a few shipped images, and shows
    nothing but that all of it runs.
    """

    quick: bool = False
    data: str | Path | None = None
    data_name: str | None = None
    seed: int = 0


def silent(what: str, done: int, total: int, seconds: float | None = None) -> None:
    """No progress shown."""


def images(options: Options, device: torch.device | str = "cpu", *, many: bool = False) -> data.Arrays:
    """The image set to run on, on the device; with `many`, an ImageFolder is preferred where there is one."""
    if options.quick or options.data is None:
        shipped = data.fashion_mnist_subset().to(device)
        if not options.quick:
            return shipped
        return replace(shipped.subset(QUICK_IMAGES), test_x=shipped.test_x[::10], test_y=shipped.test_y[::10])
    order = ("folder", "cifar", "idx") if many else ("cifar", "idx", "folder")
    places = [data.find(options.data, kind) for kind in order] if Path(options.data).is_dir() else []
    loaded = data.load(
        next((p for p in places if p), options.data), name=options.data_name, prefer=(*order, "text", "archive")
    )
    if not isinstance(loaded, data.Arrays):
        raise UsageError(f"--data {options.data}: the experiments need images; this is a text")
    return loaded.to(device)


@contextmanager
def failures_expected() -> Iterator[None]:
    """Too large stepsizes and shocks are tried on purpose: the optimizers' warning of them is no news."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*a gradient is not finite")
        yield


def finished(out: Path, warn: Callable[[str], None] = warnings.warn) -> list[Record]:
    """The records in the file; a line that is none is a UsageError.

    A last line that was not written whole, by a run that was killed, is mended first, which `warn` is told.
    """
    if not out.exists():
        return []
    if said := records.mend(out):
        warn(said)
    try:
        return records.read(out)
    except ValueError as error:
        raise UsageError(f"{error}; remove that line, or choose another --out") from error


def kept(name: str, out: Path, warn: Callable[[str], None] = warnings.warn) -> list[Record]:
    """The records of the experiment called `name` in its file below the folder `out`; a foreign one is a UsageError."""
    path = out / f"{name}.jsonl"
    found = finished(path, warn)
    if not all(belongs(record, name) for record in found):
        raise UsageError(f"{path} holds records that are not of {name}; move it away, or choose another --out")
    return found


def belongs(record: Record, name: str) -> bool:
    """Whether a record has what the judges, tables and figures of an experiment read: its own, or a trial."""
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
    """The record of `config` on `arrays`, if it needs some, in the file.

    If it is not there, `make` gives its metrics and it is added. Records on other data of the same name are a
    UsageError.
    """
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
    """Copy to `out` what another experiment, in the same folder, ran on these data, that is `wanted` and not there."""
    have = by_key(finished(out), arrays, out)
    theirs = wanted([r for r in kept(other, out.parent) if may_be_of(r["config"], arrays)])
    for key, record in by_key(theirs, arrays, out.with_name(f"{other}.jsonl")).items():
        if key not in have:
            records.append(out, record)


def only(out: Path, sets: Sequence[data.Arrays]) -> None:
    """Refuse a file that holds records of other data, also of the same name: they would be taken for these."""
    names, found = {arrays.name for arrays in sets}, finished(out)
    other = {r["config"]["data"] for r in found if "data" in r["config"]} - names
    if other:
        raise UsageError(f"{out} holds records on {min(other)}, this run is on {min(names)}; choose another --out")
    for arrays in sets:
        by_key(found, arrays, out)


def joined(claims: Sequence[Claim]) -> str:
    """All that an experiment is about, in one text."""
    return " ".join(f"{claim.text} ({claim.section})" for claim in claims)


def judged(claims: Sequence[Claim], records: list[Record]) -> Verdict:
    """One verdict on several claims: it holds if all hold, and not if one does not."""
    found = [claim.judge(records) for claim in claims]
    held = False if any(v.held is False for v in found) else None if any(v.held is None for v in found) else True
    return Verdict(held, " ".join(v.text for v in found))


def below(lower: Sequence[float], upper: Sequence[float]) -> bool | None:
    """Whether every seed of one is below every seed of the other; None if they overlap or there is nothing.

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
