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

from ..parallel import dtensor as shards

OURS = {"mx", "vx", "mass", "sharing"}  # state of ours beside the rule's own
REFUSED = {
    "LBFGS": "it evaluates the loss several times along a line",
    "SparseAdam": "it takes sparse gradients alone",
    "ASGD": "it averages and decays the parameters themselves",
    "Adafactor": "its relative step is a multiple of the parameter's own size",
}


class StandIn:
    """A parameter that a rule moves in many steps, and what the rule knew of it in the last one."""

    __slots__ = ("known", "of", "q", "size")

    def __init__(self, q: nn.Parameter) -> None:
        """`q` has a gradient."""
        self.q, self.size = q, 0
        self.of: dict[str, Any] = {}
        self.known: dict[str, Any] = {}

    def remember(self, state: dict[str, Any], known: dict[str, Any]) -> None:
        """Note what is kept in `state`, and what of it is the rule's."""
        self.of, self.size, self.known = state, len(state), known

    def remembers(self, state: dict[str, Any]) -> bool:
        """Whether all of that is still there, and nothing else."""
        same = self.of is state and self.size == len(state)
        return same and all(state.get(name) is value for name, value in self.known.items())


class Proxy(NamedTuple):
    """What stands in for parameter `p` (which keeps the rule's state): the gradient on v, its group and its stepsize.

    Of a parameter that is sharded over ranks it is this rank's part, or all of it (`whole`). The rule moves a parameter
    that is zero and has that gradient: one that `stays` between steps, or a new one.
    """

    p: Tensor
    grad: Tensor
    group: dict[str, Any]
    lr: Any
    whole: bool = False
    stays: StandIn | None = None

    def stand_in(self) -> nn.Parameter:
        """The parameter that the rule moves."""
        if self.stays is not None:
            return self.stays.q
        q = nn.Parameter(torch.zeros_like(self.grad))
        q.grad = self.grad
        return q

    def shown(self, value: Any) -> Any:
        """What is kept of the rule's memory, as the rule is to see it."""
        if not isinstance(value, Tensor):
            return value
        return shards.whole(value) if self.whole else shards.local(value)

    def kept(self, value: Any) -> Any:
        """The rule's memory as it is to be kept: what is shaped like the stand-in is sharded as the parameter is."""
        if not shards.sharded(self.p) or not isinstance(value, Tensor) or value.shape != self.grad.shape:
            return value
        own = shards.part(value, self.p) if self.whole else value
        return shards.placed(own, self.p, whole_shape(self.p, self.grad))


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
        self.instance.__setstate__({"state": counted, "param_groups": [dict(group) for group in groups]})
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

    The rule's memory lives in `state`, where `foreign` names are another rule's; its options in the proxies' groups,
    or, with `own_options`, as it was made. The instance holds nothing between steps, so checkpoints, schedulers and
    surgery on groups need no second thought.
    """
    rule, stand_ins = base.instance, [proxy.stand_in() for proxy in proxies]
    rule.state, rule.param_groups = defaultdict(dict), []
    groups: dict[Any, tuple[dict[str, Any], dict[str, Any]]] = {}
    for proxy, q in zip(proxies, stand_ins, strict=True):
        rule.state[q] = remembered(base, proxy, state[proxy.p], foreign) or base.first_state(q)
        key = id(proxy.group), plain_rate(proxy.lr), q.is_cuda
        if key not in groups:
            options = options_of(proxy.group, rule, own_options, q.is_cuda)
            groups[key] = proxy.group, {**rule.defaults, **options, **fixed(proxy.lr), "params": []}
        groups[key][1]["params"].append(q)
    rule.param_groups = [mine for _, mine in groups.values()]
    unhooked(rule)
    for proxy, q in zip(proxies, stand_ins, strict=True):
        kept, known = state[proxy.p], rule.state[q]
        for name, value in known.items():
            if kept.get(name) is not value:
                kept[name] = proxy.kept(value)
        if proxy.stays is None:
            q.grad = None
        else:
            proxy.stays.remember(kept, known)
    if not own_options:  # some rules count in their groups
        apart = {"params", *fixed(0)}
        for group, mine in groups.values():
            group.update({k: v for k, v in mine.items() if k not in apart})
    rule.state, rule.param_groups = defaultdict(dict), []
    steps = [shards.part(q.detach(), p.p) if p.whole else q.detach() for p, q in zip(proxies, stand_ins, strict=True)]
    for proxy, step in zip(proxies, steps, strict=True):
        if isinstance(proxy.lr, Tensor):
            step.mul_(proxy.lr)
    return steps


def options_of(group: dict[str, Any], rule: Optimizer, own_options: bool, on_gpu: bool) -> dict[str, Any]:
    """What a group says to the rule; with `own_options` nothing but that it is captured.

    Capture is a matter of the device, and torch's rules know it on a GPU alone.
    """
    if own_options:
        return {"capturable": True} if group.get("capturable") and on_gpu and "capturable" in rule.defaults else {}
    return {k: v for k, v in group.items() if k not in ("params", "param_names")}


def remembered(base: BaseRule, proxy: Proxy, state: dict[str, Any], foreign: Set[str]) -> dict[str, Any]:
    """What the rule has kept of a proxy, as it is to see it.

    Layers become plain parameters and come back, and biases join them and leave: what another rule has kept, or of
    another shape, is dropped; a matrix with more or fewer biases than before keeps what it can.
    """
    if proxy.stays is not None and proxy.stays.remembers(state):
        return proxy.stays.known
    mine = {k: proxy.shown(v) for k, v in state.items() if k not in OURS and (base.counts or k != "step")}
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
