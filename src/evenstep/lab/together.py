"""Trials that differ in stepsize and seed alone, trained as one ensemble: the same records, in a fraction of the time.

On a GPU a step is one CUDA graph, whose inputs lie in tensors that stay in place.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from evenstep.lab import feed, records
from evenstep.lab.data import Arrays, Text
from evenstep.lab.ensemble import Ensemble
from evenstep.lab.methods import METHODS
from evenstep.lab.models import MODELS
from evenstep.lab.stacked import elementwise, linear, of_base
from evenstep.lab.train import CHECK_EVERY, Epoch, linear_decay
from evenstep.lab.trial import Trial
from evenstep.shell import CoordinateOptimizer
from evenstep.whitened import Whitened

WARM_UP = 3  # steps made eagerly before a graph is captured: state is made, libraries choose their algorithms


class Captured:
    """`compute(x, y)` for inputs of one shape, as a CUDA graph: eager at first, then captured, then replayed."""

    def __init__(self, compute: Callable[[Tensor, Tensor], None], x: Tensor, y: Tensor) -> None:
        """`x` and `y` give the shapes."""
        self.compute, self.x, self.y = compute, torch.empty_like(x), torch.empty_like(y)
        self.graph, self.calls = torch.cuda.CUDAGraph(), 0

    def __call__(self, x: Tensor, y: Tensor) -> None:
        """The next call, on the current stream, which must not be the default one."""
        self.x.copy_(x)
        self.y.copy_(y)
        if self.calls < WARM_UP:
            self.compute(self.x, self.y)
        elif self.calls == WARM_UP:
            with torch.cuda.graph(self.graph, stream=torch.cuda.current_stream()):
                self.compute(self.x, self.y)
        if self.calls >= WARM_UP:
            self.graph.replay()
        self.calls += 1


def alike(trial: Trial) -> str:
    """What trials must share to be members of one ensemble, as text: all but stepsize and seed."""
    return records.dumps({k: v for k, v in asdict(trial).items() if k not in ("lr", "seed")})


def why_alone(trial: Trial, data: Arrays | Text, device: torch.device | str) -> str | None:
    """Why this trial should not be a member of an ensemble on the device; None if it should.

    A GPU is idle without one. On a CPU the optimizer's arithmetic for all members at once is what is gained, and a
    torch rule has little of it.
    """
    if torch.device(device).type == "cpu" and not isinstance(_optimizer(trial, data), CoordinateOptimizer):
        return "a torch rule gains nothing from an ensemble on a CPU"
    return why_not(trial, data)


def why_not(trial: Trial, data: Arrays | Text) -> str | None:
    """Why this trial cannot be a member of an ensemble; None if it can."""
    optimizer = _optimizer(trial, data)
    if not isinstance(optimizer, CoordinateOptimizer):
        build = METHODS[trial.method].optimizer
        together = elementwise(lambda module, lr: build(module, lr=lr, **trial.options))
        return None if together else f"{type(optimizer).__name__} is not elementwise, or not linear in lr"
    group, blocks = optimizer.param_groups[0], optimizer._blocks(lambda p: p.requires_grad)
    if isinstance(optimizer, Whitened):
        if not all(linear(of_base(rule)) for rule in (optimizer._base, optimizer._plain)):
            return f"{optimizer._base.name}'s steps are not linear in lr"
    elif type(optimizer)._advance is not CoordinateOptimizer._advance:
        return f"{type(optimizer).__name__} looks at the whole network"
    if group["maximize"] or group.get("reduction", "mean") != "mean":
        return "the loss of an ensemble is a mean, to be made small"
    whole = all(b.entry is None or len(b.biases) == sum(x is not None for x in b.entry.biases) for b in blocks)
    return None if whole else "a bias does not move with its layer"


def run_together(
    trials: Sequence[Trial],
    data: Arrays | Text,
    device: torch.device | str = "cpu",
    *,
    forward: str | None = None,
    on_epoch: Callable[[Trial, Epoch], None] | None = None,
) -> list[records.Record]:
    """The records of `trials`, in their order; they may differ in stepsize and seed alone.

    What a record holds is what `trial.run` gives, but `seconds` is a member's share of the time of all, whose number
    is in its environment as `together`. `forward` is the ensemble's, by default what is fastest on the device.
    """
    device = torch.device(device)
    with _stream(device):
        data = data.to(device)
        rows = _train(trials, data, _ensemble(trials, data, device, forward), on_epoch)
    found = [
        records.make({**asdict(t), "data": data.name}, t.seed, r, device) for t, r in zip(trials, rows, strict=True)
    ]
    for record in found:
        record["environment"]["together"] = len(trials)
    return found


def best_forward(model: nn.Module, device: torch.device) -> str:
    """How an ensemble finds its gradients fastest (`scripts/bench_ensemble.py` measures it).

    Large layers fill a GPU by themselves, and a CPU gains nothing from grouped convolutions.
    """
    small = sum(p.numel() for p in model.parameters()) < 1_000_000
    attends = any(isinstance(module, nn.MultiheadAttention) for module in model.modules())
    return "matmul" if device.type == "cuda" and small and not attends else "each"


@contextmanager
def _stream(device: torch.device) -> Iterator[None]:
    """A stream of our own on a GPU: steps cannot be captured on the default one."""
    if device.type != "cuda":
        yield
        return
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield


def _model(trial: Trial, data: Arrays | Text) -> nn.Module:
    torch.manual_seed(trial.seed)
    batch_norm = METHODS[trial.method].batch_norm
    return MODELS[trial.model](data.channels, batch_norm=batch_norm, **trial.model_options)


def _optimizer(trial: Trial, data: Arrays | Text) -> Optimizer:
    """The trial's public optimizer, to be looked at."""
    with torch.random.fork_rng(devices=[]):
        return METHODS[trial.method].optimizer(_model(trial, data), lr=trial.lr, **trial.options)


