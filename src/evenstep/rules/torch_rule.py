"""Run a torch rule on v: on proxies that start at zero and hold the gradient on v; what it leaves there is its step.

v itself is never stored, so a rule serves here if its step does not depend on the parameter's value.
"""

import inspect
from collections import defaultdict
from collections.abc import Callable, Sequence, Set
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..coordinates.coordinates import Schema
from ..math import stepsize
from ..parallel import dtensor as shards
from .rule import Rule, RuleStep, plain_share

OURS = {"mx", "vx", "mass", "sharing"}  # state of ours beside the rule's own
REFUSED = {
    "LBFGS": "it evaluates the loss several times along a line",
    "SparseAdam": "it takes sparse gradients alone",
    "ASGD": "it averages and decays the parameters themselves",
    "Adafactor": "its relative step is a multiple of the parameter's own size",
}


class Proxy(NamedTuple):
    """Stands in for parameter `p`, which keeps the rule's state: a gradient on v, with its group and stepsize.

    The rule moves `q`, which is zero and has that gradient. Of a parameter that is sharded over ranks it is this rank's
    part, or all of it (`whole`).
    """

    p: Tensor
    q: nn.Parameter
    group: dict[str, Any]
    lr: Any
    whole: bool = False

    @property
    def grad(self) -> Tensor:
        """The gradient on v."""
        assert self.q.grad is not None
        return self.q.grad

    def to_rule(self, value: Any) -> Any:
        """State as the rule sees it."""
        if not isinstance(value, Tensor):
            return value
        return shards.whole(value) if self.whole else shards.local(value)

    def to_state(self, value: Any) -> Any:
        """The rule's state as it is kept: a tensor shaped like the proxy is sharded as the parameter is."""
        if not shards.sharded(self.p) or not isinstance(value, Tensor) or value.shape != self.grad.shape:
            return value
        own = shards.part(value, self.p) if self.whole else value
        return shards.placed(own, self.p, whole_shape(self.p, self.grad))


def proxy_of(grad: Tensor) -> nn.Parameter:
    """A parameter that is zero and has this gradient."""
    q = nn.Parameter(torch.zeros_like(grad))
    q.grad = grad
    return q


def whole_shape(p: Tensor, grad: Tensor) -> torch.Size:
    """The shape of what `grad` is a part of: the parameter's, or that of its layer as one matrix."""
    joint = grad.dim() == 2 and (p.dim() != 2 or grad.shape[1] != shards.local(p).shape[1])
    return torch.Size([p.shape[0], grad.shape[1]]) if joint else p.shape


def gathered(p: Tensor, grad: Tensor) -> Tensor:
    """The whole of a gradient on v of which each rank has a part."""
    return shards.whole(shards.placed(grad, p, whole_shape(p, grad)))


