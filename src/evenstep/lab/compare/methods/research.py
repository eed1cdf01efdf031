"""Variants of EvenStep, for research on its rule by single jobs; none takes part in the race."""

from typing import Any

import torch
from torch import Tensor

from evenstep.coordinates.plain_size import PlainSize
from evenstep.even_step import EvenStep
from evenstep.math.change_of_variables import Scales
from evenstep.math.constants import plain_size
from evenstep.math.polar import MUON
from evenstep.rules.orthogonal import OrthogonalRule

from .method import Method
from .ours import ours

# minimax from 0.005 in three steps (0.5 to 1.5), and from 0.003 in four (0.8 to 1.2)
STEEP = ((8.2987, -24.4305, 18.0903), (3.9152, -2.9211, 0.5592), (3.1746, -2.3804, 0.4978))
FOUR = ((8.3837, -24.7659, 18.3571), (4.0434, -3.0114, 0.5695), (3.5056, -2.6267, 0.5257), (2.4901, -1.8343, 0.4368))


class OwnNorMuon(OrthogonalRule):
    """The rule without balls: a step is lr · √max(1, units/inputs) times the polar factor, its norm kept."""

    def state(self, momentum: float) -> Any:
        """Without the radius."""
        return {name: field for name, field in super().state(momentum).items() if name != "radius"}

    def _lengths(self, step: Any, ok: Tensor | None) -> list[Tensor]:
        return [torch.full((b.groups,), (b.units / b.groups) ** 0.5, device=b.weight.device) for b in step.blocks]


def partly(power: float, centre: float) -> type[PlainSize]:
    """Coordinates with this power of α and this share of the mean taken out: (1, 1) is whitening, (0, 0) plain."""

    class Partly(PlainSize):
        def at(self, state: Any, batch: Any, layers: Any) -> Scales:
            whitened: Any = super(PlainSize, self).at(state, batch, layers)
            mu, alpha, damping = centre * whitened.mu, whitened.alpha**power, layers.group["damping"]
            over, biased = layers.inputs, layers.biased
            beta, constant = plain_size(mu, alpha, whitened.spread, damping, biased=biased, over=over)
            return whitened._replace(mu=mu, alpha=alpha, beta=beta, constant=constant)

    return Partly


def variant(power: float = 1, centre: float = 1, rule: OrthogonalRule | None = None, **fixed: Any) -> Method:
    """`EvenStep` in other coordinates, which the GPU's kernels do not know, or by another rule."""
    coordinates = EvenStep.coordinates if (power, centre) == (1, 1) else partly(power, centre)
    cls = type("Variant", (EvenStep,), {"coordinates": coordinates, "rule": rule or EvenStep.rule})
    return ours(cls, **fixed)


VARIANTS: dict[str, Method] = {
    "own-normuon": variant(0, 0, OwnNorMuon(quintics=(MUON,) * 5), trust=None),
    "half": variant(0.5, 0),
    "plain": variant(0, 0),
    "centred": variant(0, 1),
    "no-radius": variant(rule=OwnNorMuon()),
    "least-03": variant(rule=OrthogonalRule(least=0.3)),
    "least-1": variant(rule=OrthogonalRule(least=1.0)),  # steps relative to the radius
    # instead of three minimax quintics from 0.01 on
    "five": variant(rule=OrthogonalRule(quintics=(MUON,) * 5)),
    "four": variant(rule=OrthogonalRule(quintics=(MUON,) * 4)),
    "steep": variant(rule=OrthogonalRule(quintics=STEEP)),
    "minimax-four": variant(rule=OrthogonalRule(quintics=FOUR)),
}
