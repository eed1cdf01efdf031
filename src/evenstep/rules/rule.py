"""What a rule is: it turns gradients on v into directions. To add one: a class here, used by an optimizer class."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from .. import foreach
from ..coordinates.coordinates import Field, Schema
from ..math import stepsize
from ..math.segments import Segments


class OnV(NamedTuple):
    """Gradients or directions on v: [group, unit, input, kernel] for each block, biases as [bias, unit] for all."""

    weights: list[Tensor]
    biases: Tensor | None


class Direction(NamedTuple):
    """A direction of descent on v; `scale`, if any, multiplies each unit's, bias included."""

    weights: list[Tensor]
    biases: Tensor | None
    scale: Tensor | None = None


class Fused(NamedTuple):
    """What the kernels must know of a rule to make its directions themselves."""

    nesterov: bool  # whether the momentum looks ahead
    unit_scale: bool  # whether each unit is divided by the root of its running mean square


class RuleStep(Protocol):
    """The step of some blocks, as a rule sees it. State is packed: one flat tensor per field."""

    blocks: list[Any]
    state: Any  # the optimizer's
    group: dict[str, Any]  # whose settings all blocks share; stepsizes and weight decay aside
    on_v: OnV
    direction: Direction
    units: Segments  # the units of each block on this rank; reductions are over all ranks

    def read(self, name: str) -> Tensor:
        """A field of the blocks' state, packed."""

    def write(self, name: str, value: Tensor, ok: Tensor | None) -> None:
        """Write a packed field back, unless the mask `ok` says that the step does not count."""

    def buffers(self, name: str) -> list[Tensor]:
        """A field per parameter of all blocks, as this rank has it: weights, then biases."""

    def as_parameters(self, on_v: OnV) -> list[Tensor]:
        """Tensors on v in the shapes of the parameters: weights, then biases."""

    def as_blocks(self, tensors: list[Tensor]) -> OnV:
        """The inverse of `as_parameters`."""

    def unit_square(self, on_v: OnV) -> Tensor:
        """Σ of squares over each unit, its bias included; over all ranks where a unit is split."""

    def unit_length2(self) -> Tensor:
        """Squared length of each unit in these coordinates."""

    def column_scales(self) -> list[Tensor | None]:
        """How far a step of 1 on v moves the weights of each column: [group, 1, column] of each block; None for 1."""

    def stand_ins(self) -> list[list[nn.Parameter]]:
        """For each block parameters that are zero and have its gradients on v, for torch's rules to move."""

    def take(self, steps: list[list[Tensor]]) -> None:
        """Take what a torch rule has made of the stand-ins for the direction."""


class Rule:
    """A rule. This one takes the gradient itself: plain stochastic gradient, with momentum if the groups ask for it."""

    linear = True  # linear in the gradient: feels β, and commutes with loss scaling
    own_rate = False  # whether directions have their stepsize and sign already
    fused: Fused | None = Fused(nesterov=False, unit_scale=False)

    def joint(self, block: Any) -> bool:
        """Whether it sees a layer as one matrix, biases as columns."""
        return False

    def counted(self, block: Any) -> list[Tensor]:
        """The parameters whose steps the optimizer counts: checkpointers want some state for every parameter."""
        return list(block.parameters)

    def state(self, momentum: float) -> Schema:
        """The state it keeps."""
        return {"momentum_buffer": Field("parameter")} if momentum else {}

    def direct(self, steps: Sequence[RuleStep], ok: Tensor | None) -> None:
        """Set the direction of each step. All blocks of the rule come at once; `ok` masks a step not to be taken."""
        for step in steps:
            step.direction = self.direction(step, ok)

    def direction(self, step: RuleStep, ok: Tensor | None) -> Direction:
        """The direction of the blocks of one step."""
        return Direction(*heavy_ball(step, step.on_v, ok))


def heavy_ball(step: RuleStep, on_v: OnV, ok: Tensor | None) -> OnV:
    """The momentum buffers after one more value, in torch's convention; the value itself without momentum."""
    momentum = step.group["momentum"]
    if not momentum:
        return on_v
    buffers = step.buffers("momentum_buffer")
    news = [stepsize.heavy_ball(b, v, momentum) for b, v in zip(buffers, step.as_parameters(on_v), strict=True)]
    put(buffers, news, ok)
    return step.as_blocks(news)


def put(old: Sequence[Tensor], new: Sequence[Tensor], ok: Tensor | None) -> None:
    """Write `new` over `old` in place, unless the mask `ok` says that the step does not count."""
    if ok is not None:
        new = [torch.where(ok, n, o) for n, o in zip(new, old, strict=True)]
    foreach.copy_(old, new)


def plain_share(group: dict[str, Any]) -> float:
    """Share of their group's lr that parameters outside layers take: `plain_lr` over the lr it was given with.

    >>> [plain_share({"plain_lr": lr, "plain_at": 2.0}) for lr in (0.5, None, 0.0)]
    [0.25, 1.0, 0.0]
    >>> plain_share({"plain_lr": 0.5, "plain_at": 0.0}), plain_share({})  # no ratio; a rule without plain_lr
    (1.0, 1.0)
    """
    plain_lr, at = group.get("plain_lr"), group.get("plain_at")
    if plain_lr is None or (plain_lr and not at):
        return 1.0
    return float(plain_lr / at) if at else 0.0
