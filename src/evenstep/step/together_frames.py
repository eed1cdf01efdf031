"""Coordinates and moments of many blocks at once on the CPU: what `frames` has for one block, for `together`.

What belongs to inputs lies end to end in one tensor; what belongs to layers is read by the host.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..math import guards, moments, rows, update
from ..math.constants import geometry_beta2, inverse_root, unsteady
from . import room as at
from .layout import Layout
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
    number: Tensor  # of rows, for each input
    tau: Tensor
    input_scale: Tensor
    input_share: Tensor
    decays: list[float]
    decay: float | None  # if it is the same for all
    radii: list[float]
    guarded: bool
    free: Tensor | None  # layers that no radius holds, where there are some
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
        for k, b in zip(tally, found, strict=True):
            beta[k] = b
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
    free = [k for k in lay.guarded if groups[k]["trust"] is None]
    shares = [
        0.0 if b.entry is None else b.group.get("damping", 0.0) / n for b, n in zip(blocks, lay.sizes, strict=True)
    ]
    return Fixed(
        sharing,
        beta,
        scales,
        lay.units.widen(lay.tensor(scales)),
        number,
        tau,
        input_scale,
        input_share,
        decays,
        decays[0] if len({*decays}) == 1 else None,
        radii,
        guarded,
        lay.index(free) if free else None,
        bool(lay.guarded) and (guarded or any(g.get("fresh_max") is not None for g in groups)),
        any(g["weight_decay"] for b in blocks for g in (b.group, *b.bias_groups)),
        lay.tensor([g.get("eps", 0.0) for g in groups]),
        lay.tensor(shares),
        lay.tensor([(1 - momentum) ** 2]),
    )


class Coordinates:
    """The coordinates of all blocks in one step, and their moments after it.

    In most steps every layer is `settled`: it has moments, a batch that is finite, and sums about its running mean. The
    short way that is open then saves a third of a small network's step; the general one is `update.moving_frame`'s.
    """

    def __init__(self, layout: Layout, room: Room, momentum: float, linear: bool) -> None:
        """From the blocks' state and what their stages hold."""
        self.layout, self.room, lay = layout, room, layout
        self.mass, sharing, self.square_mass = room.layers.tolist()
        tally = [s.counts() for s in room.shared]
        lay.all_seen = len(tally) == len(lay.guarded) and all([counts[2] for counts in tally])
        key = lay.settings(), tally, None if lay.all_seen else sharing
        self.fixed: Fixed = room.kept(
            "fixed", key, lambda: fixed(lay, dict(zip(lay.shared, tally, strict=True)), sharing, momentum, linear)
        )
        self.settled = False
        self.renewed = sharing != self.fixed.sharing
        self.raised: list[float] | None = None  # how many inputs of each moving layer were raised; None: none
        if lay.moving:
            self._frame(dict(zip(lay.shared, tally, strict=True)))

    def _frame(self, tally: dict[int, list[float]]) -> None:
        lay, room, place = self.layout, self.room, self.room.vector_of
        settled = self._centred()
        for k, stage, both in zip(lay.moving, room.moving, room.sums_of, strict=True):
            stage.write_sums(*both)
            settled = settled and self.mass[k] > 0 and tally[k][0] > 0
        self.settled = settled and self._settled_frame()
        mu = room.mx if self.settled else self._general_frame([tally[k][0] for k in lay.moving])
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
        torch.div(room.batch, self.fixed.number, out=room.averages)
        mass = over.widen(self.layout.tensor([*(self.mass[k] for k in self.layout.moving), 1.0]))
        torch.maximum(room.square, guards.unproven(room.mx, mass), out=room.about)
        torch.div(room.about, self.fixed.tau, out=room.bounds)
        vx = unsteady(room.vx, room.mx, self.layout.steady) if self.layout.unbiased else room.vx
        total, same = update.settled_frame(
            vx, room.squares_of_batch, self.fixed.input_share, over, room.spreads, room.vector_of[at.SPREAD]
        )
        if not all(map(math.isfinite, total.tolist())):
            return False
        if not same:
            self.raised = over.total((room.bounds > vx).to(total.dtype)).tolist()
        return True

    def _general_frame(self, counts: list[float]) -> Tensor:
        """Spreads in all other cases; gives μ."""
        lay, room = self.layout, self.room
        counted, mass = lay.tensor([[*counts, 0], [*(self.mass[k] for k in lay.moving), 0]])
        self.centre = torch.cat([*(s.centre for s in room.moving), room.none])
        self.running = moments.Running(room.mx, room.vx, lay.inputs.widen(mass))
        self.batch_sums = moments.Sums(lay.inputs.widen(counted), *room.batch)
        self.batch = update.batch_of(self.batch_sums, self.centre, lay.inputs)
        found = update.moving_frame(
            self.running,
            self.batch_sums,
            self.centre,
            mass,
            batch=self.batch,
            damping=self.fixed.input_share * lay.inputs.widen(lay.inputs.offsets.diff()),
            fresh_max=self.fixed.tau,
            steady=lay.steady if lay.unbiased else 0.0,
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
        if self.settled:
            self._join_settled()
        elif lay.moving:
            self._join_general()
        if decay is not None and self.settled and not self.renewed:
            room.masses.lerp_(room.full, 1 - decay)
        else:
            table = [self.mass, self.fixed.sharing, self.square_mass]
            room.layers.copy_(torch.tensor(table, dtype=lay.dtype))
        room.steps.add_(room.one)

    def _join_settled(self) -> None:
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
            stage.centre_is_mean = True
        torch._foreach_copy_(centres, room.mean_of)
        room.centred_at = versions

    def _join_general(self) -> None:
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
            stage.centre_is_mean = self.mass[k] > 0
