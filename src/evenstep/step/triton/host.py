"""The step of many blocks in five launches, whatever the network; one more where a torch rule gives the steps.

`frame` finds the coordinates, `add_up` the sums over each unit's row, `measure` how far each unit goes, `move` moves
the weights, `commit` lets the batch join the moments. `torch_step` is the same in torch operations. All is masked on
the device: the host never waits.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from ...coordinates.coordinates import Coordinates, Statistics
from ...coordinates.fan_in import FanIn
from ...coordinates.plain_size import PlainSize
from ...coordinates.whitening import Whitening
from ...kernels.input_sums import SLOTS, available
from ...kernels.launch import HostTable, Launcher, on
from ...math import guards
from ...math.moments import accumulation_dtype
from ...math.segments import Segments
from ...rules.rule import plain_share
from ...statistics.batch import LayerStatistics
from .. import spec
from ..block import Block

KNOWN = (Coordinates, FanIn, Whitening, PlainSize)  # the coordinates that `frame` finds; not those derived from them
KINDS = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
# warps and elements at a time, chosen by measurement on an H200 over AlexNet and GPT-2
LAUNCH = {"frame": (16, 1024), "measure": (32, 1024), "commit": (16, 2048), "add_up": (2, 512), "move": (2, 256)}
LAUNCH["write_gradients"] = LAUNCH["move"]
LONG, FEW = 16384, 264  # columns of a row that one program would be long with, unless there are many rows
PIECE, LEAST = 1024, 64  # columns of a piece of such a row, at most and at least
ALIGNED = 16  # elements: what a torch rule sees begins at multiples of these
PARTS = 16  # programs that share a block whose units do not depend on each other


def serves(block: Block, stage: LayerStatistics | None, state: Any) -> bool:
    """Whether the kernels can make a block's step: coordinates they know, plain tensors, units as rows in memory."""
    weight, group, rule = block.weight, block.group, block.rule
    if not runs_on(weight) or group["foreach"] is False or group.get("reduction") == "sum":
        return False
    if type(block.coordinates) not in KNOWN or block.alone or (rule.fused is None and not rule.own_rate):
        return False
    biases = [*block.biases, *block.frozen]
    if len(biases) > 1 or not weight.numel() or any(type(t) not in (Tensor, nn.Parameter) for t in (weight, *biases)):
        return False
    groups, units, inputs, kernel = block.matrix(weight).shape
    if stage is not None and (stage.stuffed or (whitened(block) and stage.inputs != groups * inputs)):
        return False
    gap = inner(block)
    if gap is None or not pieces(block, groups * units, inputs * kernel):
        return False
    if rule.own_rate and rule.joint(block) and gap != kernel:  # the rule sees columns in their own order
        return False
    alike = all((b.device, b.dtype, b.numel()) == (weight.device, weight.dtype, groups * units) for b in biases)
    dense = all(b.is_contiguous() for b in biases) and not any(t.is_neg() for t in (weight, *biases))
    return alike and dense and has_first_dtypes(block, stage, state)


def runs_on(weight: Tensor) -> bool:
    """Whether there are kernels for the device and the dtype of a weight."""
    return weight.device.type == "cuda" and weight.dtype in KINDS and available()


def whitened(block: Block) -> bool:
    """Whether its coordinates have moments."""
    return block.coordinates.needs >= Statistics.INPUTS


def has_first_dtypes(block: Block, stage: LayerStatistics | None, state: Any) -> bool:
    """Whether state has the dtypes it was made with: a model or a checkpoint of another dtype brings others."""
    wide = accumulation_dtype(block.weight.dtype)
    kept = [state[block.weight].get(name) for name in spec.STATE]
    kept += [] if stage is None else [stage.slots, stage.centre, stage.tally]
    buffers = [state[p].get("momentum_buffer") for p in block.parameters] if block.rule.fused else []
    return all(t is None or t.dtype == wide for t in kept) and all(
        t is None or t.dtype == block.weight.dtype for t in buffers
    )


