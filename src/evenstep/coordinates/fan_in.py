"""Fan-in coordinates (§3.5)."""

from collections.abc import Mapping, Sequence
from typing import ClassVar

from torch import Tensor

from ..math.change_of_variables import Scales
from ..math.constants import geometry_beta2, sharing
from .coordinates import Batch, Coordinates, Field, Layers, Schema, Statistics


class FanIn(Coordinates):
    """μ = 0, α = 1, β² = 1/√(n·S): a stepsize divided by the root of fan-in times sharing count."""

    name = "fan-in"
    needs = Statistics.COUNTS
    fused: Sequence[str] = ()
    state: ClassVar[Schema] = {"sharing": Field("layer", nonnegative=True, initial=1.0)}

    def at(self, state: Mapping[str, Tensor], batch: Batch, layers: Layers) -> Scales:
        """β from the layer's geometry, where the rule is linear."""
        if not self.linear:
            return Scales()
        return Scales(beta=geometry_beta2(layers.fan_in, FanIn.after(self, state, batch, layers)["sharing"]).sqrt())

    def after(self, state: Mapping[str, Tensor], batch: Batch, layers: Layers) -> dict[str, Tensor]:
        """The sharing count, for steps that see no batch."""
        return {"sharing": sharing(batch.applied, batch.examples, state["sharing"], layers.group.get("sharing"))}
