"""The optimizers' arithmetic for many members at once, on parameters stacked as [member, ...].

A public optimizer, built on one member, is the template: it names the blocks, the coordinates, the rule and the first
state. Each step then runs the functions that its own step runs, under `vmap` and in place. A torch rule runs once on
stacked proxies at lr = 1, each member's step being multiplied by its own lr after; a rule that looks at a tensor as a
whole (Muon) runs on the members' proxies one by one.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.optim import Optimizer

from ..math import update
from ..math.guards import TRUST_FLOOR
from ..math.moments import accumulation_dtype
from ..rules import torch_rule as proxies
from ..rules.torch_rule import BaseRule, Proxy
from ..step import frames
from ..step.block import Block
from ..torch_optimizer.coordinate_optimizer import CoordinateOptimizer
from ..torch_optimizer.motion import displace
from ..whitened import Whitened, joined
from .methods import OwnBatchSGD
from .watching import Seen, Shown, Watcher

Stack = dict[str, Tensor]  # by name, each [member, ...]
Build = Callable[..., Optimizer]  # build(module, lr=…)
Frame = update.Frame | update.Still


class StackedRule:
    """A torch rule on the parameters themselves."""

    def __init__(self, model: nn.Module, build: Build, params: Stack, rates: Tensor) -> None:
        """`params` are moved by `step`, each member by its own of `rates`."""
        self.params, self.rates = params, rates
        self.centres: list[Tensor] = []
        self.proxies = nn.ParameterList([torch.zeros_like(p) for p in params.values()])
        self.rule = build(self.proxies, lr=1.0)
        self.decays = any(group.get("weight_decay") for group in self.rule.param_groups)
        self.watcher = Watcher(model, [], inputs=False, gradients=False)

    def step(self, grads: Stack, seen: Sequence[Seen], tallies: Sequence[Tensor], alive: Tensor) -> None:
        """Move the members that are alive."""
        for q, (name, p) in zip(self.proxies, self.params.items(), strict=True):
            q.data.copy_(p) if self.decays else q.data.zero_()  # decay alone asks where a parameter is
            q.grad = grads[name].contiguous()  # fused rules read memory as it lies
        self.rule.step()
        for q, p in zip(self.proxies, self.params.values(), strict=True):
            step = q.data - p if self.decays else q.data
            p.addcmul_(torch.where(along(alive, p), step, 0), along(self.rates, p))


class Member(NamedTuple):
    """What one member has in a step; stacked, all of them."""

    params: Stack
    state: dict[str, Stack]
    seen: list[Seen]
    rate: Tensor
    ratio: Tensor  # of the stepsize of parameters outside layers to `rate`
    ok: Tensor

    def rate_of(self, block: Block) -> Tensor:
        """A block's stepsize."""
        return self.rate * self.ratio if block.aside else self.rate


