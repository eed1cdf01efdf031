"""Jobs: single trainings, how they are written, and how records name them."""

from collections.abc import Iterable
from typing import Any, NamedTuple

from evenstep.lab import records
from evenstep.lab.reading import Record

from .methods import METHODS, VARIANTS, parse
from .methods.method import canonical
from .tasks import TASKS
from .tasks.task import Task

SINGLE, GRID, JUDGED, TIMED = "single", "grid", "judged", "timed"
PROTOCOL = 1  # of the race; a change that makes records incomparable raises it


class Job(NamedTuple):
    """A training: task, method with its options, stepsize and seed; `phase` is its part in the race.

    A single job stands by itself. A job of the grid is measured on the validation split, one that is judged on the test
    split. A timed one takes a few steps alone on the device.
    """

    task: str
    method: str
    lr: float
    seed: int
    phase: str = SINGLE

    def __str__(self) -> str:
        name = f"{self.task}:{self.method}:{self.lr:g}:{self.seed}"
        return name if self.phase == SINGLE else f"{name} ({self.phase})"


def parse_job(text: str) -> Job:
    """A job from TASK:METHOD:LR:SEED; the LR `default` is the method's usual one.

    >>> parse_job("gpt:normuon,momentum=0.9:default:0")[:4]
    ('gpt', 'normuon,momentum=0.9', 0.02, 0)
    """
    parts = text.split(":")
    if len(parts) != 4:
        raise ValueError(f"{text!r} should be TASK:METHOD:LR:SEED")
    task, method, lr, seed = parts
    if task not in TASKS:
        raise ValueError(f"unknown task {task!r}: it should be one of {', '.join(TASKS)}")
    usual, _ = parse(method)
    try:
        return Job(task, canonical(method), float(usual.lr if lr == "default" else lr), int(seed))
    except ValueError:
        raise ValueError(f"{text!r} should be TASK:METHOD:LR:SEED, with an LR like 0.02 and a SEED like 0") from None


def config(job: Job, task: Task, steps: int | None, smoke: bool) -> dict[str, Any]:
    """The configuration in the record of a job; `steps` ends its training early."""
    found: dict[str, Any] = {"study": "rules"} if job.phase == SINGLE else {"compare": PROTOCOL, "phase": job.phase}
    found |= {"task": job.task, "method": job.method, "lr": job.lr, "steps": min(task.steps, steps or task.steps)}
    return {**found, "smoke": True} if smoke else found


def identity(record: Record) -> str:
    """Equal for records of the same job."""
    return records.dumps({**record["config"], "seed": record["seed"]})


def of_race(found: Iterable[Record]) -> dict[Job, dict[str, Any]]:
    """The metrics of each job of the race in the records; of a job that was run twice, the later one's.

    Records of a task that has changed its number of steps since do not count.
    """
    rows = {}
    for record in found:
        config = record["config"]
        task = TASKS.get(config.get("task", ""))
        if config.get("compare") == PROTOCOL and task and config["steps"] in (task.steps, task.tiny().steps):
            job = Job(config["task"], config["method"], config["lr"], record["seed"], config["phase"])
            rows[job] = record["metrics"]
    return rows


def usual_lr(method: str) -> float:
    """The usual lr of a method with or without options; NaN of one that is gone."""
    name = method.partition(",")[0]
    known = METHODS.get(name) or VARIANTS.get(name)
    return float(known.lr) if known else float("nan")
