"""Run jobs side by side within a budget: single ones, or those that the race is missing."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from evenstep.lab import records
from evenstep.lab.parallel_trials import Work, round_robin
from evenstep.lab.reading import Record
from evenstep.lab.usage import UsageError

from . import protocol
from .jobs import TIMED, Job, config, identity
from .methods import parse
from .methods.method import Capture
from .methods.packages import MissingRivals, package
from .tasks import TASKS
from .tasks.task import Splits, Task
from .training import Metrics, guarded

AT_ONCE = 12
Say = Callable[[str], None]


@dataclass
class Runner:
    """What all jobs of a command share. `budget` ends it cleanly: a job that is not done by then is left out."""

    out: Path
    data: Path | None
    device: torch.device
    budget: float
    at_once: int = AT_ONCE
    steps: int | None = None
    smoke: bool = False
    say: Say = print

    def __post_init__(self) -> None:
        self.begin = time.perf_counter()
        self.loaded: dict[Any, Splits] = {}
        if self.device.type == "cuda":
            torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True

    @property
    def elapsed(self) -> float:
        """Seconds since the command began."""
        return time.perf_counter() - self.begin

    def task(self, name: str) -> Task:
        """The task, or a tiny version of it."""
        return TASKS[name].tiny() if self.smoke else TASKS[name]

    def config(self, job: Job) -> dict[str, Any]:
        """What the record of a job says of it."""
        return config(job, self.task(job.task), self.steps, self.smoke)

    def known(self) -> list[Record]:
        """The records that are in the file; a line that was cut off, as by a kill, is put aside."""
        if message := records.mend(self.out):
            self.say(message)
        try:
            return records.read(self.out) if self.out.exists() else []
        except ValueError as error:
            raise UsageError(str(error)) from error

    def done(self, jobs: Sequence[Job], at_once: int | None = None) -> int:
        """Run jobs, append a record of each as it ends, and return how many ended."""
        ended = 0
        for job, found in round_robin(self._works(jobs, self.known()), self.device, at_once or self.at_once):
            if "skipped" in found:
                self.say(f"{job}: {found['skipped']}")
                continue
            ended += 1
            records.append(self.out, records.make(self.config(job), job.seed, found, self.device))
            shown = " ".join(f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in brief(found).items())
            self.say(f"[{ended}/{len(jobs)}, {self.elapsed:.0f} s] {job} {shown}")
        return ended

    def _works(self, jobs: Sequence[Job], known: list[Record]) -> Iterator[Work[tuple[Job, Metrics]]]:
        """The jobs as works; none begins that would not end in time, judged by those of its task before it."""
        took: dict[Any, float] = {}
        for record in known:
            config, seconds = record["config"], record["metrics"].get("seconds") or 0.0
            for key in (config.get("task"), (config.get("task"), config.get("method"))):
                took[key] = max(took.get(key, 0.0), seconds)
        for job in jobs:
            known_time = took.get((job.task, job.method), took.get(job.task, 0.0))
            if self.elapsed + (0 if job.phase == TIMED else known_time) < self.budget:
                task = self.task(job.task)
                yield self._within(job, guarded(job, task, self._loaded(task), self.device, self.steps))

    def _loaded(self, task: Task) -> Splits:
        """The data of a task, read when the first one that shares them begins."""
        if task.source not in self.loaded:
            self.loaded[task.source] = task.load(self.data, self.device)
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)  # streams of trainings are not ordered after this one
        return self.loaded[task.source]

    def _within(self, job: Job, work: Work[tuple[Job, Metrics]]) -> Work[tuple[Job, Metrics]]:
        """The work, given up at the end of the budget."""
        while self.elapsed < self.budget:
            try:
                next(work)
            except StopIteration as end:
                return end.value
            yield
        work.close()
        return job, {"skipped": "not done within the budget"}


def brief(found: Metrics) -> Metrics:
    """Metrics but curves."""
    return {key: value for key, value in found.items() if not isinstance(value, dict | list)}


def installed(methods: Sequence[str]) -> None:
    """A UsageError if packages of these methods are not installed."""
    for method in methods:
        try:
            for name in parse(method)[0].packages:
                package(name)
        except MissingRivals as error:
            raise UsageError(f"{method}: {error}, or leave it out with --methods") from error


def single(runner: Runner, jobs: Sequence[Job]) -> int:
    """Run the jobs that the file has no result of; how many are left."""
    installed([job.method for job in jobs])
    known = {identity(r) for r in runner.known() if "error" not in r["metrics"]}
    left = [job for job in jobs if identity({"config": runner.config(job), "seed": job.seed}) not in known]
    runner.say(f"{len(left)} jobs on {records.device_name(runner.device)}; {len(jobs) - len(left)} are done")
    return len(left) - runner.done(left)


def race(runner: Runner, pairs: Sequence[protocol.Pair], phases: Sequence[str], retry: bool) -> int:
    """Run what the race is missing until nothing is, or the budget ends; how many jobs can still run.

    Timings come last, and alone: one job at a time.
    """
    installed(list(dict.fromkeys(method for _, method in pairs)))
    forgiven = {identity(r) for r in runner.known() if "error" in r["metrics"]} if retry else set()

    def missing(timed: bool) -> list[Job]:
        found = [r for r in runner.known() if bool(r["config"].get("smoke")) == runner.smoke]
        kept = [r for r in found if "error" not in r["metrics"] or identity(r) not in forgiven]
        all_results = protocol.results(kept, pairs).values()
        jobs = [job for own in all_results for job in (own.untimed() if timed else own.missing())]
        # steps that Python drives would hold up captured ones beside them
        return sorted(jobs, key=lambda job: parse(job.method)[0].capture is not Capture.STEP)

    for timed in [phase == "time" for phase in ("train", "time") if phase in phases]:
        while (jobs := missing(timed)) and runner.elapsed < runner.budget:
            runner.say(f"{len(jobs)} jobs on {records.device_name(runner.device)}, {runner.elapsed:.0f} s")
            if runner.done(jobs, 1 if timed else None) == 0:
                break
            forgiven.clear()  # what failed again in this command stays failed
    return sum(len(missing(phase == "time")) for phase in phases)