class BaseRule:
    """A torch rule ready to run on proxies: an instance without parameters, and how to make another."""

    def __init__(self, owner: str, rule: Any, keywords: dict[str, Any]) -> None:
        """Try the rule on two small matrices; an error says why it cannot serve."""
        cls = getattr(rule, "func", rule)
        self.name = getattr(cls, "__name__", repr(cls))
        if not (isinstance(cls, type) and issubclass(cls, Optimizer)):
            raise ValueError(f"{owner}: base must be a torch.optim.Optimizer class; got {rule!r}.")
        if self.name in REFUSED:
            raise ValueError(f"{owner}: {self.name} cannot run in whitened coordinates: {REFUSED[self.name]}.")
        if "weight_decay" in inspect.signature(cls).parameters:
            keywords = {**keywords, "weight_decay": 0}  # ours acts on w
        self.make = partial(rule, **keywords)
        try:
            self.instance: Optimizer = self.make([nn.Parameter(torch.zeros(2, 2))])
        except TypeError as error:
            raise ValueError(f"{owner}: {self.name} does not take these keywords: {error}.") from error
        if "lr" not in self.instance.defaults:
            raise ValueError(f"{owner}: {self.name} has no keyword lr; a rule here must have one.")
        self.born_with_state = bool(self.instance.state)  # Adagrad's accumulator
        quiet = {k: False for k in ("foreach", "fused", "capturable", "differentiable") if k in keywords}
        (still, kept), (moved, _) = (trial(partial(self.make, **quiet), start) for start in (0.0, 1.0))
        self.keeps = set(kept)
        self.shaped_apart = {k for k, v in kept.items() if isinstance(v, Tensor) and v.shape != still.shape}
        self.counts = "step" in self.keeps
        self.elementwise = torch.allclose(still, trial(partial(self.make, **quiet), 0.0, apart=True)[0], atol=1e-14)
        if not torch.allclose(still, moved, rtol=1e-6, atol=1e-14):
            raise ValueError(
                f"{owner}: {self.name} cannot run in whitened coordinates: its step depends on the parameter."
            )

    def first_state(self, q: nn.Parameter) -> dict[str, Any]:
        """The state of a new proxy, where the rule makes it at construction."""
        return dict(self.make([q]).state[q]) if self.born_with_state else {}

    def mend(self, state: dict[Tensor, dict[str, Any]], groups: list[dict[str, Any]]) -> None:
        """Let the rule bring loaded state up to date, as torch's do with step counts that are plain numbers."""
        counted = {p: kept for p, kept in state.items() if isinstance(kept, dict) and "step" in kept}
        defaults = dict(self.instance.defaults)  # torch adds one of its own, which the rule would add to our groups
        self.instance.__setstate__({"state": counted, "param_groups": [dict(group) for group in groups]})
        self.instance.defaults = defaults
        self.instance.state, self.instance.param_groups = defaultdict(dict), []


def flags(rule: Any, **wanted: bool | None) -> dict[str, bool]:
    """Those of torch's flags that are asked for (not None) and that the rule has.

    >>> flags(torch.optim.SGD, capturable=True, foreach=False)
    {'foreach': False}
    """
    cls = getattr(rule, "func", rule)
    known = inspect.signature(cls).parameters if callable(cls) else {}
    return {name: value for name, value in wanted.items() if value is not None and name in known}


def trial(make: Callable[..., Optimizer], start: float, apart: bool = False) -> tuple[Tensor, dict[str, Any]]:
    """How far a rule moves a small matrix that starts at `start` in two steps, and what it keeps.

    With `apart` each element is a matrix of its own.
    """
    shape = (6, 1, 1) if apart else (1, 2, 3)
    params = [nn.Parameter(p) for p in torch.full(shape, start, dtype=torch.float64)]
    optimizer = make(params)
    for grad in ([[1.0, -2.0, 0.3], [0.5, 3.0, -1.0]], [[-1.0, 1.0, 0.7], [2.0, 0.1, -0.4]]):
        for p, g in zip(params, torch.tensor(grad, dtype=torch.float64).view(shape), strict=True):
            p.grad = g.clone()
        optimizer.step()
    return torch.stack([p.detach() for p in params]).view(2, 3) - start, dict(optimizer.state[params[0]])


def steps_of(
    base: BaseRule,
    proxies: Sequence[Proxy],
    state: dict[Tensor, dict[str, Any]],
    *,
    own_options: bool,
    foreign: Set[str] = frozenset(),
) -> list[Tensor]:
    """What one step of the rule does to each proxy, stepsize and sign included.

    The rule's state lives in `state`, where `foreign` names are another rule's; its options in the proxies' groups, or,
    with `own_options`, as it was made. The instance keeps nothing between steps, so checkpoints, schedulers and surgery
    on groups need no second thought.
    """
    rule = base.instance
    rule.state, rule.param_groups = defaultdict(dict), []
    groups: dict[Any, tuple[dict[str, Any], dict[str, Any]]] = {}
    for proxy in proxies:
        rule.state[proxy.q] = remembered(base, proxy, state[proxy.p], foreign) or base.first_state(proxy.q)
        key = id(proxy.group), plain_rate(proxy.lr), proxy.q.is_cuda
        if key not in groups:
            options = options_of(proxy.group, rule, own_options, proxy.q.is_cuda)
            groups[key] = proxy.group, {**rule.defaults, **options, **fixed(proxy.lr), "params": []}
        groups[key][1]["params"].append(proxy.q)
    rule.param_groups = [mine for _, mine in groups.values()]
    unhooked(rule)
    for proxy in proxies:
        kept = state[proxy.p]
        for name, value in rule.state[proxy.q].items():
            if kept.get(name) is not value:
                kept[name] = proxy.to_state(value)
    if not own_options:  # some rules count in their groups
        apart = {"params", *fixed(0)}
        for group, mine in groups.values():
            group.update({k: v for k, v in mine.items() if k not in apart})
    rule.state, rule.param_groups = defaultdict(dict), []
    for proxy in proxies:
        if isinstance(proxy.lr, Tensor):
            proxy.q.detach().mul_(proxy.lr)
    return [shards.part(proxy.q.detach(), proxy.p) if proxy.whole else proxy.q.detach() for proxy in proxies]


