"""The step for many blocks at once on the CPU, in as few operations as may be; on a GPU `kernels.step` makes it.

The arithmetic is that of the block-by-block loop in `shell`, which stays as its reference. What belongs to inputs lies
end to end in one tensor, what belongs to units in another; what belongs to layers is read by the host, which leaves out
what a step does not need. Between two steps a network has driven all of this out of the processor's caches, so what
counts is how much code runs, Python's included: everything that goes by settings and shapes is made once.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import guards, moments, rows, stepsize, update
from . import room as at
from .constants import geometry_beta2, inverse_root
from .kernels import step as step_kernel
from .layout import Layout
from .motion import gradient, rates
from .room import Room


class Fixed(NamedTuple):
    """What goes by settings and by what layers have counted: the same in most steps.

    `scale` is what gradients are multiplied by: β, with the sign of `maximize`, over 1 − momentum, so that they join
    the momentum by interpolation. `share` is damping over the number of inputs, or of units.
    """

    sharing: list[float]
    beta: list[float]
    scales: list[float]
    unit_scale: Tensor
    divisors: Tensor  # per input: rows, rows, and rows times τ
    tau: Tensor
    input_scale: Tensor
    input_share: Tensor
    decays: list[float]
    decay: float | None  # if it is the same for all
    radii: list[float]
    guarded: bool
    watched: bool  # whether any guard's work is to be counted
    decayed: bool
    eps: Tensor
    share: Tensor
    shrunk: Tensor  # (1 − momentum)²


def fixed(layout: Layout, tally: dict[int, list[float]], old: list[float], momentum: float, linear: bool) -> Fixed:
    """From the settings of the blocks' groups."""
    lay, blocks = layout, layout.blocks
    groups, sharing = [b.group for b in blocks], [*old]
    for k, (_, _, applied, examples) in tally.items():
        declared = groups[k].get("sharing")
        if declared is not None or applied:
            sharing[k] = applied / max(1, examples) if declared is None else declared
    beta = [1.0] * len(blocks)
    if linear and tally:
        found = geometry_beta2(lay.fan_in, lay.tensor([sharing[k] for k in tally])).sqrt().tolist()
        beta = [dict(zip(tally, found, strict=True)).get(k, 1.0) for k in range(len(blocks))]
    scales = [(-b if g["maximize"] else b) / (1 - momentum) for g, b in zip(groups, beta, strict=True)]
    moving = [groups[k] for k in lay.moving]
    inputs = [
        [*(tally[k][0] for k in lay.moving), 1],
        [*(torch.inf if g["fresh_max"] is None else g["fresh_max"] for g in moving), torch.inf],
        [*(scales[k] for k in lay.moving), 1],
        [*(g["damping"] / n for g, n in zip(moving, lay.input_sizes, strict=True)), 0],
    ]
    radii = [
        math.inf if s is None or g["trust"] is None else g["trust"] for s, g in zip(lay.stages, groups, strict=True)
    ]
    number, tau, input_scale, input_share = lay.inputs.widen(lay.tensor(inputs).T).T.contiguous()
    decays = [g.get("decay", 0.0) for g in groups]
    guarded = bool(lay.guarded) and any(g["trust"] is not None for g in groups)
    shares = [
        0.0 if b.entry is None else b.group.get("damping", 0.0) / n for b, n in zip(blocks, lay.sizes, strict=True)
    ]
    return Fixed(
        sharing,
        beta,
        scales,
        lay.units.widen(lay.tensor(scales)),
        torch.stack([number, number, number * tau]),
        tau,
        input_scale,
        input_share,
        decays,
        decays[0] if len({*decays}) == 1 else None,
        radii,
        guarded,
        bool(lay.guarded) and (guarded or any(g.get("fresh_max") is not None for g in groups)),
        any(g["weight_decay"] for b in blocks for g in (b.group, *b.bias_groups)),
        lay.tensor([g.get("eps", 0.0) for g in groups]),
        lay.tensor(shares),
        lay.tensor([(1 - momentum) ** 2]),
    )


