"""Plain stochastic gradient, with momentum."""

from torch import Tensor

from .rule import Direction, Rule, RuleStep, heavy_ball


class GradientRule(Rule):
    """The gradient itself; with momentum, its heavy ball."""

    linear = True
    fused = ()

    def direction(self, step: RuleStep, ok: Tensor | None) -> Direction:
        """The gradient, or the momentum buffer."""
        return Direction(*heavy_ball(step, step.on_v, ok))
