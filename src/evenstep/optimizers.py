"""The paper's optimizers: each names its coordinates and its rule. No arithmetic here; it is in the core."""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from . import checks
from .keywords import explained
from .math import stepsize
from .rules import old as rules
from .step.block import Block
from .step.plan import Plan
from .torch_optimizer.step import CoordinateOptimizer


def options(arguments: dict[str, Any], **fixed: Any) -> dict[str, Any]:
    """A constructor's hyperparameters, from its `locals()`: all that groups may have."""
    apart = ("self", "params", "model", "scaler", "process_group", "__class__")
    return {k: v for k, v in arguments.items() if k not in apart} | fixed


class _SG(CoordinateOptimizer):
    """Stochastic gradient with momentum on v: linear in the gradient."""

    _together: ClassVar[str | None] = "sg"

    def _init_rule(self, block: Block) -> None:
        if block.group["momentum"]:
            rules.init_momentum([self.state[p] for p in block.parameters], block)

    def _rule(
        self, block: Block, on_weight: Tensor, on_bias: Tensor | None, ok: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        if not block.group["momentum"]:
            return on_weight, on_bias
        return rules.momentum([self.state[p] for p in block.parameters], block, on_weight, on_bias, ok)


@explained
class FanInSGD(_SG):
    """SGD with every layer's stepsize divided by √(n·S), fan-in times sharing count (§3.5).

    The forward pass is watched for the sharing count alone.
    """

    coordinates = "fan-in"

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1.0,
        *,
        model: nn.Module | None = None,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        plain_lr: float | None = None,
        trust: float | None = None,
        sharing: float | None = None,
        exclude: Sequence[str] = (),
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        process_group: Any = None,
    ) -> None:
        """The keywords are explained in the class."""
        super().__init__(params, options(locals()), model, process_group)


