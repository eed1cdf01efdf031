"""Whitened coordinates (§4, eq. 12)."""

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from ..math.change_of_variables import Scales
from ..math.constants import STEADY, geometry_beta2, sharing
from ..math.frame import running_after, whitened_frame
from ..math.moments import Running, Sums, gain
from .coordinates import Batch, Coordinates, Field, Layers, Schema, Statistics
from .fan_in import FanIn


class Whitening(Coordinates):
    """μ and α whiten the layer's inputs; β² = 1/√(n·S)."""

    name = "whitened"
    needs = Statistics.INPUTS
    state: ClassVar[Schema] = {
        **FanIn.state,
        "mx": Field("input"),
        "vx": Field("input", nonnegative=True),
        "mass": Field("layer", nonnegative=True),
    }

    def at(self, state: Mapping[str, Tensor], batch: Batch, layers: Layers) -> Scales:
        """From the moments of earlier batches; this batch's serve the guards."""
        scales = whitened_frame(
            *moments(state, batch, layers),
            damping=layers.group["damping"],
            fresh_max=layers.group["fresh_max"],
            steady=0.0 if layers.biased else STEADY,
            over=layers.inputs,
        )
        if not self.linear:
            return scales
        return scales._replace(beta=geometry_beta2(layers.fan_in, shared(state, batch, layers)).sqrt())

    def after(self, state: Mapping[str, Tensor], batch: Batch, layers: Layers) -> dict[str, Tensor]:
        """The batch joins the running moments."""
        mx, vx, _ = running_after(*moments(state, batch, layers), decay=layers.group["decay"])
        _, mass = gain(state["mass"], layers.group["decay"])
        mass = torch.where(batch.usable, mass, state["mass"])
        return {"sharing": shared(state, batch, layers), "mx": mx, "vx": vx, "mass": mass}


def shared(state: Mapping[str, Tensor], batch: Batch, layers: Layers) -> Tensor:
    """S of each layer."""
    return sharing(batch.applied, batch.examples, state["sharing"], layers.group.get("sharing"))


def moments(state: Mapping[str, Tensor], batch: Batch, layers: Layers) -> tuple[Running, Sums, Tensor, Tensor]:
    """The running moments, the batch's sums, their centre, and whether they are usable, all per input."""
    assert batch.sums is not None and batch.centre is not None
    widen = layers.inputs.widen
    return Running(state["mx"], state["vx"], widen(state["mass"])), batch.sums, batch.centre, widen(batch.usable)
