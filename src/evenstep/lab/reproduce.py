"""The paper's experiments, one after the other, within a budget of time.

`python -m evenstep.lab.reproduce …` is `evenstep reproduce …`. Records go to OUT/<experiment>.jsonl as runs end; run it
again to go on where it stopped.
"""

import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from . import reading, records, usage
from .experiments import EXPERIMENTS, Options, Progress, Session
from .experiments.session import belongs, kept
from .reading import Record


class OutOfTime(Exception):
    """The budget does not allow another piece of work."""


def reproduce(
    names: Sequence[str],
    options: Options,
    out: Path,
    device: torch.device | str = "cpu",
    budget: float | None = None,
    show: Progress = lambda what, done, total: None,
    warn: Callable[[str], None] = warnings.warn,
) -> list[str]:
    """Run the experiments into `out`, beginning no run after `budget` seconds; the names of those left unfinished.

    A damaged or foreign file of one of them is refused before anything runs; `warn` receives a line if a file was
    repaired.
    """
    start = time.perf_counter()

    def begin(what: str, done: int, total: int) -> None:
        if budget is not None and time.perf_counter() - start > budget:
            raise OutOfTime
        show(what, done, total)

    usage.writable_folder(out)
    for name in names:
        kept(name, out, warn)
    for number, name in enumerate(names):
        try:
            EXPERIMENTS[name].run(Session(options, out / f"{name}.jsonl", device, begin))
        except OutOfTime:
            return list(names[number:])
    return []


def everything(folder: Path) -> tuple[dict[str, list[Record]], list[str]]:
    """The records of every experiment that has some in the folder, and a line about each file that cannot be used."""
    found: dict[str, list[Record]] = {}
    faults = []
    for name in EXPERIMENTS:
        path = folder / f"{name}.jsonl"
        try:
            there = [reading.clean(record) for record in records.read(path)] if path.exists() else []
            if not all(belongs(record, name) for record in there):
                raise ValueError(f"{path} holds records that are not of {name}; move it away, or choose another --out")
            if there:
                found[name] = there
        except (ValueError, OSError) as error:
            faults.append(f"{name} is left out: {usage.of_file(error) if isinstance(error, OSError) else error}")
    return found, faults


def fast_cuda() -> None:
    """Let a GPU multiply in TF32 and look for its fastest convolutions."""
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.benchmark = True


if __name__ == "__main__":
    from .cli import main

    main(["reproduce", *sys.argv[1:]])
