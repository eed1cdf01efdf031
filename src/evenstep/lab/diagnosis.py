"""The cost of `UnitStep` on a model: memory of its state, and time of a step."""

import copy
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

import evenstep

from .bench import seconds_per_step

WARM_UP = 3
Call = Callable[[nn.Module], Tensor]  # a forward pass that ends in a loss


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
