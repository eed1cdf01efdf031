"""Run a torch rule on v: on proxies that start at zero and hold the gradient on v; what it leaves there is its step.

v itself is never stored, so a rule serves here if its step does not depend on the parameter's value. The rule's memory
lives in the optimizer's state and its hyperparameters in the optimizer's groups, and it gets both anew in each step: so
checkpoints, schedulers and replaced parameters need no second bookkeeping.
"""

from collections import defaultdict
from collections.abc import Sequence, Set
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..coordinates.coordinates import Schema, Statistics
from ..coordinates.whitening import Whitening
from ..parallel import dtensor
from .rule import Rule, RuleStep, plain_share, stand_in
from .torch_class import TorchClass


class Proxy(NamedTuple):
    """Stands in for parameter `p`, which keeps the rule's state: a gradient on v, with its group, stepsize and rule.

    The rule moves `q`, which is zero and has that gradient. Of a parameter that is sharded over ranks it is this rank's
    part, or all of it (`whole`).
    """

    p: Tensor
    q: nn.Parameter
    group: dict[str, Any]
    lr: Any
    rule: TorchClass
    whole: bool = False

    @property
    def grad(self) -> Tensor:
        """The gradient on v."""
        assert self.q.grad is not None
        return self.q.grad

    @property
    def step(self) -> Tensor:
        """How far the rule has moved it: what this rank has of that."""
        moved = self.q.detach()
        return dtensor.part(moved, self.p) if self.whole else moved

    def to_rule(self, value: Any) -> Any:
        """State as the rule sees it."""
        if not isinstance(value, Tensor):
            return value
        return dtensor.whole(value) if self.whole else dtensor.local(value)

    def to_state(self, value: Any) -> Any:
        """The rule's state as it is kept: a tensor shaped like the proxy is sharded as the parameter is."""
        if not dtensor.sharded(self.p) or not isinstance(value, Tensor) or value.shape != self.grad.shape:
            return value
        own = dtensor.part(value, self.p) if self.whole else value
        return dtensor.placed(own, self.p, whole_shape(self.p, self.grad))


def whole_shape(p: Tensor, grad: Tensor) -> torch.Size:
    """The shape of what `grad` is a part of: the parameter's, or that of its layer as one matrix."""
    joint = grad.dim() == 2 and (p.dim() != 2 or grad.shape[1] != dtensor.local(p).shape[1])
    return torch.Size([p.shape[0], grad.shape[1]]) if joint else p.shape


def gathered(p: Tensor, grad: Tensor) -> Tensor:
    """The whole of a gradient on v of which each rank has a part."""
    return dtensor.whole(dtensor.placed(grad, p, whole_shape(p, grad)))


class TorchRule(Rule):
    """A torch rule on v, and a second one for parameters outside layers, where that is to be another."""

    own_rate = True

    def __init__(self, base: TorchClass, plain: TorchClass, *, own_options: bool = False) -> None:
        """`plain` may be `base`. With `own_options` groups say nothing to it: it keeps the options it was made with."""
        self.base, self.plain, self.own_options = base, plain, own_options

    def joint(self, block: Any) -> bool:
        """A layer, if its weight trains and its group asks for it."""
        return bool(block.group.get("joint")) and block.entry is not None and not block.alone

    def state(self, momentum: float) -> Schema:
        """No fields: torch's rules make their own state."""
        return {}

    def rules_of(self, block: Any) -> list[TorchClass]:
        """The rule of each of the block's proxies: `plain` for what is no matrix of a layer."""
        if self.joint(block):
            return [self.base]
        return [self.plain if block.entry is None or p.dim() < 2 else self.base for p in block.parameters]

    def counted(self, block: Any) -> list[Tensor]:
        """Parameters whose steps no rule counts; a bias inside a joint matrix has no state of the rule's."""
        rules = self.rules_of(block)
        uncounted = [p for p, rule in zip(block.parameters, rules, strict=False) if not rule.counts]
        return [*uncounted, *block.parameters[len(rules) :]]

    def direct(self, steps: Sequence[RuleStep], ok: Tensor | None) -> None:
        """One step of each rule for all blocks at once: some rules count steps in their groups."""
        proxies = [[self._proxies(b, qs, ok) for b, qs in zip(s.blocks, s.stand_ins(), strict=True)] for s in steps]
        flat = [proxy for some in proxies for few in some for proxy in few]
        for rule in dict.fromkeys(proxy.rule for proxy in flat):
            foreign = (self.base.keeps | self.plain.keeps) - rule.keeps
            part = [proxy for proxy in flat if proxy.rule is rule]
            run(rule, part, steps[0].state, self.own_options or rule is not self.base, foreign)
        for step, some in zip(steps, proxies, strict=True):
            step.take([[proxy.step for proxy in few] for few in some])

    def _proxies(self, block: Any, stand_ins: list[nn.Parameter], ok: Tensor | None) -> list[Proxy]:
        """The block's gradients on v as the rule sees them."""
        found, columns = [], (block.parameters, block.param_groups, self._rates(block), self.rules_of(block))
        for q, p, group, lr, rule in zip(stand_ins, *columns, strict=False):
            assert q.grad is not None
            if ok is not None:  # not in place: it may be the parameter's own gradient
                q.grad = torch.where(ok.to(q.device), q.grad, 0)
            whole = dtensor.sharded(p) and not rule.elementwise
            found.append(Proxy(p, stand_in(gathered(p, q.grad)) if whole else q, group, lr, rule, whole))
        return found

    def _rates(self, block: Any) -> list[Any]:
        """The stepsizes of the block's proxies."""
        power = block.group.get("fan_in_power")
        whitened = block.coordinates.needs >= Statistics.INPUTS
        share = block.fan_in**-power if power and whitened else 1.0
        lrs = [lr * share for lr in block.rates()]
        if self.plain is self.base or block.uses_plain_lr:
            return lrs
        each = zip(lrs, block.param_groups, self.rules_of(block), strict=False)
        return [lr * plain_share(group) if rule is self.plain else lr for lr, group, rule in each]


