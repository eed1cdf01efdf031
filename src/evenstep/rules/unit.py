"""Eq. 11 per unit, with momentum: every unit takes an even step."""

import torch
from torch import Tensor

from ..coordinates.coordinates import Field, Schema
from ..math import stepsize
from ..math.constants import inverse_root
from ..math.moments import gain
from .rule import Direction, Rule, RuleStep, heavy_ball


class UnitRule(Rule):
    """Each unit's gradient over the root of its running mean square, damped by its layer's; Nesterov momentum."""

    fused = ("NESTEROV", "UNIT_SCALE")

    def state(self, momentum: float) -> Schema:
        """Momentum, and the running mean square of each unit."""
        return {**super().state(momentum), **SQUARE}

    def direction(self, step: RuleStep, ok: Tensor | None) -> Direction:
        """The direction, and the scale of each unit."""
        square = step.unit_square()
        average = running_square(step, square)
        ahead = heavy_ball(step, step.on_v, ok, ahead=True)  # with momentum, 1/(1−m) times a constant gradient
        in_layer = step.blocks[0].entry is not None
        damping = step.group["damping"] if in_layer else 0.0
        level = stepsize.unit_level(average, square, damping, step.units)
        scale = inverse_root(level + step.group["eps"]) * (1 - step.group["momentum"])
        usual = stepsize.LONG if in_layer else 1.0
        scale = scale * stepsize.own_length(step.unit_length2(), usual)
        return Direction(*ahead, scale, own=step.owned or bool(step.group["momentum"]))


SQUARE: Schema = {"square": Field("unit", nonnegative=True), "square_mass": Field("layer", nonnegative=True)}


def running_square(step: RuleStep, square: Tensor, *, per_layer: bool = False) -> Tensor:
    """Eq. 11's expectation: the running mean of `square`, this one included; bias-corrected unless told not to be."""
    average, decay = step.read("square"), step.group["decay"]
    k, after = gain(step.number("square_mass"), decay)
    k = k if step.group.get("bias_correction", True) else 1 - decay
    if per_layer:
        square = square.expand_as(average)
    average = torch.lerp(average, square, k if per_layer else step.units.widen(k))
    step.write({"square": average, "square_mass": after})
    return average
