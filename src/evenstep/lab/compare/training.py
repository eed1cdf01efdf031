"""Train one network, as a work in steps that runs beside others on one GPU."""

import gc
import statistics
import time
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from evenstep.lab.bench import seconds_per_step
from evenstep.lab.parallel_trials import CapturedStep, Work

from .jobs import GRID, JUDGED, SINGLE, TIMED, Job
from .methods import parse
from .methods.method import Capture
from .methods.packages import MissingRivals
from .tasks.task import Splits, Task

Metrics = dict[str, Any]
POINTS = 20  # of a curve
BURSTS, BURST = 3, 20  # timed: bursts, and steps of each, a multiple of the 10 after which SOAP does more


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


class Training:
    """A network with its optimizers and batches. The seed sets weights and batches, the same for all methods.

    With Capture.STEP lr is a tensor, and on a GPU the whole step is a CUDA graph. With BACKWARD forward and backward
    are one, and the optimizer's step runs eagerly on the same stream.
    """

    def __init__(self, job: Job, task: Task, data: Splits, device: torch.device, steps: int, capture: Capture) -> None:
        self.task, self.data, self.steps, self.taken = task, data, steps, 0
        self.method, options = parse(job.method)
        options = {key: steps if value == "steps" else value for key, value in options.items()}
        torch.manual_seed(job.seed)
        with torch.device(device):
            self.model = task.network(self.method.batch_norm)
        lr = torch.tensor(job.lr, device=device) if capture is Capture.STEP else job.lr
        self.optimizers = self.method.build(self.model, lr, options)
        self.schedule, self.loss_now = Schedule(self.optimizers), torch.zeros((), device=device)
        self.graphs, self.device, self.whole = device.type == "cuda", device, capture is Capture.STEP
        run = self._whole if self.whole else self._backward
        self.run = CapturedStep(run) if self.graphs and capture is not Capture.NOTHING else run
        self.how = capture.value if self.graphs else "eager"
        self.batches = task.batches(data["train"], torch.Generator(device).manual_seed(job.seed))
        self.swap("train")

    def swap(self, mode: str) -> None:
        """Change to `train` or `eval` in the network, and in optimizers that keep averaged weights."""
        for part in (self.model, *self.optimizers):
            getattr(part, mode, lambda: None)()

    def predict(self, x: Tensor) -> Tensor:
        """The network's output."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.task.mixed):
            return self.model(x).float()

    def _backward(self, x: Tensor, y: Tensor) -> None:
        self.model.zero_grad()  # to None, so that a captured backward writes gradients instead of adding to them
        loss = self.task.loss(self.predict(x), y)
        loss.backward()
        self.loss_now.copy_(loss.detach())

    def _whole(self, x: Tensor, y: Tensor) -> None:
        self._backward(x, y)
        self._update()

    def _update(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def step(self) -> None:
        """One step on the next batch."""
        self.schedule.set(self.task.rate(self.taken % self.steps, self.steps, self.method.decay))
        self.run(*next(self.batches))
        if not self.whole:
            self._update()
        self.taken += 1

    @torch.no_grad()
    def held_out(self, split: str) -> Tensor:
        """The metric on a split, without waiting for the device."""
        self.swap("eval")
        found = self.task.held_out(self.predict, self.data[split])
        self.swap("train")
        return found

    def close(self) -> None:
        """Free the graph, which refers to what holds it, and what else waits for the garbage collector."""
        del self.run
        if self.graphs:
            gc.collect()

    def state_bytes(self) -> int:
        """Bytes of optimizer state."""
        kept = tree_leaves([list(optimizer.state.values()) for optimizer in self.optimizers])
        return sum(value.nbytes for value in kept if isinstance(value, Tensor))


def train(
    job: Job, task: Task, data: Splits, device: torch.device, most: int | None, capture: Capture
) -> Work[Metrics]:
    """Train one network in steps; its metrics, and the seconds that took beside others."""
    begin, steps = time.perf_counter(), min(task.steps, most or task.steps)
    training = Training(job, task, data, device, steps, capture)
    try:
        found = yield from _curves(training, job, steps)
    finally:
        training.close()
    return {**found, "seconds": time.perf_counter() - begin, "run": training.how}


def _curves(training: Training, job: Job, steps: int) -> Work[Metrics]:
    """Take all steps; the metrics, the curves of the race among them."""
    task, data, device = training.task, training.data, training.device
    marks = {round(steps * k / POINTS) for k in range(1, POINTS + 1)} if job.phase != SINGLE else set()
    first, last, running, curve = None, [], torch.zeros((), device=device), []
    for k in range(steps):
        training.step()
        if k == 0:
            first = training.loss_now.clone()
        if k >= steps - max(1, min(390, steps // 16)):
            last.append(training.loss_now.clone())
        running += training.loss_now
        if k + 1 in marks:
            held = training.held_out("validation") if job.phase == JUDGED else None
            curve.append((k + 1, running.clone(), held))
            running.zero_()
        yield
    chosen = "validation" if job.phase in (SINGLE, GRID) and "validation" in data else "test"
    assert first is not None
    found: Metrics = {
        task.metric: float(training.held_out(chosen)),
        "training_loss": float(torch.stack(last).mean()),
        "first_loss": float(first),
    }
    if curve:
        lengths = [k - before for k, before in zip([k for k, *_ in curve], [0] + [k for k, *_ in curve], strict=False)]
        found["curve"] = {
            "steps": [k for k, *_ in curve],
            "training_loss": [_short(loss / n) for (_, loss, _), n in zip(curve, lengths, strict=True)],
        }
        if job.phase == JUDGED:
            found["curve"]["validation"] = [_short(held) for *_, held in curve]
    return found


def _short(value: Any) -> float:
    """Four digits are enough for a curve."""
    return float(f"{float(value):.4g}")


def timed(job: Job, task: Task, data: Splits, device: torch.device, most: int | None, capture: Capture) -> Metrics:
    """The seconds of a step, batch included, and the memory, of a training that is alone on the device."""
    training = Training(job, task, data, device, min(task.steps, most or task.steps), capture)
    steps = 1 if most is not None or device.type != "cuda" else BURST
    gpu = device.type == "cuda"
    before = torch.cuda.memory_allocated(device) if gpu else 0
    for _ in range(BURST // 2 if steps > 1 else 1):  # graphs are captured, libraries choose their algorithms
        training.step()
    if gpu:
        torch.cuda.reset_peak_memory_stats(device)
    seconds = [seconds_per_step(training.step, device, steps) for _ in range(BURSTS)]
    found: Metrics = {"seconds_per_step": statistics.median(seconds), "seconds_of_bursts": list(map(_short, seconds))}
    if gpu:  # activations, gradients and the optimizer's state; not what the graph's own pool keeps between steps
        found["memory"] = torch.cuda.max_memory_allocated(device) - before
    found |= {"state_bytes": training.state_bytes(), "run": training.how}
    training.close()
    return found


def guarded(
    job: Job, task: Task, data: Splits, device: torch.device, most: int | None = None
) -> Work[tuple[Job, Metrics]]:
    """A job with its result or its error: one job's failure must not lose the others.

    If a step cannot be captured after all, the job begins again with eager steps of the optimizer.
    """
    notes: Metrics = {}
    capture = parse(job.method)[0].capture
    ways = {capture: None, Capture.BACKWARD: None} if capture is Capture.STEP else {capture: None}
    for way in ways:
        try:
            if job.phase == TIMED:
                yield
                return job, {**timed(job, task, data, device, most, way), **notes}
            return job, {**(yield from train(job, task, data, device, most, way)), **notes}
        except MissingRivals as error:
            return job, {"skipped": str(error)}
        except Exception as error:
            message = f"{type(error).__name__}: {error}"[:400]
            notes = {"error" if way is list(ways)[-1] else "capture_error": message}
    return job, notes
