"""What a rule keeps between steps, for one block: momentum, and eq. 11's running squares."""

from typing import Any

import torch
from torch import Tensor

from ..math import stepsize
from ..math.change_of_variables import per_unit
from ..math.moments import accumulation_dtype, fold_mean, gain
from ..math.segments import WHOLE
from ..parallel import dtensor as shards
from ..step.block import Block
from ..step.frames import State, put


def init_momentum(states: list[State], block: Block) -> None:
    """Add momentum buffers like the block's parameters, in their dtype as torch keeps them."""
    for state, p in zip(states, block.parameters, strict=True):
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(p, memory_format=torch.preserve_format)


def momentum(
    states: list[State], block: Block, on_weight: Tensor, on_bias: Tensor | None, ok: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """The momentum buffers, in the core's shapes, after one more value."""
    buffers = [shards.local(state["momentum_buffer"]) for state in states]
    values = [block.unmatrix(on_weight), *block.unstack(on_bias)]
    for buffer, value in zip(buffers, values, strict=True):
        put(buffer, stepsize.heavy_ball(buffer, value, block.group["momentum"]), ok)
    wide = [buffer.to(on_weight.dtype) for buffer in buffers]
    return block.matrix(wide[0]), block.stack(wide[1:])


def look_ahead(
    on_weight: Tensor, on_bias: Tensor | None, weight_buffer: Tensor, bias_buffer: Tensor | None, momentum: float
) -> tuple[Tensor, Tensor | None]:
    """Nesterov's direction for a weight and its biases."""
    ahead = stepsize.look_ahead(on_weight, weight_buffer, momentum)
    if on_bias is None or bias_buffer is None:
        return ahead, None
    return ahead, stepsize.look_ahead(on_bias, bias_buffer, momentum)


def init_square(state: State, block: Block, p: Tensor, of: str) -> None:
    """Add to `state` running mean squares for `p`, in float32 or better: one per "weight", per "unit", or "network".

    Those of other units, as a parameter has inside a layer and outside, are made anew.
    """
    spread = of == "unit" and block.over is not WHOLE
    units = [] if of == "network" else [block.units if spread else block.here]
    if "square" not in state or state["square"].shape != (p.shape if of == "weight" else torch.Size(units)):
        dtype = accumulation_dtype(p.dtype)
        if of == "weight":
            state["square"] = torch.zeros_like(p, dtype=dtype)
        else:
            square = torch.zeros([block.here] if spread else units, dtype=dtype, device=p.device)
            state["square"] = shards.placed(square, p, units) if spread else square
        state["square_mass"] = torch.zeros((), dtype=dtype, device=p.device)


def running_square(state: dict[str, Any], square: Tensor, group: dict[str, Any], ok: Tensor | None) -> Tensor:
    """Eq. 11's expectation: the running mean of `square`, this one included; bias-corrected unless told not to be."""
    mass = state["square_mass"]
    weight = mass if group["bias_correction"] else torch.ones_like(mass)
    average = shards.local(state["square"])
    put(average, fold_mean(average, square, weight, group["decay"]), ok)
    put(mass, gain(mass, group["decay"])[1], ok)
    return average


def divided(
    block: Block, on_weight: Tensor, on_bias: Tensor | None, squares: list[Tensor]
) -> tuple[Tensor, Tensor | None]:
    """A block's gradient over the root of its squares: one per parameter, one per unit, or one for all."""
    eps = block.group["eps"]
    if block.group["block"] == "weight":
        over_weight, over_bias = block.matrix(squares[0]), block.stack(squares[1:])
    else:
        units = (
            squares[0].expand(on_weight.shape[:2]) if squares[0].dim() == 0 else squares[0].view(on_weight.shape[:2])
        )
        over_weight, over_bias = per_unit(units), units
    on_weight = stepsize.normalized(on_weight, over_weight, eps)
    if on_bias is not None and over_bias is not None:
        on_bias = stepsize.normalized(on_bias, over_bias, eps)
    return on_weight, on_bias


def by_own_length(block: Block, step: Tensor, weight: Tensor) -> Tensor:
    """A step of the block's units, times each one's own length where that is above 1."""
    return step * per_unit(stepsize.own_length(block.unit_square(weight.to(step.dtype), None)))