def _ensemble(trials: Sequence[Trial], data: Arrays | Text, device: torch.device, forward: str | None) -> Ensemble:
    method, seeds = METHODS[trials[0].method], list(dict.fromkeys(t.seed for t in trials))
    graph_options = method.graph_options if device.type == "cuda" else {}

    def build(model: nn.Module, lr: float) -> Optimizer:
        return method.optimizer(model, lr=lr, **graph_options, **trials[0].options)

    models = [_model(trial, data).to(device) for trial in trials]
    return Ensemble(
        models,
        build,
        [trial.lr for trial in trials],
        source=[seeds.index(trial.seed) for trial in trials],
        forward=forward or best_forward(models[0], device),
    )


def _train(
    trials: Sequence[Trial],
    data: Arrays | Text,
    ensemble: Ensemble,
    on_epoch: Callable[[Trial, Epoch], None] | None,
) -> list[list[Epoch]]:
    """Rows of each member; a member's end with the epoch in which its loss ceases to be finite."""
    first, device = trials[0], ensemble.rates.device
    generators = [torch.Generator().manual_seed(seed) for seed in dict.fromkeys(t.seed for t in trials)]
    steps, captured = feed.steps_per_epoch(data, first.batch_size), {}
    rows: list[list[Epoch]] = [[] for _ in trials]
    for number in range(first.epochs):
        running = [e for e, mine in enumerate(rows) if not (mine and mine[-1]["diverged"])]
        if not running:
            break
        start, count = time.perf_counter(), 0
        ensemble.total.zero_()
        sources = [feed.epoch(data, first.batch_size, g, device, first.augment) for g in generators]
        for k, batches in enumerate(zip(*sources, strict=True)):
            x, y = (torch.stack(parts) for parts in zip(*batches, strict=True))
            if first.decay_lr:
                ensemble.scale_rates(linear_decay((number * steps + k) / (first.epochs * steps)))
            if device.type == "cuda":
                if x.shape not in captured:
                    captured[x.shape] = Captured(ensemble.step, x, y)
                captured[x.shape](x, y)
            else:
                ensemble.step(x, y)
            count += y.shape[1]
            if k % CHECK_EVERY == 0:
                ensemble.freeze_diverged()
        losses = (ensemble.total / count).tolist()
        ensemble.freeze_diverged()
        seconds = (time.perf_counter() - start) / len(trials)
        for e in running:
            row = {"epoch": number + 1, "train_loss": losses[e], "seconds": seconds}
            row |= {"steps": steps, "diverged": not math.isfinite(losses[e])}
            row |= feed.score(ensemble.member(e), data)
            rows[e].append(row)
            if on_epoch is not None:
                on_epoch(trials[e], row)
    return rows
