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
    """

    fused: Sequence[str] = ("PLAIN_SIZE",)

    def at(self, state: Mapping[str, Tensor], batch: Batch, layers: Layers) -> Scales:
        """Whitened coordinates with another β, and a scale for the constant input."""
        scales = super().at(state, batch, layers)
        assert scales.mu is not None and scales.alpha is not None and scales.spread is not None
        damping, over = layers.group["damping"], layers.inputs
        beta, constant = plain_size(scales.mu, scales.alpha, scales.spread, damping, biased=layers.biased, over=over)
        # not `_replace`, whose result torch 2.11 cannot carry over a break in a compiled step
        return Scales(scales.mu, scales.alpha, scales.spread, scales.fresh, scales.raised, beta, constant)
