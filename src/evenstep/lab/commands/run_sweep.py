"""`evenstep sweep`: methods at many stepsizes and seeds, into one file of records and a report."""

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from .. import usage
from ..method_names import NAMES, find
from ..trial import Trial
from . import shared

OWN = "default"  # stands for each method's own stepsizes


@dataclass(frozen=True)
class Options(shared.Setting):
    """Train methods at many stepsizes and seeds; finished runs are kept, and the same command continues from there."""

    methods: Annotated[tuple[str, ...], f"Classes to compare: {NAMES}."] = ("EvenStep", "AdamW", "SGD")
    stepsizes: Annotated[tuple[str, ...], "Stepsizes, or `default` for each method's own.", "NUMBER"] = (OWN,)
    seeds: Annotated[tuple[int, ...], "Seeds of weights and order of the data.", "--seed"] = (0,)
    out: Annotated[Path | None, "Folder for the records and the report (default: runs/sweep, or runs/FILE)."] = None
    study: Annotated[str | None, "Share the sweep through an Optuna study: a journal file or a database.", "URL"] = None


def main(options: Options) -> int:
    """Run the sweep and report; the exit code."""
    from .. import running, study

    trials = grid(options)
    device = usage.usable_device(options.device)
    arrays = shared.load(options)
    trials = [shared.fitted(trial, arrays) for trial in trials]
    for example in {trial.method: trial for trial in trials}.values():
        shared.try_out(example, arrays, device)
    path = usage.writable_folder(shared.folder(options, "sweep")) / "records.jsonl"
    runner = None if options.study is None else functools.partial(study.run, options.study)
    with running.one_thread(arrays):
        stopped = running.run_trials(trials, arrays, path, device, runner)
    return running.conclude(path, stopped)


def grid(options: Options) -> list[Trial]:
    """The trials of the options, each once, ordered by method."""
    return [
        shared.trial(options, method, lr, seed)
        for method in dict.fromkeys(usage.some(options.methods, "--methods"))
        for lr in stepsizes(method, options.stepsizes)
        for seed in dict.fromkeys(usage.some(options.seeds, "--seeds"))
    ]


def stepsizes(method: str, words: tuple[str, ...]) -> list[float]:
    """A method's stepsizes, each once, in their order."""
    if tuple(words) == (OWN,):
        if not (own := find(method).stepsizes):
            raise usage.UsageError(f"{method} has no default lr to try others about; give --stepsizes")
        return list(own)
    return list(dict.fromkeys(usage.stepsize(word, "--stepsizes") for word in usage.some(words, "--stepsizes")))
