"""Orthogonalized momentum: all directions of a layer's matrix take steps of one length, relative to the matrix."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..coordinates.coordinates import Field, Schema
from ..math import polar
from ..parallel import dtensor
from .rule import Rule, put
from .torch_rule import gathered

MEMORY = 0.95  # weight of the old value in the mean squares of rows or columns


@dataclass(frozen=True)
class OrthogonalRule(Rule):
    """Nesterov momentum on v, its polar factor, rows or columns of even mean square; steps relative to the weights.

    The gradient of a wide layer is nearly of rank one, and a rule that steps each unit by itself moves all of them the
    same way. The polar factor has equal singular values instead. A layer is one matrix [unit, inputs · kernel], with
    the bias as a column; a layer in groups is one matrix per group.

    A step is lr times as long as the matrix of weights, so that one lr serves layers of any size. The matrix stays in
    a ball, whose radius is its norm before the first step, at least √units: rows of length 1. A matrix that is shorter
    than `least` times the radius, as one that starts at zero, takes the steps of one of that length. `steps` are those
    of the Newton–Schulz iteration.
    """

    steps: int = 4
    least: float = 0.1

    own_rate = True

    def joint(self, block: Any) -> bool:
        """A layer is one matrix."""
        return True

    def state(self, momentum: float) -> Schema:
        """Momentum, mean squares of the matrix's rows, or of its columns where there are more of them, and radii."""
        return {
            "momentum_buffer": Field("matrix"),
            "line_square": Field("line", nonnegative=True),
            "radius": Field("group", nonnegative=True),
        }

    def direct(self, steps: Sequence[Any], ok: Tensor | None) -> None:
        """Turn the gradients of all layers into steps; layers of one shape are multiplied in one batch."""
        if not steps:
            return
        targets = [[q for (q,) in step.stand_ins()] for step in steps]
        by_shape: dict[Any, list[Layer]] = {}
        for step, matrices in zip(steps, targets, strict=True):
            ahead = self._ahead(step, [q.grad for q in matrices if q.grad is not None], ok)
            lengths = self._lengths(step, ok)
            parts = zip(step.blocks, matrices, ahead, lengths, step.column_scales(), strict=True)
            for block, q, matrix, length, scale in parts:
                if dtensor.sharded(block.weight):
                    matrix = gathered(block.weight, matrix)
                layer = Layer(block, step.state[block.weight], q.detach(), matrix, length, scale)
                by_shape.setdefault((block.groups, matrix.shape, matrix.device, matrix.dtype), []).append(layer)
        for layers in by_shape.values():
            self._write(layers, self._directions(layers, ok))
        for step, matrices in zip(steps, targets, strict=True):
            step.take([[q.detach()] for q in matrices])

    def _ahead(self, step: Any, grads: list[Tensor], ok: Tensor | None) -> list[Tensor]:
        """Nesterov's direction, (1 − m) g + m M with the mean M ← m M + (1 − m) g."""
        momentum = step.group["momentum"]
        buffers = [block.local(step.state[block.weight]["momentum_buffer"]) for block in step.blocks]
        grads = [g.to(buffer.dtype) for g, buffer in zip(grads, buffers, strict=True)]
        means = torch._foreach_lerp(buffers, grads, 1 - momentum)
        put(buffers, means, ok)
        return list(torch._foreach_lerp(grads, means, momentum))

    def _lengths(self, step: Any, ok: Tensor | None) -> list[Tensor]:
        """Bring matrices back into their balls; the length of a step at lr 1 for each group, that of its weights.

        This is done before a step rather than after it, so that nothing but the step itself follows the guards.
        """
        state = [step.state[block.weight]["radius"] for block in step.blocks]
        norms, lengths = matrix_norms(step.blocks), []
        radii = [first_radius(*each) for each in zip(state, norms, step.blocks, strict=True)]
        put(state, radii, ok)
        for block, radius, norm in zip(step.blocks, radii, norms, strict=True):
            shrink = (radius / norm.clamp(min=torch.finfo(norm.dtype).tiny)).clamp(max=1)
            shrink = shrink if ok is None else torch.where(ok, shrink, 1)
            lengths.append((norm * shrink).clamp(min=self.least * radius))
            weight = dtensor.local(block.weight).detach()
            if block.groups > 1:  # one factor for each row of the matrix, in the layout of the weight
                rows = shrink[group_of_rows(block)] if block.rows_as_groups else shrink
                shrink = block.unmatrix(rows[:, None, None, None].expand(block.matrix(weight).shape))
            weight.mul_(shrink)
        return lengths

    def _directions(self, layers: "Sequence[Layer]", ok: Tensor | None) -> Tensor:
        """Steps at lr 1 of layers of one shape, [layer · group, unit, column]."""
        groups = layers[0].block.groups
        x = torch.cat([layer.matrix.reshape(groups, -1, layer.matrix.shape[1]) for layer in layers])
        narrow = x.is_cuda and x.dtype != torch.float64  # GPUs multiply in bfloat16 many times as fast
        factor = polar.polar(x.bfloat16() if narrow else x, self.steps).to(x.dtype)
        squares = [layer.state["line_square"] for layer in layers]
        fresh = polar.mean_square_of_lines(factor).view(len(layers), -1)
        means = torch._foreach_lerp(squares, list(fresh.unbind()), 1 - MEMORY)
        put(squares, means, ok)
        factor = polar.normalize_lines(factor, torch.cat([s.reshape(groups, -1) for s in means]))
        parts = zip(layers, torch.split(factor, groups), strict=True)
        lengths = torch.cat([layer.length_on_w(part) for layer, part in parts])
        wanted = torch.cat([layer.length for layer in layers])
        return factor * (wanted / lengths.clamp(min=torch.finfo(x.dtype).tiny))[:, None, None]

    def _write(self, layers: "Sequence[Layer]", directions: Tensor) -> None:
        """Write the steps where the optimizer looks for them: weights and biases have stepsizes of their own."""
        for layer, step in zip(layers, directions.reshape(len(layers), -1, directions.shape[-1]), strict=True):
            block, target = layer.block, layer.target
            own = dtensor.part(step, block.weight) if dtensor.sharded(block.weight) else step
            rate, *bias_rates = block.rates()
            torch.mul(own, -rate, out=target)
            for k, bias_rate in enumerate(bias_rates, target.shape[1] - len(bias_rates)):
                if bias_rate is not rate and (isinstance(rate, Tensor) or bias_rate != rate):
                    target[:, k] = own[:, k] * -bias_rate


