"""Guards: bounds on a step that stale moments would make too long (§4.4).

A guard that does not fire leaves its values unchanged, bit for bit. Guards are pure, never wait for the device, and
count how often they fire.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .change_of_variables import response
from .segments import WHOLE, Whole

CROWD = 3.0  # how far beyond its layer's typical relative step a normalizing rule may move a unit
TRUST_FLOOR = 1e-3  # s₀: the least length of a unit; absolute, or units that shrink would take steps of their old size
DRIFT = 0.2  # how far an input that few batches have shown may be from its mean in the next one, relative to that mean
LEAST = 0.1  # the share of its radius that a unit keeps, however far it stands out of its layer


def fresh_max(vx: Tensor, q: Tensor, tau: float | Tensor) -> tuple[Tensor, Tensor]:
    """Raise a stale variance: m_i = max(vx_i, q_i/τ), and which inputs that changed.

    `q` is this batch's second moment about the *running* mean. With α_i² = 1/m_i no whitened input exceeds a mean
    square of τ on this batch.
    """
    raised = q / tau
    return torch.maximum(vx, raised), raised > vx


def unproven(mx: Tensor, mass: Tensor) -> Tensor:
    """(1 − mass)(d μ_i)²: the least second moment of a batch about the running mean; d = DRIFT.

    The inputs of a layer drift as the layers before it train. For an input that hardly varies, the first batches do not
    show how far. The floor fades as `mass`, that of the running moments, goes to 1: 1 − decayᵗ after t batches. It does
    not depend on whether an input is raw data, which is unknown in compiled code.
    """
    return (mass - 1) * (-DRIFT * DRIFT) * mx * mx  # torch takes far longer for a number less a tensor


def stretch(weight: Tensor, spread: Tensor | None) -> Tensor:
    """Σ w_ij² spread_i of each unit; the plain sum of squares without a spread."""
    return torch.linalg.vecdot(weight, weight) if spread is None else response(weight * weight, spread)


def squared_length(stretch: Tensor, level: Tensor | None) -> Tensor:
    """‖u_j‖² of each unit in whitened coordinates: Σ w_ij² spread_i + (w_0j + Σ μ_i w_ij)².

    The first term is `stretch`, the second the square of `level`; several levels, of one bias each, give the shortest.
    For a step instead of weights: how far it moves the unit's pre-activation, by its deviation and mean.
    """
    if level is None:
        return stretch
    square = level * level
    return stretch + (square if level.dim() == stretch.dim() else square.amin(0))


def bounds_steps(settings: Mapping[str, Any]) -> bool:
    """Whether some guard of these settings bounds the steps of units."""
    return settings.get("trust") is not None


def cannot_fire(largest2: float, settings: Mapping[str, Any], linear: bool) -> bool:
    """Whether no unit can be held back, by the largest squared relative step of all; rounding allowed for."""
    least: float = settings["trust"] * (1 if linear else LEAST)
    return largest2 < 0.99 * least * least


def trust_factor(
    unit2: Tensor, step2: Tensor, settings: Mapping[str, Any], typical2: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """min(1, c_j ‖u_j‖/‖δu_j‖) for each unit, and which units were held back; `unit2` is at least TRUST_FLOOR².

    c_j is the setting `trust`. With the layer's typical squared relative step it is at most CROWD times the root of
    that, but at least LEAST times `trust`: a rule that normalizes takes the same absolute step on a unit that has
    shrunk, which would then grow by the whole radius in every step.
    """
    most2 = settings["trust"] ** 2
    bound2 = most2 * unit2
    if typical2 is not None:  # NaN where no unit of the layer moves
        crowd2 = (CROWD * CROWD * typical2).clamp(min=most2 * (LEAST * LEAST))
        bound2 = torch.fmin(bound2, crowd2 * unit2)
    over = step2 > bound2
    factor = torch.where(over, (bound2 / step2.clamp(min=torch.finfo(step2.dtype).tiny)).sqrt(), 1.0)
    return factor, over


def typical(relative2: Tensor, over: Whole = WHOLE) -> Tensor:
    """The geometric mean of squared relative steps over the units that move; NaN if none does.

    Ten per cent of units that move a hundred times as far as the others raise it 1.6-fold, an arithmetic mean 11-fold.
    """
    moves = relative2 > 0
    logs, count = over.totals(torch.where(moves, relative2.log(), 0.0), moves.to(relative2.dtype))
    return over.widen((logs / count).exp())
