"""The step of many blocks on the CPU by `native.c`, in three calls; `together.Together` makes it in plain torch."""

import ctypes
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from ..constants import STEADY
from ..guards import CROWD, DRIFT, LEAST
from . import native, tables

ROW = tables.BIAS_STEP + 1  # addresses of a block
ALONE = 2**18  # weights up to which one thread is faster


def serves(layout: Any) -> bool:
    """Whether the library is there."""
    return native.library(layout.stored) is not None


class Kept:
    """The tensors of state that the kernels need, and where their addresses belong in a table."""

    def __init__(self, table: Any, dtype: torch.dtype) -> None:
        """None so far."""
        self.table, self.dtype = table, dtype
        self.parts: list[tuple[Tensor, dict[str, torch.Size], Any]] = []  # parameters, and what of their state
        self.places: list[int] = []
        self.known: list[int] = []  # the ids of states, to see whether one was put in the place of another
        self.mine: list[tuple[Any, Any]] = []
        self.tensors: list[Tensor] = []
        self.aliases: list[Tensor] = []  # no other tensor comes to lie where these do, whatever becomes of the state
        self.ids: list[int] = []
        self.last: list[int] = []

    def add(self, p: Tensor, places: dict[str, int], shapes: dict[str, torch.Size]) -> None:
        """What is needed of the state of `p`."""
        if places:
            names = [*places] if len(places) > 1 else [*places] * 2  # a single one would come without a tuple
            self.parts.append((p, shapes, itemgetter(*names)))
            self.places += [places[name] for name in names]

    def write(self, state: Any) -> None:
        """Write the addresses; tensors that are others than before, or elsewhere, are looked at first."""
        known = [*map(id, state.values())]
        if known != self.known:
            self.mine, self.known = [(look, state[p]) for p, _, look in self.parts], known
        found = [tensor for look, mine in self.mine for tensor in look(mine)]
        if [*map(id, found)] != self.ids or [tensor.data_ptr() for tensor in found] != self.last:
            self._take(state)
            for place, address in zip(self.places, self.last, strict=True):
                self.table[place] = address

    def _take(self, state: Any) -> None:
        """Look at all tensors: C takes what it is given."""
        for p, shapes, _ in self.parts:
            for name, shape in shapes.items():
                value = state[p][name]
                if value.shape != shape:
                    raise RuntimeError(
                        f"the state {name!r} of a parameter of shape {[*p.shape]} has shape {[*value.shape]}, where "
                        f"{[*shape]} is needed; load a checkpoint of this model, or delete the parameter from the "
                        "optimizer's state, which is then made anew."
                    )
                dtype = {"step": torch.float32, "momentum_buffer": p.dtype}.get(name, self.dtype)
                stride = p.stride() if name == "momentum_buffer" else (1,) * len(shape)
                if (type(value), value.dtype, value.device, value.stride()) != (Tensor, dtype, p.device, stride):
                    like = state[p][name] = torch.empty_strided(shape, stride, dtype=dtype, device=p.device)
                    like.copy_(value)
        self.tensors = [tensor for p, _, look in self.parts for tensor in look(state[p])]
        self.aliases = [tensor.detach() for tensor in self.tensors]
        self.ids = [*map(id, self.tensors)]
        self.last = [tensor.data_ptr() for tensor in self.tensors]


class Room:
    """What a layout needs from step to step: the tables, and room for what is worked out."""

    def __init__(self, layout: Any, state: Any, *, linear: bool, even: bool) -> None:
        """For the layout's blocks and one rule."""
        self.layout, self.library = layout, native.library(layout.stored)
        count, width, dtype = len(layout.blocks), layout.identity + 1, layout.dtype
        rows = tables.shapes(layout)
        longest = max(row[tables.COLUMNS] for row in rows)
        self.shapes = flat(ctypes.c_int64, rows)
        self.addresses = (ctypes.c_int64 * (count * ROW))()
        self.tallies = (ctypes.c_double * (4 * count))()
        self.vectors = torch.ones(4, width, dtype=dtype)
        self.vectors[0] = 0
        several = native.parallel() and sum(s.numel() for s in layout.shapes) > ALONE
        self.parts = min(native.PARTS, torch.get_num_threads()) if several else 1
        self.columns = torch.zeros(self.parts, native.PER_COLUMN, longest, dtype=dtype)
        self.layers = torch.zeros(4, count, dtype=dtype)
        self.sums, self.motion = (torch.zeros(n, layout.total, dtype=dtype) for n in (native.SUMS, 3))
        self.given_at = 0  # where the rule's gradients and steps lay when their addresses were written
        self.counts_steps = layout.given is None and all(
            state[p]["step"].dtype == torch.float32 for p in layout.parameters
        )
        self.momentum = layout.momentum
        self.kept = Kept(self.addresses, dtype)
        shared = {*layout.shared}
        for k in range(count):
            self._keep(k, k in shared, even)
        for k in layout.shared:
            self.addresses[k * ROW + tables.TALLY] = ctypes.addressof(self.tallies) + 32 * k
        self.set_to: Any = None  # what the settings were made from
        self.job = native.Job(blocks=count, width=width, longest=longest, units=layout.total)
        self.job.momentum, self.job.linear, self.job.even = float(self.momentum), linear, even
        self.job.given = layout.given is not None
        self.job.parallel = native.parallel()
        self.job.crowd, self.job.least = 0.0 if linear else CROWD, LEAST
        self.job.steady, self.job.drift = STEADY, DRIFT
        self.job.addresses, self.job.shapes = map(ctypes.addressof, (self.addresses, self.shapes))
        for name in ("vectors", "columns", "layers", "sums", "motion"):
            setattr(self.job, name, getattr(self, name).data_ptr())
        if layout.guarded:
            self.job.last, self.job.fired = layout.last.data_ptr(), layout.fired.data_ptr()
        self.at = ctypes.addressof(self.job)

    def _keep(self, k: int, shared: bool, even: bool) -> None:
        """Note the state of block k."""
        block, start = self.layout.blocks[k], k * ROW
        columns = (tables.BUFFER, tables.STEP), (tables.BIAS_BUFFER, tables.BIAS_STEP)
        for p, (buffer, step) in zip(block.parameters, columns, strict=False):
            places = {"momentum_buffer": start + buffer} if self.momentum else {}
            if self.counts_steps:
                places["step"] = start + step
            if p is block.weight:
                needed = [k in self.layout.base] * 3 + [shared] + [even] * 2
                names = zip(tables.KEPT, range(tables.MX, tables.SHOWN), needed, strict=True)
                places |= {name: start + at for name, at, need in names if need}
            stage = self.layout.stages[k]
            inputs = [] if stage is None else [stage.inputs]
            sizes = {"momentum_buffer": p.shape, "mx": inputs, "vx": inputs, "square": [self.layout.sizes[k]]}
            self.kept.add(p, places, {name: torch.Size(sizes.get(name, [])) for name in places})

    def settle(self) -> None:
        """Write the table of settings again, if they have changed.

        All of torch's threads are called where several are: a smaller team would have the others started anew after it.
        """
        lay = self.layout
        if self.parts > 1:
            self.job.threads = torch.get_num_threads()
        self.job.parts = min(self.parts, self.job.threads) if self.parts > 1 else 1
        now = lay.settings(), [float(group["lr"]) for group in lay.param_groups]
        if now != self.set_to:
            self.settings, self.set_to = flat(ctypes.c_double, tables.settings(lay)), now
            groups = [block.group for block in lay.blocks]
            guarded = bool(lay.guarded) and any(g["trust"] is not None for g in groups)
            self.job.settings, self.job.guarded = ctypes.addressof(self.settings), guarded
            self.job.counted = bool(lay.guarded) and (guarded or any(g.get("fresh_max") is not None for g in groups))


