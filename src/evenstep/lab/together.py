"""Trials that differ in stepsize, seed and L2 alone, trained as one ensemble: the same records, in less time.

On a GPU several ensembles train at the same time (`turns`), the steps of each as CUDA graphs (`captured`).
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import nn
from torch.optim import Optimizer

from ..torch_optimizer.coordinate_optimizer import CoordinateOptimizer
from ..whitened import Whitened
from . import feed, records
from .captured import Steps
from .data import Arrays, Text
from .ensemble import Ensemble
from .identity import described
from .methods import METHODS, OwnBatchSGD
from .models import MODELS
from .stacked import elementwise, linear, of_base
from .train import CHECK_EVERY, Epoch, linear_decay
from .trial import Trial
from .turns import Work, in_turn

AT_ONCE = 12  # ensembles under way on a GPU; one after the other elsewhere

OnEpoch = Callable[[Trial, Epoch], None]


def alike(trial: Trial) -> str:
    """What trials must share to be members of one ensemble, as text: all but stepsize, seed and strength of L2."""
    shared = asdict(trial)
    del shared["lr"], shared["seed"]
    if "l2" in shared["model_options"]:
        shared["model_options"]["l2"] = bool(trial.model_options["l2"])  # a network without it has no such buffer
    return records.dumps(shared)


def why_alone(trial: Trial, data: Arrays | Text, device: torch.device | str) -> str | None:
    """Why this trial should not be a member of an ensemble on the device; None if it should.

    A GPU is idle without one. On a CPU the optimizer's arithmetic for all members at once is what is gained, and only
    those have much of it that step layer by layer.
    """
    if torch.device(device).type == "cpu":
        optimizer = _optimizer(trial, data)
        if not isinstance(optimizer, CoordinateOptimizer) or optimizer._together:
            return "it gains nothing from an ensemble on a CPU"
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
    elif type(optimizer)._advance is not CoordinateOptimizer._advance and not isinstance(optimizer, OwnBatchSGD):
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
    on_epoch: OnEpoch | None = None,
) -> list[records.Record]:
    """The records of `trials`, in their order; they may differ in what `alike` leaves out.

    What a record holds is what `trial.run` gives, but `seconds` is a member's share of the time of all that ran, whose
    number is in its environment as `together`. `forward` is the ensemble's, by default what is fastest on the device.
    """
    return next(run_interleaved([trials], data, device, forward=forward, on_epoch=on_epoch))


def run_interleaved(
    parts: Iterable[Sequence[Trial]],
    data: Arrays | Text,
    device: torch.device | str = "cpu",
    *,
    at_once: int | None = None,
    forward: str | None = None,
    on_epoch: OnEpoch | None = None,
) -> Iterator[list[records.Record]]:
    """The records of several ensembles, as `run_together` gives them, each as soon as it is finished.

    Up to `at_once` are under way, a step of each in turn; a part is asked for when there is room for it. An ensemble
    that fails stops no other, and its exception is raised in the end.
    """
    device, company, which = torch.device(device), Company(), described(data)
    data = data.to(device)
    works = (_training(trials, data, which, device, forward, on_epoch, company) for trials in parts)
    return in_turn(works, device, at_once or (AT_ONCE if device.type == "cuda" else 1))


@dataclass
class Company:
    """How many members share the device at the moment."""

    members: int = 0


def best_forward(model: nn.Module, device: torch.device) -> str:
    """How an ensemble finds its gradients fastest (`scripts/bench_ensemble.py` measures it).

    Large layers fill a GPU by themselves, and a CPU gains nothing from grouped convolutions.
    """
    small = sum(p.numel() for p in model.parameters()) < 1_000_000
    attends = any(isinstance(module, nn.MultiheadAttention) for module in model.modules())
    return "vmap" if device.type == "cuda" and small and not attends else "each"


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


def _training(
    trials: Sequence[Trial],
    data: Arrays | Text,
    which: dict[str, str],
    device: torch.device,
    forward: str | None,
    on_epoch: OnEpoch | None,
    company: Company,
) -> Work[list[records.Record]]:
    """Train an ensemble step by step, and make its records."""
    company.members += len(trials)
    try:
        rows, most = yield from _train(trials, data, _ensemble(trials, data, device, forward), on_epoch, company)
    finally:
        company.members -= len(trials)
    found = [records.make({**asdict(t), **which}, t.seed, r, device) for t, r in zip(trials, rows, strict=True)]
    for record in found:
        record["environment"]["together"] = most
    return found


def _train(
    trials: Sequence[Trial],
    data: Arrays | Text,
    ensemble: Ensemble,
    on_epoch: OnEpoch | None,
    company: Company,
) -> Work[tuple[list[list[Epoch]], int]]:
    """Rows of each member, and how many members shared the device at most; yields after every step.

    A member's rows end with the epoch in which its loss ceases to be finite.
    """
    first, device = trials[0], ensemble.rates.device
    generators = [torch.Generator().manual_seed(seed) for seed in dict.fromkeys(t.seed for t in trials)]
    steps, step, most = feed.steps_per_epoch(data, first.batch_size), Steps(ensemble.step), len(trials)
    rows: list[list[Epoch]] = [[] for _ in trials]
    for number in range(first.epochs):
        running = [e for e, mine in enumerate(rows) if not (mine and mine[-1]["diverged"])]
        if not running:
            break
        start, count = time.perf_counter(), 0
        ensemble.total.zero_()
        sources = [feed.epoch(data, first.batch_size, g, device, first.augment) for g in generators]
        for k, batches in enumerate(zip(*sources, strict=True)):
            x, y = (torch.stack(parts) if len(parts) > 1 else parts[0][None] for parts in zip(*batches, strict=True))
            if first.decay_lr:
                ensemble.scale_rates(linear_decay((number * steps + k) / (first.epochs * steps)))
            step(x, y)
            count += y.shape[1]
            if k % CHECK_EVERY == 0:
                ensemble.freeze_diverged()
            yield
        losses = (ensemble.total / count).tolist()
        ensemble.freeze_diverged()
        most = max(most, company.members)
        seconds, scores = (time.perf_counter() - start) / company.members, ensemble.scores(data)
        for e in running:
            row = {"epoch": number + 1, "train_loss": losses[e], "seconds": seconds}
            row |= {"steps": steps, "diverged": not math.isfinite(losses[e]), **scores[e]}
            rows[e].append(row)
            if on_epoch is not None:
                on_epoch(trials[e], row)
    return rows, most
