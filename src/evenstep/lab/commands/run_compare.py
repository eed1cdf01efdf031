"""`evenstep compare`: the fair race of optimizers on one device, in parts, and the page made from its records."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch

from .. import records, usage
from ..compare import protocol
from ..compare.jobs import Job, parse_job
from ..compare.methods import METHODS, parse
from ..compare.running import AT_ONCE, Runner, race, single
from ..compare.tasks import RACE

PHASES = ("train", "time")
SMOKE_TASKS, SMOKE_METHODS = ("gpt-384", "autoencoder", "resnet20-bn"), ("evenstep", "adamw", "sgd")


@dataclass(frozen=True)
class Options:
    """Race optimizers on twelve tasks by one protocol: what is missing in --out is run, the same command goes on."""

    jobs: Annotated[tuple[str, ...], "Single jobs instead of the race.", "TASK:METHOD:LR:SEED"]
    data: Annotated[Path | None, "Folder with CIFAR-10, Tiny-ImageNet and python-source.txt."] = None
    out: Annotated[Path, "File of records, which may exist."] = Path("runs/compare.jsonl")
    tasks: Annotated[tuple[str, ...], f"Tasks, of {', '.join(RACE)} (default: all)."] = ()
    methods: Annotated[tuple[str, ...], f"Methods, of {', '.join(METHODS)} (default: all, each on its tasks)."] = ()
    phases: Annotated[tuple[str, ...], "Of train, time: timings need the device to themselves."] = PHASES
    budget: Annotated[float | None, "Stop cleanly after so many seconds."] = None
    at_once: Annotated[int, "Trainings side by side on a GPU."] = AT_ONCE
    device: Annotated[str | None, "Where to train; without it a GPU if there is one."] = None
    steps: Annotated[int | None, "End single jobs early, to see that they run."] = None
    retry: Annotated[bool, "Run jobs again that ended in an error."] = False
    smoke: Annotated[bool, "Tiny networks and made-up data: all phases in a minute on a CPU."] = False
    table: Annotated[tuple[Path, ...], "Run nothing: make --page from records, or print single jobs.", "FILE"] = ()
    page: Annotated[Path, "The page that --table writes; its figure goes to figures/ beside it."] = Path(
        "docs/comparison.md"
    )


def main(options: Options) -> int:
    """Run what is asked for, or what is missing; or make the page. The exit code, 3 if jobs are left."""
    if options.table:
        return tabulated(options)
    jobs, pairs = wanted(options)
    if options.data is None and not options.smoke:
        raise usage.UsageError("compare needs --data DIR, the folder of the data sets, or --smoke; see docs/compare.md")
    if options.data is not None and not options.data.is_dir():
        raise usage.UsageError(f"--data {options.data} is not a folder")
    budget = usage.budget(options.budget)
    device = usage.usable_device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    usage.writable_folder(options.out.parent)
    at_once = usage.in_range(options.at_once, 1, 1000, "--at-once") if device.type == "cuda" else 1
    limit = math.inf if budget is None else budget
    data = None if options.smoke else options.data
    if options.smoke and device.type == "cpu":
        torch.set_num_threads(1)  # tiny networks take longer on several
    runner = Runner(options.out, data, device, limit, at_once, options.steps, options.smoke, say)
    left = single(runner, jobs) if jobs else race(runner, pairs, options.phases, options.retry)
    say(f"{left} jobs are left: run the same command again" if left else f"nothing is left; records: {options.out}")
    return 3 if left else 0


def say(text: str) -> None:
    """Print at once, also into a file or a pipe."""
    print(text, flush=True)


def wanted(options: Options) -> tuple[list[Job], list[protocol.Pair]]:
    """The single jobs, or the pairs of task and method; a UsageError if a name is unknown."""
    for name in options.phases:
        usage.known_name(name, PHASES, "phase")
    usage.some(options.phases, "--phases")
    for name in options.tasks:
        usage.known_name(name, RACE, "task")
    for method in options.methods:
        usage.known_name(method.partition(",")[0], METHODS, "method")
    try:
        if options.jobs:
            if options.tasks or options.methods:
                raise usage.UsageError("single jobs name their tasks and methods: leave out --tasks and --methods")
            return list(dict.fromkeys(map(parse_job, options.jobs))), []
        if options.steps is not None:
            raise usage.UsageError("--steps is for single jobs: a race that ends early is none")
        for method in options.methods:
            parse(method)
    except ValueError as error:
        raise usage.UsageError(str(error)) from error
    if options.smoke:
        return [], protocol.pairs(options.tasks or SMOKE_TASKS, options.methods or SMOKE_METHODS)
    return [], protocol.pairs(options.tasks, options.methods)


def tabulated(options: Options) -> int:
    """Print the tables of single jobs; make the page of the race, if the records have one."""
    from ..compare import job_tables, page

    found = []
    for path in options.table:
        if not path.is_file():
            raise usage.UsageError(f"--table {path}: no such file")
        found += records.read(path)
    own = [r for r in found if r["config"].get("study") == "rules"]
    if own:
        print(job_tables.markdown(own))
    raced = [r for r in found if "compare" in r["config"] and not r["config"].get("smoke")]
    if raced:
        print(f"Page: {page.write(options.page, raced, options.table)}")
    if not (own or raced):
        smoke = " but those of --smoke, which measure nothing" if found else ""
        raise usage.UsageError(f"--table: no record of evenstep compare there{smoke}; run the race first")
    return 0