@explained
class WhitenedSGD(_SG):
    """SGD in whitened coordinates, eq. 12 (§4).

    With `damping=0, fresh_max=None, trust=None` it is the paper's, to the letter.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 0.3,
        *,
        model: nn.Module | None = None,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        decay: float = 0.95,
        damping: float = 0.1,
        fresh_max: float | None = 4.0,
        trust: float | None = 0.1,
        rows: int | None = 1024,
        plain_lr: float | None = None,
        sharing: float | None = None,
        exclude: Sequence[str] = (),
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        process_group: Any = None,
    ) -> None:
        """The keywords are explained in the class."""
        super().__init__(params, options(locals()), model, process_group)


@explained
class CanonicalSGD(_SG):
    """SGD in canonical coordinates, eq. 5 (§2.3): whitened inputs, and units scaled by 1/E[g²].

    Fast, and known to diverge with little warning (§2.4). E[g²] is read at each layer's output, so it must know how
    the loss reduces the batch (`reduction`), and of a GradScaler (`scaler`) if there is one. Parameters without g²
    take `plain_lr`.
    """

    coordinates = "canonical"
    _together = None
    _copied = ("scaler",)

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-4,
        *,
        model: nn.Module | None = None,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        decay: float = 0.95,
        damping: float = 0.1,
        fresh_max: float | None = 4.0,
        trust: float | None = 0.1,
        rows: int | None = 1024,
        plain_lr: float | None = 0.01,
        reduction: str = "mean",
        scaler: Any = None,
        exclude: Sequence[str] = (),
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        process_group: Any = None,
    ) -> None:
        """The keywords are explained in the class."""
        checks.one_of(type(self).__name__, "reduction", reduction, ["mean", "sum"])
        super().__init__(params, options(locals()), model, process_group)
        self.scaler = scaler

    def _step_blocks(self, plan: Plan, agreed: Tensor | None) -> None:
        scale = getattr(getattr(self, "scaler", None), "_scale", None)
        if self._statistics is not None:
            if scale is not None:
                self._statistics.unscale(scale)
            self._common.examples = self._statistics.examples() / self._world  # gradients are averaged over ranks
        super()._step_blocks(plan, agreed)

    def _gradients(self, block: Block) -> tuple[Tensor, Tensor | None]:
        """Of the mean loss, whatever the reduction."""
        on_weight, on_bias = super()._gradients(block)
        if block.group["reduction"] == "mean" or self._statistics is None:
            return on_weight, on_bias
        examples = self._common.examples.to(on_weight.device)
        return on_weight / examples, None if on_bias is None else on_bias / examples


@explained
class UnitStep(_SG):
    """The one to try first: whitened coordinates, eq. 11 per unit with momentum, both guards.

    Each unit's gradient on v is divided by the root of its running mean square, damped by the layer's, so that every
    unit takes an even step of about `lr`; momentum looks ahead (Nesterov). Rows of parameters outside layers, an
    embedding's for instance, take steps of about `lr` times their own length where that is above 1.

    State: one momentum buffer, one float per unit, two per input.
    """

    linear = False
    _together = "even"

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 0.05,
        *,
        model: nn.Module | None = None,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        decay: float = 0.99,
        damping: float = 0.3,
        fresh_max: float | None = 4.0,
        trust: float | None = 0.1,
        rows: int | None = 1024,
        eps: float = 1e-12,
        plain_lr: float | None = None,
        exclude: Sequence[str] = (),
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        process_group: Any = None,
    ) -> None:
        """The keywords are explained in the class."""
        super().__init__(params, options(locals(), bias_correction=True, block="unit"), model, process_group)

    def _init_rule(self, block: Block) -> None:
        super()._init_rule(block)
        rules.init_square(self.state[block.weight], block, block.weight, "unit")

    def _rule(
        self, block: Block, on_weight: Tensor, on_bias: Tensor | None, ok: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        square = block.unit_square(on_weight, on_bias).flatten()
        average = rules.running_square(self.state[block.weight], square, block.group, ok)
        ahead = on_weight, on_bias
        if block.group["momentum"]:
            ahead = rules.look_ahead(*ahead, *super()._rule(block, *ahead, ok), block.group["momentum"])
        damping = 0.0 if block.entry is None else block.group["damping"]
        step, bias_step = rules.divided(block, *ahead, [stepsize.unit_level(average, square, damping, block.over)])
        if block.entry is None:
            step = rules.by_own_length(block, step, self._weight(block))
        return step, bias_step


@explained
class BlockNaturalSGD(_SG):
    """Steps of bounded length per block of parameters (§3.2–3.4), with G = I in plain coordinates.

    `block` is what shares a denominator: the whole "network" (eq. 9), each "unit" with its bias (eq. 10), or each
    "weight". By default the denominator is eq. 11's running mean square, √(eps + R); `bounded=False` takes the batch's
    own, eqs. 9 and 10. `block="weight"` is RMSProp, exactly so with `bias_correction=False`.
    """

    coordinates = "plain"
    linear = False
    _together = None

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 0.01,
        *,
        model: nn.Module | None = None,
        block: str = "unit",
        bounded: bool = True,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        decay: float = 0.95,
        eps: float = 1e-12,
        bias_correction: bool = True,
        trust: float | None = None,
        exclude: Sequence[str] = (),
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        process_group: Any = None,
    ) -> None:
        """The keywords are explained in the class."""
        checks.one_of(type(self).__name__, "block", block, ["network", "unit", "weight"])
        super().__init__(params, options(locals()), model, process_group)

    def _advance(self, blocks: list[Block], ok: Tensor | None) -> None:
        """Sum the squares of the whole network first, where they are wanted."""
        whole = [b for b in blocks if b.group["block"] == "network"]
        if whole:
            squares = [b.over.total(b.unit_square(*self._gradients(b))) for b in whole]
            self._common.square = torch.stack(squares).sum()
        super()._advance(blocks, ok)

    def _init_rule(self, block: Block) -> None:
        super()._init_rule(block)
        if block.group["bounded"]:
            single = block.group["block"] == "weight"
            for p in block.parameters if single else [block.weight]:
                rules.init_square(self.state[p], block, p, block.group["block"])

    def _rule(
        self, block: Block, on_weight: Tensor, on_bias: Tensor | None, ok: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        group = block.group
        if group["block"] == "weight":
            squares = [torch.square(g) for g in [block.unmatrix(on_weight), *block.unstack(on_bias)]]
        elif group["block"] == "unit":
            squares = [block.unit_square(on_weight, on_bias).flatten()]
        else:
            squares = [self._common.square.to(on_weight.device)]
        if group["bounded"]:
            states = [self.state[p] for p in block.parameters[: len(squares)]]
            squares = [rules.running_square(s, q, group, ok) for s, q in zip(states, squares, strict=True)]
        return super()._rule(block, *rules.divided(block, on_weight, on_bias, squares), ok)


EvenStep = UnitStep  # until the orthogonalized rule takes this name
