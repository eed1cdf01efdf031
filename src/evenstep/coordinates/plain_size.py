"""Whitened coordinates in which steps are as long as in plain ones."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from ..math.change_of_variables import Scales
from ..math.constants import plain_size
from .coordinates import Batch, Layers
from .whitening import Whitening


class PlainSize(Whitening):
    """μ and α whiten the layer's inputs; β brings steps back to the size they have in plain coordinates.

    A rule that normalizes takes steps of about lr, whatever the gradient's scale. In the coordinates of eq. 12 such a
    step is lr long beside units that may be hundreds long, where inputs are large, and far too long where inputs are
    small. Here lr means what it means to the rule in plain coordinates.

    `power` is that of α: 1 whitens, 0 leaves the inputs' scales alone. `centre` is the share of the mean taken out.
    """

    fused: Sequence[str] = ("PLAIN_SIZE",)

    def __init__(self, *, linear: bool = True, power: float = 1.0, centre: float = 1.0) -> None:
        """Whitening itself by default."""
        super().__init__(linear=linear)
        self.power, self.centre = power, centre
        if (power, centre) != (1, 1):  # found by logarithms, which take time
            self.fused = "PLAIN_SIZE", "PARTLY"

    def at(self, state: Mapping[str, Tensor], batch: Batch, layers: Layers) -> Scales:
        """Whitened coordinates with another β, and a scale for the constant input."""
        scales = super().at(state, batch, layers)
        assert scales.mu is not None and scales.alpha is not None and scales.spread is not None
        mu = scales.mu if self.centre == 1 else self.centre * scales.mu
        alpha = scales.alpha if self.power == 1 else scales.alpha**self.power
        damping, over = layers.group["damping"], layers.inputs
        beta, constant = plain_size(mu, alpha, scales.spread, damping, biased=layers.biased, over=over)
        # not `_replace`, whose result torch 2.11 cannot carry over a break in a compiled step
        return Scales(mu, alpha, scales.spread, scales.fresh, scales.raised, beta, constant)
