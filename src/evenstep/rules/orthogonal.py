"""Orthogonalized momentum: all directions of a layer's matrix take steps of one length, relative to the matrix."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..coordinates.coordinates import Field, Schema
from ..math import polar
from ..parallel import dtensor, shared_matrices
from .rule import Matrices, Rule, put, unpack

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
    narrow: bool = True  # multiply in bfloat16 on GPUs, which is many times as fast there

    own_rate = True
    matrices = True

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

    def direct(self, steps: Sequence[Any], ok: Tensor | None, ranks: Any = None) -> None:
        """Turn the gradients of all layers into steps; layers of one shape are multiplied in one batch.

        Ranks share the layers: each turns some into steps, and has those of the others from them.
        """
        lengths, found = dict[int, Tensor](), list[tuple[Any, list[Matrices]]]()
        for step in steps:
            ok = None if ok is None else ok.to(step.device)
            lengths |= zip(map(id, step.blocks), self._lengths(step, ok), strict=True)
            found.append((step, step.matrices(ok)))
        for shared in shared_matrices.share(found, ranks):
            for layers in shared.own():
                states = [steps[0].state[block.weight] for block in layers.blocks]
                ok = None if ok is None else ok.to(layers.x.device)
                self._orthogonalize(layers, torch.cat([lengths[id(block)] for block in layers.blocks]), states, ok)
            shared.spread(lambda block: steps[0].state[block.weight]["line_square"])
        for step, some in found:
            step.take_matrices(some)

    def _lengths(self, step: Any, ok: Tensor | None) -> Sequence[Tensor]:
        """Bring matrices back into their balls; the length of a step at lr 1 for each group, that of its weights.

        This is done before a step rather than after it, so that nothing but the step itself follows the guards.
        """
        blocks, radii = step.blocks, [step.state[block.weight]["radius"] for block in step.blocks]
        norms = matrix_norms(blocks)
        first = torch._foreach_clamp_min(norms, [(block.units / block.groups) ** 0.5 for block in blocks])
        norm, radius = torch.cat(norms), torch.cat(radii)
        radius = torch.where(radius > 0, radius, torch.cat(first))
        put(radii, unpack(radius, radii), ok)
        shrink = (radius / norm.clamp(min=torch.finfo(norm.dtype).tiny)).clamp(max=1)
        shrink = shrink if ok is None else torch.where(ok, shrink, 1)
        step.shrink(unpack(shrink, radii))
        return unpack((norm * shrink).maximum(self.least * radius), radii)

    def _orthogonalize(self, layers: Matrices, lengths: Tensor, states: Sequence[Any], ok: Tensor | None) -> None:
        """Write the steps of layers that are alike over their momentum; `lengths` are those of the steps at lr 1."""
        x, block = layers.x, layers.blocks[0]
        groups, biases, rows = block.groups, len(block.biases), block.units // block.groups
        weights = block.weight.numel() // block.units
        tall, wide = polar.rows_are_longer(rows, weights + biases), lengths.dtype
        factor = polar.polar(x, self.steps)
        square = factor * factor
        sums = square.sum(-1 if tall else -2, dtype=wide)[:, : rows if tall else weights + biases]
        fresh = (sums / (weights + biases if tall else rows)).view(len(states), -1)
        squares = [state["line_square"] for state in states]
        means = torch._foreach_lerp(squares, list(fresh.unbind()), 1 - MEMORY)
        put(squares, means, ok)
        even = polar.line_scales(torch.cat([mean.view(groups, -1) for mean in means]))
        # the length of the step on weights, biases left out: a layer without bias moves a little less along its mean
        if not tall:
            moved = sums[:, :weights] if layers.scale is None else sums[:, :weights] * layers.scale.square()
        elif layers.scale is None:
            moved = square[:, :rows, :weights].sum(-1, dtype=wide)
        else:
            by_column = layers.scale.square().to(square.dtype).unsqueeze(-1)
            moved = (square[:, :rows, :weights] @ by_column).squeeze(-1).to(wide)
        length = (moved * even[:, : moved.shape[1]].square()).sum(-1).sqrt()
        even = even * torch.where(length > 0, lengths / length, 0).unsqueeze(-1)
        (rate, *_), group = block.rates(), block.group
        alike = all(g is group for b in layers.blocks for g in b.param_groups)
        even = F.pad(even * -rate if alike else even, (0, factor.shape[-2 if tall else -1] - even.shape[1]))
        # in one dtype, which GPUs read several numbers at a time
        torch.mul(factor, even.to(x.dtype).unsqueeze(-1 if tall else -2), out=x)
        if alike:
            return
        for b, matrix in zip(layers.blocks, torch.split(x, groups), strict=True):
            rate, *of_biases = b.rates()
            matrix[..., :weights].mul_(-rate)
            for k, of_bias in enumerate(of_biases, weights):
                matrix[..., k].mul_(-of_bias)


def matrix_norms(blocks: Sequence[Any]) -> list[Tensor]:
    """The norm of each matrix of weights: [group] for each block, over all ranks; the blocks are sharded alike."""
    whole = {id(b): b.weight.detach() for b in blocks if b.groups == 1 and not dtensor.sharded(b.weight)}
    weights = list(whole.values())
    wide = torch.promote_types(blocks[0].weight.dtype, torch.float32)
    norms = dict(zip(whole, torch._foreach_norm(weights, 2, wide) if weights else [], strict=True))
    others, sums = [block for block in blocks if id(block) not in norms], []
    for block in others:
        weight = block.local(block.weight).detach()
        squares = torch.linalg.vector_norm(block.matrix(weight), dim=1, dtype=wide).square()
        sums.append(squares.new_zeros(block.groups).index_add_(0, block.group_of_rows(), squares))
    if others:
        total = dtensor.reduced(torch.cat(sums), dtensor.groups_along(others[0].weight, rows=True))
        norms |= zip(map(id, others), unpack(total.sqrt(), sums), strict=True)
    return [norms[id(block)].view(-1) for block in blocks]
