"""A layer's whitened coordinates for one step, from its moments; and its moments after the step."""

import torch
from torch import Tensor

from . import guards
from .change_of_variables import Scales
from .constants import damped, inverse_root
from .moments import Running, Sums, batch_moments, fold, second_moment_about
from .segments import WHOLE, Whole


def whitened_frame(
    running: Running,
    sums: Sums,
    centre: Tensor,
    usable: Tensor,
    *,
    damping: float | Tensor,
    fresh_max: float | Tensor | None,
    steady: float = 0.0,
    over: Whole = WHOLE,
) -> Scales:
    """Whitened coordinates from the moments of *earlier* batches (§2.3); this batch's serve the guards alone.

    μ_i = mx_i,   spread_i = raised_i + damping · mean_i raised_i,   α_i = 1/√spread_i

    The first batch uses its own moments, since there are no others; without any moments, μ = 0 and α = 1. With `over`,
    many layers are packed into flat tensors, and rows and mass are per input. `usable` is whether a layer's batch has
    rows and finite sums, and `steady` is `constants.STEADY` for a layer without bias.
    """
    mean, var = batch_moments(sums, centre)
    started = running.mass > 0
    mx, vx = torch.where(started, running.mx, mean), torch.where(started, running.vx, var)
    if steady:  # a layer without bias gets its constant part through its inputs' means alone, which may never vary
        vx = torch.maximum(vx, steady * mx * mx)
    q = torch.where(usable, second_moment_about(sums, centre, mx), vx)
    q = torch.maximum(q, guards.unproven(mx, running.mass))
    raised, fired = guards.fresh_max(vx, q, torch.inf if fresh_max is None else fresh_max)
    known = usable | started
    floored = damped(raised, damping, over)
    spread = torch.where(known, floored, 1.0)
    return Scales(
        torch.where(known, mx, 0.0),
        inverse_root(spread),
        spread,
        torch.where(known, torch.maximum(vx, q) + (floored - raised), 1.0),
        over.total((fired & known).to(vx.dtype)),
    )


def running_after(running: Running, sums: Sums, centre: Tensor, usable: Tensor, *, decay: float | Tensor) -> Running:
    """The running moments once this batch has joined them; unchanged if the batch is not usable."""
    joined = fold(running, *batch_moments(sums, centre), decay)
    return Running(*(torch.where(usable, new, old) for new, old in zip(joined, running, strict=True)))