class StackedCoordinates:
    """An optimizer of evenstep's."""

    def __init__(self, model: nn.Module, optimizer: CoordinateOptimizer, params: Stack, rates: Tensor) -> None:
        """`optimizer` was built on `model`; `params` are moved by `step`, each member by its own of `rates`."""
        optimizer.detach()
        self.optimizer, self.params, self.rates = optimizer, params, rates
        self.blocks = optimizer._blocks(lambda p: p.requires_grad)
        self.names = {id(p): name for name, p in model.named_parameters()}
        groups = optimizer._groups()
        self.watcher = Watcher(
            model,
            dict.fromkeys(block.entry for block in self.blocks if block.entry is not None),
            inputs=optimizer.coordinates in ("whitened", "canonical"),
            gradients=optimizer.coordinates == "canonical",
            rows=lambda entry: groups.get(id(entry.weight), {}).get("rows"),
        )
        optimizer._init_state(self.blocks)
        every = [p for block in self.blocks for p in block.parameters]
        self.state = {
            self.names[id(p)]: {k: v.expand(len(rates), *v.shape).clone() for k, v in optimizer.state[p].items()}
            for p in every
        }
        plain_lr = optimizer.defaults.get("plain_lr")
        self.ratios = torch.ones_like(rates) if plain_lr is None else torch.where(rates > 0, plain_lr / rates, 1.0)
        self.rule = TorchRule(optimizer, len(rates)) if isinstance(optimizer, Whitened) else None

    @property
    def centres(self) -> list[Tensor]:
        """What each entry's inputs are summed about: the running mean, NaN while there is none."""
        return [self._centre(self.state[self.names[id(entry.weight)]], entry) for entry in self.watcher.entries]

    def _centre(self, state: Stack, entry: Any) -> Tensor:
        if "mx" in state:
            return torch.where(along(state["mass"] > 0, state["mx"]), state["mx"], torch.nan)
        groups, _, inputs, _ = entry.kind.matrix(entry.module, entry.weight).shape
        shape, dtype = (len(self.rates), groups * inputs), accumulation_dtype(entry.weight.dtype)
        return torch.zeros(shape, dtype=dtype, device=entry.weight.device)

    def step(self, grads: Stack, seen: Sequence[Seen], tallies: Sequence[Tensor], alive: Tensor) -> None:
        """Move the members that are alive and whose gradients are finite; then their batch joins the moments."""
        self.tallies = tallies
        if isinstance(self.optimizer, OwnBatchSGD):
            self.optimizer.forget(self.state.values())
        ok = vmap(finite)(list(grads.values())) & alive
        members = Member(self.params, self.state, list(seen), self.rates, self.ratios, ok)
        moving, on_v = vmap(self._to_v)(members, grads)
        if self.rule is not None:
            steps = self.rule.steps(self.blocks, on_v, ok, self.rates, self.ratios)
        else:
            steps = vmap(self._rule)(members, on_v)
        vmap(self._move)(members, moving, steps)

    def _name(self, block: Block) -> str:
        return self.names[id(block.weight)]

    def _stage(self, block: Block, member: Member) -> Shown | None:
        if block.entry is None:
            return None
        k = self.watcher.entries.index(block.entry)
        return Shown(member.seen[k], self.tallies[k], block.entry.kind.stuffed)

    def _to_v(self, member: Member, grads: Stack) -> tuple[list[Frame], list[list[Tensor]]]:
        """Each block's coordinates, and its gradient there as the rule is to see it."""
        moving, found = [], []
        for block in self.blocks:
            state, stage = member.state[self._name(block)], self._stage(block, member)
            frame = frames.frame(state, block, stage, linear=self.optimizer.linear)
            mine = [grads[self.names[id(p)]] for p in block.parameters]
            on_weight, on_bias = update.gradient_on_v(block.matrix(mine[0]), block.stack(mine[1:]), frame)
            joint = self.rule is not None and block.group["joint"] and block.entry is not None
            moving.append(frame)
            found.append(
                [joined(on_weight, on_bias)] if joint else [block.unmatrix(on_weight), *block.unstack(on_bias)]
            )
        return moving, found

    def _rule(self, member: Member, on_v: list[list[Tensor]]) -> list[list[Tensor]]:
        """The template's own rule, on one member's state and weights."""
        found = []
        self.optimizer._weight = lambda block: block.matrix(member.params[self._name(block)])  # type: ignore[method-assign]
        for block, (on_weight, *on_biases) in zip(self.blocks, on_v, strict=True):
            for p in block.parameters:
                self.optimizer.state[p] = member.state[self.names[id(p)]]
            matrices = block.matrix(on_weight), block.stack(on_biases)
            step, bias_steps = self.optimizer._rule(block, *matrices, member.ok)
            rate = member.rate_of(block)
            found.append([-rate * s for s in (block.unmatrix(step), *block.unstack(bias_steps))])
        return found

    def _move(self, member: Member, moving: list[Frame], steps: list[list[Tensor]]) -> Tensor:
        """As the optimizer's own: a step on v back to w, guarded, made; then the batch joins the moments."""
        for block, frame, on_v in zip(self.blocks, moving, steps, strict=True):
            mine = [member.params[self.names[id(p)]] for p in block.parameters]
            if isinstance(self.optimizer, Whitened):
                weight_step, bias_steps = self.optimizer._read(block, on_v)
            else:
                weight_step, bias_steps = block.matrix(on_v[0]), block.stack(on_v[1:])
            weight_step, bias_steps = update.step_on_w(weight_step, bias_steps, frame)
            if block.entry is not None and block.group["trust"] is not None:
                weight_step, bias_steps, _, _ = update.within_trust(
                    update.unit_length2(block.matrix(mine[0]), block.stack(mine[1:]), frame),
                    weight_step,
                    bias_steps,
                    frame,
                    radius=block.group["trust"],
                    floor=TRUST_FLOOR,
                    crowd=not self.optimizer.linear,
                )
            shrink = member.rate_of(block) * block.group["weight_decay"]
            for p, step in zip(mine, [block.unmatrix(weight_step), *block.unstack(bias_steps)], strict=True):
                displace(p, step, shrink, member.ok)
            frames.commit(member.state[self._name(block)], block, self._stage(block, member), member.ok)
        return member.ok


