"""Whitened coordinates (§4, eq. 12)."""

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from ..math import guards
from ..math.change_of_variables import Scales
from ..math.constants import STEADY, inverse_root
from ..math.moments import fold, gain
from .coordinates import Batch, Field, Layers, Schema, Statistics
from .fan_in import FanIn


class Whitening(FanIn):
    """μ and α whiten the layer's inputs; β² = 1/√(n·S)."""

    name = "whitened"
    needs = Statistics.INPUTS
    fused: Sequence[str] = ()
    state: ClassVar[Schema] = {
        **FanIn.state,
        "mx": Field("input"),
        "vx": Field("input", nonnegative=True),
        "mass": Field("layer", nonnegative=True),
    }

    def at(self, state: Mapping[str, Tensor], batch: Batch, layers: Layers) -> Scales:
        """Whitened coordinates from the moments of *earlier* batches (§2.3); this batch's serve the guards alone.

        μ_i = mx_i,   spread_i = raised_i + damping · mean_i raised_i,   α_i = 1/√spread_i

        The first batch uses its own moments, since there are no others; without any moments, μ = 0 and α = 1.
        """
        assert batch.offset is not None and batch.var is not None and batch.centre is not None
        over, fresh_max = layers.inputs, layers.group["fresh_max"]
        mass, known = over.widen(state["mass"]), None
        if batch.complete:
            mx, vx, q = state["mx"], state["vx"], torch.addcmul(batch.var, batch.offset, batch.offset)
        else:
            usable, started = over.widen(batch.usable), mass > 0
            mx = torch.where(started, state["mx"], batch.centre + batch.offset)
            vx, off = torch.where(started, state["vx"], batch.var), batch.offset - (mx - batch.centre)
            q, known = torch.where(usable, torch.addcmul(batch.var, off, off), vx), usable | started
        if not layers.biased:  # the constant part comes through the inputs' means alone, which may never vary
            vx = torch.maximum(vx, STEADY * mx * mx)
        q = torch.maximum(q, guards.unproven(mx, mass))
        raised, fired = guards.fresh_max(vx, q, torch.inf if fresh_max is None else fresh_max)
        more = layers.group["damping"] * over.mean(raised)
        spread, fresh = raised + more, torch.maximum(vx, q) + more
        if known is not None:
            mx, fired = torch.where(known, mx, 0.0), fired & known
            spread, fresh = torch.where(known, spread, 1.0), torch.where(known, fresh, 1.0)
        beta = super().at(state, batch, layers).beta
        return Scales(mx, inverse_root(spread), spread, fresh, over.total(fired.to(vx.dtype)), beta)

    def after(self, state: Mapping[str, Tensor], batch: Batch, layers: Layers) -> dict[str, Tensor]:
        """The batch joins the running moments, unless it is not usable."""
        assert batch.offset is not None and batch.var is not None and batch.centre is not None
        widen = layers.inputs.widen
        k, mass = gain(state["mass"], layers.group["decay"])
        mx, vx = fold(state["mx"], state["vx"], batch.centre + batch.offset, batch.var, widen(k))
        if not batch.complete:
            usable = widen(batch.usable)
            mx, vx = torch.where(usable, mx, state["mx"]), torch.where(usable, vx, state["vx"])
            mass = torch.where(batch.usable, mass, state["mass"])
        return {**super().after(state, batch, layers), "mx": mx, "vx": vx, "mass": mass}
