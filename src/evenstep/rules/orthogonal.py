"""Orthogonalized momentum: all directions of a layer's matrix take steps of one length."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..coordinates.coordinates import Field, Schema
from ..math import polar
from ..parallel import dtensor
from .rule import Rule, RuleStep, put
from .torch_rule import gathered

MEMORY = 0.95  # weight of the old value in the mean squares of rows or columns


@dataclass(frozen=True)
class OrthogonalRule(Rule):
    """Nesterov momentum on v, its polar factor, rows or columns of even mean square, times √max(1, units/inputs).

    The gradient of a wide layer is nearly of rank one, and a rule that steps each unit by itself moves all of them the
    same way. The polar factor has equal singular values instead. A layer is one matrix [unit, inputs · kernel], with
    the bias as a column; a layer in groups is one matrix per group.

    `steps` are those of the Newton–Schulz iteration; without `even_lines` the rule is Muon's.
    """

    steps: int = 5
    even_lines: bool = True

    linear = False
    own_rate = True
    fused = None

    def joint(self, block: Any) -> bool:
        """A layer is one matrix."""
        return True

    def state(self, momentum: float) -> Schema:
        """Momentum of the matrix, and mean squares of its rows, or of its columns where there are more of them."""
        lines: Schema = {"line_square": Field("line", nonnegative=True)} if self.even_lines else {}
        return {"momentum_buffer": Field("matrix"), **lines}

    def direct(self, steps: Sequence[RuleStep], ok: Tensor | None) -> None:
        """Turn the gradients of all layers into steps; layers of one shape are multiplied in one batch."""
        if not steps:
            return
        state, taken = steps[0].state, [[q for (q,) in step.stand_ins()] for step in steps]
        by_shape: dict[Any, list[tuple[Any, Tensor, Tensor]]] = {}
        for step, matrices in zip(steps, taken, strict=True):
            ahead = self._ahead(step, [q.grad for q in matrices if q.grad is not None], ok)
            for block, q, matrix in zip(step.blocks, matrices, ahead, strict=True):
                if dtensor.sharded(block.weight):
                    matrix = gathered(block.weight, matrix)
                key = block.groups, matrix.shape, matrix.device, matrix.dtype
                by_shape.setdefault(key, []).append((block, q.detach(), matrix))
        for (groups, *_), some in by_shape.items():
            blocks, targets, matrices = (list(column) for column in zip(*some, strict=True))
            x = torch.cat([m.view(groups, -1, m.shape[1]) for m in matrices])
            self._write(blocks, targets, self._direction(x, groups, [state[b.weight] for b in blocks], ok))
        for step, matrices in zip(steps, taken, strict=True):
            step.take([[q.detach()] for q in matrices])

    def _ahead(self, step: RuleStep, grads: list[Tensor], ok: Tensor | None) -> list[Tensor]:
        """Nesterov's direction, (1 − m) g + m M with the mean M ← m M + (1 − m) g."""
        momentum = step.group["momentum"]
        buffers = [dtensor.local(step.state[block.weight]["momentum_buffer"]) for block in step.blocks]
        grads = [g.to(buffer.dtype) for g, buffer in zip(grads, buffers, strict=True)]
        means = torch._foreach_lerp(buffers, grads, 1 - momentum)
        put(buffers, means, ok)
        return list(torch._foreach_lerp(grads, means, momentum))

    def _direction(self, x: Tensor, groups: int, states: Sequence[dict[str, Tensor]], ok: Tensor | None) -> Tensor:
        """The directions of layers of one shape, whose matrices are `x`, [layer · group, unit, column]."""
        units, columns = x.shape[-2:]
        factor = polar.polar(x.bfloat16() if x.is_cuda else x, self.steps).to(x.dtype)
        if self.even_lines:
            squares = [state["line_square"] for state in states]
            fresh = polar.mean_square_of_lines(factor).view(len(states), -1)
            means = torch._foreach_lerp(squares, list(fresh.unbind()), 1 - MEMORY)
            put(squares, means, ok)
            factor = polar.normalize_lines(factor, torch.cat([s.view(groups, -1) for s in means]))
        longer: float = max(1.0, units / columns) ** 0.5
        return (longer * factor).view(len(states), -1, columns)

    def _write(self, blocks: Sequence[Any], targets: Sequence[Tensor], directions: Tensor) -> None:
        """Write steps of these directions over `targets`: weights and biases have stepsizes of their own."""
        for block, target, step in zip(blocks, targets, directions, strict=True):
            own = dtensor.part(step, block.weight) if dtensor.sharded(block.weight) else step
            rate, *bias_rates = block.rates()
            torch.mul(own, -rate, out=target)
            for k, bias_rate in enumerate(bias_rates, target.shape[1] - len(bias_rates)):
                if bias_rate is not rate and (isinstance(rate, Tensor) or bias_rate != rate):
                    target[:, k] = own[:, k] * -bias_rate
