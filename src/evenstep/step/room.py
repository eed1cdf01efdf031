"""What a step of many blocks keeps from step to step on the CPU: state end to end, and room for what it works out.

The optimizer's state then has views of these tensors. Whoever puts other tensors in their place (a checkpoint, a model
that moved) finds their values taken over at the next step.
"""

import math
from collections.abc import Callable
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from ..math.rows import RowSums
from .layout import Layout, as_rows

# rows of `Room.vectors`, one value per input, and of `Room.columns`, one per column of a weight; the last two are for
# layers without bias
SCALED, SHIFT, ALPHA, FRESH, SPREAD, BENT, BENT_FRESH = range(7)
# rows of `Room.units`
NORM, BIAS_GRAD, BIAS, ALONG, STRETCH, BEND, LEVEL, LENGTH2, STEP, BIAS_STEP = range(10)
MASS, SHARING, SQUARE_MASS = range(3)  # rows of `Room.layers`
KEPT = 2**20  # numbers beyond which room for a whole step is not kept between steps
PIECE = 2**18  # how many weights are squared at a time: what a cache can hold


class Room:
    """The tensors of one layout."""

    def __init__(self, layout: Layout, state: Any, even: bool) -> None:
        """`even` keeps the squares of eq. 11, too."""
        self.layout = lay = layout
        self.numbers = [math.prod(s) for s in lay.shapes]
        self.shapes = [(s[1], s[2] * s[3]) if s[0] == 1 else (s[0], s[1], s[2] * s[3]) for s in lay.shapes]
        rows = BENT_FRESH + 1 if lay.unbiased else SPREAD + 1
        self.layers = torch.zeros(3, len(lay.blocks), dtype=lay.dtype)
        self.squares = torch.zeros(lay.total, dtype=lay.dtype)
        self.vectors = torch.zeros(rows, lay.identity + 1, dtype=lay.dtype)
        self.moments = torch.zeros(2, lay.identity + 1, dtype=lay.dtype)  # mx and vx
        self.columns = torch.zeros(rows, len(lay.column), dtype=lay.dtype)
        self.mu = torch.zeros(len(lay.column), dtype=lay.dtype)
        self.units = torch.zeros(BIAS_STEP + 1, lay.total, dtype=lay.dtype)
        self._keep_momentum()
        self.steps = torch.zeros(len(lay.parameters), dtype=state[lay.parameters[0]]["step"].dtype)
        self._name()
        self.parts = self._parts(even)
        self.looks = [itemgetter(*(name for name, _ in parts), "step") for _, parts in self.parts]  # never a single one
        self.places = [[*map(id, look(dict(parts)))] for look, (_, parts) in zip(self.looks, self.parts, strict=True)]
        self.kept_steps = self._steps() if sum(self.numbers) <= KEPT else None
        scratch = torch.zeros(min(PIECE, max(self.numbers)), dtype=lay.dtype)
        self.squared = [
            scratch[:n].view(s) if n <= PIECE else None for n, s in zip(self.numbers, self.shapes, strict=True)
        ]
        self._find_weights()
        self.centred_at: list[int] = []  # versions of means and centres that are the same
        self.cached: dict[str, tuple[Any, Any]] = {}

    def _name(self) -> None:
        """Views that every step needs."""
        lay = self.layout
        self.mx, self.vx = self.moments
        self.vector_of, self.unit = self.vectors.unbind(), self.units.unbind()
        self.batch = torch.zeros(2, lay.identity + 1, dtype=lay.dtype)  # first and second sums
        self.means = torch.zeros(
            4, lay.identity + 1, dtype=lay.dtype
        )  # the same over rows, then as guards see it, and over τ
        self.averages, (self.offset, self.square, self.about, self.bounds) = self.means[:2], self.means
        self.squares_of_batch, self.spreads = self.means[2:], self.vectors[FRESH : SPREAD + 1]
        self.none, self.tiny = torch.zeros(1, dtype=lay.dtype), torch.finfo(lay.dtype).tiny
        self.moving, self.shared = lay.staged(lay.moving), lay.staged(lay.shared)
        self.biases = [lay.blocks[k].biases[0] for k in lay.biased]
        self.one = torch.ones(1)
        self.masses = self.layers[::2]  # both masses
        self.full = torch.ones_like(self.masses)
        self.seen = self.units[NORM : BIAS_GRAD + 1]  # finite if all gradients are
        self.total = self.units[NORM, 0]
        self.largest = lay.last[:, 2] if len(lay.guarded) == len(lay.blocks) else None
        self.steps_fired = lay.fired[:, 2] if lay.guarded else self.squares[:0]
        self.noted = True  # whether `last` may have other counts than zeros
        self.mean_of = [self.mx[lay.base[k] : lay.base[k] + n] for k, n in self._sized()]
        self.sums_of = [self.batch[:, lay.base[k] : lay.base[k] + n].unbind() for k, n in self._sized()]
        self.column_of = [self._columns(row) for row in self.columns]
        self.mu_of = self._columns(self.mu)
        self.unit_of = [self._per_unit(row) for row in self.unit]
        self.row_of = [[v.unsqueeze(-1) for v in some] for some in self.unit_of]
        self.biases_of = [[some[k].view(-1) for k in lay.biased] for some in self.unit_of]
        self.sums = RowSums(*(self.unit[row] for row in (ALONG, STRETCH, BEND, LEVEL, LENGTH2)))
        self.shifted = sorted({*lay.moving} - {*lay.unbiased})
        self.shifts = (
            [self.row_of[BIAS_GRAD][k] for k in self.shifted],
            [self.column_of[SHIFT][k] for k in self.shifted],
        )

    def _keep_momentum(self) -> None:
        """Room for momentum: of all weights end to end, and of one bias for each unit."""
        lay, kept = self.layout, bool(self.layout.momentum)
        self.momentum = torch.zeros(sum(self.numbers) * kept, dtype=lay.dtype)
        self.bias_momentum = torch.zeros(lay.total * kept, dtype=lay.dtype)
        self.momentum_of: list[tuple[Tensor, Tensor]] = []  # parameters and their parts of it
        self.buffers: list[Tensor] = []  # the weights' parts as rows
        if kept:
            wholes = torch.split(self.momentum, self.numbers)
            self.buffers = [part.view(s) for part, s in zip(wholes, self.shapes, strict=True)]
            weights = [b.weight for b in lay.blocks]
            places = [part.as_strided(w.shape, w.stride()) for w, part in zip(weights, wholes, strict=True)]
            of_unit = self._per_unit(self.bias_momentum)
            bias_places = [of_unit[k].view(-1) for k in lay.biased]
            biases = [lay.blocks[k].biases[0] for k in lay.biased]
            self.momentum_of = [*zip(weights, places, strict=True), *zip(biases, bias_places, strict=True)]

    def _sized(self) -> list[tuple[int, int]]:
        return list(zip(self.layout.moving, self.layout.input_sizes, strict=True))

    def _parts(self, even: bool) -> list[tuple[Tensor, list[tuple[str, Tensor]]]]:
        """For each parameter the names in its state, and the places for them."""
        lay, weights = self.layout, [b.weight for b in self.layout.blocks]
        found = [(weights[k], "mass", self.layers[MASS, k]) for k in lay.moving]
        found += [(weights[k], "sharing", self.layers[SHARING, k]) for k in lay.shared]
        for row, name in zip(self.moments, ("mx", "vx"), strict=True):
            found += [(weights[k], name, row[lay.base[k] : lay.base[k] + n]) for k, n in self._sized()]
        if even:
            pieces = zip(weights, torch.split(self.squares, lay.sizes), self.layers[SQUARE_MASS], strict=True)
            for weight, square, mass in pieces:
                found += [(weight, "square", square), (weight, "square_mass", mass)]
        found += [(p, "momentum_buffer", place) for p, place in self.momentum_of]
        found += [(p, "step", count) for p, count in zip(lay.parameters, self.steps, strict=True)]
        places: dict[int, list[tuple[str, Tensor]]] = {}
        for p, name, place in found:
            places.setdefault(id(p), []).append((name, place))
        return [(p, places[id(p)]) for p in lay.parameters]

    def _columns(self, values: Tensor) -> dict[int, Tensor]:
        """What each moving block sees of values per column, to meet its weight."""
        lay = self.layout
        wide = zip(lay.moving, torch.split(values, lay.column_sizes), strict=True)
        shapes = {k: (-1,) if lay.shapes[k][0] == 1 else (lay.shapes[k][0], 1, -1) for k in lay.moving}
        return {k: w.view(shapes[k]) for k, w in wide}

    def _per_unit(self, values: Tensor) -> list[Tensor]:
        """What each block has of a value per unit: [unit], or [group, unit]."""
        parts = torch.split(values, self.layout.sizes)
        return [p if s[0] == 1 else p.view(s[0], s[1]) for p, s in zip(parts, self.layout.shapes, strict=True)]

    def settle(self, state: Any) -> None:
        """Take over what has been put in the place of our tensors, and look where the weights lie."""
        for (p, parts), look, ours in zip(self.parts, self.looks, self.places, strict=True):
            mine = state[p]
            if [*map(id, look(mine))] != ours:
                for name, place in parts:
                    if mine[name] is not place:
                        place.copy_(mine[name])
                        mine[name] = place
        if [block.weight.data_ptr() for block in self.layout.blocks] != self.lie_at:
            self._find_weights()

    def _find_weights(self) -> None:
        """Look where the weights lie."""
        weights = [block.weight.detach() for block in self.layout.blocks]
        self.weights = [self._rows(k, weight) for k, weight in enumerate(weights)]
        self.lie_at = [weight.data_ptr() for weight in weights]

    def _rows(self, k: int, tensor: Tensor) -> Tensor:
        """A tensor like the weight of block k as [unit, column] or [group, unit, column]."""
        found = as_rows(self.layout.blocks[k], tensor, self.layout.inner[k])
        return found[0] if self.layout.shapes[k][0] == 1 else found

    def rows_of_gradient(self, k: int, grad: Tensor) -> Tensor:
        """A gradient in the same shape: itself, or a view where it lies in memory as its weight does."""
        rows = self.weights[k]
        if grad.shape == rows.shape and grad.stride() == rows.stride():
            return grad
        if grad.stride() != self.layout.blocks[k].weight.stride():
            return self._rows(k, grad)
        return grad.as_strided(rows.shape, rows.stride(), grad.storage_offset())

    def gather(self, row: int, biases: list[Tensor]) -> None:
        """Write one tensor per bias to a row of `units`."""
        if self.layout.unit_of_bias is None:
            torch.cat(biases, out=self.unit[row])
        elif biases:
            torch._foreach_copy_(self.biases_of[row], biases)

    def times(self, matrix: Tensor, vector: Tensor, row: int, k: int, plus: Tensor | None = None) -> None:
        """Write rows of block k times a vector over its columns, one value per unit, to a row of `units`."""
        if matrix.dim() == 3:
            torch.bmm(matrix, vector.mT, out=self.row_of[row][k])
            if plus is not None:
                self.unit_of[row][k].add_(plus.view(matrix.shape[:2]))
        elif plus is None:
            torch.mv(matrix, vector, out=self.unit_of[row][k])
        else:
            torch.addmv(plus, matrix, vector, out=self.unit_of[row][k])

    def times_squares(self, matrix: Tensor, vector: Tensor | None, row: int, k: int) -> None:
        """The same with the squares of the rows' elements; without a vector, their sum."""
        square = self.squared[k]
        if square is not None:
            torch.mul(matrix, matrix, out=square)
            if vector is None:
                torch.sum(square, -1, out=self.unit_of[row][k])
            else:
                self.times(square, vector, row, k)
            return
        some = max(1, PIECE // matrix[0].numel())
        for j in range(0, len(matrix), some):
            square, out = matrix[j : j + some].square(), self.unit_of[row][k][j : j + some]
            if vector is None:
                torch.sum(square, -1, out=out)
            elif square.dim() == 2:
                torch.mv(square, vector, out=out)
            else:
                torch.bmm(square, vector[j : j + some].mT, out=out.unsqueeze(-1))

    def _steps(self) -> tuple[Tensor, list[Tensor]]:
        whole = torch.empty(sum(self.numbers), dtype=self.layout.dtype)
        return whole, [part.view(s) for part, s in zip(torch.split(whole, self.numbers), self.shapes, strict=True)]

    def like_weights(self) -> tuple[Tensor, list[Tensor]]:
        """Room for something like each weight, end to end and as rows.

        Kept if it is small, as asking for it anew takes long then.
        """
        return self._steps() if self.kept_steps is None else self.kept_steps

    def kept(self, name: str, key: Any, make: Callable[[], Any]) -> Any:
        """What `make` gives, made again when `key` is another."""
        known = self.cached.get(name)
        if known is None or known[0] != key:
            known = self.cached[name] = key, make()
        return known[1]
