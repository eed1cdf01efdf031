"""The optimizers: each is a preset of coordinates, a rule, and what its keywords are by default."""

from collections.abc import Sequence
from dataclasses import KW_ONLY, fields
from functools import cache
from typing import Any

from torch import Tensor, nn

from .coordinates.canonical import Canonical
from .coordinates.coordinates import Coordinates
from .coordinates.fan_in import FanIn
from .options import for_groups, preset
from .rules.block_natural import BlockNaturalRule
from .rules.rule import Rule
from .rules.unit import UnitRule
from .step.block import Group
from .step.plan import Plan
from .torch_optimizer.optimizer_step import CoordinateOptimizer

natural_rule = cache(BlockNaturalRule)  # one object per kind, so that blocks can be grouped by it


@preset
class Preset(CoordinateOptimizer):
    """What all presets take."""

    params: Any
    lr: float | Tensor
    _: KW_ONLY
    model: nn.Module | None = None
    momentum: float = 0.0
    weight_decay: float = 0.0
    trust: float | None = 0.1
    exclude: Sequence[str] = ()
    maximize: bool = False
    foreach: bool | None = None
    capturable: bool = False
    process_group: Any = None

    def __post_init__(self) -> None:
        """Begin with the arguments of the constructor."""
        given = {field.name: vars(self).pop(field.name) for field in fields(self) if field.name not in self._copied}
        CoordinateOptimizer.__init__(self, given["params"], for_groups(given), given["model"], given["process_group"])


@preset
class WithMoments(Preset):
    """What presets with moments of the layers' inputs take besides."""

    _: KW_ONLY
    decay: float = 0.95
    damping: float = 0.1
    fresh_max: float | None = 4.0
    rows: int | None = 1024
    plain_lr: float | None = None


@preset
class FanInSGD(Preset):
    """SGD with every layer's stepsize divided by √(n·S), fan-in times sharing count (§3.5).

    Hooks count how often each weight is used, and nothing else.
    """

    coordinates = FanIn
    lr: float | Tensor = 1.0
    _: KW_ONLY
    trust: float | None = None
    plain_lr: float | None = None
    sharing: float | None = None


@preset
class WhitenedSGD(WithMoments):
    """SGD in whitened coordinates, eq. 12 (§4).

    With `damping=0, fresh_max=None, trust=None` it is the paper's, to the letter.
    """

    lr: float | Tensor = 0.3
    _: KW_ONLY
    sharing: float | None = None


@preset
class CanonicalSGD(WithMoments):
    """SGD in canonical coordinates, eq. 5 (§2.3): whitened inputs, and units scaled by 1/E[g²].

    Fast, and known to diverge with little warning (§2.4). E[g²] is read at each layer's output, so it must know how
    the loss reduces the batch (`reduction`), and of a GradScaler (`scaler`) if there is one. Parameters without g²
    take `plain_lr`.
    """

    coordinates = Canonical
    _copied = ("scaler",)
    lr: float | Tensor = 1e-4
    _: KW_ONLY
    plain_lr: float | None = 0.01
    reduction: str = "mean"
    scaler: Any = None

    def _make(self, plan: Plan, agreed: Tensor | None) -> None:
        scale = getattr(getattr(self, "scaler", None), "_scale", None)
        if scale is not None:
            self._statistics.unscale(scale)
        super()._make(plan, agreed)

    def _divisor(self) -> Tensor | None:
        """The number of examples, by which a summed loss is divided; gradients are averaged over ranks."""
        return None if self._statistics.model is None else self._statistics.examples() / self._world


@preset
class UnitStep(WithMoments):
    """Whitened coordinates, eq. 11 per unit with momentum, both guards: no matrix product, the cheapest rule.

    Each unit's gradient on v is divided by the root of its running mean square, damped by the layer's, so that every
    unit takes an even step of about `lr`; momentum looks ahead (Nesterov). Rows of parameters outside layers, an
    embedding's for instance, take steps of about `lr` times their own length where that is above 1.

    State: one momentum buffer, one float per unit, two per input.
    """

    rule = UnitRule()
    lr: float | Tensor = 0.05
    _: KW_ONLY
    momentum: float = 0.9
    decay: float = 0.99
    damping: float = 0.3
    eps: float = 1e-12


@preset
class BlockNaturalSGD(Preset):
    """Steps of bounded length per block of parameters (§3.2–3.4), with G = I in plain coordinates.

    `block` is what shares a denominator: the whole "network" (eq. 9), each "unit" with its bias (eq. 10), or each
    "weight". By default the denominator is eq. 11's running mean square, √(eps + R); `bounded=False` takes the batch's
    own, eqs. 9 and 10. `block="weight"` is RMSProp, exactly so with `bias_correction=False`.
    """

    coordinates = Coordinates
    lr: float | Tensor = 0.01
    _: KW_ONLY
    block: str = "unit"
    bounded: bool = True
    decay: float = 0.95
    eps: float = 1e-12
    bias_correction: bool = True
    trust: float | None = None

    def _rule_of(self, group: Group) -> Rule:
        return natural_rule(group["block"], group["bounded"])