class TorchRule:
    """The torch rule of a `Whitened` optimizer, and the one it has for parameters outside layers."""

    def __init__(self, optimizer: Whitened, members: int) -> None:
        """Find out whether the rules can take all members in one tensor."""
        self.optimizer, self.members = optimizer, members
        self.memory: dict[Tensor, dict[str, Any]] = defaultdict(dict)
        self.keys: dict[int, list[Tensor]] = {}
        self.together = {id(rule): elementwise(of_base(rule)) for rule in (optimizer._base, optimizer._plain)}

    def steps(
        self, blocks: list[Block], on_v: list[list[Tensor]], ok: Tensor, rates: Tensor, ratios: Tensor
    ) -> list[list[Tensor]]:
        """What the rules do with the gradients on v; one that is not finite counts as zero in their memory."""
        optimizer = self.optimizer
        two = optimizer._plain is not optimizer._base
        shown: list[tuple[bool, Proxy]] = []
        for block, grads in zip(blocks, on_v, strict=True):
            for p, grad, outside in zip(block.parameters, grads, optimizer._outside(block), strict=False):
                rate = (rates * ratios if block.aside or (two and outside) else rates) * optimizer._share(block)
                shown.append((two and outside, Proxy(p, torch.where(along(ok, grad), grad, 0), block.group, rate)))
        found = {
            side: iter(self._run(rule, [proxy for s, proxy in shown if s is side], own_options=side))
            for side, rule in ((False, optimizer._base), (True, optimizer._plain))
        }
        flat = [next(found[side]) for side, _ in shown]
        sizes = [len(grads) for grads in on_v]
        return [[flat.pop(0) for _ in range(size)] for size in sizes]

    def _run(self, rule: BaseRule, shown: list[Proxy], *, own_options: bool) -> list[Tensor]:
        """One step of a rule, on stacked proxies or on each member's."""
        if not shown:
            return []
        if self.together[id(rule)]:
            stacked = [Proxy(x.p, x.grad.contiguous(), x.group, along(x.lr, x.grad)) for x in shown]
            return proxies.steps_of(rule, stacked, self.memory, own_options=own_options)
        single = [
            Proxy(self._key(x.p, member), x.grad[member].contiguous(), x.group, x.lr[member])
            for x in shown
            for member in range(self.members)
        ]
        steps = proxies.steps_of(rule, single, self.memory, own_options=own_options)
        return [torch.stack(steps[k : k + self.members]) for k in range(0, len(steps), self.members)]

    def _key(self, p: Tensor, member: int) -> Tensor:
        """A tensor to keep one member's memory under."""
        if id(p) not in self.keys:
            self.keys[id(p)] = [torch.empty(0) for _ in range(self.members)]
        return self.keys[id(p)][member]


def along(value: Tensor, like: Tensor) -> Tensor:
    """[member] shaped to meet a stacked tensor.

    >>> along(torch.ones(2), torch.ones(2, 3, 4)).shape
    torch.Size([2, 1, 1])
    """
    return value.view(-1, *[1] * (like.dim() - 1))


def finite(grads: list[Tensor]) -> Tensor:
    """Whether all of one member's gradients are."""
    return torch.stack([grad.abs().amax().isfinite() for grad in grads]).all()


def of_base(rule: BaseRule) -> Build:
    """How to build a rule for a trial on the CPU."""
    quiet = {k: False for k in ("fused", "capturable") if k in rule.instance.defaults}
    return lambda module, lr: rule.make(list(module.parameters()), lr=lr, **quiet)


def elementwise(build: Build) -> bool:
    """Whether a rule moves two members stacked in one tensor, at lr = 1 and scaled after, as it moves each alone."""
    return _agrees(build, (2, 2, 2), [0.3, 0.02], lambda p: list(p.unbind()))


def linear(build: Build) -> bool:
    """Whether a rule at lr = 1, its steps multiplied by lr after, moves a matrix as it does at lr."""
    return _agrees(build, (2, 2), [0.3, 0.3], lambda p: [p])


def _agrees(build: Build, shape: tuple[int, ...], rates: list[float], parts: Callable[[Tensor], list[Tensor]]) -> bool:
    """Walk with the rule as `StackedRule` runs it, and with one built for each part, long enough to meet bounds."""
    generator = torch.Generator().manual_seed(0)
    start, *grads = torch.randn(4, *shape, generator=generator, dtype=torch.float64)
    together = start.clone()
    single = nn.ParameterList([part.clone() for part in parts(start)])
    try:
        stacked = StackedRule(nn.Module(), build, {"p": together}, torch.tensor(rates, dtype=torch.float64))
        alone = [build(nn.ParameterList([p]), lr=rate) for p, rate in zip(single, rates, strict=False)]
        for grad in [grad for grad in grads for _ in range(25)]:
            stacked.step({"p": grad}, [], [], torch.ones(len(rates), dtype=torch.bool))
            for rule, p, g in zip(alone, single, parts(grad), strict=True):
                p.grad = g.clone()
                rule.step()
    except (ValueError, TypeError, RuntimeError, IndexError):
        return False
    pairs = zip(parts(together), single, strict=True)
    return all(torch.allclose(a, b, rtol=1e-6, atol=1e-12) for a, b in pairs)
