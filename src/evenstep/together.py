"""The step for many blocks at once, in a number of launches that does not grow with the network.

The arithmetic is that of the block-by-block loop in `shell`, which stays as its reference. What belongs to inputs lies
end to end in one tensor, what belongs to units in another; weights are read twice: on a GPU by `kernels.step`,
elsewhere by a few operations per block.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import rows, stepsize, update
from .constants import geometry_beta2
from .kernels import step as step_kernel
from .layout import Layout, as_rows
from .moments import Running, Sums, fold_mean, gain
from .motion import gradient, rates

State = dict[str, Any]


class Coordinates:
    """The coordinates of all moving blocks in one step, and their moments after it."""

    def __init__(self, layout: Layout, states: Sequence[State], linear: bool) -> None:
        """From the states of the blocks' weights and what their stages hold."""
        self.layout, self.states = layout, states
        lay = layout
        self.mine, self.stages = [states[k] for k in lay.moving], lay.staged(lay.moving)
        self.tally = (
            torch.stack([s.tally for s in lay.staged(lay.shared)]) if lay.shared else lay.nothing.expand(2, 4)[:0]
        )
        self.beta = self._beta(linear)
        self._frame()

    def _frame(self) -> None:
        lay, mine, stages, none = self.layout, self.mine, self.stages, self.layout.nothing
        groups = [lay.blocks[k].group for k in lay.moving]
        taus = [torch.inf if g["fresh_max"] is None else g["fresh_max"] for g in groups]
        dampings, decays = [g["damping"] for g in groups], [g["decay"] for g in groups]
        damping, tau, self.decay = lay.set("inputs", [[*dampings, 0.0], [*taus, torch.inf], [*decays, 0.0]], lay.inputs)
        slots = torch.cat(
            [*(s.slots for s in stages), none.expand(stages[0].slots.shape[0] if stages else 1, 2, 1)], -1
        )
        first, second = (slots[0] if len(slots) == 1 else slots.sum(0)).unbind()
        self.centre = torch.cat([*(s.centre for s in stages), none[0]])
        mx = torch.cat([*(s["mx"] for s in mine), none[0]])
        vx = torch.cat([*(s["vx"] for s in mine), none[0]])
        counted = (
            self.tally[:, 0] if lay.moving == lay.shared else torch.stack([s.rows for s in stages] or [none[0, 0]])
        )
        self.mass = torch.stack([s["mass"] for s in mine] or [none[0, 0]])
        per_layer = torch.stack([counted, self.mass]) if stages else none[:, :0]
        number, mass = lay.inputs.widen(torch.cat([per_layer, none], 1).T).unbind(1)
        self.running, sums = Running(mx, vx, mass), Sums(number, first, second)
        self.sums, self.batch = sums, update.batch_of(sums, self.centre, lay.inputs)
        self.frame = update.moving_frame(
            self.running, sums, self.centre, mass, batch=self.batch, damping=damping, fresh_max=tau, over=lay.inputs
        )
        self.mu, self.alpha = self.frame.constants.mu, self.frame.constants.alpha2.sqrt()

    def _beta(self, linear: bool) -> Tensor | None:
        """β of each block; None where it is 1 for all. Also S of this step."""
        lay = self.layout
        if not lay.shared:
            return None
        _, _, applied, examples = self.tally.unbind(1)
        old = torch.stack([self.states[k]["sharing"] for k in lay.shared])
        self.sharing = torch.where(applied > 0, applied / examples.clamp(min=1), old)
        declared = [lay.blocks[k].group.get("sharing") for k in lay.shared]
        if any(d is not None for d in declared):
            (fixed,) = lay.set("sharing", [[torch.nan if d is None else d for d in declared]])
            self.sharing = torch.where(fixed.isnan(), self.sharing, fixed)
        if not linear:
            return None
        beta = geometry_beta2(lay.fan_in, self.sharing).sqrt()
        if len(lay.shared) == len(lay.blocks):
            return beta
        return torch.ones(len(lay.blocks), dtype=lay.dtype, device=lay.device).index_copy(
            0, lay.index(lay.shared), beta
        )

    def commit(self) -> None:
        """Let the batches join the running moments, and the next ones be summed about them."""
        lay = self.layout
        mx, vx, mass = update.moments_after(self.running, self.sums, self.centre, decay=self.decay, batch=self.batch)
        centre = mx if lay.started else torch.where(mass > 0, mx, torch.nan)
        if not lay.started:
            lay.started = bool((mass[: lay.identity] > 0).all())
            for stage in self.stages:
                stage.centred = lay.started
        for targets, value in (
            ([s["mx"] for s in self.mine], mx),
            ([s["vx"] for s in self.mine], vx),
            ([s.centre for s in self.stages], centre),
        ):
            put_all(targets, split(value[: lay.identity], lay.input_sizes))
        put_all([s["mass"] for s in self.mine], mass.index_select(0, lay.inputs.offsets[:-1]).unbind())
        if lay.shared:
            put_all([self.states[k]["sharing"] for k in lay.shared], self.sharing.unbind())


