"""Canonical coordinates (§2.3, eq. 5)."""

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from ..math.change_of_variables import Scales
from ..math.constants import canonical_mg2, damped, inverse_root
from ..math.moments import fold_mean
from .coordinates import Batch, Field, Layers, Schema, Statistics
from .whitening import Whitening


class Canonical(Whitening):
    """Whitened inputs, and units scaled by their gradients: β_j² = 1/(S·E[g_j²]), damped like the variance (App. B)."""

    name = "canonical"
    needs = Statistics.GRADIENTS
    beta_per_output = True
    state: ClassVar[Schema] = {**Whitening.state, "mg2": Field("output", nonnegative=True)}

    def at(self, state: Mapping[str, Tensor], batch: Batch, layers: Layers) -> Scales:
        """From the moments of earlier batches; β from the layer's geometry before the first batch."""
        scales, widen = super().at(state, batch, layers), layers.outputs.widen
        started = state["mass"] > 0
        mg2 = torch.where(widen(started), state["mg2"], batch_mg2(batch, layers))
        beta = inverse_root(damped(mg2, layers.group["damping"], layers.outputs)).nan_to_num(0.0)  # of a skipped batch
        geometry = torch.ones_like(started, dtype=beta.dtype) if scales.beta is None else scales.beta
        known = widen(started | (batch.applied > 0))
        return scales._replace(beta=torch.where(known, beta, widen(geometry)))

    def after(self, state: Mapping[str, Tensor], batch: Batch, layers: Layers) -> dict[str, Tensor]:
        """The batch joins the running moments, squared gradients included."""
        outputs, fresh = layers.outputs, batch_mg2(batch, layers)
        joined = fold_mean(state["mg2"], fresh, outputs.widen(state["mass"]), layers.group["decay"])
        usable = outputs.widen(batch.usable & outputs.every(fresh.isfinite()))
        return {**super().after(state, batch, layers), "mg2": torch.where(usable, joined, state["mg2"])}


def batch_mg2(batch: Batch, layers: Layers) -> Tensor:
    """S·E[g_j²] of the batch alone."""
    assert batch.g2 is not None
    return canonical_mg2(batch.g2, layers.outputs.widen(batch.examples), layers.group["reduction"])