def options_of(group: dict[str, Any], rule: Optimizer, own_options: bool, on_gpu: bool) -> dict[str, Any]:
    """What a group says to the rule; with `own_options` nothing but that it is captured.

    Capture is a matter of the device, and torch's rules know it on a GPU alone.
    """
    if own_options:
        return {"capturable": True} if group.get("capturable") and on_gpu and "capturable" in rule.defaults else {}
    return {k: v for k, v in group.items() if k not in ("params", "param_names")}


def remembered(base: BaseRule, proxy: Proxy, state: dict[str, Any], foreign: Set[str]) -> dict[str, Any]:
    """The rule's state of a proxy.

    Layers become plain parameters and come back, and biases join them and leave: what another rule has kept, or of
    another shape, is dropped; a matrix with more or fewer biases than before keeps what it can.
    """
    mine = {k: proxy.to_rule(v) for k, v in state.items() if k not in OURS and (base.counts or k != "step")}
    own, shape = base.keeps - {"step"}, proxy.grad.shape
    like = {k: v for k, v in mine.items() if isinstance(v, Tensor) and v.dim() and k not in base.shaped_apart}
    others = foreign & mine.keys() or (own and not own & mine.keys())
    if others or not all(v.shape == shape or same_rows(v.shape, shape) for v in like.values()):
        for k in mine:
            del state[k]
        return {}
    for k, v in like.items():
        if v.shape != shape:
            mine[k] = with_columns(v, shape[1])
        elif v.stride() != proxy.grad.stride():  # fused rules read memory as it lies
            mine[k] = torch.empty_like(proxy.grad).copy_(v)
    return mine


def same_rows(kept: torch.Size, wanted: torch.Size) -> bool:
    """Whether both are matrices whose numbers of columns alone may differ."""
    return len(kept) == len(wanted) == 2 and kept[0] == wanted[0]


def with_columns(matrix: Tensor, count: int) -> Tensor:
    """A matrix cut to its first `count` columns, or filled up with zeros.

    >>> with_columns(torch.ones(1, 2), 3), with_columns(torch.ones(1, 2), 1)
    (tensor([[1., 1., 0.]]), tensor([[1.]]))
    """
    return nn.functional.pad(matrix, (0, count - matrix.shape[1]))