def put_all(old: Sequence[Tensor], new: Sequence[Tensor]) -> None:
    """Write each new tensor over an old one, in one launch; a new one too many is left."""
    if old:
        torch._foreach_copy_(list(old), list(new)[: len(old)])


class PlainRows:
    """The two readings of the weights by torch operations, for a device whose answers the host may read."""

    def __init__(self, layout: Layout, coordinates: Coordinates, state: Any, momentum: float, ahead: bool) -> None:
        """The gradient on v of every row; `ahead` asks for Nesterov's direction."""
        self.layout, self.state, self.momentum, self.ahead = layout, state, momentum, ahead
        lay, c, beta = layout, coordinates, coordinates.beta
        scaled = c.alpha
        if beta is not None and lay.moving:
            of_moving = beta if len(lay.moving) == len(lay.blocks) else beta[lay.index(lay.moving)]
            scaled = c.alpha * lay.inputs.widen(torch.cat([of_moving, lay.nothing[0]]))
        u, fresh = c.alpha * c.mu, c.frame.fresh_spread
        self.unbiased = project(lay, c)
        vectors = [scaled, u, c.mu, c.alpha, c.frame.spread, fresh]
        if self.unbiased is not None:
            vectors += [c.alpha * u, c.alpha * u * fresh]
        wide = torch.split_with_sizes(torch.stack(vectors).index_select(1, lay.column), lay.column_sizes, 1)
        shapes = [(-1,) if lay.shapes[k][0] == 1 else (lay.shapes[k][0], 1, -1) for k in lay.moving]
        self.columns = {
            k: [v.view(s) if len(s) > 1 else v for v in w.unbind()]
            for k, w, s in zip(lay.moving, wide, shapes, strict=True)
        }
        self.weights: dict[int, Tensor] = lay.__dict__.setdefault("weights", {})
        self.bias_grad = self._bias_gradient(beta)
        self.on_v = self._on_v(beta)
        norms = torch.cat([torch.linalg.vector_norm(a, dim=-1).flatten() for a in self.on_v])
        self.square = norms * norms
        if lay.biased:
            self.square = self._at_biased(self.square, self.bias_grad * self.bias_grad)

    def _rows(self, k: int, tensor: Tensor) -> Tensor:
        """A tensor like the weight as [unit, column], or [group, unit, column] where there are groups."""
        lay = self.layout
        found = as_rows(lay.blocks[k], tensor, lay.inner[k])
        return found[0] if lay.shapes[k][0] == 1 else found

    def _weight(self, k: int) -> Tensor:
        """The weight of block k as rows; the view is kept while the weight stays where it is."""
        weight = self.layout.blocks[k].weight
        known = self.weights.get(k)
        if known is None or known.data_ptr() != weight.data_ptr():
            known = self.weights[k] = self._rows(k, weight.detach())
        return known

    def _per_row(self, k: int, values: Tensor) -> Tensor:
        """One value per unit of block k, to meet its rows."""
        groups, units = self.layout.shapes[k][:2]
        return values.unsqueeze(-1) if groups == 1 else values.view(groups, units, 1)

    def _at_biased(self, to: Tensor, value: Tensor) -> Tensor:
        """Add a value for each unit with a bias."""
        where = self.layout.unit_of_bias
        return to + value if where is None else to.index_add(0, where, value)

    def _of_biased(self, values: Tensor) -> Tensor:
        """The values of the units with a bias."""
        where = self.layout.unit_of_bias
        return values if where is None else values.index_select(0, where)

    def _bias_gradient(self, beta: Tensor | None) -> Tensor:
        lay = self.layout
        if not lay.biased:
            return lay.no_rows[:0]
        grads = [gradient(lay.blocks[k].biases[0]) for k in lay.biased]
        flipped = [lay.blocks[k].group["maximize"] for k in lay.biased]
        found = torch.cat([-g if f else g for g, f in zip(grads, flipped, strict=True)] if any(flipped) else grads)
        return found if beta is None else found * self._of_biased(lay.units.widen(beta))

    def _on_v(self, beta: Tensor | None) -> list[Tensor]:
        lay, found = self.layout, []
        biases = dict(zip(lay.biased, split(self.bias_grad, lay.bias_sizes), strict=True))
        kappa = split(self.unbiased.kappa, lay.sizes) if self.unbiased is not None else ()
        for k, block in enumerate(lay.blocks):
            grad = self._rows(k, gradient(block.weight))
            if block.group["maximize"]:
                grad = -grad
            if k not in lay.base:
                found.append(grad if beta is None else grad * beta[k])
                continue
            scaled, u = self.columns[k][:2]
            grad = grad * scaled
            shift = biases[k] if k in biases else times(grad, u) * kappa[k]
            found.append(grad.addcmul_(self._per_row(k, shift), u, value=-1))
        return found

    def sums(self, guarded: bool) -> rows.RowSums:
        """Let the gradients join the momentum, and add up the rows."""
        lay, bias = self.layout, self._directions()
        along, stretch, bend, level, length2 = parts = [list[Tensor]() for _ in range(5)]
        for k in range(len(lay.blocks)):
            none, at = lay.no_rows[: lay.sizes[k]], lay.levels[k]
            measured = guarded and lay.stages[k] is not None
            weight = self._weight(k)
            if k in lay.base:
                _, _, mu, alpha, spread, fresh, *bends = self.columns[k]
                self.steps[k] = step = self.steps[k] * alpha
                along.append(times(step, mu))
                if measured:
                    stretch.append(times(step * step, fresh))
                    length2.append(times(weight * weight, spread))
                    level.append(times(weight, mu) if at is None else times(weight, mu).add_(at))
                    bend.append(times(step, bends[1]) if k in lay.unbiased else none)
            else:
                along.append(none)
                if measured:
                    stretch.append(self.steps[k].square().sum(-1).flatten())
                    length2.append(weight.square().sum(-1).flatten())
                    level.append(none if at is None else at)
                    bend.append(none)
            if not measured:
                for part in parts[1:]:
                    part.append(none)
        full = self._at_biased(lay.no_rows, bias) if lay.biased else lay.no_rows
        if not guarded:
            none = lay.no_rows
            return rows.RowSums(self.square, torch.cat(along), none, none, none, none, full)
        bent = torch.cat(bend) if lay.unbiased else lay.no_rows
        return rows.RowSums(
            self.square, torch.cat(along), torch.cat(stretch), bent, torch.cat(level), torch.cat(length2), full
        )

    def _directions(self) -> Tensor:
        """Set `steps`, the direction on v of every row; the direction of every bias."""
        lay, m = self.layout, self.momentum
        self.steps, bias = self.on_v, self.bias_grad
        if not m:
            return bias
        buffers = [self._rows(k, lay.momentum_of(self.state, b.weight)) for k, b in enumerate(lay.blocks)]
        biases = [lay.momentum_of(self.state, lay.blocks[k].biases[0]) for k in lay.biased]
        torch._foreach_mul_([*buffers, *biases], m)
        torch._foreach_add_([*buffers, *biases], [*self.on_v, *split(self.bias_grad, lay.bias_sizes)])
        held = torch.cat(biases) if biases else bias
        if not self.ahead:
            self.steps = buffers
            return held
        self.steps = list(torch._foreach_add(self.on_v, buffers, alpha=m))
        return bias + m * held

    def move(self, motion: rows.Motion) -> None:
        """Move weights and biases."""
        lay = self.layout
        gains, backs = split(motion.gain, lay.sizes), split(motion.back, lay.sizes)
        for k, block in enumerate(lay.blocks):
            step = self.steps[k]
            if k in lay.unbiased:
                step = step.addcmul_(self._per_row(k, backs[k]), self.columns[k][6], value=-1)
            shrink(block.weight, rates(block)[0], block.group)
            self._weight(k).addcmul_(step, self._per_row(k, gains[k]))
        if lay.biased:
            for k, change in zip(lay.biased, split(self._of_biased(motion.bias), lay.bias_sizes), strict=True):
                block = lay.blocks[k]
                shrink(block.biases[0], rates(block)[1], block.bias_groups[0])
                block.biases[0].add_(change)


