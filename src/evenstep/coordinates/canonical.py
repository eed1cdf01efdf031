"""Canonical coordinates (§2.3, eq. 5)."""

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from ..math.constants import canonical_beta2, canonical_mg2
from ..math.moments import fold_mean
from .coordinates import Batch, Field, Layers, Scales, Schema, Statistics
from .whitening import Whitening


class Canonical(Whitening):
    """Whitened inputs, and units scaled by their gradients: β_j² = 1/(S·E[g_j²])."""

    name = "canonical"
    needs = Statistics.GRADIENTS
    beta_per_output = True
    state: ClassVar[Schema] = {**Whitening.state, "mg2": Field("output", nonnegative=True)}

    def at(self, state: Mapping[str, Tensor], batch: Batch, layers: Layers) -> Scales:
        """From the moments of earlier batches; β from the layer's geometry before the first batch."""
        outputs = layers.outputs
        started = state["mass"] > 0
        mg2 = torch.where(outputs.widen(started), state["mg2"], batch_mg2(batch, layers))
        beta2 = canonical_beta2(mg2, layers.group["damping"], outputs)
        known = outputs.widen(started | (batch.applied > 0))
        geometry = outputs.widen(self._beta2(state, batch, layers))
        return super().at(state, batch, layers)._replace(beta=torch.where(known, beta2, geometry).sqrt())

    def after(self, state: Mapping[str, Tensor], batch: Batch, layers: Layers) -> dict[str, Tensor]:
        """The batch joins the running moments, squared gradients included."""
        assert batch.usable is not None
        outputs, fresh = layers.outputs, batch_mg2(batch, layers)
        joined = fold_mean(state["mg2"], fresh, outputs.widen(state["mass"]), layers.group["decay"])
        usable = outputs.widen(batch.usable & outputs.every(fresh.isfinite()))
        return {**super().after(state, batch, layers), "mg2": torch.where(usable, joined, state["mg2"])}


def batch_mg2(batch: Batch, layers: Layers) -> Tensor:
    """S·E[g_j²] of the batch alone."""
    assert batch.g2 is not None
    return canonical_mg2(batch.g2, layers.outputs.widen(batch.examples), layers.group["reduction"])
