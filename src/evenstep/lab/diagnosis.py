"""What `UnitStep` costs on a model: memory of its state, arithmetic and memory traffic it adds, and time."""

import copy
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.flop_counter import FlopCounterMode

import evenstep

from ..model.survey import Coverage

SUMS = 3  # operations per number of a layer's input: less the centre, added up, squared and added up
PASSES = 6  # operations per weight and place: a product and a sum, forward, for the input's and the weight's gradient
WARM_UP = 3
Call = Callable[[nn.Module], Tensor]  # a forward pass that ends in a loss


@dataclass(frozen=True)
class Cost:
    """What one step adds to forward and backward: `flops` of the sums beside all, `read` bytes of inputs read again."""

    flops: float
    added: float
    read: float


@dataclass(frozen=True)
class Times:
    """Median seconds of a step, interleaved, and how many were taken of each."""

    sgd: float
    evenstep: float
    rounds: int


def state_floats(model: nn.Module) -> dict[str, float]:
    """Numbers that optimizers keep for each parameter that trains."""
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    optimizer = evenstep.UnitStep(model)
    optimizer.step()  # without gradients nothing moves, but all state is made
    kept = sum(t.numel() for state in optimizer.state.values() for t in state.values() if isinstance(t, Tensor))
    optimizer.detach()
    return {"SGD": 0.0, "SGD with momentum": 1.0, "UnitStep": kept / trained, "AdamW": 2.0}


def largest_share(model: nn.Module, coverage: Coverage) -> float:
    """A bound on the arithmetic that whitening adds, from shapes alone: the largest share in any layer.

    It is exact for a layer that is applied once per row of its input: Linear, or a convolution of stride 1.
    """
    shares = []
    for layer in whitened(model, coverage).values():
        weight = next(p for name, p in layer.named_parameters() if name in ("weight", "in_proj_weight"))
        if weight.numel():
            shares.append(SUMS * inputs_of(layer) / (PASSES * weight.numel()))
    return max(shares, default=0.0)


def whitened(model: nn.Module, coverage: Coverage) -> dict[str, nn.Module]:
    """The layers with whitened weights, by name."""
    names = [row.parameter for row in coverage if row.treatment == "whitened" and row.parameter.endswith("weight")]
    return {name: model.get_submodule(name.rpartition(".")[0]) for name in names}


def inputs_of(layer: nn.Module) -> int:
    """Number of inputs, or input channels, of a whitened layer."""
    return next(int(getattr(layer, a)) for a in ("in_features", "in_channels", "embed_dim") if hasattr(layer, a))


def cost(model: nn.Module, coverage: Coverage, call: Call) -> Cost:
    """Count one forward and backward, and the inputs of whitened layers in it."""
    sizes: list[tuple[int, int]] = []

    def look(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tensors = [t for t in [*args, *kwargs.values()] if isinstance(t, Tensor)]
        sizes.extend((x.numel(), x.element_size()) for x in tensors[:1])  # without any, the layer itself will object

    layers = whitened(model, coverage).values()
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
    """Time steps of SGD with momentum and of UnitStep on two copies of the model, one after the other in turns."""
    copies = copy.deepcopy(model), copy.deepcopy(model)
    optimizers = torch.optim.SGD(copies[0].parameters(), lr=1e-6, momentum=0.9), evenstep.UnitStep(copies[1], lr=1e-6)
    times: list[list[float]] = [[], []]
    started = time.perf_counter()
    while len(times[0]) < WARM_UP + 3 or (time.perf_counter() - started < seconds and len(times[0]) < most):
        for taken, mine, optimizer in zip(times, copies, optimizers, strict=True):
            taken.append(_step(mine, optimizer, call, device))
    optimizers[1].detach()
    sgd, ours = (statistics.median(taken[WARM_UP:]) for taken in times)
    return Times(sgd, ours, len(times[0]) - WARM_UP)


def _step(model: nn.Module, optimizer: Optimizer, call: Call, device: torch.device) -> float:
    """Seconds of one step."""
    _wait(device)
    start = time.perf_counter()
    optimizer.zero_grad(set_to_none=True)
    call(model).backward()
    optimizer.step()
    _wait(device)
    return time.perf_counter() - start


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