class NativeStep:
    """One step of many blocks: look first, then move if all that was seen is finite."""

    def __init__(self, layout: Any, state: Any, *, linear: bool, even: bool) -> None:
        """`even` is `EvenStep`'s rule; otherwise stochastic gradient with momentum."""
        self.layout = layout
        if layout.native_room is None:
            layout.native_room = Room(layout, state, linear=linear, even=even)
        room = self.room = layout.native_room
        self.counts_steps = room.counts_steps
        self.kept: list[Tensor] = []  # gradients, alive until the step is made, whatever other threads do
        room.settle()
        room.kept.write(state)
        self._look_at_blocks()
        self._look_at_stages()
        if layout.given is not None:
            layout.given.open()
            self._look_at_given()

    def _look_at_blocks(self) -> None:
        """Write where parameters and gradients are."""
        table, start = self.room.addresses, 0
        for block, level in zip(self.layout.blocks, self.layout.levels, strict=True):
            table[start + tables.WEIGHT], table[start + tables.GRAD] = self._both(block.weight)
            if block.biases:
                table[start + tables.LEVEL], table[start + tables.BIAS_GRAD] = self._both(block.biases[0])
            elif level is not None:  # it does not train; `Layout.whole` has looked at it
                table[start + tables.LEVEL] = level.data_ptr()
            start += ROW

    def _look_at_given(self) -> None:
        """Write where gradients on v go, and where steps on v will be."""
        given, table, start = self.layout.given, self.room.addresses, 0
        if given.both.data_ptr() != self.room.given_at:
            self.room.given_at = given.both.data_ptr()
            for found in given.addresses():
                table[start + tables.SHOWN : start + tables.BIAS_GIVEN + 1] = found
                start += ROW

    def _both(self, p: Tensor) -> tuple[int, int]:
        """The addresses of a parameter and its gradient."""
        grad = tables.gradient_like(p)
        self.kept.append(grad)
        return p.data_ptr(), grad.data_ptr()

    def _look_at_stages(self) -> None:
        """Write what layers have seen."""
        lay, room, seen = self.layout, self.room, 0
        for k in lay.shared:
            stage, start = lay.stages[k], k * ROW
            counts, sums = stage.found_here()
            room.tallies[4 * k : 4 * k + 4] = counts
            room.addresses[start + tables.SLOTS], room.addresses[start + tables.CENTRE] = sums, stage.centre.data_ptr()
            seen += counts[2] > 0
        lay.all_seen = seen == len(lay.guarded)

    def finite(self) -> bool:
        """Whether all gradients are finite."""
        return bool(self.room.library.look(self.room.at))

    def move(self, ok: Tensor | None, floor: float) -> None:
        """Make the step; the host knows that all is finite, so there is no mask."""
        self.room.job.floor = floor
        self.room.library.act(self.room.at)
        torch.autograd.graph.increment_version(self.layout.parameters)

    def commit(self, ok: Tensor | None) -> None:
        """Count the step, and let the batches join the running moments, about which the next ones are summed."""
        centred = bool(self.room.library.join(self.room.at))
        for k in self.layout.moving:
            self.layout.stages[k].centred = centred


def flat(kind: Any, rows: list[list[Any]]) -> Any:
    """A table for C."""
    values = [value for row in rows for value in row]
    return (kind * len(values))(*values)