def run(base: TorchClass, proxies: Sequence[Proxy], state: Any, own_options: bool, foreign: Set[str]) -> None:
    """Let the rule move its proxies by one step, stepsize and sign included.

    The rule's state lives in `state`, where `foreign` names are another rule's; its options in the proxies' groups, or,
    with `own_options`, as it was made.
    """
    rule = base.instance
    rule.state = defaultdict(dict)
    groups: dict[Any, tuple[dict[str, Any], dict[str, Any]]] = {}
    for proxy in proxies:
        rule.state[proxy.q] = remembered(base, proxy, state[proxy.p], foreign) or base.first_state(proxy.q)
        key = id(proxy.group), plain_rate(proxy.lr), proxy.q.is_cuda
        if key not in groups:
            options = options_of(proxy.group, rule, own_options, proxy.q.is_cuda)
            groups[key] = proxy.group, {**rule.defaults, **options, **fixed(proxy.lr), "params": []}
        groups[key][1]["params"].append(proxy.q)
    rule.param_groups = [mine for _, mine in groups.values()]
    # without the hooks that torch runs for every optimizer: they run for the outer one
    getattr(type(rule).step, "__wrapped__", type(rule).step)(rule)
    for proxy in proxies:
        kept = state[proxy.p]
        for name, value in rule.state[proxy.q].items():
            if kept.get(name) is not value:
                kept[name] = proxy.to_state(value)
        if isinstance(proxy.lr, Tensor):
            proxy.q.detach().mul_(proxy.lr)
    if not own_options:  # some rules count in their groups
        apart = {"params", *fixed(0)}
        for group, mine in groups.values():
            group.update({k: v for k, v in mine.items() if k not in apart})
    rule.state, rule.param_groups = defaultdict(dict), []


def options_of(group: dict[str, Any], rule: Optimizer, own_options: bool, on_gpu: bool) -> dict[str, Any]:
    """What a group says to the rule; with `own_options` nothing but that it is captured.

    Capture is a matter of the device, and torch's rules know it on a GPU alone.
    """
    if own_options:
        return {"capturable": True} if group.get("capturable") and on_gpu and "capturable" in rule.defaults else {}
    return {k: v for k, v in group.items() if k not in ("params", "param_names")}


def remembered(base: TorchClass, proxy: Proxy, state: dict[str, Any], foreign: Set[str]) -> dict[str, Any]:
    """The rule's state of a proxy.

    Layers become plain parameters and come back, and biases join them and leave: what another rule has kept, or of
    another shape, is dropped; a matrix with more or fewer biases than before keeps what it can.
    """
    mine = {k: proxy.to_rule(v) for k, v in state.items() if k not in Whitening.state and (base.counts or k != "step")}
    own, shape = base.keeps - {"step"}, proxy.grad.shape
    like = {k: v for k, v in mine.items() if isinstance(v, Tensor) and v.dim() and k not in base.shaped_apart}
    others = foreign & mine.keys() or (own and not own & mine.keys())
    rows_agree = (v.shape == shape or (v.dim() == len(shape) == 2 and len(v) == shape[0]) for v in like.values())
    if others or not all(rows_agree):
        for k in mine:
            del state[k]
        return {}
    for k, v in like.items():
        if v.shape != shape:
            mine[k] = nn.functional.pad(v, (0, shape[1] - v.shape[1]))  # cut, or filled up with zeros
        elif v.stride() != proxy.grad.stride():  # fused rules read memory as it lies
            mine[k] = torch.empty_like(proxy.grad).copy_(v)
    return mine


def fixed(lr: Any) -> dict[str, Any]:
    """Options that override the rule's: the optimizer itself sees to signs and decay."""
    return {"lr": plain_rate(lr), "maximize": False, "weight_decay": 0}


def plain_rate(lr: Any) -> Any:
    """What a rule gets for lr: 1 for a tensor, which few rules can take without asking the device; it is applied after.

    >>> plain_rate(0.1), plain_rate(torch.tensor(0.1))
    (0.1, 1.0)
    """
    return 1.0 if isinstance(lr, Tensor) else lr