class TritonStep:
    """The step of blocks that share device, dtype, rule and momentum; coordinates and settings may differ."""

    all_seen = True  # as far as the host knows, which does not wait for the device

    def __init__(self, blocks: Sequence[Block], stages: Sequence[LayerStatistics | None], state: Any) -> None:
        """What the kernels need on the device from step to step."""
        first = blocks[0]
        self.blocks, self.of_block, self.state = list(blocks), list(stages), state
        self.stages = [s for s in stages if s is not None]
        self.rule, self.group, self.device = first.rule, first.group, first.weight.device
        self.needs_direction = self.rule.fused is None  # otherwise the kernels find it
        self.momentum = float(first.group.get("momentum", 0.0)) if self.rule.fused else 0.0
        self.unbiased = any(whitened(b) and not b.biases for b in blocks)
        self.groups = list({id(g): g for b in blocks for g in b.param_groups}.values())
        sized = [b.coordinates for b in blocks if isinstance(b.coordinates, PlainSize)]
        self.plain_size, self.partly = bool(sized), any((c.power, c.centre) != (1, 1) for c in sized)
        self.captured = False  # whether a CUDA graph holds its addresses
        shapes, self.width, self.total = shapes_table(blocks, stages, self._rule_rows())
        self.bases = [row[spec.BASE] for row in shapes]
        self.shapes = torch.tensor(shapes, dtype=torch.int64).to(self.device)
        self.owner = Segments([row[spec.UNITS] for row in shapes], self.device).owner.to(torch.int32)
        count = len(blocks)
        self.addresses = HostTable(count, spec.ADDRESSES, torch.int64, self.device)
        self.settings = HostTable(count, spec.SETTINGS, torch.float32, self.device)
        number = {id(group): k for k, group in enumerate(self.groups)}
        both = [[number[id(g)] for g in b.param_groups[:2]] for b in blocks]
        self.group_of = torch.tensor([[*some, *[len(number)] * (2 - len(some))] for some in both]).to(self.device)
        self.vectors = torch.ones(spec.VECTORS, self.width, device=self.device)
        self.batch = torch.zeros(2, self.width, device=self.device)
        self.layers = torch.ones(count, spec.LAYERS, device=self.device)
        self.sums = torch.zeros(spec.SUMS, self.total, device=self.device)
        self.motion = torch.zeros(spec.MOTION, self.total, device=self.device)
        self.always = torch.ones((), dtype=torch.bool, device=self.device)  # the mask of a step the host has checked
        self.last, self.fired = self._counters()
        self._release()

    def _counters(self) -> tuple[Tensor, Tensor]:
        """The guards' counters of all layers, of which each layer's are views."""
        if not self.stages:
            return self.layers, self.layers
        last, fired = (torch.stack([getattr(s, name) for s in self.stages]) for name in ("last", "fired"))
        for stage, own_last, own_fired in zip(self.stages, last, fired, strict=True):
            stage.last, stage.fired = own_last, own_fired
        return last, fired

    def _release(self) -> None:
        """Forget what belongs to a single step: some of it is as large as the model."""
        self.temporaries: list[Tensor] = []
        self.for_rule: Tensor | None = None
        self.step_views: list[list[Tensor]] = []

    # launches

    def look(self, divisor: Tensor | None = None) -> None:
        """Find the coordinates, and sum over the rows; or write the gradients on v that a torch rule is to see."""
        if self.needs_direction:
            weight = self.blocks[0].weight
            self.for_rule = torch.empty(2, self.rule_total, dtype=weight.dtype, device=self.device)
        with on(self.device):
            self.captured |= torch.cuda.is_current_stream_capturing()
            rows = [self._addresses(k, block) for k, block in enumerate(self.blocks)]
            self.addresses.send(rows, lambda: rows)
            self.table = self._settings()
        self._launch(
            "frame",
            *(self.shapes, self.table, self.vectors, self.batch, self.layers, self.width, len(self.blocks)),
            LINEAR=self.rule.linear,
            PLAIN_SIZE=self.plain_size,
            PARTLY=self.partly,
            SLOTS=SLOTS,
        )
        self._along_rows("write_gradients" if self.needs_direction else "add_up")

    def finite(self) -> Tensor:
        """Whether all gradients are finite: no unit's sum of squares is infinite or NaN."""
        return self.sums[spec.GRAD2].amax() < torch.inf

    def move(self, ok: Tensor | None) -> None:
        """How far each unit goes, then the weights, unless the mask `ok` says no."""
        if self.needs_direction:
            self._along_rows("add_up")
        self._launch(
            "measure",
            *(self.shapes, self.table, self.layers, self.sums, self.motion, self.last, self.fired),
            *(self.always if ok is None else ok, self.total, len(self.blocks)),
            *(guards.TRUST_FLOOR, 1 - self.momentum),
            parts=PARTS,
            UNIT_SCALE=self.rule.fused is not None and self.rule.fused.unit_scale,
            EXTERNAL=self.needs_direction,
            LINEAR=self.rule.linear,
            GUARD=bool(self.stages) and any(b.group["trust"] is not None for b in self.blocks),
            PROJECT=self.unbiased,
        )
        self._along_rows("move", ok)
        torch.autograd.graph.increment_version([p for block in self.blocks for p in block.parameters])

    def commit(self, ok: Tensor | None) -> None:
        """Let the batches join the moments, and the next ones be summed about the running means."""
        if any(block.coordinates.state for block in self.blocks):
            mask = self.always if ok is None else ok
            self._launch("commit", self.shapes, self.table, self.batch, self.layers, mask, self.width, len(self.blocks))
        self._release()

    def _launch(self, name: str, *arguments: Any, programs: int = 0, parts: int = 1, **constants: Any) -> None:
        """Launch a kernel with so many programs, by default one per block, `parts` times over."""
        warps, block = LAUNCH[name]
        grid, constants = (programs or len(self.blocks), parts, 1), {**constants, "BLOCK": block}
        # builds differ by their constants and the device alone: the tables are aligned, and of known dtypes
        key, tensors = self.device.index, (self.addresses.there, *arguments)
        with on(self.device):
            kernels()[name](key, grid, tensors, warps, **constants, VERSION=spec.VERSION)

    def _along_rows(self, name: str, ok: Tensor | None = None) -> None:
        """A launch with one program per unit."""
        fused = self.rule.fused
        self._launch(
            name,
            *(self.shapes, self.table, self.owner, self.vectors, self.layers, self.sums, self.motion),
            *(self.always if ok is None else ok, self.width, self.total),
            programs=self.total,
            MOMENTUM=self.momentum,
            NESTEROV=fused is not None and fused.nesterov,
            PROJECT=self.unbiased,
            EXTERNAL=self.needs_direction,
            KIND=KINDS[self.blocks[0].weight.dtype],
        )

    # tables

    def _addresses(self, k: int, block: Block) -> list[int]:
        """A row of the table of addresses."""
        stage, mine, row = self.of_block[k], self.state[block.weight], [0] * spec.ADDRESSES
        columns = ((spec.GRAD, spec.BUFFER), (spec.BIAS_GRAD, spec.BIAS_BUFFER))
        for p, (grad_column, buffer_column) in zip(block.parameters, columns, strict=False):
            grad = gradient_like(p)
            if grad is not p.grad:
                self.temporaries.append(grad)  # alive until the step is made
            row[grad_column] = grad.data_ptr()
            if self.momentum:
                row[buffer_column] = self._buffer(p).data_ptr()
        level = next(iter(block.biases or block.frozen), None)
        row[spec.WEIGHT], row[spec.LEVEL] = block.weight.data_ptr(), 0 if level is None else level.data_ptr()
        if stage is not None:
            row[spec.SLOTS], row[spec.TALLY] = stage.slots.data_ptr(), stage.tally.data_ptr()
            row[spec.CENTRE] = stage.centre.data_ptr()
        for column, name in enumerate(spec.STATE, spec.MX):
            row[column] = mine[name].data_ptr() if name in mine else 0
        if self.for_rule is not None:
            start, bias = self.rule_starts[k]
            far = self.for_rule.stride(0)  # from the gradients to the steps
            places = (start, bias, far + start, far + bias)
            base, size = self.for_rule.data_ptr(), self.for_rule.element_size()
            row[spec.TO_RULE : spec.ADDRESSES] = [base + size * at for at in places]
        return row

    def _buffer(self, p: Tensor) -> Tensor:
        """The momentum buffer of `p`, in the memory format of `p`."""
        buffer: Tensor = self.state[p]["momentum_buffer"]
        if buffer.stride() != p.stride():
            buffer = self.state[p]["momentum_buffer"] = torch.empty_like(p).copy_(buffer)
        return buffer

    def _settings(self) -> Tensor:
        """The table of settings on the device; a stepsize that is a tensor is put in there, so the host never waits."""
        lrs = [group["lr"] for group in self.groups]
        numbers = [0.0 if isinstance(lr, Tensor) else lr for lr in lrs]
        now = [numbers, *([group.get(name) for name in SETTINGS] for group in self.groups)]
        there = self.settings.send(now, lambda: settings_table(self.blocks, self.of_block))
        if not any(isinstance(lr, Tensor) for lr in lrs):
            return there
        table = there.clone()
        rates = [lr.detach().reshape(()).to(table) if isinstance(lr, Tensor) else table.new_full((), lr) for lr in lrs]
        both = torch.stack([*rates, table.new_zeros(())])[self.group_of]
        table[:, spec.RATE : spec.BIAS_RATE + 1] = both
        return table

    # torch rules

    def _rule_rows(self) -> list[tuple[int, int]]:
        """Distances between rows, and between biases, of what a torch rule sees; also where each block begins."""
        self.rule_starts: list[tuple[int, int]] = []
        self.rule_total, gaps = 0, []
        for block in self.blocks:
            columns, biased, start = block.weight.numel() // block.units, len(block.biases), self.rule_total
            joint = self.needs_direction and block.rule.joint(block)
            gap = columns + biased if joint else columns
            bias = start + columns if joint else start + aligned(block.weight.numel())
            self.rule_total = start + aligned(block.units * gap) if joint else bias + aligned(block.units * biased)
            self.rule_starts.append((start, bias))
            gaps.append((gap, gap if joint else 1))
        return gaps

    def column_scales(self) -> list[Tensor | None]:
        """α β of each column of the blocks' matrices, as `frame` has left them."""
        found: list[Tensor | None] = []
        for k, (block, begin) in enumerate(zip(self.blocks, self.bases, strict=True)):
            groups, _, inputs, kernel = block.matrix(block.weight).shape
            alpha = self.vectors[spec.ALPHA, begin : begin + groups * inputs]
            scale = alpha.view(groups, inputs) * self.layers[k, spec.BETA] if whitened(block) else None
            found.append(None if scale is None else scale.repeat_interleave(kernel, 1).unsqueeze(1))
        return found

    def stand_ins(self) -> list[list[nn.Parameter]]:
        """For each block parameters that are zero and have its gradients on v, for torch's rules to move."""
        assert self.for_rule is not None
        gradients, steps = self.for_rule
        steps.zero_()
        found = []
        for block, (start, bias) in zip(self.blocks, self.rule_starts, strict=True):
            tensors = zip((start, bias), block.parameters, strict=False)
            places = [(at, tuple(p.shape), tuple(p.stride())) for at, p in tensors]
            if block.rule.joint(block):
                columns = block.weight.numel() // block.units + len(block.biases)
                places = [(start, (block.units, columns), (columns, 1))]
            few = [nn.Parameter(steps.as_strided(size, by, steps.storage_offset() + at)) for at, size, by in places]
            for q, (at, size, by) in zip(few, places, strict=True):
                q.grad = gradients.as_strided(size, by, at)
            found.append(few)
        self.step_views = [[q.detach() for q in few] for few in found]
        return found

    def take(self, steps: list[list[Tensor]]) -> None:
        """The steps are where the kernels read them; a rule that has put its step elsewhere has it copied."""
        for few, own in zip(steps, self.step_views, strict=True):
            for step, view in zip(few, own, strict=True):
                if step.data_ptr() != view.data_ptr():
                    view.copy_(step)


