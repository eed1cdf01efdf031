"""`evenstep tune`: the stepsize for your network, found within a budget."""

import re
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import evenstep

from .. import trial, usage
from ..method_names import NAMES, default_lr, find
from ..summary import best_stepsize
from ..trial import Trial
from ..user_task import UserTask, load
from . import shared

if TYPE_CHECKING:
    from .. import lr_search


@dataclass(frozen=True)
class Options:
    """Find the lr for your network: short runs around the default, the bad ones stopped early; it can be resumed."""

    file: Annotated[Path, "Your file with model() and batches(train); see evenstep init.", "FILE.py"]
    method: Annotated[str, f"Class to find the lr for: {NAMES}."] = "EvenStep"
    minutes: Annotated[float | None, "How long it may take in all (default: 5, unless --runs is given)."] = None
    runs: Annotated[int | None, "How many runs it may take."] = None
    epochs: Annotated[int | None, "Passes over the data per run (default: what the minutes allow, at most 10)."] = None
    lr: Annotated[str | None, "Where to begin (default: the lr of the class).", "NUMBER"] = None
    options: Annotated[tuple[str, ...], "Keywords of the optimizer, as momentum=0.9.", "NAME=VALUE"] = ()
    seed: Annotated[int, "Seed of the first weights and of the order of the data."] = 0
    device: Annotated[str, "Where to train: cpu, cuda, mps, ..."] = "cpu"
    out: Annotated[Path | None, "Folder for the records, the search and the report (default: runs/FILE)."] = None


def main(options: Options) -> int:
    """Search, and say what was found; the exit code."""
    import optuna  # noqa: F401  # before anything runs: it comes with the extra

    from .. import lr_search, running, sweep

    budget = budget_of(options)
    task = load(options.file)
    device = usage.usable_device(options.device)
    setting = shared.Setting(file=options.file, options=options.options, epochs=options.epochs or 1, decay_lr=True)
    lr = default_lr(find(options.method)) if options.lr is None else usage.stepsize(options.lr, "--lr")
    example = shared.fitted(shared.trial(setting, options.method, lr, options.seed), task)
    shared.try_out(example, task, device)
    path = usage.writable_folder(shared.folder(options, "tune")) / "records.jsonl"
    sweep.known(path, task, print)  # refuses a changed file before anything runs
    stopped = False
    with running.one_thread(task):
        try:
            if options.epochs is None:
                length = lr_search.planned(example, task, path) or lr_search.fit(example, task, device, budget)
                example, task = replace(example, epochs=length[0]), replace(task, steps=length[1])
            label = find(example.method).label
            print(f"{label}, {in_words(example, task)} per run. Ctrl-C stops; the same command goes on.")
            lr_search.Search(example, task, path, device, budget, partial(print, flush=True)).run()
        except KeyboardInterrupt:
            stopped = True
    code = running.conclude(path, stopped, table=False)  # whose best may have no finished neighbours
    say(example, task, path)
    return code


def budget_of(options: Options) -> "lr_search.Budget":
    """The budget of the options; five minutes if they name none."""
    from .. import lr_search

    if options.minutes is not None and not 0 < options.minutes < 1e6:  # also refuses nan
        raise usage.UsageError(f"--minutes takes a number above 0; got {options.minutes:g}")
    if options.runs is not None:
        usage.in_range(options.runs, 1, 10_000, "--runs")
    minutes = 5.0 if options.minutes is None and options.runs is None else options.minutes
    return lr_search.Budget(options.runs, None if minutes is None else 60 * minutes)


def in_words(example: Trial, task: UserTask) -> str:
    """The length of a run."""
    return f"{example.epochs} epochs" if task.steps is None else f"{example.epochs * task.steps:,} steps"


def say(example: Trial, task: UserTask, path: Path) -> None:
    """Print the code to paste, how to compare, and in the last line what was found."""
    from .. import comparison, lr_search, records, sweep

    label, mine = find(example.method).label, trial.config(example, task)
    any_run = {"lr": None, "seed": None}
    runs = [r for r in sweep.finished(path) if {**r["config"], **any_run} == {**records.plain(mine), **any_run}]
    if not runs:
        print(f"{label}: no run came to its end, so there is no lr to name; give a larger budget, or a smaller --lr")
        return
    (found,) = comparison.compare(runs).series
    best = best_stepsize(found.runs)
    print(f"\nTo use it, with a schedule that falls to zero as it did here:\n\n{code(example, best)}\n")
    if remark := lr_search.overfits(found):
        print(f"{remark}\n")
    if task.steps is not None or example.epochs < lr_search.LONGEST:
        print(f"Runs were short: in a training many times as long, a smaller lr is often better than {best:g}.\n")
    if task.steps is None:
        words = f"--methods AdamW --stepsizes 1e-3 3e-4 --epochs {example.epochs} --decay-lr --out {path.parent}"
        print(f"To compare: evenstep sweep {task.path} {words}\n")
    print(lr_search.headline(found, label))


def code(example: Trial, lr: float) -> str:
    """The lines that build the optimizer and its schedule."""
    options = "".join(f", {name}={value!r}" for name, value in example.options.items())
    label = find(example.method).label
    if inner := re.fullmatch(r"Whitened\((.+)\)", label):
        made = f"evenstep.Whitened(model, torch.optim.{inner[1]}, lr={lr:g}{options})"
    elif hasattr(evenstep, label):
        made = f"evenstep.{label}(model, lr={lr:g}{options})"
    else:
        cls = example.method if "." in example.method else f"torch.optim.{label}"
        made = f"{cls}(model.parameters(), lr={lr:g}{options})"
    return (
        f"    optimizer = {made}\n"
        "    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=steps)"
    )
