"""`evenstep sweep`: methods at many stepsizes and seeds, into one file of records and a report."""

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from .. import usage
from ..methods import METHODS
from ..trial import Trial
from . import shared

COMPARED = ("sg", "adam", "evenstep")
OWN = "default"  # the word for each method's own stepsizes


@dataclass(frozen=True)
class Options(shared.Setting):
    """Train methods at many stepsizes and seeds; what is finished is kept, and the same command goes on from there."""

    methods: Annotated[tuple[str, ...], tyro.conf.arg(help=f"Methods to compare: {', '.join(METHODS)}.")] = COMPARED
    stepsizes: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NUMBER [NUMBER ...]")] = (OWN,)
    """Stepsizes for every method, or `default` for each method's own."""
    seeds: Annotated[tuple[int, ...], tyro.conf.arg(aliases=["--seed"])] = (0,)
    """Seeds of the first weights and of the order of the data."""
    out: Path = Path("runs/sweep")
    """Folder for the records and the report."""
    study: Annotated[str | None, tyro.conf.arg(metavar="URL")] = None
    """Share the sweep with other processes and machines through an Optuna study: a journal file or a database."""


def main(options: Options) -> int:
    """Run the sweep and report; the exit code."""
    from rich.console import Console

    from .. import running, showing, study

    trials = grid(options)
    device = usage.usable_device(options.device)
    arrays = shared.load(options)
    trials = [shared.fitted(trial, arrays) for trial in trials]
    for example in {trial.method: trial for trial in trials}.values():
        shared.try_out(example, arrays, device)
    path = usage.writable_folder(options.out) / "records.jsonl"
    runner: running.Runner | None = None
    if options.study is not None:
        runner = functools.partial(study.run, options.study)
    console = Console()
    with running.one_thread():
        stopped = running.run_trials(trials, arrays, path, device, console, runner)
    return showing.conclude(path, console, stopped)


def grid(options: Options) -> list[Trial]:
    """The trials that the options ask for, each once; those of one method stand together."""
    return [
        shared.trial(options, method, lr, seed)
        for method in dict.fromkeys(usage.some(options.methods, "--methods"))
        for lr in stepsizes(method, options.stepsizes)
        for seed in dict.fromkeys(usage.some(options.seeds, "--seeds"))
    ]


def stepsizes(method: str, words: tuple[str, ...]) -> list[float]:
    """The stepsizes that the words give a method, each once, in their order."""
    if tuple(words) == (OWN,):
        return list(METHODS[usage.known_name(method, METHODS, "method")].stepsizes)
    return list(dict.fromkeys(usage.stepsize(word, "--stepsizes") for word in usage.some(words, "--stepsizes")))