@cache
def kernels() -> dict[str, Launcher]:
    """The kernels by name."""
    from . import triton_inputs, triton_rows, triton_units

    rows = [triton_rows.write_gradients, triton_rows.add_up, triton_rows.move]
    found = [triton_inputs.frame, triton_inputs.commit, triton_units.measure, *rows]
    return {kernel.__name__: Launcher(kernel) for kernel in found}


def inner(block: Block) -> int | None:
    """The distance in memory between two inputs of a row of the weight; None if units are not rows."""
    m = block.matrix(block.weight)
    if m.data_ptr() != block.weight.data_ptr():
        return None
    return m.shape[3] if m.is_contiguous() else 1 if m.transpose(2, 3).is_contiguous() else None


def pieces(block: Block, units: int, columns: int) -> int:
    """Into how many rows of their own programs take a row; 1 if it is taken whole, 0 if there is no good way.

    Rows of a layer are taken whole: the guards need sums over all of a row.
    """
    if columns <= LONG or units >= FEW:
        return 1
    lengths = [n for n in range(PIECE, LEAST - 1, -1) if columns % n == 0] if block.entry is None else []
    even = [n for n in lengths if n % 8 == 0]
    return columns // (even or lengths)[0] if lengths else 0


def aligned(number: int) -> int:
    """The next multiple of `ALIGNED`.

    >>> aligned(17)
    32
    """
    return -(-number // ALIGNED) * ALIGNED


def shapes_table(
    blocks: Sequence[Block], stages: Sequence[LayerStatistics | None], rule_rows: Sequence[tuple[int, int]]
) -> tuple[list[list[int]], int, int]:
    """The table of shapes, and how many inputs and units there are. Inputs of a block begin at a multiple of 8."""
    rows, counters, width, total = list[list[int]](), 0, 0, 0
    for block, stage, (gap, bias_gap) in zip(blocks, stages, rule_rows, strict=True):
        groups, units, inputs, area = block.matrix(block.weight).shape
        moments, cut = whitened(block), pieces(block, groups * units, inputs * area)
        row = [0] * spec.SHAPES
        row[spec.BASE], row[spec.START] = width, total
        row[spec.COLUMNS], row[spec.UNITS] = inputs * area // cut, groups * units * cut
        row[spec.INPUTS], row[spec.ALL_INPUTS] = (inputs, groups * inputs) if moments else (1, 0)
        row[spec.INNER], row[spec.PER_GROUP], row[spec.PIECES] = inner(block) or 1, units, cut
        row[spec.RULE_ROW], row[spec.BIAS_RULE_ROW] = gap // cut, bias_gap
        row[spec.FLAGS] = spec.BIASED * bool(block.biases) + spec.MAXIMIZE * bool(block.group["maximize"])
        row[spec.FLAGS] += spec.WHITENED * moments + spec.PLAIN * (block.entry is None)
        row[spec.COUNTER] = -1
        if stage is not None:
            row[spec.SLOT_COUNT], row[spec.COUNTER] = stage.slot_count if moments else 0, counters
            row[spec.FLAGS] += spec.COUNTED + spec.SHARED * ("sharing" in block.coordinates.state)
            counters += 1
        rows.append(row)
        width, total = width + -(-row[spec.ALL_INPUTS] // 8) * 8, total + row[spec.UNITS]
    return rows, width, total


# what the table of settings depends on, beside lr
SETTINGS = ("maximize", "weight_decay", "plain_lr", "plain_at", *(name for name, _ in spec.OF_GROUP.values()))


def settings_table(blocks: Sequence[Block], stages: Sequence[LayerStatistics | None]) -> list[list[float]]:
    """The table of settings; a stepsize that is a tensor on another device is 0."""
    rows = []
    for block, stage in zip(blocks, stages, strict=True):
        group, row = block.group, [0.0] * spec.SETTINGS
        for column, decay_column, own in zip(
            (spec.RATE, spec.BIAS_RATE), (spec.DECAYED, spec.BIAS_DECAYED), block.param_groups, strict=False
        ):
            lr = own["lr"]
            row[column] = 0.0 if isinstance(lr, Tensor) and not lr.is_cpu else float(lr)
            row[decay_column] = own["weight_decay"]
        for column, (name, none) in spec.OF_GROUP.items():
            row[column] = none if group.get(name) is None else group[name]
        if stage is None:
            row[spec.RADIUS] = torch.inf
        row[spec.UNIT_DAMPING] = 0.0 if block.entry is None else row[spec.DAMPING]
        row[spec.RATIO] = plain_share(group) if block.uses_plain_lr else 1.0
        row[spec.POWER] = getattr(block.coordinates, "power", 1.0)
        row[spec.CENTRE_SHARE] = getattr(block.coordinates, "centre", 1.0)
        row[spec.FAN_IN] = float(block.fan_in)
        rows.append(row)
    return rows


def gradient_like(p: Tensor) -> Tensor:
    """A parameter's gradient in the parameter's own dtype and layout: itself, in most cases."""
    grad = p.grad
    assert grad is not None
    plain = grad.dtype == p.dtype and grad.stride() == p.stride() and grad.shape == p.shape
    if plain and type(grad) is Tensor and not (grad.is_neg() or grad._is_zerotensor()):
        return grad
    found = torch.empty_like(p)
    found.copy_(grad)  # of a subclass, it may give one of that subclass, which has no memory of its own
    return found
