"""The step for many blocks at once on the CPU, in as few operations as may be; on a GPU `kernels.step` makes it.

The arithmetic is that of the block-by-block loop in `shell`, which stays as its reference. What belongs to inputs lies
end to end in one tensor, what belongs to units in another; what belongs to layers is read by the host, which leaves out
what a step does not need. Between two steps a network has driven all of this out of the processor's caches, so what
counts is how much code runs, Python's included: everything that goes by settings and shapes is made once.
"""

import math
from typing import Any

import torch
from torch import Tensor

from ..math import guards, moments, rows, stepsize
from ..math.constants import inverse_root
from ..torch_optimizer.motion import gradient, rates
from . import room as at
from .block import plain_share
from .layout import Layout
from .room import Room
from .together_frames import Coordinates
from .triton import host as step_kernel


class Together:
    """One step of many blocks: look first, then move if all that was seen is finite."""

    counts_steps = True  # in `commit`

    def __init__(self, layout: Layout, state: Any, *, linear: bool, even: bool) -> None:
        """`even` is `EvenStep`'s rule; otherwise stochastic gradient with momentum."""
        self.layout, self.state, self.linear, self.even = layout, state, linear, even
        if layout.plain_room is None:
            layout.plain_room = Room(layout, state, even)
        self.room: Room = layout.plain_room
        self.momentum = layout.momentum
        self.room.settle(state)
        self.coordinates = Coordinates(layout, self.room, self.momentum, linear)
        self.fixed = self.coordinates.fixed
        self.projection = self.coordinates.projection() if layout.unbiased else None
        self.whole, self.on_v = self.room.like_weights()
        self._to_v()

    def _to_v(self) -> None:
        """The gradient on v of every row over 1 − momentum; also its norm, and the biases' gradients."""
        lay, room, found = self.layout, self.room, self.on_v
        if lay.biased:
            room.gather(at.BIAS_GRAD, [gradient(lay.blocks[k].biases[0]) for k in lay.biased])
            room.unit[at.BIAS_GRAD].mul_(self.fixed.unit_scale)
        columns, norms = room.column_of[at.SCALED], room.unit_of[at.NORM]
        for k, block in enumerate(lay.blocks):
            grad = room.rows_of_gradient(k, gradient(block.weight))
            torch.mul(grad, columns[k] if k in columns else self.fixed.scales[k], out=found[k])
        if room.shifted:
            torch._foreach_addcmul_([found[k] for k in room.shifted], *room.shifts, value=-1)
        if self.projection is not None:
            self._project(found, self.projection.kappa)
        if self.even:
            for step, norm in zip(found, norms, strict=True):
                torch.linalg.vector_norm(step, 2, -1, out=norm)
        else:
            torch.sum(self.whole, 0, out=room.total)  # whether it is finite is all that is asked

    def _project(self, found: list[Tensor], kappa: Tensor) -> None:
        """Project the gradients of layers without bias."""
        lay, room, shift = self.layout, self.room, self.room.column_of[at.SHIFT]
        for k in lay.unbiased:
            room.times(found[k], shift[k], at.ALONG, k)
        room.unit[at.ALONG].mul_(kappa)
        for k in lay.unbiased:
            found[k].addcmul_(room.row_of[at.ALONG][k], shift[k], value=-1)

    def finite(self) -> bool:
        """Whether all gradients are finite."""
        return math.isfinite(self.room.seen.sum().item())

    def commit(self, ok: Tensor | None) -> None:
        """Let the batches join the running moments."""
        self.coordinates.commit()

    def move(self, ok: Tensor | None, floor: float) -> None:
        """Make the step; the host knows that all is finite, so there is no mask."""
        lay, now = self.layout, self.fixed
        steps = self._directions()
        sums = self._sums(steps)
        lrs = [(float(g["lr"]), plain_share(g)) for g in lay.param_groups]
        both, rate, bias_rate = self.room.kept("rates", (lrs, now.beta), self._rates)
        step, bias_step = self._lengths(rate, bias_rate)
        motion = rows.motion(sums, self.projection, step, bias_step)
        held: list[float] | None = None
        largest2: Tensor | None = None
        if now.guarded:
            unit2, step2 = rows.reach(sums, self.projection, motion.back, step, bias_step)
            relative2 = guards.relative(unit2, step2, floor)
            largest2 = lay.units.most(relative2)
            if now.free is not None:
                largest2.index_fill_(0, now.free, 0)
            pairs = zip(largest2.tolist(), now.radii, strict=True)
            if not all(guards.surely_free(most, radius, not self.linear) for most, radius in pairs):
                radius = lay.units.widen(lay.tensor(now.radii))
                typical2 = None if self.linear else guards.typical(relative2, lay.units)
                factor, over = guards.trust_factor(unit2, step2, radius, floor, typical2)
                held = lay.units.total(over.to(factor.dtype)).tolist()
                motion = motion.shortened(factor)
        self._displace(steps, motion, both)
        if now.watched:
            self._count(held, largest2)

    def _rates(self) -> tuple[list[list[float]], Tensor, Tensor]:
        """Stepsizes of each block's weight and bias, and of each unit with what its direction is multiplied by."""
        lay, beta = self.layout, self.fixed.beta
        both = [[float(r) for r in rates(b)] for b in lay.blocks]
        scale = 1 - self.momentum if self.even else 1.0
        columns = [
            [r[0] * b * scale, (r[1] * b * scale if len(r) > 1 else 0.0)] for r, b in zip(both, beta, strict=True)
        ]
        rate, bias_rate = lay.units.widen(lay.tensor(columns)).T.contiguous()
        return both, rate, bias_rate

    def _directions(self) -> list[Tensor]:
        """The direction on w of every row before it is scaled and projected; those of the biases, on v, in `units`."""
        lay, room, m, free = self.layout, self.room, self.momentum, self.on_v
        steps, bias, bias_grad = free, room.unit[at.BIAS], room.unit[at.BIAS_GRAD]
        if m:
            room.momentum.lerp_(self.whole, 1 - m)
            room.bias_momentum.lerp_(bias_grad, 1 - m)
            if self.even:
                self.whole.lerp_(room.momentum, m)
                torch.lerp(room.bias_momentum, bias_grad, 1 - m, out=bias)
            else:
                steps = room.buffers
                bias.copy_(room.bias_momentum)
        elif lay.biased:
            bias.copy_(bias_grad)
        steps, alpha = [*steps], room.column_of[at.ALPHA]
        for k in lay.moving:
            steps[k] = torch.mul(steps[k], alpha[k], out=free[k])
        return steps

    def _sums(self, steps: list[Tensor]) -> rows.RowSums:
        """Add up the rows."""
        lay, room = self.layout, self.room
        mu, spread, fresh = room.mu_of, room.column_of[at.SPREAD], room.column_of[at.FRESH]
        for k in lay.moving:
            room.times(steps[k], mu[k], at.ALONG, k)
        if self.fixed.guarded:
            for k in lay.guarded:
                weight, level = room.weights[k], lay.levels[k]
                if k in mu:
                    room.times(weight, mu[k], at.LEVEL, k, level)
                elif level is not None:
                    room.unit_of[at.LEVEL][k].view(-1).copy_(level)
                room.times_squares(weight, spread.get(k), at.LENGTH2, k)
                room.times_squares(steps[k], fresh.get(k), at.STRETCH, k)
            for k in lay.unbiased:
                room.times(steps[k], room.column_of[at.BENT_FRESH][k], at.BEND, k)
        return room.sums

    def _lengths(self, rate: Tensor, bias_rate: Tensor) -> tuple[Tensor, Tensor]:
        """How far each unit and its bias go along their directions, the rule's scale included; in `units`."""
        unit = self.room.unit
        bias_step = torch.mul(bias_rate, unit[at.BIAS], out=unit[at.BIAS_STEP])
        if not self.even:
            return rate, bias_step
        scale = self._even()
        return torch.mul(rate, scale, out=unit[at.STEP]), bias_step.mul_(scale)

    def _even(self) -> Tensor:
        """Eq. 11 per unit: one over the root of its running mean square, damped."""
        lay, room, now, masses = self.layout, self.room, self.fixed, self.coordinates.square_mass
        weights: list[float] = []
        for k, decay in enumerate(now.decays):
            weight, masses[k] = moments.gain(masses[k], decay)
            weights.append(weight)
        of_batch: float | Tensor = weights[0] if len({*weights}) == 1 else lay.units.widen(lay.tensor(weights))
        norm, bias = room.unit[at.NORM], room.unit[at.BIAS_GRAD]
        square = torch.addcmul(norm * norm, bias, bias).mul_(now.shrunk)
        average = room.squares.lerp_(square, of_batch)
        level = lay.units.widen(torch.addcmul(now.eps, lay.units.total(average), now.share))
        scale = inverse_root(torch.maximum(average, square).add_(level), room.tiny)
        scales = torch.split(scale, lay.sizes) if lay.outside else ()
        for k in lay.outside:
            room.times_squares(room.weights[k], None, at.LENGTH2, k)
            scales[k].mul_(stepsize.own_length(room.unit_of[at.LENGTH2][k]))
        return scale

    def _displace(self, steps: list[Tensor], motion: rows.Motion, both: list[list[float]]) -> None:
        """Move weights and biases."""
        lay, room = self.layout, self.room
        if motion.back is not None:
            backs = torch.split(motion.back, lay.sizes)
            for k in lay.unbiased:
                back = backs[k].view(room.row_of[at.STEP][k].shape)
                steps[k].addcmul_(back, room.column_of[at.BENT][k], value=-1)
        if self.fixed.decayed:
            for block, rate in zip(lay.blocks, both, strict=True):
                for p, r, group in zip(block.parameters, rate, [block.group, *block.bias_groups], strict=True):
                    if group["weight_decay"]:
                        p.mul_(1 - r * group["weight_decay"])
        if motion.gain is not room.unit[at.STEP]:
            room.unit[at.STEP].copy_(motion.gain)
        torch._foreach_addcmul_(room.weights, steps, room.row_of[at.STEP], value=-1)
        if lay.biased:
            room.unit[at.BIAS].copy_(motion.bias)
            torch._foreach_sub_(room.biases, room.biases_of[at.BIAS])

    def _count(self, held: list[float] | None, largest2: Tensor | None) -> None:
        """What the guards did, for `fired` and monitors."""
        lay, room, raised = self.layout, self.room, self.coordinates.raised
        room.steps_fired.add_(room.one)
        if held is None and raised is None and not room.noted and room.largest is not None and largest2 is not None:
            torch.sqrt(largest2, out=room.largest)
            return
        none = [0.0] * len(lay.blocks)
        inputs = dict(zip(lay.moving, raised or none, strict=False))
        largest = none if largest2 is None else largest2.sqrt().tolist()
        lay.last.copy_(torch.tensor([[inputs.get(k, 0.0), (held or none)[k], largest[k]] for k in lay.guarded]))
        lay.fired[:, :2].add_(lay.last[:, :2])
        room.noted = raised is not None or held is not None


def begin(layout: Layout, state: Any, *, linear: bool, even: bool) -> "Together | step_kernel.TritonStep":
    """Look at the gradients of a layout's blocks, by kernels where they run."""
    make = step_kernel.TritonStep if layout.by == "triton" else Together
    return make(layout, state, linear=linear, even=even)
