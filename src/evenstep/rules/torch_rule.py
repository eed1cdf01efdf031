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

from ..coordinates.coordinates import Schema, Statistics
from ..coordinates.whitening import Whitening
from ..parallel import dtensor
from .check_torch_class import TorchClass
from .rule import Rule, RuleStep, plain_share, stand_in


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
        if not dtensor.sharded(self.p) or not isinstance(value, Tensor) or value.shape != self.q.shape:
            return value
        own = dtensor.part(value, self.p) if self.whole else value
        return dtensor.placed(own, self.p, dtensor.whole_shape(self.p, self.q))


class TorchRule(Rule):
    """A torch rule on v, and a second one for parameters outside layers, where that is to be another."""

    external = True

    def __init__(self, base: TorchClass, plain: TorchClass, *, own_options: bool = False) -> None:
        """`plain` may be `base`. With `own_options` groups say nothing to it: it keeps the options it was made with.

        Such a rule makes directions, steps at lr 1, to which the optimizer applies the groups' lr; others get lr.
        """
        self.base, self.plain, self.own_options = base, plain, own_options
        self.own_rate, self.replays = not own_options, own_options

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

    def direct(self, steps: Sequence[RuleStep], ok: Tensor | None, ranks: Any = None) -> None:
        """One step of each rule for all blocks at once: some rules count steps in their groups."""
        proxies = [[self._proxies(b, qs) for b, qs in zip(s.blocks, s.stand_ins(ok), strict=True)] for s in steps]
        flat = [proxy for some in proxies for few in some for proxy in few]
        for rule in dict.fromkeys(proxy.rule for proxy in flat):
            self._run(rule, [proxy for proxy in flat if proxy.rule is rule], steps[0].state)
        for step, some in zip(steps, proxies, strict=True):
            step.take([[proxy.step for proxy in few] for few in some])

    def _proxies(self, block: Any, stand_ins: list[nn.Parameter]) -> list[Proxy]:
        """The block's gradients on v as the rule sees them."""
        power = block.group.get("fan_in_power")
        share = block.fan_in**-power if power and block.coordinates.needs >= Statistics.INPUTS else 1.0
        found, columns = [], (block.parameters, block.param_groups, block.rates(), self.rules_of(block))
        for q, p, group, lr, rule in zip(stand_ins, *columns, strict=False):
            assert q.grad is not None
            plain = 1.0 if rule is self.base or block.uses_plain_lr else plain_share(group)
            whole = dtensor.sharded(p) and not rule.elementwise
            q = stand_in(dtensor.gathered(p, q.grad)) if whole else q
            found.append(Proxy(p, q, group, lr * share * plain if self.own_rate else 1.0, rule, whole))
        return found

    def _run(self, rule: TorchClass, proxies: Sequence[Proxy], state: Any) -> None:
        """Let a rule move its proxies by one step, stepsize and sign included.

        Its memory lives in `state`. Its options live in the proxies' groups, unless it keeps those it was made with.
        """
        own_options = self.own_options or rule is not self.base
        foreign = (self.base.keeps | self.plain.keeps) - rule.keeps
        torchs, groups = rule.instance, dict[Any, tuple[dict[str, Any], dict[str, Any]]]()
        torchs.state = defaultdict(dict)
        for proxy in proxies:
            mine = remembered(proxy, state[proxy.p], foreign) or rule.first_state(proxy.q)
            torchs.state[proxy.q] = mine
            key = id(proxy.group), plain_rate(proxy.lr), proxy.q.is_cuda
            if key not in groups:
                groups[key] = proxy.group, options_of(proxy, own_options, ascend=not self.own_rate)
            groups[key][1]["params"].append(proxy.q)
            if groups[key][1].get("fused") and "step" in mine:
                mine["step"] = mine["step"].to(proxy.q.device)
        torchs.param_groups = [mine for _, mine in groups.values()]
        # without the hooks that torch runs for every optimizer: they run for the outer one
        getattr(type(torchs).step, "__wrapped__", type(torchs).step)(torchs)
        for proxy in proxies:
            kept = state[proxy.p]
            for name, value in torchs.state[proxy.q].items():
                if kept.get(name) is not value:
                    kept[name] = proxy.to_state(value)
            if isinstance(proxy.lr, Tensor):
                proxy.q.detach().mul_(proxy.lr)
        if not own_options:  # some rules count in their groups
            for group, mine in groups.values():
                group.update({k: v for k, v in mine.items() if k not in ("params", "lr", *OURS)})
        torchs.state, torchs.param_groups = defaultdict(dict), []


OURS = {"maximize": False, "weight_decay": 0}  # options that no rule gets: the optimizer itself sees to signs and decay


def options_of(proxy: Proxy, own_options: bool, ascend: bool) -> dict[str, Any]:
    """A group of the rule's for proxies like this one: its options come from the proxy's group.

    With `own_options` that says nothing but that the step is captured. Capture is a matter of the device, and torch's
    rules know it on a GPU alone, where the fused rule is several times as fast. To `ascend` is to leave the direction
    of descent, instead of a step, in the proxy.
    """
    defaults = proxy.rule.instance.defaults
    theirs = {k: v for k, v in proxy.group.items() if k not in ("params", "param_names")}
    if own_options:
        fused = proxy.rule.name in ("Adam", "AdamW") and defaults["foreach"] is None and defaults["fused"] is None
        captured = (fused or theirs.get("capturable")) and "capturable" in defaults
        theirs = {"capturable": True} if captured and proxy.q.is_cuda else {}
        if fused and proxy.q.is_cuda:
            theirs["fused"] = True
    return {**defaults, **theirs, **OURS, "maximize": ascend, "lr": plain_rate(proxy.lr), "params": []}


def remembered(proxy: Proxy, state: dict[str, Any], foreign: Set[str]) -> dict[str, Any]:
    """The rule's state of a proxy; `foreign` names are another rule's.

    Layers become plain parameters and come back, and biases join them and leave: what another rule has kept, or of
    another shape, is dropped.
    """
    rule, like = proxy.rule, proxy.q.detach()
    mine = {k: proxy.to_rule(v) for k, v in state.items() if k not in Whitening.state and (rule.counts or k != "step")}
    # torch's rules once counted steps in plain numbers
    mine |= {k: torch.tensor(float(mine[k])) for k in rule.scalars if isinstance(mine.get(k), int | float)}
    own = rule.keeps - {"step"}
    others = foreign & mine.keys() or (own and not own & mine.keys())
    alike = {k: v for k, v in mine.items() if isinstance(v, Tensor) and v.dim() and k not in rule.shaped_apart}
    if others or any(v.shape != like.shape for v in alike.values()):
        for k in mine:
            del state[k]
        return {}
    # fused rules read memory as it lies
    moved = {k: torch.empty_like(like).copy_(v) for k, v in alike.items() if v.stride() != like.stride()}
    return {**mine, **moved}


def plain_rate(lr: Any) -> Any:
    """What a rule gets for lr: 1 for a tensor, which few can take without asking the device; it is applied after."""
    return 1.0 if isinstance(lr, Tensor) else lr