@dataclass
class Layer:
    """One layer in a step: its block and state, where its step goes, the matrix to orthogonalize, all of its rows.

    `scale` is how far each column of the matrix moves weights, [group, 1, column] without biases (None: 1).
    """

    block: Any
    state: dict[str, Tensor]
    target: Tensor
    matrix: Tensor
    length: Tensor
    scale: Tensor | None

    def length_on_w(self, step: Tensor) -> Tensor:
        """The norm of the weights' step for each group. A layer without bias moves a little less along its mean."""
        columns = step.shape[-1] - len(self.block.biases)
        weights = step[..., :columns] if self.scale is None else step[..., :columns] * self.scale
        length: Tensor = torch.linalg.vector_norm(weights, dim=(-2, -1))
        return length


def first_radius(radius: Tensor, norm: Tensor, block: Any) -> Tensor:
    """The radius of each group, found before the first step: its norm, at least that of rows of length 1."""
    return torch.where(radius > 0, radius, norm.clamp(min=(block.units / block.groups) ** 0.5))


def matrix_norms(blocks: Sequence[Any]) -> list[Tensor]:
    """The norm of each matrix of weights: [group] for each block, over all ranks."""
    found = []
    for block in blocks:
        weight = dtensor.local(block.weight).detach()
        wide = torch.promote_types(weight.dtype, torch.float32)
        if not dtensor.sharded(block.weight):
            found.append(torch.linalg.vector_norm(block.matrix(weight), dim=(1, 2, 3), dtype=wide))
            continue
        squares = torch.linalg.vector_norm(block.matrix(weight).flatten(2), dim=2, dtype=wide).square().flatten()
        sums = squares.new_zeros(block.groups).index_add_(0, group_of_rows(block), squares)
        found.append(dtensor.reduced(sums, dtensor.groups_along(block.weight, rows=True)).sqrt())
    return found


def group_of_rows(block: Any) -> Tensor:
    """The group of each row that this rank has of a sharded layer."""
    groups: Tensor = dtensor.row_numbers(block.weight) // (block.units // block.groups)
    return groups
