"""A step for many units at once, from a few sums over each unit's row: eqs. 2 and 3 and the trust radius again.

A row is a unit's weights; with D its direction on v, a = α∘(D − r u) is its direction on w, u = α∘μ, and r projects a
layer without bias (`coordinates.project`; r = 0 with a bias). Everything here is one value per unit, layers end to end.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from . import guards
from .segments import Segments


class RowSums(NamedTuple):
    """Sums over each unit's row, before its step is scaled: w its weights, D its direction on v."""

    square: Tensor  # ‖gradient on v‖², the bias's included
    along: Tensor  # Σ u D
    stretch: Tensor  # Σ α² f D², f the fresh spread
    bend: Tensor  # Σ α² f u D, where there is no bias
    level: Tensor  # w_0 + Σ μ w
    length2: Tensor  # Σ w² spread
    bias: Tensor  # the direction of the bias on v


class Projection(NamedTuple):
    """What projects a layer without bias, for each of its units; zeros where there is a bias."""

    kappa: Tensor  # k/‖u‖²
    norm2: Tensor  # ‖u‖²
    bent2: Tensor  # Σ α² f u²


class Motion(NamedTuple):
    """What moves each unit: w += `gain` α∘(D − `back` u), w_0 += `bias`; which were held back; how far they wanted."""

    gain: Tensor
    back: Tensor
    bias: Tensor
    held: Tensor
    relative2: Tensor


def motion(
    sums: RowSums,
    projection: Projection | None,
    *,
    scale: Tensor,
    rate: Tensor,
    bias_rate: Tensor,
    radius: Tensor | None,
    floor: float,
    crowd: Segments | None,
) -> Motion:
    """The motion of each unit for stepsizes `rate` and `bias_rate`, the direction times `scale` (β and the rule's own).

    `radius` is each unit's trust radius (inf for none), or None for all; `crowd` bounds it by what is typical of each
    layer.
    """
    step, bias_step = rate * scale, bias_rate * scale * sums.bias
    gain, bias = -step, step * sums.along - bias_step
    back = torch.zeros_like(step) if projection is None else projection.kappa * sums.along
    if radius is None:
        return Motion(gain, back, bias, torch.zeros_like(step), torch.zeros_like(step))
    level, stretch = bias_step, sums.stretch
    if projection is not None:
        level = torch.where(projection.kappa > 0, step * (sums.along - back * projection.norm2), level)
        stretch = (stretch - 2 * back * sums.bend + back * back * projection.bent2).clamp(min=0)
    step2, unit2 = level * level + step * step * stretch, sums.level * sums.level + sums.length2
    relative2 = guards.relative(unit2, step2, floor)
    typical2 = None if crowd is None else guards.typical(relative2, crowd)
    factor, held = guards.trust_factor(unit2, step2, radius, floor, typical2)
    return Motion(gain * factor, back, bias * factor, held.to(step.dtype), relative2)


def projection(
    mu: Tensor, alpha: Tensor, fresh: Tensor, kernel: Tensor, groups: Segments, unbiased: Tensor
) -> Projection:
    """The projection of each group's units, given each input's μ, α and fresh spread; zeros where there is a bias.

    `kernel` is the number of weights per input and unit in each group.
    """
    u2 = alpha * alpha * mu * mu
    norm2 = kernel * groups.total(u2)
    bent2 = kernel * groups.total(alpha * alpha * fresh * u2)
    root = (1 + norm2).sqrt()
    return Projection(*(torch.where(unbiased, x, 0.0) for x in (1 / (root * (1 + root)), norm2, bent2)))
