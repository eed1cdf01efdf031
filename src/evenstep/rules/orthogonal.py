"""Orthogonalized momentum: all directions of a layer's matrix take steps of one length, relative to the matrix."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import foreach
from ..coordinates.coordinates import Field, Schema
from ..kernels import matrices as kernels
from ..kernels.lanes import lanes
from ..math import polar as plain
from ..parallel import dtensor, shared_matrices
from .rule import Matrices, Rule, unpack


@dataclass(frozen=True)
class OrthogonalRule(Rule):
    """Nesterov momentum on v, its polar factor, rows or columns of even mean square; steps relative to the weights.

    The gradient of a wide layer is nearly of rank one, and a rule that steps each unit by itself moves all of them the
    same way. The polar factor has equal singular values instead. A layer is one matrix [unit, inputs · kernel], with
    the bias as a column; a layer in groups is one matrix per group.

    A step is lr times as long as the matrix of weights, so that one lr serves layers of any size. Weights and biases
    stay in a ball, whose radius is their norm before the first step, at least √units: rows of length 1. A bias counts
    as the weight of the constant input, relative to its size. Without that biases drift: the inputs of the next layer
    grow with them, and so do the steps of its biases. A matrix that is shorter than `least` times the radius, as one
    that starts at zero, takes the steps of one of that length.
    """

    quintics: Sequence[plain.Quintic] = plain.MINIMAX
    least: float = 0.1
    narrow: bool = True  # multiply in bfloat16 on GPUs, which is many times as fast there

    external = True
    matrices = True
    replays = True

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
        """Turn the gradients of all layers into directions; layers of one shape are multiplied in one batch.

        Ranks share the layers: each turns some into directions, and has those of the others from them.
        """
        lengths, found = dict[int, Tensor](), list[tuple[Any, list[Matrices]]]()
        for step in steps:
            ok = None if ok is None else ok.to(step.device)
            lengths |= zip(map(id, step.blocks), self._lengths(step, ok), strict=True)
            found.append((step, step.matrices(ok)))
        for shared in shared_matrices.share(found, ranks):
            layers = shared.own()
            with lanes(layers[0].x.device if layers else torch.device("cpu")) as lane:
                for k, some in enumerate(layers):
                    with lane(k):
                        parts: Any = kernels if kernels.serves(some.x) else plain
                        factor = plain.polar(some.x, self.quintics, parts.inverse_norm, parts.polynomial)
                        own = torch.cat([lengths[id(block)] for block in some.blocks])
                        mask = None if ok is None else ok.to(some.x.device)
                        write_direction(some, factor, own, steps[0].state, mask, parts)
            shared.spread(lambda block: steps[0].state[block.weight]["line_square"])
        for step, some_of in found:
            step.take_matrices(some_of)

    def _lengths(self, step: Any, ok: Tensor | None) -> Sequence[Tensor]:
        """Bring matrices back into their balls; the length of a step at lr 1 for each group, that of its weights.

        This is done before a step rather than after it, so that nothing but the step itself follows the guards.
        """
        blocks, radii = step.blocks, [step.state[block.weight]["radius"] for block in step.blocks]
        weights, biases = norms(blocks)
        norm = torch.hypot(weights, biases / per_group(step.constant_sizes(), blocks))
        rows = [(block.units / block.groups) ** 0.5 for block in blocks]
        first = torch.cat(torch._foreach_clamp_min(list(unpack(norm, radii)), rows))
        kept = torch.cat(radii)
        radius = torch.where(kept > 0, kept, first)
        foreach.copy_(radii, unpack(radius if ok is None else torch.where(ok, radius, kept), radii))
        shrink = (radius / norm.clamp(min=torch.finfo(norm.dtype).tiny)).clamp(max=1)
        shrink = shrink if ok is None else torch.where(ok, shrink, 1)
        step.shrink(unpack(shrink, radii))
        return unpack((weights * shrink).maximum(self.least * radius), radii)


def write_direction(
    layers: Matrices, factor: Tensor, lengths: Tensor, state: Any, ok: Tensor | None, parts: Any
) -> None:
    """Write the directions of layers that are alike over their momentum: the polar factor, its lines evened out.

    `lengths` are those of steps at lr 1, biases left out: a layer without bias moves a little less along its mean.
    `parts` are `math.polar`, or its kernels.
    """
    block, kept = layers.blocks[0], [state[b.weight]["line_square"] for b in layers.blocks]
    rows, weights = block.units // block.groups, block.weight.numel() // block.units
    columns = weights + len(block.biases)
    by_row = plain.rows_are_longer(rows, columns)
    lines, others = (rows, columns) if by_row else (columns, rows)
    sums, moved = parts.line_sums(factor, weights, layers.scale, by_row=by_row)
    mean, even = parts.even_lines(sums, moved, torch.cat(kept).view(-1, lines), lengths, others, ok)
    foreach.copy_(kept, unpack(mean.view(-1), kept))
    parts.scale_lines(factor, even, by_row=by_row, out=layers.x)


def norms(blocks: Sequence[Any]) -> tuple[Tensor, Tensor]:
    """The norms of each matrix's weights, and of its biases: one per group of each block, over all ranks.

    The blocks are sharded alike.
    """
    wide = torch.promote_types(blocks[0].weight.dtype, torch.float32)
    whole = [p for b in blocks if b.groups == 1 and not b.sharded for p in b.parameters]
    found = torch._foreach_norm([p.detach() for p in whole], 2, wide) if whole else []
    known = dict(zip(map(id, whole), found, strict=True))
    none = torch.zeros(1, dtype=wide, device=blocks[0].weight.device)
    others = [block for block in blocks if id(block.weight) not in known]
    sums = dict(zip(map(id, others), squares_of_groups(others, wide), strict=True)) if others else {}
    weights, biases = list[Tensor](), list[Tensor]()
    for block in blocks:
        if id(block) in sums:
            both = sums[id(block)].sqrt()
        else:
            few = [known[id(b)] for b in block.biases]
            of_biases = few[0].view(1) if len(few) == 1 else torch.stack(few).norm().view(1) if few else none
            both = (known[id(block.weight)].view(1), of_biases)  # type: ignore[assignment]
        weights.append(both[0])
        biases.append(both[1])
    return torch.cat(weights), torch.cat(biases)


def squares_of_groups(blocks: Sequence[Any], dtype: torch.dtype) -> Sequence[Tensor]:
    """Σ w² and Σ b² of each group, [2, group] for each block, by one reduction over ranks."""
    found = []
    for block in blocks:
        rows = torch.linalg.vector_norm(block.matrix(block.local(block.weight).detach()), dim=1, dtype=dtype).square()
        biases = [block.local(b).detach().flatten().to(dtype).square() for b in block.biases]
        both = torch.stack([rows, torch.stack(biases).sum(0) if biases else torch.zeros_like(rows)])
        found.append(both.new_zeros(2, block.groups).index_add_(1, block.group_of_rows(), both))
    total = dtensor.reduced(torch.cat(found, 1), dtensor.groups_along(blocks[0].weight, rows=True))
    return torch.split_with_sizes(total, [block.groups for block in blocks], 1)


def per_group(of_blocks: Tensor, blocks: Sequence[Any]) -> Tensor:
    """A number per block, repeated for each of its groups."""
    if all(block.groups == 1 for block in blocks):
        return of_blocks
    return torch.cat([number.expand(b.groups) for number, b in zip(of_blocks.unbind(), blocks, strict=True)])
