"""Eq. 11 per unit, with momentum: every unit takes an even step."""

import torch
from torch import Tensor

from .. import foreach
from ..coordinates.coordinates import Field, Schema
from ..math import stepsize
from ..math.constants import inverse_root
from ..math.moments import gain
from .rule import Direction, OnV, Rule, RuleStep, heavy_ball


class UnitRule(Rule):
    """Each unit's gradient over the root of its running mean square, damped by its layer's; Nesterov momentum."""

    fused = ("NESTEROV", "UNIT_SCALE")

    def state(self, momentum: float) -> Schema:
        """Momentum, and the running mean square of each unit."""
        return {**super().state(momentum), **SQUARE}

    def direction(self, step: RuleStep, ok: Tensor | None) -> Direction:
        """The direction, and the scale of each unit."""
        on_v = step.on_v
        square = step.unit_square()
        average = running_square(step, square, ok)
        ahead = look_ahead(step, on_v, heavy_ball(step, on_v, ok))
        in_layer = step.blocks[0].entry is not None
        damping = step.group["damping"] if in_layer else 0.0
        level = stepsize.unit_level(average, square, damping, step.units)
        scale = inverse_root(level + step.group["eps"]) * (1 - step.group["momentum"])
        usual = stepsize.LONG if in_layer else 1.0
        return Direction(*ahead, scale * stepsize.own_length(step.unit_length2(), usual))


SQUARE: Schema = {"square": Field("unit", nonnegative=True), "square_mass": Field("layer", nonnegative=True)}


def running_square(step: RuleStep, square: Tensor, ok: Tensor | None, *, per_layer: bool = False) -> Tensor:
    """Eq. 11's expectation: the running mean of `square`, this one included; bias-corrected unless told not to be."""
    average, mass, decay = step.read("square"), step.read("square_mass"), step.group["decay"]
    corrected = step.group.get("bias_correction", True)
    k, after = gain(mass, decay)
    k = k if corrected else torch.full_like(k, 1 - decay)
    average = torch.lerp(average, square.expand(average.shape), k if per_layer else step.units.widen(k))
    step.write({"square": average, "square_mass": after}, ok)
    return average


def look_ahead(step: RuleStep, on_v: OnV, buffers: OnV) -> OnV:
    """Nesterov's direction g + m M with the new buffer M, 1/(1−m) times the gradient if that is constant.

    Without momentum it is the gradient itself.
    """
    momentum = step.group["momentum"]
    if not momentum:
        return on_v
    count = len(on_v.weights)
    add = foreach.add_ if step.owned else foreach.add
    ahead = add([*on_v.weights, *on_v.biases], [*buffers.weights, *buffers.biases], alpha=momentum)
    return OnV(list(ahead[:count]), list(ahead[count:]))