class TorchRule(Rule):
    """A torch rule on v, and a second one for parameters outside layers, where that is to be another."""

    linear = False
    own_rate = True
    fused = None

    def __init__(self, base: BaseRule, plain: BaseRule, *, own_options: bool = False) -> None:
        """`plain` may be `base`. With `own_options` groups say nothing to it: it keeps the options it was made with."""
        self.base, self.plain, self.own_options = base, plain, own_options

    def joint(self, block: Any) -> bool:
        """A layer, if its weight trains and its group asks for it."""
        return bool(block.group.get("joint")) and block.entry is not None and not block.alone

    def state(self, momentum: float) -> Schema:
        """No fields of ours: torch's rules make their own."""
        return {}

    def direct(self, steps: Sequence[RuleStep], ok: Tensor | None) -> None:
        """One step of the rule for all blocks at once."""
        if not steps:
            return
        proxies = [[self._proxies(b, qs, ok) for b, qs in zip(s.blocks, s.stand_ins(), strict=True)] for s in steps]
        flat = [proxy for some in proxies for few in some for proxy in few]
        outside = [side for step in steps for block in step.blocks for side in self.outside(block)]
        results = iter(self._steps(flat, outside, steps[0].state))
        for step, some in zip(steps, proxies, strict=True):
            step.take([[next(results) for _ in few] for few in some])

    def _proxies(self, block: Any, stand_ins: list[nn.Parameter], ok: Tensor | None) -> list[Proxy]:
        """The block's gradients on v as the rule sees them."""
        found = []
        each = zip(
            block.parameters, stand_ins, block.param_groups, self._rates(block), self.outside(block), strict=False
        )
        for p, q, group, lr, side in each:
            whole = shards.sharded(p) and not (self.plain if side else self.base).elementwise
            if ok is not None and q.grad is not None:  # it may be the parameter's own gradient
                q.grad = torch.where(ok.to(q.device), q.grad, 0)
            found.append(
                Proxy(p, proxy_of(gathered(p, q.grad)) if whole and q.grad is not None else q, group, lr, whole)
            )
        return found

    def outside(self, block: Any) -> list[bool]:
        """Which of the block's proxies the plain rule moves: what is no matrix of a layer."""
        if self.plain is self.base:
            return [False] * (1 if self.joint(block) else len(block.parameters))
        if block.entry is None:
            return [True]
        return [False] if self.joint(block) else [p.dim() < 2 for p in block.parameters]

    def counted(self, block: Any) -> list[Tensor]:
        """Parameters whose steps no rule counts; a bias inside a joint matrix has no state of the rule's."""
        rules = [self.plain if side else self.base for side in self.outside(block)]
        uncounted = [p for p, rule in zip(block.parameters, rules, strict=False) if not rule.counts]
        return [*uncounted, *block.parameters[len(rules) :]]

    def _rates(self, block: Any) -> list[Any]:
        """The stepsizes of the block's proxies."""
        power = block.group.get("fan_in_power")
        share = stepsize.fan_in_share(block.fan_in, power) if power and block.treatment == "whitened" else 1.0
        lrs = [lr * share for lr in block.rates()]
        if self.plain is self.base or block.uses_plain_lr:
            return lrs
        sides = zip(lrs, block.param_groups, self.outside(block), strict=False)
        return [lr * plain_share(group) if side else lr for lr, group, side in sides]

    def _steps(self, proxies: list[Proxy], outside: list[bool], state: Any) -> list[Tensor]:
        """What the base does to each proxy, or the plain rule to those outside."""
        if self.plain is self.base:
            return steps_of(self.base, proxies, state, own_options=self.own_options)
        results = []
        for rule, other, side in ((self.base, self.plain, False), (self.plain, self.base, True)):
            part = [p for p, o in zip(proxies, outside, strict=True) if o is side]
            foreign = other.keeps - rule.keeps
            results.append(iter(steps_of(rule, part, state, own_options=side, foreign=foreign) if part else []))
        return [next(results[side]) for side in outside]


def joined(weight: Tensor, biases: Tensor | None) -> Tensor:
    """[group, unit, input, kernel] and [bias, unit] as one matrix [unit, inputs · kernel + biases]."""
    matrix = weight.flatten(2).flatten(0, 1)
    return matrix if biases is None else torch.cat([matrix, biases.T], dim=1)


def parted(matrix: Tensor, shape: torch.Size, biases: int) -> tuple[Tensor, list[Tensor]]:
    """The inverse of `joined`, for a weight of this shape: the weight, and each bias."""
    if not biases:
        return matrix.view(shape), []
    return matrix[:, :-biases].reshape(shape), list(matrix[:, -biases:].unbind(1))


def unhooked(rule: Optimizer) -> None:
    """One step of the rule without the hooks that torch runs for every optimizer: they run for the outer one."""
    step = type(rule).step
    getattr(step, "__wrapped__", step)(rule)


def fixed(lr: Any) -> dict[str, Any]:
    """What a rule gets whatever its options say: signs and decay are ours."""
    return {"lr": plain_rate(lr), "maximize": False, "weight_decay": 0}


def plain_rate(lr: Any) -> Any:
    """What a rule gets for lr: 1 for a tensor, which few rules can take without asking the device; it is applied after.

    >>> plain_rate(0.1), plain_rate(torch.tensor(0.1))
    (0.1, 1.0)
    """
    return 1.0 if isinstance(lr, Tensor) else lr
