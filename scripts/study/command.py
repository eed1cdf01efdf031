"""Compare optimizers on the study's tasks, side by side on one GPU.

    make rivals
    python scripts/study --data DIR --out FILE.jsonl {gpt,deep}:normuon,momentum={0.9,0.95}:{0.01,0.02,0.04}:0
    python scripts/study --table FILE.jsonl ...

A job is TASK:METHOD:LR:SEED; METHOD may carry options, and the LR `default` is the method's usual one. DIR holds
cifar-10-batches-py and python-source.txt, as the tasks need them. Each job appends a record. Jobs that are in the file
already are not run again unless they ended in an error, and no job begins after `--budget` seconds.
"""

import argparse
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from evenstep.lab import records
from evenstep.lab.parallel_trials import round_robin

from . import table
from .methods import METHODS
from .tasks import TASKS, tiny
from .training import Job, guarded, load, parse_job

SMOKE = [f"{task}:{method}:default:0" for task in ("gpt", "deep") for method in ("evenstep", "muon")]


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python scripts/study",
        description=__doc__,
        epilog=f"tasks: {', '.join(TASKS)}\nmethods: {', '.join(METHODS)}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("jobs", nargs="*", metavar="TASK:METHOD:LR:SEED")
    parser.add_argument("--data", type=Path, help="folder of the data sets; needed but for --smoke")
    parser.add_argument("--out", type=Path, help="file of records, which may exist")
    parser.add_argument("--table", type=Path, nargs="+", metavar="FILE", help="print tables of these records")
    parser.add_argument("--at-once", type=int, default=12, help="trainings side by side on a GPU (default: 12)")
    parser.add_argument("--budget", type=float, default=math.inf, help="begin no job after so many seconds")
    parser.add_argument("--steps", type=int, help="end each training early, to see that it runs")
    parser.add_argument("--smoke", action="store_true", help="small networks and made-up data, three steps")
    args = parser.parse_args()
    args.jobs = args.jobs or (SMOKE if args.smoke else [])
    if not args.table and (not args.jobs or args.out is None or not (args.smoke or args.data)):
        parser.error("needs jobs, --out and --data (or --smoke); or --table")
    try:
        args.jobs = list(dict.fromkeys(map(parse_job, args.jobs)))
    except ValueError as error:
        parser.error(str(error))
    return args


def main() -> None:
    """Run the jobs, print tables, or both."""
    args = arguments()
    if args.jobs:
        run(args)
    if args.table:
        print(table.markdown([record for path in args.table for record in records.read(path)]))


def run(args: argparse.Namespace) -> None:
    """Run all jobs that the file has no result of."""
    begin = time.perf_counter()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    tasks = {job.task: tiny(job.task) if args.smoke else TASKS[job.task] for job in args.jobs}
    settings = {job: config(job, args, tasks) for job in args.jobs}
    old = records.read(args.out) if args.out.exists() else []
    known = {identity(r["config"], r["seed"]) for r in old if "error" not in r["metrics"]}
    jobs = [job for job in args.jobs if identity(settings[job], job.seed) not in known]
    print(f"{len(jobs)} jobs on {records.device_name(device)}; {len(args.jobs) - len(jobs)} are done", flush=True)
    data = load({job.task: tasks[job.task] for job in jobs}, args.data, device)  # before there are streams

    def works() -> Iterator[Any]:
        for job in jobs:
            if time.perf_counter() - begin < args.budget:
                yield guarded(job, tasks[job.task], data[job.task], device, args.steps)

    ended, at_once = 0, args.at_once if device.type == "cuda" else 1
    for ended, (job, found) in enumerate(round_robin(works(), device, at_once), 1):
        if "skipped" not in found:
            records.append(args.out, records.make(settings[job], job.seed, found, device))
        shown = " ".join(f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in found.items())
        print(
            f"[{ended}/{len(jobs)}, {time.perf_counter() - begin:.0f} s] {':'.join(map(str, job))} {shown}", flush=True
        )
    if ended < len(jobs):
        print(f"{len(jobs) - ended} jobs are left: run the same command again", flush=True)


def config(job: Job, args: argparse.Namespace, tasks: dict[str, Any]) -> dict[str, Any]:
    """What a record says of a job."""
    steps = min(tasks[job.task].steps, args.steps or math.inf)
    smoke = {"smoke": True} if args.smoke else {}
    return {"study": "rules", "task": job.task, "method": job.method, "lr": job.lr, "steps": steps, **smoke}


def identity(config: dict[str, Any], seed: int) -> tuple[Any, ...]:
    """What two records of the same job have in common."""
    return (*sorted(config.items()), seed)
