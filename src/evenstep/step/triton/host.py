"""The step of many blocks in five launches, whatever the network: frames, sums over rows, motions, weights, moments.

Where a rule of torch's gives the steps, it is shown gradients by one more.

The plain version is `together.Together`, whose names are used here; see there, and in `update`, `rows` and `stepsize`,
for what is computed. Everything is masked on the device: the host never waits.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from ...kernels.input_sums import SLOTS as MOST_SLOTS
from ...kernels.input_sums import available
from ...kernels.launch import Launcher, on
from ...math.constants import STEADY
from ...math.guards import CROWD, DRIFT
from ...math.segments import Segments
from . import tables

KINDS = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
SUMS = 10  # per unit: seven of rows.RowSums, the shift of the gradient, then κ, ‖u‖² and Σ α²fu² of a projection
# warps and elements at a time, chosen by measurement on an H200 over AlexNet and GPT-2
SHAPE = {"frame": (16, 1024), "measure": (32, 1024), "commit": (16, 2048), "add_up": (2, 512), "move": (2, 256)}
SHAPE["show"] = SHAPE["move"]
PARTS = 16  # programs that share a block whose units do not go by each other
HANDS = 16  # pinned copies of a table: half of them in turn, the others for captured graphs


def serves(weight: Tensor) -> bool:
    """Whether the kernels can take a weight."""
    return weight.device.type == "cuda" and weight.dtype in KINDS and available()


class Sent:
    """A table that the host writes and the device reads, sent when it has changed, without waiting."""

    def __init__(self, rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> None:
        self.pinned = torch.zeros(HANDS, rows, columns, dtype=dtype).pin_memory()
        self.there = torch.zeros(rows, columns, dtype=dtype, device=device)
        self.last: Any = None
        self.turn, self.captured = 0, HANDS // 2
        self.sent = [torch.cuda.Event() for _ in range(HANDS // 2)]  # type: ignore[no-untyped-call]

    def send(self, now: list[list[Any]]) -> Tensor:
        """The table on the device, with these values."""
        if torch.cuda.is_current_stream_capturing():
            if self.captured == HANDS:
                raise RuntimeError("this optimizer's step is in too many CUDA graphs; build a new optimizer for more.")
            self.pinned[self.captured].copy_(torch.tensor(now, dtype=self.pinned.dtype))
            self.there.copy_(self.pinned[self.captured], non_blocking=True)
            self.captured, self.last = self.captured + 1, None
        elif now != self.last:
            hand, self.last = self.turn, now
            self.turn = (self.turn + 1) % len(self.sent)
            self.sent[hand].synchronize()  # it was sent eight changes ago
            self.pinned[hand].copy_(torch.tensor(now, dtype=self.pinned.dtype))
            self.there.copy_(self.pinned[hand], non_blocking=True)
            self.sent[hand].record()
        return self.there


class Room:
    """What a layout needs on the device from step to step."""

    def __init__(self, layout: Any) -> None:
        blocks, device, count, shapes = layout.blocks, layout.device, len(layout.blocks), tables.shapes(layout)
        self.width = self.total = 0  # inputs, each layer's beginning evenly, and units, pieces of long rows apart
        for block, row in zip(blocks, shapes, strict=True):
            row[tables.PIECES] = cut = tables.pieces(block, row[tables.UNITS], row[tables.COLUMNS]) or 1
            row[tables.COLUMNS], row[tables.UNITS] = row[tables.COLUMNS] // cut, row[tables.UNITS] * cut
            row[tables.SHOWN_ROW] //= cut
            row[tables.BASE], self.width = self.width, self.width + -(-row[tables.ALL_INPUTS] // 8) * 8
            row[tables.START], self.total = self.total, self.total + row[tables.UNITS]
        self.key = device.index  # all that builds differ by beside their constants: tables are ours, and aligned
        self.shapes = torch.tensor(shapes, dtype=torch.int64).to(device)
        self.owner = Segments.of([row[tables.UNITS] for row in shapes], device).owner.to(torch.int32)
        self.addresses = Sent(count, tables.ADDRESSES, torch.int64, device)
        self.settings = Sent(count, tables.SETTINGS, torch.float32, device)
        self.set_to: list[Any] | None = None  # the groups' settings that the table has
        number = {id(group): k for k, group in enumerate(layout.param_groups)}
        groups = [[b.group, *b.bias_groups[:1]] for b in blocks]
        both = [[*(number[id(g)] for g in some), *[len(number)] * (2 - len(some))] for some in groups]
        self.group_of = torch.tensor(both).to(device)  # of each block's weight and bias; the last: no bias
        self.vectors = torch.ones(4, self.width, device=device)  # μ, α, spread, fresh spread
        self.fresh = torch.zeros(2, self.width, device=device)  # Σ(x − c), Σ(x − c)² of the batch
        self.layers = torch.ones(4, count, device=device)  # β, S, usable, inputs raised
        self.sums = torch.zeros(SUMS, self.total, device=device)
        self.always = torch.ones((), dtype=torch.bool, device=device)  # the mask of a step that the host has checked
        self.motion = torch.zeros(3, self.total, device=device)
        self.counters = layout.last if layout.guarded else self.layers, layout.fired if layout.guarded else self.layers


class TritonStep:
    """One step of many blocks: look first, then move where all that was seen is finite."""

    counts_steps = False  # the caller does

    def __init__(self, layout: Any, state: Any, *, linear: bool, even: bool) -> None:
        """`even` is `EvenStep`'s rule; otherwise stochastic gradient with momentum."""
        self.layout, self.linear, self.even = layout, linear, even
        if not hasattr(layout, "room"):
            layout.room = Room(layout)
        self.room: Room = layout.room
        self.momentum = layout.momentum
        self.kept: list[Tensor] = []  # gradients in the weight's own layout, alive until the step is made
        none = [(0, 0, 0, 0)] * len(layout.blocks)
        if layout.given is not None:
            layout.given.open()
        given = none if layout.given is None else layout.given.addresses()
        rows = [[*self._addresses(k, block, state), *given[k]] for k, block in enumerate(layout.blocks)]
        with on(layout.device):
            layout.captured |= torch.cuda.is_current_stream_capturing()
            self.addresses = self.room.addresses.send(rows)
            self.settings = self._settings()
        room, count = self.room, len(layout.blocks)
        tensors = room.shapes, self.settings, room.vectors, room.fresh, room.layers, room.width, count
        self._launch("frame", count, *tensors, LINEAR=linear, STEADY=STEADY, DRIFT=DRIFT, SLOTS=MOST_SLOTS)
        self._rows("add_up" if layout.given is None else "show")

    def _launch(self, name: str, programs: int, *arguments: Any, parts: int = 1, **constants: Any) -> None:
        """Launch a kernel with so many programs, `parts` times over."""
        warps, block = SHAPE[name]
        with on(self.layout.device):
            kernel, grid = _kernels()[name], (programs, parts, 1)
            kernel(self.room.key, grid, (self.addresses, *arguments), warps, **constants, BLOCK=block)

    def _rows(self, name: str, ok: Tensor | None = None) -> None:
        """A launch with one program per unit."""
        lay, room = self.layout, self.room
        tensors = room.owner, room.vectors, room.layers, room.sums, room.motion, room.always if ok is None else ok
        self._launch(
            name,
            room.total,
            room.shapes,
            self.settings,
            *tensors,
            room.width,
            room.total,
            MOMENTUM=float(self.momentum),
            HAS_MOMENTUM=bool(self.momentum),
            AHEAD=self.even,
            PROJECT=bool(lay.unbiased),
            GIVEN=lay.given is not None,
            KIND=KINDS[lay.blocks[0].weight.dtype],
        )

    def finite(self) -> Tensor:
        """Whether all gradients are finite: no unit's sum of squares is infinite or NaN."""
        return self.room.sums[0].amax() < torch.inf

    def move(self, ok: Tensor | None, floor: float) -> None:
        """Make the step, unless the mask `ok` says no."""
        lay, room = self.layout, self.room
        guarded = bool(lay.guarded) and any(b.group["trust"] is not None for b in lay.blocks)
        if lay.given is not None:
            self._rows("add_up")
        tensors = (
            room.shapes,
            self.settings,
            room.layers,
            room.sums,
            room.motion,
            *room.counters,
            room.always if ok is None else ok,
        )
        self._launch(
            "measure",
            len(lay.blocks),
            *tensors,
            room.total,
            len(lay.blocks),
            float(floor),
            1 - float(self.momentum),
            parts=PARTS,
            EVEN=self.even,
            GIVEN=lay.given is not None,
            GUARD=guarded,
            CROWD=0.0 if self.linear else CROWD,
            PROJECT=bool(lay.unbiased),
            TURNS=1 + guarded,
        )
        self._rows("move", ok)
        torch.autograd.graph.increment_version(lay.parameters)

    def commit(self, ok: Tensor | None) -> None:
        """Let the batches join the running moments, and the next ones be summed about them."""
        lay, room, count = self.layout, self.room, len(self.layout.blocks)
        if lay.shared:
            tensors = room.shapes, self.settings, room.fresh, room.layers, room.always if ok is None else ok
            self._launch("commit", count, *tensors, room.width, count)

    def _addresses(self, k: int, block: Any, state: Any) -> list[int]:
        lay, stage, mine = self.layout, self.layout.stages[k], state[block.weight]
        grads, buffers = [0, 0], [0, 0]
        for j, p in enumerate([block.weight, *block.biases]):
            grad = tables.gradient_like(p)
            if grad is not p.grad:
                self.kept.append(grad)
            grads[j] = grad.data_ptr()
            if self.momentum:
                buffers[j] = lay.momentum_of(state, p).data_ptr()
        level = 0 if lay.levels[k] is None else lay.levels[k].data_ptr()
        staged = [] if stage is None else [stage.slots, stage.tally, stage.centre]
        row = [block.weight.data_ptr(), grads[0], buffers[0], level, grads[1], buffers[1]]
        row += [t.data_ptr() for t in staged] or [0, 0, 0]
        return row + [mine[n].data_ptr() if n in mine else 0 for n in tables.KEPT]

    def _settings(self) -> Tensor:
        """The table of settings on the device; written again when groups have changed."""
        lay, table = self.layout, self.room.settings
        lrs = [group["lr"] for group in lay.param_groups]
        moving = any(isinstance(lr, Tensor) for lr in lrs)
        now = [*lay.settings(), *(None if isinstance(lr, Tensor) else lr for lr in lrs)]
        if torch.cuda.is_current_stream_capturing():
            there, self.room.set_to = table.send(tables.settings(lay)), None
        elif now != self.room.set_to:
            there, self.room.set_to = table.send(tables.settings(lay)), now
        else:
            there = table.there
        return self._with_rates(there, lrs) if moving else there

    def _with_rates(self, table: Tensor, lrs: list[Any]) -> Tensor:
        """A copy of the table with the groups' stepsizes, of which some are tensors: the host does not read them."""
        table = table.clone()
        rates = [lr.detach().reshape(()).to(table) if isinstance(lr, Tensor) else table.new_full((), lr) for lr in lrs]
        table[:, tables.RATE : tables.BIAS_RATE + 1] = torch.stack([*rates, table.new_zeros(())])[self.room.group_of]
        return table


@cache
def _kernels() -> dict[str, Launcher]:
    from . import triton_inputs, triton_rows, triton_units

    found = [triton_inputs.frame, triton_rows.show, triton_rows.add_up, triton_units.measure, triton_rows.move]
    return {kernel.__name__: Launcher(kernel) for kernel in (*found, triton_inputs.commit)}
