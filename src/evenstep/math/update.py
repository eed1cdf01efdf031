"""One layer's update, put together from the pure pieces: moments → constants → v → w → guard.

The optimizers and the batched programs of the lab call these; nothing here knows a module or a device.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from . import change_of_variables as coordinates
from . import constants as C
from . import guards
from .moments import Running, Sums, batch_moments, fold, second_moment_about, usable
from .segments import WHOLE, Segments, Whole


class Frame(NamedTuple):
    """A layer's coordinates for one step.

    `spread` is 1/α², the metric that measures a unit; `fresh_spread` the one that measures its step, with this batch's
    second moment where that is larger; `raised` counts the inputs that the fresh-max guard changed.
    """

    constants: C.Constants
    spread: Tensor
    fresh_spread: Tensor
    raised: Tensor


class Still(NamedTuple):
    """A `Frame` without statistics: μ = 0 and α = 1, so that there and back is a factor β."""

    constants: C.Constants
    spread: Tensor
    fresh_spread: Tensor
    raised: Tensor


def still_frame(like: Tensor, beta2: Tensor) -> Still:
    """Fan-in coordinates (plain ones with β² = 1): nothing to guard with but the unit's own length.

    `like` is any tensor shaped [group, input].
    """
    still = C.fan_in(like, beta2)
    return Still(still, still.alpha2, still.alpha2, like.new_zeros(()))


class Batch(NamedTuple):
    """The batch's own mean and variance, and whether they are usable."""

    mean: Tensor
    var: Tensor
    fresh: Tensor


def batch_of(sums: Sums, centre: Tensor, over: Whole | Segments = WHOLE) -> Batch:
    """The moments of what was summed about `centre`."""
    return Batch(*batch_moments(sums, centre), usable(sums, over))


def moving_frame(
    running: Running,
    sums: Sums,
    centre: Tensor,
    beta2: Tensor,
    *,
    batch: Batch | None = None,
    damping: float | Tensor,
    fresh_max: float | Tensor | None,
    steady: float | Tensor = 0.0,
    over: Whole | Segments = WHOLE,
) -> Frame:
    """Whitened coordinates from the moments of *earlier* batches (§2.3); this batch's serve the guards alone.

    The first batch uses its own moments, for want of others. Without any moments the coordinates are fan-in ones.
    Many layers can lie end to end (`over`), rows, mass and settings then given for each input. `batch` is what
    `batch_of` gives, where that is known; `steady` is `constants.STEADY` for a layer without bias.
    """
    mean, var, fresh = batch or batch_of(sums, centre, over)
    started = running.mass > 0
    mx, vx = torch.where(started, running.mx, mean), torch.where(started, running.vx, var)
    if isinstance(steady, Tensor) or steady:
        vx = C.unsteady(vx, mx, steady)
    q = torch.where(fresh, second_moment_about(sums, centre, mx), vx)
    q = torch.maximum(q, guards.unproven(mx, running.mass))
    raised, fired = guards.fresh_max(vx, q, torch.inf if fresh_max is None else fresh_max)
    known = fresh | started
    floored = C.damped(raised, damping, over)
    spread = torch.where(known, floored, 1.0)
    return Frame(
        C.whitening(torch.where(known, mx, 0.0), spread, beta2),
        spread,
        torch.where(known, torch.maximum(vx, q) + (floored - raised), 1.0),
        over.total((fired & known).to(vx.dtype)),
    )


def settled_frame(
    vx: Tensor, squares: Tensor, share: Tensor, over: Segments, out: Tensor, raised: Tensor
) -> tuple[Tensor, bool]:
    """`moving_frame` for layers that have moments and a usable batch.

    `squares` is the batch's ⟨(x − mx)²⟩, at least what is `unproven`, and the same over τ, of the fresh-max guard;
    `share` is the damping over the layer's number of inputs. Writes `fresh_spread` and `spread` to `out`, of which
    `raised` is the second row. Gives the sum over each layer of what it has damped, which is not finite if the batch is
    not, and whether the guard let all variances be.
    """
    torch.maximum(vx, squares, out=out)
    total, same = over.total(raised), torch.equal(raised, vx)
    out.add_(over.widen(total).mul_(share))
    return total, same


def gradient_on_v(weight_grad: Tensor, bias_grads: Tensor | None, frame: Frame | Still) -> tuple[Tensor, Tensor | None]:
    """Gradient on v. `bias_grads` is [bias, group, unit]: several where tied weights serve several biases."""
    c = frame.constants
    if isinstance(frame, Still):
        return _times_beta(weight_grad, bias_grads, c)
    if bias_grads is None:
        return coordinates.gradient_to_v_biasless(weight_grad, c), None
    on_weight, _ = coordinates.gradient_to_v(weight_grad, bias_grads.sum(0), c)
    return on_weight, c.beta2.sqrt() * bias_grads


def step_on_w(weight_step: Tensor, bias_steps: Tensor | None, frame: Frame | Still) -> tuple[Tensor, Tensor | None]:
    """Step on w and on every bias from a step on v."""
    if isinstance(frame, Still):
        return _times_beta(weight_step, bias_steps, frame.constants)
    if bias_steps is None:
        return coordinates.step_to_w_biasless(weight_step, frame.constants), None
    return coordinates.step_to_w(weight_step, bias_steps, frame.constants)


def _times_beta(weight: Tensor, biases: Tensor | None, c: C.Constants) -> tuple[Tensor, Tensor | None]:
    """What `coordinates` does with μ = 0 and α = 1."""
    beta = c.beta2.sqrt()
    return weight * coordinates.per_unit(beta), None if biases is None else beta * biases


def unit_length2(weight: Tensor, biases: Tensor | None, frame: Frame | Still) -> Tensor:
    """‖u_j‖² of each unit, whatever of it trains; the shortest where tied weights serve several biases."""
    length2 = guards.squared_length(weight, biases, frame.constants.mu, frame.spread)
    return length2 if biases is None else length2.amin(0)


def within_trust(
    unit2: Tensor,
    weight_step: Tensor,
    bias_steps: Tensor | None,
    frame: Frame | Still,
    *,
    radius: float,
    floor: float,
    crowd: bool,
    over: Whole = WHOLE,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """The step with every unit held to its trust radius; how many units were; the largest relative step asked for.

    With `crowd` the radius is bounded by what is typical of the layer, too; `over` reduces over all of its units.
    """
    step2 = guards.squared_length(weight_step, bias_steps, frame.constants.mu, frame.fresh_spread)
    if bias_steps is not None:
        step2 = step2.amax(0)
    relative2 = guards.relative(unit2, step2, floor)
    typical2 = guards.typical(relative2, over) if crowd else None
    factor, held = guards.trust_factor(unit2, step2, radius, floor, typical2)
    return *guards.shorten(weight_step, bias_steps, factor), over.total(held), over.most(relative2).sqrt()


def moments_after(
    running: Running, sums: Sums, centre: Tensor, *, decay: float | Tensor, batch: Batch | None = None
) -> Running:
    """The running moments once this batch has joined them; unchanged if the batch is empty or not finite."""
    mean, var, fresh = batch or batch_of(sums, centre)
    joined = fold(running, mean, var, decay)
    return Running(*(torch.where(fresh, new, old) for new, old in zip(joined, running, strict=True)))
