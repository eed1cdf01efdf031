"""Which blocks move in a step, and how: many at once, or one by one."""

from operator import contains, lt
from typing import Any, NamedTuple

import torch

from ..torch_optimizer.motion import gradient, parted
from .block import Block
from .layout import Layout, as_they_lie


class Plan(NamedTuple):
    """The blocks of a step: those that move together, and the rest, which move one by one."""

    signature: list[Any]
    blocks: list[Block]
    layouts: list[Layout]
    rest: list[Block]
    sizes: list[int]  # how much state each parameter of the optimizer had
    homes: list[dict[str, Any]]  # where each layer has its weight
    names: list[str]  # and what it is called there

    @property
    def captured(self) -> bool:
        """Whether a CUDA graph goes on using its tensors."""
        return any(layout.captured for layout in self.layouts)

    @property
    def all_seen(self) -> bool:
        """Whether the step of many blocks has all of them, and has found that each layer saw something."""
        return bool(self.layouts) and not self.rest and all(layout.all_seen for layout in self.layouts)

    def lacks(self, state: Any) -> bool:
        """Whether some of that state is gone."""
        return len(state) < len(self.sizes) or any(map(lt, map(len, state.values()), self.sizes))

    @property
    def whole(self) -> bool:
        """Whether all layers still have their weights, and biases that do not train."""
        return all(map(contains, self.homes, self.names)) and all(layout.whole for layout in self.layouts)

    def part(self, state: Any, layouts: list[Layout]) -> None:
        """Give parameters that are in none of the `layouts` to come tensors of their own: a view keeps the whole."""
        staying = {id(p) for layout in layouts for p in layout.parameters}
        for layout in self.layouts:
            leaving = [] if layout.plain_room is None else layout.parameters
            for p in leaving:
                if id(p) not in staying and p in state:
                    state[p].update(parted(state[p]))

    @property
    def device(self) -> torch.device | None:
        """Where it begins; None if nothing moves."""
        return next((lay.device for lay in self.layouts), self.rest[0].weight.device if self.rest else None)

    def one_by_one(self, blocks: list[Block]) -> "Plan":
        """A plan for some of the blocks alone."""
        return self._replace(blocks=blocks, layouts=[], rest=blocks)


def signature(groups: list[dict[str, Any]], compiled: bool) -> list[Any]:
    """What a plan goes by: made again when parameters, gradients or groups come and go, or lie otherwise in memory."""
    return [
        compiled,
        *(
            (
                id(group),
                group["foreach"],
                group.get("momentum"),
                group.get("joint"),
                group["maximize"],
                group["capturable"],
                as_they_lie([p for p in group["params"] if p.grad is not None]),
            )
            for group in groups
        ),
    ]


def refuse_sparse(owner: str, blocks: list[Block]) -> None:
    """Dense gradients alone."""
    if any(gradient(p).layout != torch.strided for block in blocks for p in block.parameters):
        raise RuntimeError(f"{owner} does not support sparse gradients; build the Embedding with sparse=False.")
