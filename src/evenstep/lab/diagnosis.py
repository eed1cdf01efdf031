"""The cost of `UnitStep` on a model: memory of its state, added arithmetic and memory traffic, and time."""

import copy
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import evenstep

from .bench import seconds_per_step

SUMS = 3  # operations per number of a layer's input: subtract the centre, add, square and add
WARM_UP = 3
Call = Callable[[nn.Module], Tensor]  # a forward pass that ends in a loss


class Cost(NamedTuple):
    """Operations of forward and backward, operations that whitening adds, and bytes of inputs it reads again."""

    flops: float
    added: float
    read: float


class Times(NamedTuple):
    """Median seconds of a step of each optimizer, and how many steps were timed."""

    sgd: float
    unitstep: float
    rounds: int


def state_floats(model: nn.Module) -> dict[str, float]:
    """Numbers that optimizers keep for each trained parameter."""
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    optimizer = evenstep.UnitStep(model)
    optimizer.step()  # without gradients nothing moves, but all state is created
    kept = sum(t.numel() for state in optimizer.state.values() for t in state.values() if isinstance(t, Tensor))
    optimizer.detach()
    return {"SGD": 0.0, "SGD with momentum": 1.0, "UnitStep": kept / trained, "AdamW": 2.0}


def cost(model: nn.Module, coverage: Any, call: Call) -> Cost:
    """Count one forward and backward pass, and the inputs of the layers that an optimizer's `coverage` whitens."""
    sizes: list[tuple[int, int]] = []

    def look(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tensors = [t for t in [*args, *kwargs.values()] if isinstance(t, Tensor)]
        sizes.extend((x.numel(), x.element_size()) for x in tensors[:1])

    weights = [row.parameter for row in coverage if row.treatment == "whitened" and row.parameter.endswith("weight")]
    layers = [model.get_submodule(name.rpartition(".")[0]) for name in weights]
    handles = [layer.register_forward_pre_hook(look, with_kwargs=True) for layer in layers]
    try:
        with FlopCounterMode(display=False) as counter:
            call(model).backward()
    finally:
        for handle in handles:
            handle.remove()
        model.zero_grad(set_to_none=True)
    return Cost(counter.get_total_flops(), SUMS * sum(n for n, _ in sizes), sum(n * size for n, size in sizes))


def measure(model: nn.Module, call: Call, device: torch.device, seconds: float = 3.0, most: int = 50) -> Times:
    """Time steps of SGD with momentum and of UnitStep, alternately, on two copies of the model."""
    copies = copy.deepcopy(model), copy.deepcopy(model)
    optimizers = torch.optim.SGD(copies[0].parameters(), lr=1e-6, momentum=0.9), evenstep.UnitStep(copies[1], lr=1e-6)
    times: list[list[float]] = [[], []]

    def step(network: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad(set_to_none=True)
        call(network).backward()
        optimizer.step()

    started = time.perf_counter()
    while len(times[0]) < WARM_UP + 3 or (time.perf_counter() - started < seconds and len(times[0]) < most):
        for taken, network, optimizer in zip(times, copies, optimizers, strict=True):
            taken.append(seconds_per_step(partial(step, network, optimizer), device, 1))
    optimizers[1].detach()
    sgd, unitstep = (statistics.median(taken[WARM_UP:]) for taken in times)
    return Times(sgd, unitstep, len(times[0]) - WARM_UP)
