"""A torch rule in whitened coordinates."""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from . import options
from .coordinates.coordinates import Coordinates
from .coordinates.plain_size import PlainSize
from .options import explained
from .rules import torch_rule as proxies
from .rules.check_torch_class import TorchClass
from .rules.torch_rule import TorchRule
from .step.block import Block
from .torch_optimizer.optimizer_step import CoordinateOptimizer

COMMON = {"lr", "weight_decay", "maximize", "foreach", "capturable"}  # keywords of ours that a rule may have too


@explained
class Whitened(CoordinateOptimizer):
    """A first-order torch rule (AdamW, Muon, RMSprop, …) in whitened coordinates.

    `base` is the class; its keywords follow ours. It gets `weight_decay=0`, ours acts on w. With `joint=True`, the
    default for Muon, each layer is one matrix [unit, inputs · kernel + 1], its bias a column. `plain` is the rule for
    parameters outside layers, if not `base`: AdamW beside Muon, which takes matrices alone. `fan_in_power` divides a
    layer's stepsize by that power of its number of inputs: rules that move every weight alike, as Adam does, move a
    unit of n weights by √n times as much, and 0.25 keeps wide layers from dying.

    A gradient that is not finite moves nothing. On a GPU, where no step waits for the device, and with
    `capturable=True` it counts as zero in the rule's memory.
    """

    coordinates: ClassVar[type[Coordinates]] = PlainSize
    rule: TorchRule
    _copied = "_torch_rules", "rule"
    _direct = _disable_dynamo(CoordinateOptimizer._direct)  # torch's rules are not for a compiler to look into

    def __init__(
        self,
        params: Any,
        base: Any,
        *,
        model: nn.Module | None = None,
        decay: float = 0.99,
        damping: float = 0.3,
        fresh_max: float | None = 4.0,
        trust: float | None = 0.1,
        rows: int | None = 1024,
        weight_decay: float = 0.0,
        joint: bool | None = None,
        fan_in_power: float = 0.0,
        plain: Any = None,
        plain_lr: float | None = None,
        exclude: Sequence[str] = (),
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        process_group: Any = None,
        **base_kwargs: Any,
    ) -> None:
        ours, owner = options.for_groups(locals()), type(self).__name__
        if (lr := base_kwargs.get("lr")) is not None:
            options.check(owner, {"lr": lr})
            base_kwargs["lr"] = proxies.plain_rate(lr)
        muon = getattr(getattr(base, "func", base), "__name__", "") == "Muon"
        main = TorchClass(owner, base, base_kwargs, capturable=capturable or None, foreach=foreach)
        plain = torch.optim.AdamW if plain is None and muon else plain
        rest = main if plain is None else TorchClass(owner, plain, {})
        self.rule, self._torch_rules, theirs = TorchRule(main, rest), tuple({main, rest}), main.instance.defaults
        ours["lr"] = theirs["lr"] if lr is None else lr
        ours["joint"] = muon if joint is None else joint
        if plain_lr is None and plain is not None:
            ours["plain_lr"] = rest.instance.defaults["lr"]
        if clash := (ours.keys() & theirs.keys()) - COMMON:
            raise ValueError(f"{owner}: {main.name} has keywords that are ours too: {sorted(clash)}.")
        super().__init__(params, {**theirs, **ours}, model, process_group)

    def _remark(self, block: Block, p: Tensor) -> str:
        """Which parameters the second rule moves, if there is one."""
        rules = self.rule.rules_of(block)
        moved_by = {id(p): rule for p, rule in zip(block.parameters, rules, strict=False)}.get(id(p), rules[0])
        return "" if moved_by is self.rule.base else f"moved by {moved_by.name}"

    def _writer(self) -> str:
        return f"{super()._writer()}({self.rule.base.name})"
