"""Steps of bounded length per block of parameters (§3.2–3.4): eqs. 9, 10 and 11."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..coordinates.coordinates import Field, Schema
from ..math import stepsize
from ..math.constants import inverse_root
from ..math.moments import fold_mean, gain
from .rule import Direction, OnV, Rule, RuleStep, heavy_ball, put
from .unit import SQUARE, running_square

MASS = Field("layer", nonnegative=True)
SQUARES: dict[str, Schema] = {
    "network": {"square": Field("layer", nonnegative=True), "square_mass": MASS},
    "unit": SQUARE,
    "weight": {
        "square": Field("parameter", nonnegative=True, wide=True),
        "square_mass": Field("count", nonnegative=True),
    },
}


@dataclass(frozen=True)
class BlockNaturalRule(Rule):
    """The gradient over the root of a squared length: that of the whole "network", of a "unit", or of a "weight".

    `bounded` takes eq. 11's running mean square; otherwise it is the batch's own, as in eqs. 9 and 10.
    """

    block: str = "unit"
    bounded: bool = True

    def state(self, momentum: float) -> Schema:
        """Momentum, and running mean squares."""
        return {**super().state(momentum), **(SQUARES[self.block] if self.bounded else {})}

    def direct(self, steps: Sequence[RuleStep], ok: Tensor | None, ranks: Any = None) -> None:
        """Add up the squares of the whole network first, where they are the denominator."""
        whole = [step.units.total(step.unit_square()).sum() for step in steps if self.block == "network"]
        for step in steps:
            if self.block == "weight":
                on_v = self._by_weight(step, ok)
            else:
                home = step.on_v.weights[0].device
                square = torch.stack([w.to(home) for w in whole]).sum() if whole else step.unit_square()
                on_v = self._by_unit(step, square, ok)
            step.direction = Direction(*heavy_ball(step, on_v, ok))

    def _by_unit(self, step: RuleStep, square: Tensor, ok: Tensor | None) -> OnV:
        """The gradient over the root of one squared length per unit, or one for all."""
        if self.bounded and self.block == "unit":
            square = running_square(step, square, ok)
        elif self.bounded:
            square = step.units.widen(running_square(step, square, ok, per_layer=True))
        scale = inverse_root(square + step.group["eps"]).expand(sum(step.units.sizes))
        weights = [w * s for w, s in zip(step.on_v.weights, step.rows(scale), strict=True)]
        return OnV(weights, [bias * scale for bias in step.on_v.biases])

    def _by_weight(self, step: RuleStep, ok: Tensor | None) -> OnV:
        """RMSProp: each weight over the root of its own running mean square."""
        values = step.as_parameters(step.on_v)
        squares = [value * value for value in values]
        eps, decay = step.group["eps"], step.group["decay"]
        if self.bounded:
            averages, masses = step.buffers("square"), step.buffers("square_mass")
            weights = masses if step.group["bias_correction"] else [torch.ones_like(mass) for mass in masses]
            squares = [fold_mean(*three, decay) for three in zip(averages, squares, weights, strict=True)]
            put(averages, squares, ok)
            put(masses, [gain(mass, decay)[1] for mass in masses], ok)
        return step.as_blocks([stepsize.normalized(v, q, eps) for v, q in zip(values, squares, strict=True)])
