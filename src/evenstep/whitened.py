"""A torch rule in whitened coordinates."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from . import checks
from .keywords import explained
from .math import stepsize, update
from .parallel import dtensor as shards
from .rules import torch_rule as proxies
from .rules.torch_rule import BaseRule, Proxy
from .step.block import Block, plain_share
from .step.plan import Plan
from .torch_optimizer.motion import gradient, rates
from .torch_optimizer.step import CoordinateOptimizer

COMMON = {"lr", "weight_decay", "maximize", "foreach", "capturable"}  # keywords of ours that a rule may have too


def joint(block: Block) -> bool:
    """Whether the rule sees the block as one matrix, biases as columns: a layer, if its weight trains."""
    return bool(block.group["joint"]) and block.entry is not None and not block.alone


@explained
class Whitened(CoordinateOptimizer):
    """A first-order torch rule (AdamW, Muon, RMSprop, …) run on v instead of w.

    `base` is the class; its keywords follow ours. It gets `weight_decay=0`, ours acts on w. `joint=True` shows it each
    layer as one matrix [unit, inputs · kernel + 1] with the bias as a column, the default for Muon. `plain` is the rule
    for parameters outside layers, where it is to be another than `base`: AdamW for Muon, which takes matrices alone.
    `fan_in_power` divides a layer's stepsize by that power of its number of inputs: rules that move every weight alike,
    as Adam does, move a unit of n weights by √n times as much, and 0.25 keeps wide layers from dying.
    Once a step it reads one bool from the device, to skip a gradient that is not finite; with `capturable=True` it
    reads none, and such a gradient counts as zero in the rule's memory.
    """

    linear = False
    _together, _joint = "given", staticmethod(joint)
    _copied = ("_base", "_plain", "_streams")

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
        """The keywords are explained in the class."""
        owner = type(self).__name__
        lr = base_kwargs.get("lr")
        if lr is not None:
            checks.learning_rate(owner, lr)
            base_kwargs["lr"] = proxies.plain_rate(lr)
        muon = getattr(getattr(base, "func", base), "__name__", "") == "Muon"
        base_kwargs |= proxies.flags(base, capturable=capturable or None, foreach=foreach)
        self._base = BaseRule(owner, base, base_kwargs)
        plain = torch.optim.AdamW if plain is None and muon else plain
        self._plain = self._base if plain is None else BaseRule(owner, plain, {})
        self._streams = type(self._base.instance) is torch.optim.SGD
        if plain_lr is None and plain is not None:
            plain_lr = self._plain.instance.defaults["lr"]
        ours = {
            "lr": self._base.instance.defaults["lr"] if lr is None else lr,
            "decay": decay,
            "damping": damping,
            "fresh_max": fresh_max,
            "trust": trust,
            "rows": rows,
            "weight_decay": weight_decay,
            "joint": muon if joint is None else joint,
            "fan_in_power": fan_in_power,
            "plain_lr": plain_lr,
            "exclude": exclude,
            "maximize": maximize,
            "foreach": foreach,
            "capturable": capturable,
        }
        clash = (set(ours) & set(self._base.instance.defaults)) - COMMON
        if clash:
            raise ValueError(f"{owner}: {self._base.name} has keywords that are ours too: {sorted(clash)}.")
        super().__init__(params, {**self._base.instance.defaults, **ours}, model, process_group)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """As ours; the rules then mend what an older version of theirs has left."""
        super().__setstate__(state)
        for rule in {id(rule): rule for rule in (self._base, self._plain)}.values():
            rule.mend(self.state, self.param_groups)

    def _writer(self) -> str:
        return f"{super()._writer()}({self._base.name})"

    def _known_state(self) -> tuple[set[str], set[str], bool]:
        """The rules' own names beside ours; the shapes of torch's rules are the parameters'."""
        known, _, _ = super()._known_state()
        torchs = all(type(rule.instance).__module__.startswith("torch.") for rule in (self._base, self._plain))
        return known | self._base.keeps | self._plain.keeps, set(), torchs

    def _counted(self, block: Block) -> list[Tensor]:
        """What no rule counts the steps of; a bias inside a joint matrix has no state of the rule's."""
        rules = [self._plain if outside else self._base for outside in self._outside(block)]
        uncounted = [p for p, rule in zip(block.parameters[: len(rules)], rules, strict=True) if not rule.counts]
        return uncounted + block.parameters[len(rules) :]

    def _step_blocks(self, plan: Plan, agreed: Tensor | None) -> None:
        """As ours; what the rule was shown is given back, whatever happens."""
        try:
            super()._step_blocks(plan, agreed)
        finally:
            for layout in plan.layouts:
                if layout.given is not None:
                    layout.given.close()

    def _advance_all(self, moving: list[Any], rest: list[Block], ok: Tensor | None) -> None:
        """One step of the rule for all blocks, or, for SGD, block by block where they do not move together anyway.

        Compiled, all go at once: what comes before the rule is one graph then, and what comes after it is another.
        """
        if ok is not None and not any(group["capturable"] for group in self.param_groups):
            if not ok:
                return self._recentre()
            ok = None
        streams = self._streams and not torch.compiler.is_compiling()
        self._advance_shown(moving, [] if streams else rest, ok)
        for block in rest if streams else []:
            self._advance_shown([], [block], ok)

    def _advance_shown(self, moving: list[Any], blocks: list[Block], ok: Tensor | None) -> None:
        """Show blocks to the rule, those that move together where their gradients on v lie already; then move them."""
        if torch.compiler.is_compiling():  # of parameters it meets as keys of the state it would guard each gradient
            _ = [gradient(p) for block in blocks for p in block.parameters]
        shown = [proxy for move in moving for proxy in self._shown(move, ok)]
        outside = [o for move in moving for block in move.layout.blocks for o in self._outside(block)]
        frames = [self._frame(block) for block in blocks]
        counts = []
        for block, frame in zip(blocks, frames, strict=True):
            mine = self._proxies(block, *update.gradient_on_v(*self._gradients(block), frame), ok)
            counts.append(len(mine))
            shown += mine
            outside += self._outside(block)
        if not shown:
            return
        steps = self._steps(shown, outside)[len(shown) - sum(counts) :]
        for move in moving:
            self._make(move, ok)
        for block, frame, count in zip(blocks, frames, counts, strict=True):
            self._move(block, frame, *self._read(block, steps[:count]), ok)
            steps = steps[count:]

    def _shown(self, move: Any, ok: Tensor | None) -> list[Proxy]:
        """Blocks that move together as the rule is to see them."""
        given = move.layout.given
        gradients, steps = given.both
        if ok is not None:
            gradients.masked_fill_(~ok.to(gradients.device), 0)
        steps.zero_()
        return [
            Proxy(p, one.q.grad, group, lr, stays=one)
            for block, some in zip(move.layout.blocks, given.stand_ins, strict=True)
            for p, one, group, lr in zip(
                block.parameters, some, [block.group, *block.bias_groups], self._rates(block, len(some)), strict=False
            )
        ]

    def _outside(self, block: Block) -> list[bool]:
        """Which of the block's proxies the plain rule moves, where there is one: what is no matrix of a layer."""
        if block.entry is None:
            return [True]
        return [False] if joint(block) else [p.dim() < 2 for p in block.parameters]

    def _share(self, block: Block) -> float:
        """What the block gets of its group's stepsize: all of it outside whitened layers."""
        power = block.group["fan_in_power"]
        return stepsize.fan_in_share(block.fan_in, power) if power and block.treatment == "whitened" else 1.0

    @_disable_dynamo
    def _steps(self, shown: list[Proxy], outside: list[bool]) -> list[Tensor]:
        """What the base does to each proxy, or the plain rule to those outside; compilers leave it to the rules."""
        if self._plain is self._base:
            return proxies.steps_of(self._base, shown, self.state, own_options=False)
        results = []
        for rule, other, side in ((self._base, self._plain, False), (self._plain, self._base, True)):
            part, foreign = [p for p, o in zip(shown, outside, strict=True) if o is side], other.keeps - rule.keeps
            steps = proxies.steps_of(rule, part, self.state, own_options=side, foreign=foreign) if part else []
            results.append(iter(steps))
        return [next(results[side]) for side in outside]

    def _proxies(self, block: Block, on_weight: Tensor, on_bias: Tensor | None, ok: Tensor | None) -> list[Proxy]:
        """The block's gradient on v as the rule is to see it."""
        if joint(block):
            grads = [joined(on_weight, on_bias)]
        else:
            grads = [block.unmatrix(on_weight), *block.unstack(on_bias)]
        if ok is not None:
            grads = [torch.where(ok, g, 0) for g in grads]
        count = len(grads)
        parameters, groups = block.parameters[:count], [block.group, *block.bias_groups][:count]
        lrs, rules = self._rates(block, count), [self._plain if o else self._base for o in self._outside(block)]
        wholes = [shards.sharded(p) and not rule.elementwise for p, rule in zip(parameters, rules, strict=True)]
        grads = [g.to(p.dtype).contiguous() for p, g in zip(parameters, grads, strict=True)]
        return [
            Proxy(p, proxies.gathered(p, g) if whole else g, group, lr, whole)
            for p, g, group, lr, whole in zip(parameters, grads, groups, lrs, wholes, strict=True)
        ]

    def _rates(self, block: Block, count: int) -> list[Any]:
        """The stepsizes of the block's proxies."""
        share = self._share(block)
        lrs = [lr * share for lr in rates(block)[:count]]
        if self._plain is not self._base and not block.aside:
            groups, outside = [block.group, *block.bias_groups][:count], self._outside(block)
            lrs = [lr * plain_share(g) if o else lr for lr, g, o in zip(lrs, groups, outside, strict=True)]
        return lrs

    def _read(self, block: Block, steps: list[Tensor]) -> tuple[Tensor, Tensor | None]:
        """The rule's step in the core's shapes."""
        wide = [s.to(torch.promote_types(s.dtype, torch.float32)) for s in steps]
        if joint(block):
            return parted(wide[0], block)
        return block.matrix(wide[0]), block.stack(wide[1:])


def joined(on_weight: Tensor, on_bias: Tensor | None) -> Tensor:
    """[group, unit, input, kernel] and [bias, group, unit] as one matrix [unit, inputs · kernel + biases]."""
    matrix = on_weight.flatten(2).flatten(0, 1)
    return matrix if on_bias is None else torch.cat([matrix, on_bias.flatten(1).T], dim=1)


def parted(matrix: Tensor, block: Block) -> tuple[Tensor, Tensor | None]:
    """The inverse of `joined` for a block."""
    shape = block.matrix(shards.local(block.weight)).shape
    if not block.biases:
        return matrix.view(shape), None
    on_weight, on_bias = matrix[:, : -len(block.biases)], matrix[:, -len(block.biases) :]
    return on_weight.reshape(shape), on_bias.T.reshape(len(block.biases), *shape[:2])
