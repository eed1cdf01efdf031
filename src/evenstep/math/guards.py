"""Guards: bounds on a step that stale moments would make too long (§4.4).

A guard that does not fire leaves its values unchanged, bit for bit. Guards are pure, never wait for the device, and
count how often they fire.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .change_of_variables import mean_response, per_input
from .segments import WHOLE, Whole

CROWD = 3.0  # how far beyond its layer's typical relative step a normalizing rule may move a unit
TRUST_FLOOR = 1e-3  # s₀: the least length of a unit; absolute, or units that shrink would take steps of their old size
DRIFT = 0.2  # how far an input that few batches have shown may be from its mean in the next one, relative to that mean
LEAST = 0.1  # the share of its radius that a unit keeps, however far it stands out of its layer


def fresh_max(vx: Tensor, q: Tensor, tau: float | Tensor) -> tuple[Tensor, Tensor]:
    """Raise a stale variance: m_i = max(vx_i, q_i/τ), and which inputs that changed.

    `q` is this batch's second moment about the *running* mean. With α_i² = 1/m_i no whitened input exceeds a mean
    square of τ on this batch.

    >>> fresh_max(torch.tensor([1.0, 1.0]), torch.tensor([3.0, 8.0]), tau=4.0)
    (tensor([1., 2.]), tensor([False,  True]))
    """
    raised = q / tau
    return torch.maximum(vx, raised), raised > vx


def unproven(mx: Tensor, mass: Tensor) -> Tensor:
    """(1 − mass)(d μ_i)²: the least second moment of a batch about the running mean; d = DRIFT.

    The inputs of a layer drift as the layers before it train. For an input that hardly varies, the first batches do not
    show how far. The floor fades as `mass`, that of the running moments, goes to 1: 1 − decayᵗ after t batches. It does
    not depend on whether an input is raw data, which is unknown in compiled code.

    >>> unproven(torch.tensor([1.0, 10.0]), torch.tensor([0.0, 0.75]))
    tensor([0.0400, 1.0000])
    """
    return (1 - mass) * (DRIFT * DRIFT) * mx * mx


def stretch(weight: Tensor, spread: Tensor | None) -> Tensor:
    """Σ w_ij² spread_i of each unit; the plain sum of squares without a spread."""
    square = weight * weight
    return (square if spread is None else square * per_input(spread)).sum((-2, -1))


def squared_length(weight: Tensor, bias: Tensor | None, mu: Tensor | None, spread: Tensor | None) -> Tensor:
    """‖u_j‖² of each unit in whitened coordinates: (w_0j + Σ μ_i w_ij)² + Σ w_ij² spread_i.

    For a step instead of weights: how far it moves the unit's pre-activation, by its mean and deviation. Without μ
    and spread it is the length in plain coordinates.
    """
    length2 = stretch(weight, spread)
    levels = [] if mu is None else [mean_response(weight, mu)]
    levels += [] if bias is None else [bias]
    return length2 + torch.square(sum(levels[1:], levels[0])) if levels else length2


def bounds_steps(settings: Mapping[str, Any]) -> bool:
    """Whether some guard of these settings bounds the steps of units."""
    return settings.get("trust") is not None


def trust_factor(
    unit2: Tensor, step2: Tensor, settings: Mapping[str, Any], typical2: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """min(1, c_j · max(‖u_j‖, s₀)/‖δu_j‖) for each unit, and which units were held back.

    c_j is the setting `trust`. With the layer's typical squared relative step it is at most CROWD times the root of
    that, but at least LEAST times `trust`: a rule that normalizes takes the same absolute step on a unit that has
    shrunk, which would then grow by the whole radius in every step.

    >>> trust_factor(torch.tensor([4.0, 4.0]), torch.tensor([1.0, 0.01]), {"trust": 0.1})
    (tensor([0.2000, 1.0000]), tensor([ True, False]))
    >>> trust_factor(torch.ones(2), torch.tensor([1e-4, 36e-4]), {"trust": 0.1}, typical2=torch.tensor(1e-4))
    (tensor([1.0000, 0.5000]), tensor([False,  True]))
    """
    radius, size2 = settings["trust"], unit2.clamp(min=TRUST_FLOOR * TRUST_FLOOR)
    bound2 = radius * radius * size2
    if typical2 is not None:
        crowd2 = (CROWD * CROWD * typical2).clamp(min=radius * radius * (LEAST * LEAST))
        bound2 = torch.fmin(bound2, crowd2 * size2)
    over = step2 > bound2
    factor = torch.where(over, (bound2 / step2.clamp(min=torch.finfo(step2.dtype).tiny)).sqrt(), 1.0)
    return factor, over


def relative(unit2: Tensor, step2: Tensor) -> Tensor:
    """(‖δu_j‖/max(‖u_j‖, s₀))²: how far each unit is asked to move, measured by itself."""
    return step2 / unit2.clamp(min=TRUST_FLOOR * TRUST_FLOOR)


def typical(relative2: Tensor, over: Whole = WHOLE) -> Tensor:
    """The geometric mean of squared relative steps over the units that move; NaN if none does.

    Ten per cent of units that move a hundred times as far as the others raise it 1.6-fold, an arithmetic mean 11-fold.

    >>> typical(torch.tensor([1.0, 4.0, 0.0]))
    tensor(2.)
    """
    moves = relative2 > 0
    logs, count = over.totals(torch.where(moves, relative2.log(), 0.0), moves.to(relative2.dtype))
    return over.widen((logs / count).exp())
