"""Orthogonalized momentum: all directions of a layer's matrix take steps of one length, relative to the matrix."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..coordinates.coordinates import Field, Schema
from ..math import polar
from ..parallel import dtensor
from .rule import Rule, put, unpack
from .torch_rule import gathered

ALIGNED = 8  # numbers of 2 bytes in the 16 that matrix units read at once
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
    padded: bool = False  # whether GPUs get matrices of aligned sizes: not before it has been timed on one

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
        alike: dict[Any, list[Layer]] = {}
        for step, matrices in zip(steps, targets, strict=True):
            ahead = self._ahead(step, [q.grad for q in matrices if q.grad is not None], ok)
            lengths = self._lengths(step, ok)
            parts = zip(step.blocks, matrices, ahead, lengths, step.column_scales(), strict=True)
            for block, q, matrix, length, scale in parts:
                if dtensor.sharded(block.weight):
                    matrix = gathered(block.weight, matrix)
                layer = Layer(block, step.state[block.weight], q.detach(), matrix, length, scale)
                alike.setdefault(layer.key(), []).append(layer)
        for layers in alike.values():
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
        weights = [dtensor.local(block.weight).detach() for block in blocks]
        factors = list(unpack(shrink, radii))
        for k, (block, weight) in enumerate(zip(blocks, weights, strict=True)):
            if block.groups > 1:  # one factor for each row of the matrix, in the layout of the weight
                rows = factors[k][block.group_of_rows()]
                factors[k] = block.unmatrix(rows[:, None].expand(block.matrix(weight).shape))
        torch._foreach_mul_(weights, factors)
        return unpack((norm * shrink).maximum(self.least * radius), radii)

    def _directions(self, layers: "Sequence[Layer]", ok: Tensor | None) -> Tensor:
        """Steps at lr 1 of layers that are alike, [layer · group, unit, column]."""
        groups, biases = layers[0].block.groups, len(layers[0].block.biases)
        x = torch.cat([layer.matrix.reshape(groups, -1, layer.matrix.shape[1]) for layer in layers])
        if x.is_cuda and x.dtype != torch.float64:  # GPUs multiply in bfloat16 many times as fast
            narrow = aligned(x.bfloat16()) if self.padded else x.bfloat16()
            factor = polar.polar(narrow, self.steps)[:, : x.shape[1], : x.shape[2]].to(x.dtype)
        else:
            factor = polar.polar(x, self.steps)
        squares = [layer.state["line_square"] for layer in layers]
        fresh = polar.mean_square_of_lines(factor).view(len(layers), -1)
        means = torch._foreach_lerp(squares, list(fresh.unbind()), 1 - MEMORY)
        put(squares, means, ok)
        factor = polar.normalize_lines(factor, torch.cat([s.reshape(groups, -1) for s in means]))
        # a layer without bias moves a little less along its mean
        scales = [layer.scale for layer in layers if layer.scale is not None]
        weights = factor[..., : factor.shape[-1] - biases]
        norms = torch.linalg.vector_norm(weights * torch.cat(scales) if scales else weights, dim=(-2, -1))
        wanted = torch.cat([layer.length for layer in layers])
        return factor.mul_((wanted / norms.clamp(min=torch.finfo(x.dtype).tiny))[:, None, None])

    def _write(self, layers: "Sequence[Layer]", directions: Tensor) -> None:
        """Write the steps where the optimizer looks for them: weights and biases have stepsizes of their own."""
        steps = directions.reshape(len(layers), -1, directions.shape[-1]).unbind()
        for layer, step in zip(layers, steps, strict=True):
            own = dtensor.part(step, layer.block.weight) if dtensor.sharded(layer.block.weight) else step
            rate, *bias_rates = layer.block.rates()
            torch.mul(own, -rate, out=layer.target)
            for k, bias_rate in enumerate(bias_rates, own.shape[1] - len(bias_rates)):
                if bias_rate is not rate and (isinstance(rate, Tensor) or bias_rate != rate):
                    layer.target[:, k] = own[:, k] * -bias_rate


@dataclass
class Layer:
    """One layer in a step: its block and state, where its step goes, the matrix to orthogonalize, all of its rows.

    `length` is that of its step at lr 1, for each group. `scale` is how far each column of the matrix moves weights,
    [group, 1, column] without biases (None: 1).
    """

    block: Any
    state: dict[str, Tensor]
    target: Tensor
    matrix: Tensor
    length: Tensor
    scale: Tensor | None

    def key(self) -> tuple[Any, ...]:
        """What layers have in common that are multiplied in one batch."""
        x = self.matrix
        return self.block.groups, len(self.block.biases), self.scale is None, x.shape, x.device, x.dtype


def aligned(x: Tensor) -> Tensor:
    """Matrices with zeros added, which stay zero, up to sizes that GPUs multiply fast: a bias makes columns odd.

    >>> aligned(torch.ones(1, 16, 9)).shape
    torch.Size([1, 16, 16])
    """
    more = [-size % ALIGNED for size in x.shape[-2:]]
    return F.pad(x, (0, more[1], 0, more[0])) if any(more) else x


def matrix_norms(blocks: Sequence[Any]) -> list[Tensor]:
    """The norm of each matrix of weights: [group] for each block, over all ranks."""
    found = []
    for block in blocks:
        weight = block.local(block.weight).detach()
        wide = torch.promote_types(weight.dtype, torch.float32)
        if not dtensor.sharded(block.weight):
            found.append(torch.linalg.vector_norm(block.layout(weight), dim=(1, 2, 3), dtype=wide))
            continue
        squares = torch.linalg.vector_norm(block.matrix(weight), dim=1, dtype=wide).square()
        sums = squares.new_zeros(block.groups).index_add_(0, block.group_of_rows(), squares)
        found.append(dtensor.reduced(sums, dtensor.groups_along(block.weight, rows=True)).sqrt())
    return found
