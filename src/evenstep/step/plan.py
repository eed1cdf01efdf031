"""Which blocks move in a step, and by which backend; kept until parameters, gradients or settings change.

Plans are not kept for a set of gradients that may come back: a plan may have buffers as large as the model, and sets
drawn at random, as experts and dropped layers have them, hardly ever come back.
"""

from collections.abc import Sequence
from operator import lt
from typing import Any, NamedTuple
from zlib import crc32

import torch
from torch import Tensor

from ..kernels.replay import Replay
from ..model.survey import home
from ..parallel import dtensor
from ..rules.rule import Rule
from .block import Block, gradient
from .torch_step import TorchStep
from .triton.triton_step import TritonStep, serves

Step = TorchStep | TritonStep  # one interface: look, finite, move, commit, and what `RuleStep` shows to rules


class Plan(NamedTuple):
    """The blocks that move, and their steps."""

    signature: list[Any]
    blocks: list[Block]
    steps: list[Step]
    sizes: list[int]  # how much state each parameter of the optimizer had
    homes: list[tuple[dict[str, Any], str]]  # where each layer has its weight
    frozen: list[tuple[Block, list[Any]]]  # biases that do not train, and how they lie in memory: kernels read them
    replay: Replay | None  # of the rules' work, where it can be replayed

    def current(self, signature: list[Any]) -> bool:
        """Whether the plan still holds."""
        return (
            self.signature == signature
            and all(name in home for home, name in self.homes)
            and all(memory_of(block.frozen) == then for block, then in self.frozen)
        )

    def lacks(self, state: Any) -> bool:
        """Whether some state that parameters had is gone."""
        return len(state) < len(self.sizes) or any(map(lt, map(len, state.values()), self.sizes))

    def steps_of(self) -> list[tuple[Rule, list[Any]]]:
        """The steps of each rule."""
        found: dict[int, tuple[Rule, list[Any]]] = {}
        for step in self.steps:
            found.setdefault(id(step.rule), (step.rule, []))[1].append(step)
        return list(found.values())


def make(signature: list[Any], blocks: list[Block], state: Any, compiled: bool) -> Plan:
    """A plan for these blocks."""
    homes = [home(b.entry.module, b.entry.slot.weight) for b in blocks if b.entry is not None]
    frozen = [(b, memory_of(found)) for b in blocks if (found := b.frozen)]
    steps = group(blocks, state, compiled)
    return Plan(signature, blocks, steps, [*map(len, state.values())], homes, frozen, replay_of(steps))


def replay_of(steps: Sequence[Step]) -> Replay | None:
    """How to replay the work of all rules, if that can be done; users capture `capturable` steps themselves."""
    outside = [step for step in steps if isinstance(step, TritonStep) and step.needs_direction and step.rule.replays]
    captured = any(block.group["capturable"] for step in steps for block in step.blocks)
    others = sum(step.needs_direction for step in steps) > len(outside)
    devices = {step.device for step in steps}
    if not outside or others or captured or len(devices) > 1 or steps[0].device.type != "cuda":
        return None
    for step in outside:
        step.replayed = True
    return Replay(steps[0].device)


def group(blocks: Sequence[Block], state: Any, compiled: bool) -> list[Step]:
    """Steps for blocks: as few as possible."""
    # for parameters without a model the tables of the kernels may be larger than the parameters
    kernels = not compiled and any(block.entry is not None for block in blocks)
    found: dict[Any, list[Block]] = {}
    for block in blocks:
        backend = TritonStep if kernels and serves(block, state) else TorchStep
        weight: Any = block.weight
        key: list[Any] = [backend, weight.device, weight.dtype, id(block.rule), block.group.get("momentum", 0.0)]
        if backend is TorchStep:
            key += [
                block.group["foreach"] is False and id(block),
                id(block.coordinates),
                len(block.biases),
                len(block.frozen),
                block.entry is None,
                block.has_rows,
                (weight.device_mesh, weight.placements) if dtensor.sharded(weight) else None,
                *settings(block.group),
            ]
        found.setdefault(tuple(key), []).append(block)
    return [key[0](some, state) for key, some in found.items()]


def fingerprint(plan: Plan, groups: list[dict[str, Any]]) -> Tensor:
    """Bits that depend on which matrices move, and how they are batched: ranks that share them must agree."""
    place = {id(p): k for k, p in enumerate(p for group in groups for p in group["params"])}
    found = [
        (type(step).__name__, step.device.type, [[(place[id(p)], *p.shape) for p in b.parameters] for b in step.blocks])
        for step in plan.steps
        if step.rule.matrices
    ]
    code = crc32(repr(found).encode())
    device = plan.blocks[0].weight.device if plan.blocks else None
    return torch.tensor([float(code >> k & 1) for k in range(32)], device=device)


APART = ("params", "param_names", "lr", "initial_lr", "weight_decay", "plain_lr", "plain_at", "exclude", "rows")


def settings(group: dict[str, Any]) -> list[tuple[str, Any]]:
    """The settings that blocks of one step share."""
    return [(k, v) for k, v in group.items() if k not in APART and isinstance(v, int | float | str | None)]


def memory_of(tensors: Sequence[Tensor]) -> list[Any]:
    """Which tensors these are, and how they lie in memory."""
    return [(id(t), type(t), t.device, t.dtype, t.shape, t.stride()) for t in tensors]


def signature(groups: list[dict[str, Any]], compiled: bool) -> list[Any]:
    """What a plan depends on: parameters with gradients, their memory, and the settings of groups."""
    moving = [[p for p in group["params"] if p.grad is not None] for group in groups]
    each = zip(groups, moving, strict=True)
    return [compiled, *((id(group), settings(group), memory_of(params)) for group, params in each)]


def refuse_sparse(owner: str, blocks: list[Block]) -> None:
    """Dense gradients alone."""
    if any(gradient(p).layout != torch.strided for block in blocks for p in block.parameters):
        raise RuntimeError(f"{owner} does not support sparse gradients; build the Embedding with sparse=False.")
