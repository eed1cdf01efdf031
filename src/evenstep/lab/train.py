"""The training loop of every command and experiment."""

import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

from .evaluate import evaluate
from .loader import epoch_batches, steps_per_epoch
from .parallel_trials import CapturedStep
from .user_task import Data, UserTask, size

Epoch = dict[str, Any]
CHECK_EVERY = 25  # steps between two checks that the loss is finite


class Training:
    """A training, resumable after every epoch; `rows` has one row per finished epoch.

    The loss is cross-entropy, or that of a user's task.

    A row has `train_loss` (the mean over the epoch's batches as they were trained on, as in the paper's figure 2),
    `test_loss`, `test_accuracy` and `dead_share` after the epoch, `seconds` and `steps` of training, and `diverged`.
    Training ends with the epoch in which the loss stops being finite.

    `seed` fixes the order of the data. `schedule` maps the finished share of the training to a factor on every group's
    lr. With `capture` the steps run as CUDA graphs: the
    optimizer must be capturable, and needs a tensor as lr if there is a schedule.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        data: Data,
        *,
        epochs: int,
        batch_size: int,
        seed: int,
        device: torch.device | str = "cpu",
        augment: bool | str = False,
        schedule: Callable[[float], float] | None = None,
        capture: bool = False,
    ) -> None:
        self.device = torch.device(device)
        self.model, self.optimizer, self.data = model.to(device).train(), optimizer, data.to(device)
        self.epochs, self.batch_size, self.augment = epochs, batch_size, augment
        self.schedule = schedule
        self.rates = [float(group["lr"]) for group in optimizer.param_groups]
        self.order = torch.Generator().manual_seed(seed)
        self.loss, self.total = torch.zeros((), device=device), torch.zeros((), device=device)
        self.step = CapturedStep(self._step) if capture else self._step
        self.rows: list[Epoch] = []
        endless = isinstance(self.data, UserTask) and self.data.steps is not None
        self.stream = self.data.stream(self.order) if endless and isinstance(self.data, UserTask) else None

    @property
    def done(self) -> bool:
        """Whether all epochs are trained, or the loss diverged."""
        return len(self.rows) >= self.epochs or bool(self.rows and self.rows[-1]["diverged"])

    def run(self, on_epoch: Callable[[Epoch], None] | None = None) -> Iterator[None]:
        """Train to the end, pausing after every step."""
        while not self.done:
            yield from self.epoch()
            if on_epoch is not None:
                on_epoch(self.rows[-1])

    def finish(self, on_epoch: Callable[[Epoch], None] | None = None) -> list[Epoch]:
        """Train to the end without a pause; the rows."""
        for _ in self.run(on_epoch):
            pass
        return self.rows

    def epoch(self) -> Iterator[None]:
        """Train one epoch, pausing after every step, and add its row; `seconds` leaves the pauses out."""
        steps, count, seconds = steps_per_epoch(self.data, self.batch_size), 0, 0.0
        self.total.zero_()
        batches = self._batches()
        for number in range(steps):
            start = time.perf_counter()
            x, y = next(batches)
            self._set_rates(len(self.rows) * steps + number, self.epochs * steps)
            self.step(x, y)
            count += examples(x, y)
            diverged = number % CHECK_EVERY == 0 and self._seen_diverged()
            seconds += time.perf_counter() - start
            yield
            if diverged:
                break
        start = time.perf_counter()
        mean = self.total.item() / count  # waits for a GPU
        seconds += time.perf_counter() - start
        row = {"epoch": len(self.rows) + 1, "train_loss": mean, "seconds": seconds, "steps": steps}
        self.rows.append({**row, "diverged": not math.isfinite(mean), **evaluate(self.model, self.data)})

    def _batches(self) -> Iterator[tuple[Any, Any]]:
        """The batches of the next epoch."""
        if self.stream is not None:
            return ((batch, None) for batch in self.stream)
        return epoch_batches(self.data, self.batch_size, self.order, self.device, self.augment)

    def _step(self, x: Any, y: Any) -> None:
        """One training step; `total` sums the losses of the epoch's examples."""
        self.optimizer.zero_grad()
        if isinstance(self.data, UserTask):
            loss = self.data.loss(self.model, x)
        else:
            loss = functional.cross_entropy(self.model(x).flatten(0, -2), y.flatten())
        loss.backward()
        self.optimizer.step()
        self.loss.copy_(loss.detach())
        self.total.add_(self.loss, alpha=examples(x, y))

    def _set_rates(self, step: int, steps: int) -> None:
        """Apply the schedule; a captured step reads its lr from a tensor, which keeps its address."""
        if self.schedule is None:
            return
        factor = self.schedule(step / steps)
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate * factor)
            else:
                group["lr"] = rate * factor

    def _seen_diverged(self) -> bool:
        """Whether the loss is known to be infinite or NaN; a GPU is not asked, because the answer takes a wait."""
        return self.device.type != "cuda" and not math.isfinite(self.total.item())


def examples(x: Any, y: Any) -> int:
    """The number of examples in a batch."""
    return size(x) if y is None else len(y)


def linear_decay(done: float) -> float:
    """Schedule: from the full stepsize to zero in a straight line."""
    return 1 - done
