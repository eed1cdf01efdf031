"""A step for many units at once, from a few sums over each unit's row: eqs. 2 and 3 and the trust radius again.

A row is a unit's weights; with D its direction on v, a = α∘(D − r u) is its direction on w, u = α∘μ, and r projects a
layer without bias (`coordinates.project`; r = 0 with a bias). Everything here is one value per unit, layers end to end.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .segments import Segments


class RowSums(NamedTuple):
    """Sums over each unit's row, before its step is scaled: w its weights, D its direction on v."""

    along: Tensor  # Σ u D
    stretch: Tensor  # Σ α² f D², f the fresh spread
    bend: Tensor  # Σ α² f u D, where there is no bias
    level: Tensor  # w_0 + Σ μ w
    length2: Tensor  # Σ w² spread


class Projection(NamedTuple):
    """What projects a layer without bias, for each of its units; zeros where there is a bias."""

    kappa: Tensor  # k/‖u‖²
    norm2: Tensor  # ‖u‖²
    bent2: Tensor  # Σ α² f u²


class Motion(NamedTuple):
    """What moves each unit: w −= `gain` α∘(D − `back` u), w_0 −= `bias`; `back` is None if all have biases."""

    gain: Tensor
    back: Tensor | None
    bias: Tensor

    def shortened(self, factor: Tensor) -> "Motion":
        """The motion times each unit's trust factor."""
        return Motion(self.gain * factor, self.back, self.bias * factor)


def motion(sums: RowSums, projection: Projection | None, step: Tensor, bias_step: Tensor) -> Motion:
    """The motion of each unit: its direction on v times `step`, its bias's `bias_step`."""
    back = None if projection is None else projection.kappa * sums.along
    return Motion(step, back, torch.addcmul(bias_step, step, sums.along, value=-1))


def reach(
    sums: RowSums, projection: Projection | None, back: Tensor | None, step: Tensor, bias_step: Tensor
) -> tuple[Tensor, Tensor]:
    """How long each unit is and how far it would move, both squared and in whitened coordinates."""
    level, stretch = bias_step, sums.stretch
    if projection is not None and back is not None:
        level = torch.where(projection.kappa > 0, step * (sums.along - back * projection.norm2), level)
        stretch = (stretch - 2 * back * sums.bend + back * back * projection.bent2).clamp(min=0)
    unit2 = torch.addcmul(sums.length2, sums.level, sums.level)
    return unit2, torch.addcmul(level * level, step * step, stretch)


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
