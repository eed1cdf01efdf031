"""Fan-in coordinates (§3.5)."""

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor

from ..math.constants import geometry_beta2
from .coordinates import Batch, Coordinates, Field, Layers, Scales, Schema, Statistics, sharing


class FanIn(Coordinates):
    """μ = 0, α = 1, β² = 1/√(n·S): a stepsize divided by the root of fan-in times sharing count."""

    name = "fan-in"
    needs = Statistics.COUNTS
    state: ClassVar[Schema] = {"sharing": Field("layer", nonnegative=True, initial=1.0)}

    def at(self, state: Mapping[str, Tensor], batch: Batch, layers: Layers) -> Scales:
        """β from the layer's geometry."""
        return Scales(beta=self._beta2(state, batch, layers).sqrt() if self.linear else None)

    def _beta2(self, state: Mapping[str, Tensor], batch: Batch, layers: Layers) -> Tensor:
        return geometry_beta2(layers.fan_in, sharing(state, batch, layers))

    def after(self, state: Mapping[str, Tensor], batch: Batch, layers: Layers) -> dict[str, Tensor]:
        """The sharing count, for steps that see no batch."""
        return {"sharing": sharing(state, batch, layers)}