class Coordinates:
    """The coordinates of all blocks in one step, and their moments after it."""

    def __init__(self, layout: Layout, room: Room, momentum: float, linear: bool) -> None:
        """From the blocks' state and what their stages hold."""
        self.layout, self.room, lay = layout, room, layout
        self.mass, sharing, self.square_mass = room.layers.tolist()
        tally = [s.counts_here() for s in room.shared]
        lay.all_seen = len(tally) == len(lay.guarded) and all([counts[2] for counts in tally])
        key = room.settings(), tally, None if lay.all_seen else sharing
        self.fixed: Fixed = room.kept(
            "fixed", key, lambda: fixed(lay, dict(zip(lay.shared, tally, strict=True)), sharing, momentum, linear)
        )
        self.renewed = sharing != self.fixed.sharing
        self.raised: list[float] | None = None  # how many inputs of each moving layer were raised; None: none
        if lay.moving:
            self._frame(dict(zip(lay.shared, tally, strict=True)))

    def _frame(self, tally: dict[int, list[float]]) -> None:
        lay, room, place = self.layout, self.room, self.room.vector_of
        firsts, seconds, self.settled = [], [], self._centred()
        for k, stage in zip(lay.moving, room.moving, strict=True):
            first, second = stage.sums_here()
            firsts.append(first)
            seconds.append(second)
            self.settled = self.settled and self.mass[k] > 0 and tally[k][0] > 0
        seconds.append(room.none)
        torch.cat([*firsts, room.none, *seconds, *seconds], out=room.batch_flat)
        self.settled = self.settled and self._settled_frame()
        mu = room.mx if self.settled else self._moving_frame([tally[k][0] for k in lay.moving])
        alpha = inverse_root(place[at.SPREAD], room.tiny, out=place[at.ALPHA])
        shift = torch.mul(alpha, mu, out=place[at.SHIFT])
        torch.mul(alpha, self.fixed.input_scale, out=place[at.SCALED])
        if lay.unbiased:
            torch.mul(alpha, shift, out=place[at.BENT])
            torch.mul(place[at.BENT], place[at.FRESH], out=place[at.BENT_FRESH])
        torch.index_select(room.vectors, 1, lay.column, out=room.columns)
        torch.index_select(mu, 0, lay.column, out=room.mu)
        self.mu = mu

    def _centred(self) -> bool:
        """Whether all sums are about the running means: nobody has written to either since the last step."""
        room = self.room
        if room.centred_at == [room.moments._version, *[s.centre._version for s in room.moving]]:
            return True
        return all(torch.equal(s.centre, m) for s, m in zip(room.moving, room.mean_of, strict=True))

    def _settled_frame(self) -> bool:
        """Spreads where every layer has moments and sums about its running mean; False if a batch is not finite."""
        room, over = self.room, self.layout.inputs
        torch.div(room.batch, self.fixed.divisors, out=room.means)
        total, same = update.settled_frame(
            room.vx, room.squares_of_batch, self.fixed.input_share, over, room.spreads, room.vector_of[at.SPREAD]
        )
        if not all(map(math.isfinite, total.tolist())):
            return False
        if not same:
            self.raised = over.total((room.means[2] > room.vx).to(total.dtype)).tolist()
        return True

    def _moving_frame(self, counts: list[float]) -> Tensor:
        """Spreads in all other cases; gives μ."""
        lay, room = self.layout, self.room
        counted, mass = lay.tensor([[*counts, 0], [*(self.mass[k] for k in lay.moving), 0]])
        self.centre = torch.cat([*(s.centre for s in room.moving), room.none])
        self.running = moments.Running(room.mx, room.vx, lay.inputs.widen(mass))
        self.batch_sums = moments.Sums(lay.inputs.widen(counted), *room.batch[:2])
        self.batch = update.batch_of(self.batch_sums, self.centre, lay.inputs)
        found = update.moving_frame(
            self.running,
            self.batch_sums,
            self.centre,
            mass,
            batch=self.batch,
            damping=self.fixed.input_share * lay.inputs.widen(lay.inputs.offsets.diff()),
            fresh_max=self.fixed.tau,
            over=lay.inputs,
        )
        self.raised = found.raised.tolist()
        room.vector_of[at.SPREAD].copy_(found.spread)
        room.vector_of[at.FRESH].copy_(found.fresh_spread)
        return found.constants.mu

    def projection(self) -> rows.Projection:
        """What projects the layers without bias, for each unit."""
        lay = self.layout
        alpha, fresh = self.room.vector_of[at.ALPHA], self.room.vector_of[at.FRESH]
        found = rows.projection(self.mu, alpha, fresh, lay.kernel, lay.groups, lay.group_unbiased)
        return rows.Projection(*(x.index_select(0, lay.group_of_unit) for x in found))

    def commit(self) -> None:
        """Let the batches join the running moments, and the next ones be summed about them."""
        lay, room, decay = self.layout, self.room, self.fixed.decay
        alike = decay is not None and lay.moving and self.settled
        if lay.moving and self.settled:
            self._join()
        elif lay.moving:
            self._join_moving()
        if alike and not self.renewed:
            room.masses.lerp_(room.full, 1 - decay)  # type: ignore[operator]
        else:
            table = [self.mass, self.fixed.sharing, self.square_mass]
            room.layers.copy_(torch.tensor(table, dtype=lay.dtype))
        room.steps.add_(1)

    def _join(self) -> None:
        lay, room, weights = self.layout, self.room, []
        for k in lay.moving:
            weight, self.mass[k] = moments.gain(self.mass[k], self.fixed.decays[k])
            weights.append(weight)
        alike = len({*weights}) == 1
        weight_of_batch = weights[0] if alike else lay.inputs.widen(lay.tensor([*weights, 0]))
        moments.fold_settled(room.mx, room.vx, room.offset, room.square, weight_of_batch)
        centres, versions = [], [room.moments._version]
        for stage in room.moving:
            centres.append(stage.centre)
            versions.append(stage.centre._version + 1)
            stage.centred = True
        torch._foreach_copy_(centres, room.mean_of)
        room.centred_at = versions

    def _join_moving(self) -> None:
        lay, room = self.layout, self.room
        decay = lay.inputs.widen(lay.tensor([*(self.fixed.decays[k] for k in lay.moving), 0]))
        after = update.moments_after(self.running, self.batch_sums, self.centre, decay=decay, batch=self.batch)
        for k, mass in zip(lay.moving, after.mass.index_select(0, lay.inputs.offsets[:-2]).tolist(), strict=True):
            self.mass[k] = mass
        centre = torch.where(after.mass > 0, after.mx, torch.nan)[: lay.identity]
        room.mx.copy_(after.mx)
        room.vx.copy_(after.vx)
        torch._foreach_copy_([s.centre for s in room.moving], torch.split(centre, lay.input_sizes))
        for k, stage in zip(lay.moving, room.moving, strict=True):
            stage.centred = self.mass[k] > 0


