"""Train one network, as a work in steps that runs beside others on one GPU."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from evenstep.lab.parallel_trials import CapturedStep, Work

from .methods import MissingRivals, canonical, parse
from .tasks import TASKS, Task

Data = tuple[Tensor, ...]
Metrics = dict[str, Any]


class Job(NamedTuple):
    """A training: task, method with its options, stepsize and seed."""

    task: str
    method: str
    lr: float
    seed: int


def parse_job(text: str) -> Job:
    """A job from TASK:METHOD:LR:SEED; the LR `default` is the method's usual one.

    >>> parse_job("gpt:normuon,momentum=0.9:default:0")
    Job(task='gpt', method='normuon,momentum=0.9', lr=0.02, seed=0)
    """
    parts = text.split(":")
    if len(parts) != 4:
        raise ValueError(f"{text!r} should be TASK:METHOD:LR:SEED")
    task, method, lr, seed = parts
    if task not in TASKS:
        raise ValueError(f"unknown task {task!r}: it should be one of {', '.join(TASKS)}")
    usual, _ = parse(method)
    return Job(task, canonical(method), float(usual.lr if lr == "default" else lr), int(seed))


class Schedule:
    """Stepsizes of all optimizers, in tensors or as numbers."""

    def __init__(self, optimizers: list[Any]) -> None:
        self.groups = [(group, float(group["lr"])) for optimizer in optimizers for group in optimizer.param_groups]

    def set(self, rate: float) -> None:
        """Set every lr to `rate` times its first value."""
        for group, lr in self.groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(lr * rate)
            else:
                group["lr"] = lr * rate


def train(
    job: Job, task: Task, data: Data, device: torch.device, most: int | None = None, captured: bool = False
) -> Work[Metrics]:
    """Train one network in steps; its metric on held-out data, training loss and seconds.

    The seed sets weights and batches, the same for all methods. With `captured` lr is a tensor, and on a GPU the whole
    step is a CUDA graph; else forward and backward are one, and the optimizer's step runs eagerly on the same stream.
    """
    begin, (method, options) = time.perf_counter(), parse(job.method)
    torch.manual_seed(job.seed)
    with torch.device(device):
        model = task.build()
    lr = torch.tensor(job.lr, device=device) if captured else job.lr
    optimizers = method.build(model, lr, options)
    steps = min(task.steps, most or task.steps)
    loss_now, losses, schedule = torch.zeros((), device=device), [], Schedule(optimizers)

    def predict(x: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=task.mixed):
            return model(x).float()

    def backward(x: Tensor, y: Tensor) -> None:
        model.zero_grad()  # to None, so that a captured backward writes gradients instead of adding to them
        loss = F.cross_entropy(predict(x).flatten(0, -2), y.flatten())
        loss.backward()
        loss_now.copy_(loss.detach())

    def update() -> None:
        for optimizer in optimizers:
            optimizer.step()

    def whole(x: Tensor, y: Tensor) -> None:
        backward(x, y)
        update()

    run: Callable[[Tensor, Tensor], None]
    graphs = device.type == "cuda"
    run = CapturedStep(whole if captured else backward) if graphs else whole
    generator = torch.Generator(device).manual_seed(job.seed)
    first = None
    for k, (x, y) in zip(range(steps), task.batches(data, generator), strict=False):
        schedule.set(task.rate(k, steps))
        run(x, y)
        if graphs and not captured:
            update()
        if k == 0:
            first = loss_now.clone()
        if k >= steps - max(1, min(390, steps // 16)):
            losses.append(loss_now.clone())
        yield
    model.eval()
    with torch.no_grad():
        held_out = task.held_out(predict, data)
    return {
        task.metric: held_out,
        "training_loss": float(torch.stack(losses).mean()),
        "first_loss": float(first),
        "seconds": time.perf_counter() - begin,
        "run": ("captured" if captured else "step eager") if graphs else "eager",
    }


def guarded(
    job: Job, task: Task, data: Data, device: torch.device, most: int | None = None
) -> Work[tuple[Job, Metrics]]:
    """A job with its result or its error: one job's failure must not lose the others.

    If a step cannot be captured after all, the job begins again with eager steps of the optimizer.
    """
    notes: Metrics = {}
    can = parse(job.method)[0].captured
    for captured in (True, False) if can and device.type == "cuda" else (can,):
        try:
            return job, {**(yield from train(job, task, data, device, most, captured)), **notes}
        except MissingRivals as error:
            return job, {"skipped": str(error)}
        except Exception as error:
            kind = "capture_error" if captured and device.type == "cuda" else "error"
            notes = {kind: f"{type(error).__name__}: {error}"[:400]}
    return job, notes


def load(tasks: dict[str, Task], folder: Path | None, device: torch.device) -> dict[str, Data]:
    """The data of each task, read once for all tasks that share it."""
    kinds: dict[Any, Data] = {}
    for task in tasks.values():
        if type(task) not in kinds:
            kinds[type(task)] = task.load(folder, device)
    return {name: kinds[type(task)] for name, task in tasks.items()}