def times(matrix: Tensor, vector: Tensor) -> Tensor:
    """Rows [unit, column] or [group, unit, column] times a vector over the columns: one value per unit."""
    return torch.mv(matrix, vector) if matrix.dim() == 2 else torch.matmul(matrix, vector.mT).flatten()


def split(x: Tensor, sizes: list[int]) -> tuple[Tensor, ...]:
    """`x` in pieces."""
    return torch.split_with_sizes(x, sizes)


def project(layout: Layout, c: Coordinates) -> rows.Projection | None:
    """What projects the layers without bias, for each unit; None if there are none."""
    if not layout.unbiased:
        return None
    found = rows.projection(c.mu, c.alpha, c.frame.fresh_spread, layout.kernel, layout.groups, layout.group_unbiased)
    return rows.Projection(*(x.index_select(0, layout.group_of_unit) for x in found))


def shrink(p: Tensor, rate: Any, group: dict[str, Any]) -> None:
    """Decoupled weight decay."""
    if group["weight_decay"]:
        p.mul_(1 - rate * group["weight_decay"])


class Together:
    """One step of many blocks: look first, then move if all that was seen is finite."""

    def __init__(self, layout: Layout, state: Any, *, linear: bool, even: bool) -> None:
        """`even` is `EvenStep`'s rule; otherwise stochastic gradient with momentum."""
        self.layout, self.linear, self.even = layout, linear, even
        self.states = [state[b.weight] for b in layout.blocks]
        self.coordinates = Coordinates(layout, self.states, linear)
        self.rows = PlainRows(layout, self.coordinates, state, layout.blocks[0].group["momentum"], even)

    def finite(self) -> Tensor:
        """Whether all gradients are finite."""
        return torch.isfinite(self.rows.square).all()

    def commit(self, ok: Tensor | None) -> None:
        """Let the batches join the running moments."""
        self.coordinates.commit()

    def move(self, ok: Tensor | None, floor: float) -> None:
        """Make the step; the host knows that all is finite, so there is no mask."""
        lay, beta = self.layout, self.coordinates.beta
        groups = [b.group for b in lay.blocks]
        guarded = bool(lay.guarded) and any(g["trust"] is not None for g in groups)
        sums = self.rows.sums(guarded)
        both = [rates(b) for b in lay.blocks]
        radii = [
            torch.inf if s is None or g["trust"] is None else g["trust"]
            for s, g in zip(lay.stages, groups, strict=True)
        ]
        columns = [[r[0] for r in both], [r[1] if len(r) > 1 else 0.0 for r in both], radii, [1.0] * len(both)]
        rate, bias_rate, radius, scale = lay.set("units", columns, lay.units)
        if beta is not None:
            scale = lay.units.widen(beta)
        if self.even:
            scale = self._even(sums.square)
        motion = rows.motion(
            sums,
            self.rows.unbiased,
            scale=scale,
            rate=rate,
            bias_rate=bias_rate,
            radius=radius if guarded else None,
            floor=floor,
            crowd=None if self.linear else lay.units,
        )
        self.rows.move(motion)
        self._count(motion, guarded)

    def _even(self, square: Tensor) -> Tensor:
        """Eq. 11 per unit: one over the root of its running mean square, damped."""
        lay, groups = self.layout, [b.group for b in self.layout.blocks]
        old = torch.cat([s["square"] for s in self.states])
        mass = torch.stack([s["square_mass"] for s in self.states])
        dampings = [0.0 if b.entry is None else b.group["damping"] for b in lay.blocks]
        columns = [
            [g["decay"] for g in groups],
            [g["eps"] for g in groups],
            dampings,
            [1 - g["momentum"] for g in groups],
        ]
        decay, eps, damping, one = lay.set("even", columns, lay.units)
        (layer_decay,) = lay.set("decay", columns[:1])
        average, after = fold_mean(old, square, lay.units.widen(mass), decay), gain(mass, layer_decay)[1]
        put_all([s["square"] for s in self.states], split(average, lay.sizes))
        put_all([s["square_mass"] for s in self.states], after.unbind())
        return stepsize.normalized(one, stepsize.unit_level(average, square, damping, lay.units), eps)

    def _count(self, motion: rows.Motion, guarded: bool) -> None:
        """What the guards did, for `fired` and monitors."""
        lay, raised = self.layout, self.coordinates.frame.raised[:-1]
        if not lay.guarded or not (guarded or any(b.group.get("fresh_max") is not None for b in lay.blocks)):
            return
        held = lay.units.total(motion.held)
        largest = torch.segment_reduce(motion.relative2, "max", offsets=lay.units.offsets, unsafe=True).sqrt()
        if len(lay.moving) < len(lay.blocks):
            raised = torch.zeros_like(held).index_copy(0, lay.index(lay.moving), raised)
        table = torch.stack([raised, held, largest], 1)
        if len(lay.guarded) < len(lay.blocks):
            table = table.index_select(0, lay.index(lay.guarded))
        lay.last.copy_(table)
        lay.fired[:, :2].add_(lay.last[:, :2])
        lay.fired[:, 2].add_(1)


def begin(layout: Layout, state: Any, *, linear: bool, even: bool) -> "Together | step_kernel.TritonStep":
    """Look at the gradients of a layout's blocks, by kernels where they run."""
    make = step_kernel.TritonStep if layout.device.type == "cuda" else Together
    return make(layout, state, linear=linear, even=even)