class Together:
    """One step of many blocks: look first, then move if all that was seen is finite."""

    def __init__(self, layout: Layout, state: Any, *, linear: bool, even: bool) -> None:
        """`even` is `EvenStep`'s rule; otherwise stochastic gradient with momentum."""
        self.layout, self.state, self.linear, self.even = layout, state, linear, even
        if layout.plain_room is None:
            layout.plain_room = Room(layout, state, even)
        self.room: Room = layout.plain_room
        self.momentum = layout.blocks[0].group["momentum"]
        self.room.settle(state)
        self.coordinates = Coordinates(layout, self.room, self.momentum, linear)
        self.fixed = self.coordinates.fixed
        self.projection = self.coordinates.projection() if layout.unbiased else None
        self.on_v = self._on_v()

    def _on_v(self) -> list[Tensor]:
        """The gradient on v of every row over 1 − momentum; also its norm, and the biases' gradients."""
        lay, room, found = self.layout, self.room, self.room.like_weights()
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
        for step, norm in zip(found, norms, strict=True):
            if self.even:
                torch.linalg.vector_norm(step, 2, -1, out=norm)
            else:
                torch.sum(step, -1, out=norm)  # whether it is finite is all that is asked
        return found

    def _project(self, found: list[Tensor], kappa: Tensor) -> None:
        """Project the gradients of layers without bias."""
        lay, room, shift = self.layout, self.room, self.room.column_of[at.SHIFT]
        for k in lay.unbiased:
            room.times(found[k], shift[k], at.ALONG, k)
        room.unit[at.ALONG].mul_(kappa)
        for k in lay.unbiased:
            found[k].addcmul_(room.row_of[at.ALONG][k], shift[k], value=-1)

    def finite(self) -> Tensor:
        """Whether all gradients are finite."""
        return self.room.yes if math.isfinite(self.room.seen.sum().item()) else self.room.no

    def commit(self, ok: Tensor | None) -> None:
        """Let the batches join the running moments."""
        self.coordinates.commit()

    def move(self, ok: Tensor | None, floor: float) -> None:
        """Make the step; the host knows that all is finite, so there is no mask."""
        lay, now = self.layout, self.fixed
        steps = self._directions()
        sums = self._sums(steps)
        lrs = [float(g["lr"]) for g in self.room.groups]
        both, rate, bias_rate = self.room.kept("rates", (lrs, now.beta), self._rates)
        step, bias_step = self._lengths(rate, bias_rate)
        motion = rows.motion(sums, self.projection, step, bias_step)
        held: list[float] | None = None
        largest2: Tensor | None = None
        if now.guarded:
            unit2, step2 = rows.reach(sums, self.projection, motion.back, step, bias_step)
            relative2 = guards.relative(unit2, step2, floor)
            largest2 = lay.units.most(relative2)
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
            buffers, biases = room.buffers, room.bias_buffers
            torch._foreach_lerp_([*buffers, *biases], [*steps, *room.biases_of[at.BIAS_GRAD]], 1 - m)
            room.gather(at.BIAS, biases)
            if self.even:
                torch._foreach_lerp_(steps, buffers, m)
                bias.lerp_(bias_grad, 1 - m)
            else:
                steps = buffers
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
    make = step_kernel.TritonStep if layout.device.type == "cuda" else Together
    return make(layout, state, linear=linear, even=even)
