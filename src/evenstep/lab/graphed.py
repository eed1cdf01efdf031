"""Many trials at once on one GPU: each trial's step is a CUDA graph on a stream of its own.

The trials use the public optimizers as they are, and none can touch another. Small networks leave a GPU mostly idle,
so that dozens of trials take little longer than one.
"""

import math
import time
from collections.abc import Iterator
from dataclasses import asdict

import torch
from torch import nn
from torch.nn import functional

from evenstep.lab import records
from evenstep.lab.data import Arrays, Text, augmented
from evenstep.lab.evaluate import evaluate, evaluate_text
from evenstep.lab.methods import METHODS
from evenstep.lab.models import MODELS
from evenstep.lab.train import linear_decay
from evenstep.lab.trial import Trial

WARM_UP = 4  # steps made eagerly, so that state exists and libraries have chosen their algorithms


class Feed:
    """The batches of one seed, in tensors that stay in place; whole batches alone, since a graph has one shape."""

    def __init__(self, arrays: Arrays, seed: int, batch_size: int, augment: bool | str) -> None:
        self.arrays, self.batch_size, self.augment = arrays, batch_size, augment
        self.generator = torch.Generator().manual_seed(seed)
        self.steps = len(arrays.train_y) // batch_size
        shape = (batch_size, *arrays.train_x.shape[1:])
        self.x = torch.zeros(shape, device=arrays.train_x.device)
        self.y = torch.zeros(batch_size, dtype=torch.long, device=arrays.train_x.device)

    def epoch(self) -> Iterator[None]:
        """Fill `x` and `y` with one batch after the other."""
        order = torch.randperm(len(self.arrays.train_y), generator=self.generator).to(self.x.device)
        for rows in order[: self.steps * self.batch_size].split(self.batch_size):
            x = self.arrays.normalize(self.arrays.train_x[rows])
            self.x.copy_(augmented(x, self.generator, self.augment))
            self.y.copy_(self.arrays.train_y[rows])
            yield


class TextFeed:
    """Batches of text windows of one seed; an epoch is a fixed number of steps."""

    def __init__(
        self, text: Text, seed: int, batch_size: int, augment: bool, context: int = 128, steps: int = 250
    ) -> None:
        self.arrays, self.batch_size, self.steps = text, batch_size, steps
        self.generator = torch.Generator().manual_seed(seed)
        self.offsets = torch.arange(context + 1, device=text.train.device)
        self.x, self.y = torch.zeros(2, batch_size, context, dtype=torch.long, device=text.train.device)

    def epoch(self) -> Iterator[None]:
        """Fill `x` with windows and `y` with what follows each character."""
        last = len(self.arrays.train) - len(self.offsets)
        starts = torch.randint(0, last, (self.steps, self.batch_size, 1), generator=self.generator).to(self.x.device)
        for start in starts:
            window = self.arrays.train[start + self.offsets]
            self.x.copy_(window[:, :-1])
            self.y.copy_(window[:, 1:])
            yield


class Member:
    """One trial: its network, its optimizer, and its captured step."""

    def __init__(self, trial: Trial, feed: Feed | TextFeed, model: nn.Module | None = None) -> None:
        method = METHODS[trial.method]
        self.trial, self.feed = trial, feed
        torch.manual_seed(trial.seed)
        if model is None:
            model = MODELS[trial.model](feed.arrays.channels, batch_norm=method.batch_norm, **trial.model_options)
        self.model = model.to(feed.x.device).train()
        self.optimizer = method.optimizer(self.model, lr=trial.lr, **method.graph_options, **trial.options)
        self.rates = [torch.full((), g["lr"], device=feed.x.device) for g in self.optimizer.param_groups]
        if trial.decay_lr:
            for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
                group["lr"] = rate
        self.total = torch.zeros((), device=feed.x.device)
        self.stream, self.graph, self.done = torch.cuda.Stream(), torch.cuda.CUDAGraph(), 0

    def compute(self) -> None:
        """One training step on the feed's batch."""
        loss = functional.cross_entropy(self.model(self.feed.x).flatten(0, -2), self.feed.y.flatten())
        loss.backward()
        self.optimizer.step()
        self.total += loss.detach()

    def step(self, share_done: float) -> None:
        """The next step, on this member's stream: eager at first, then captured, then replayed."""
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            if self.trial.decay_lr:
                for rate in self.rates:
                    rate.fill_(self.trial.lr * linear_decay(share_done))
            if self.done < WARM_UP:
                self.optimizer.zero_grad(set_to_none=True)
                self.compute()
        if self.done == WARM_UP:
            self.optimizer.zero_grad(set_to_none=True)
            torch.cuda.synchronize()
            with torch.cuda.graph(self.graph, stream=self.stream):
                self.compute()
        if self.done >= WARM_UP:
            with torch.cuda.stream(self.stream):
                self.graph.replay()
        self.done += 1


def run_together(trials: list[Trial], arrays: Arrays | Text) -> list[records.Record]:
    """Train all trials (of one length and batch size) side by side; the records come in the order of the trials."""
    arrays = arrays.to("cuda")
    make = TextFeed if isinstance(arrays, Text) else Feed
    feeds = {t.seed: make(arrays, t.seed, t.batch_size, t.augment) for t in trials}  # type: ignore[arg-type]
    members = [Member(t, feeds[t.seed]) for t in trials]
    rows: list[list[dict]] = [[] for _ in trials]
    epochs, steps = trials[0].epochs, next(iter(feeds.values())).steps
    for epoch in range(epochs):
        start = time.perf_counter()
        for k, _ in enumerate(zip(*(feed.epoch() for feed in feeds.values()), strict=True)):
            for member in members:
                member.step((epoch * steps + k) / (epochs * steps))
            for member in members:
                torch.cuda.current_stream().wait_stream(member.stream)
        losses = (torch.stack([m.total for m in members]) / steps).tolist()
        seconds = (time.perf_counter() - start) / len(members)
        for member, mine, loss in zip(members, rows, losses, strict=True):
            mine.append(
                {"epoch": epoch + 1, "train_loss": loss, "seconds": seconds, "diverged": not math.isfinite(loss)}
            )
            member.total.zero_()
            if epoch + 1 == epochs:
                score = evaluate_text if isinstance(arrays, Text) else evaluate
                mine[-1] |= score(member.model, arrays)  # type: ignore[arg-type]
    return [
        records.make({**asdict(t), "data": arrays.name}, t.seed, r, "cuda") for t, r in zip(trials, rows, strict=True)
    ]
