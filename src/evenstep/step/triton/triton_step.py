"""The step of many blocks in five launches, whatever the network; one more where torch operations make the steps.

`frame` finds the coordinates, `add_up` the sums over each unit's row, `measure` how far each unit goes, `move` moves
the weights, `commit` lets the batch join the moments. `torch_step` is the same in torch operations. All is masked on
the device: the host never waits.
"""

import inspect
from collections.abc import Sequence
from functools import cache
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from ...kernels.input_sums import SLOTS, available
from ...kernels.launch import HostTable, Launcher, on
from ...math import guards
from ...math.moments import accumulation_dtype
from ...math.segments import Segments
from ...rules.rule import Matrices, shrink
from ..block import Block, all_finite, gradient
from . import table_spec as spec
from .tables import FAST, SETTINGS, aligned, inner, padded, pieces, places_of, settings_table, shapes_table, whitened

KINDS = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
# warps and elements at a time, chosen by measurement on an H200 over AlexNet and GPT-2
LAUNCH = {"frame": (16, 1024), "measure": (32, 1024), "commit": (16, 2048), "add_up": (2, 512), "move": (2, 256)}
LAUNCH["write_gradients"] = LAUNCH["move"]
PARTS = 16  # programs that share a block whose units do not depend on each other


def serves(block: Block, state: Any) -> bool:
    """Whether the kernels can make a block's step: coordinates they know, plain tensors, units as rows in memory."""
    weight, group, rule = block.weight, block.group, block.rule
    if not runs_on(weight) or group["foreach"] is False or group.get("reduction") == "sum":
        return False
    known = "fused" in vars(type(block.coordinates))  # not coordinates derived from known ones
    if not known or block.alone or (rule.fused is None and not rule.external):
        return False
    biases = [*block.biases, *block.frozen]
    if len(biases) > 1 or not weight.numel() or any(type(t) not in (Tensor, nn.Parameter) for t in (weight, *biases)):
        return False
    groups, units, inputs, kernel = block.layout(weight).shape
    stage = block.statistics
    if stage is not None and (stage.stuffed or (whitened(block) and stage.inputs != groups * inputs)):
        return False
    if inner(block) is None or not pieces(block, groups * units, inputs * kernel):
        return False
    alike = all((b.device, b.dtype, b.numel()) == (weight.device, weight.dtype, groups * units) for b in biases)
    dense = all(b.is_contiguous() for b in biases) and not any(t.is_neg() for t in (weight, *biases))
    return alike and dense and has_first_dtypes(block, state)


def runs_on(weight: Tensor) -> bool:
    """Whether there are kernels for the device and the dtype of a weight."""
    return weight.device.type == "cuda" and weight.dtype in KINDS and available()


def has_first_dtypes(block: Block, state: Any) -> bool:
    """Whether state has the dtypes it was made with: a model or a checkpoint of another dtype brings others."""
    wide, stage = accumulation_dtype(block.weight.dtype), block.statistics
    kept = [state[block.weight].get(name) for name in spec.STATE]
    kept += [] if stage is None else [stage.slots, stage.centre, stage.tally]
    buffers = [state[p].get("momentum_buffer") for p in block.parameters] if block.rule.fused is not None else []
    if block.rule.matrices:
        kept.append(state[block.weight].get("momentum_buffer"))
    return all(t is None or t.dtype == wide for t in kept) and all(
        t is None or t.dtype == block.weight.dtype for t in buffers
    )


def likeness(block: Block) -> tuple[Any, ...]:
    """What layers have in common whose matrices are multiplied at once."""
    return tuple(block.layout(block.weight).shape), len(block.biases), whitened(block)


class TritonStep:
    """The step of blocks that share device, dtype, rule and momentum; coordinates and settings may differ."""

    all_seen = True  # as far as the host knows, which does not wait for the device
    row_group = None  # its tensors are plain

    def __init__(self, blocks: Sequence[Block], state: Any) -> None:
        """What the kernels need on the device from step to step."""
        first = blocks[0]
        if first.rule.matrices:  # those that are alike lie one after another
            blocks = sorted(blocks, key=likeness)
        self.blocks, self.state = list(blocks), state
        self.stages = [block.statistics for block in blocks if block.statistics is not None]
        self.rule, self.group, self.device = first.rule, first.group, first.weight.device
        self.needs_direction = self.rule.fused is None  # otherwise the kernels find it
        self.momentum = 0.0 if self.needs_direction else float(first.group.get("momentum", 0.0))
        # of the gradients on v that the rule sees
        self.rule_dtype = self.rule.product_dtype(first.weight) if self.rule.matrices else first.weight.dtype
        self.constants = self._constants()
        self.groups = list({id(g): g for b in blocks for g in b.param_groups}.values())
        self.captured = False  # whether a CUDA graph holds its addresses
        self.replayed = False  # whether the rule's work is replayed, so that its buffers must stay where they are
        self.for_rule: Tensor | None = None
        self.places, self.rule_size = places_of(blocks)
        shapes, self.width, self.total = shapes_table(blocks, self.places)
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

    def _constants(self) -> dict[str, dict[str, Any]]:
        """What each kernel is built with, in its own order: the flags of rule and coordinates by their names there."""
        known = {
            **dict.fromkeys(self.rule.fused or (), True),
            **{name: True for block in self.blocks for name in block.coordinates.fused},
            "MOMENTUM": self.momentum,
            "MEMORY": float(self.group["momentum"]) if self.rule.matrices else -1.0,
            "LINEAR": self.rule.linear,
            "EXTERNAL": self.needs_direction,
            "OWN_RATE": self.rule.own_rate,
            "GUARD": bool(self.stages) and any(guards.bounds_steps(b.group) for b in self.blocks),
            "PROJECT": any(whitened(b) and not b.biases for b in self.blocks),
            "KIND": KINDS[self.blocks[0].weight.dtype],
            "RULE_KIND": KINDS[self.rule_dtype],
            "SLOTS": SLOTS,
            "VERSION": spec.VERSION,
        }
        found = {}
        for name, kernel in kernels().items():
            own = [c for c in inspect.signature(kernel.kernel.fn).parameters if c.isupper()]
            found[name] = {c: LAUNCH[name][1] if c == "BLOCK" else known.get(c, False) for c in own}
        return found

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
        self.step_views: list[list[Tensor]] = []
        if not self.replayed:
            self.for_rule = None

    # launches

    def look(self, divisor: Tensor | None = None) -> None:
        """Find the coordinates, and sum over the rows, unless the rule makes the steps in torch operations."""
        if self.needs_direction and self.for_rule is None:  # a rule of matrices makes steps where it finds gradients
            size = self.rule_size * (1 if self.rule.matrices else 2)
            self.for_rule = torch.zeros(size, dtype=self.rule_dtype, device=self.device)
        with on(self.device):
            self.captured |= torch.cuda.is_current_stream_capturing()
            rows = [self._address_row(k, block) for k, block in enumerate(self.blocks)]
            self.addresses.send(rows, lambda: rows)
            self.table = self._settings()
        self._launch("frame", self.vectors, self.batch, self.layers, self.width, len(self.blocks))
        if not self.needs_direction:
            self._along_rows("add_up")

    def finite(self) -> Tensor:
        """Whether all gradients are finite: no unit's sum of squares is infinite or NaN."""
        if self.needs_direction:
            return all_finite([gradient(p) for block in self.blocks for p in block.parameters])
        return self.sums[spec.GRAD2].amax() < torch.inf

    def move(self, ok: Tensor | None) -> None:
        """How far each unit goes, then the weights, unless the mask `ok` says no."""
        if self.needs_direction:
            self._along_rows("add_up")
        mask = self.always if ok is None else ok
        self._launch(
            "measure",
            *(self.layers, self.sums, self.motion, self.last, self.fired, mask, self.total, len(self.blocks)),
            *(guards.TRUST_FLOOR, 1 - self.momentum),
            parts=PARTS,
        )
        self._along_rows("move", ok)
        torch.autograd.graph.increment_version([p for block in self.blocks for p in block.parameters])

    def commit(self, ok: Tensor | None) -> None:
        """Let the batches join the moments, and the next ones be summed about the running means."""
        if any(block.coordinates.state for block in self.blocks):
            mask = self.always if ok is None else ok
            self._launch("commit", self.batch, self.layers, mask, self.width, len(self.blocks))
        self._release()

    def _along_rows(self, name: str, ok: Tensor | None = None) -> None:
        """A launch with one program per unit."""
        mask = self.always if ok is None else ok
        buffers = (self.owner, self.vectors, self.layers, self.sums, self.motion)
        self._launch(name, *buffers, mask, self.width, self.total, programs=self.total)

    def _launch(self, name: str, *arguments: Any, programs: int = 0, parts: int = 1) -> None:
        """Launch a kernel on the tables with so many programs, by default one per block, `parts` times over."""
        grid, tables = (programs or len(self.blocks), parts, 1), (self.addresses.there, self.shapes, self.table)
        # builds differ by their constants and the device alone: the tables are aligned, and of known dtypes
        with on(self.device):
            kernels()[name](self.device.index, grid, tables + arguments, LAUNCH[name][0], **self.constants[name])

    # tables

    def _address_row(self, k: int, block: Block) -> list[int]:
        """A row of the table of addresses."""
        stage, mine, row = block.statistics, self.state[block.weight], [0] * spec.ADDRESSES
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
            start, bias, *_ = self.places[k]
            far = 0 if self.rule.matrices else self.rule_size  # from the gradients to the steps
            base, size = self.for_rule.data_ptr(), self.for_rule.element_size()
            places = (start, bias, far + start, far + bias)
            row[spec.TO_RULE : spec.MEMORY_OF_RULE] = [base + size * at for at in places]
            if self.rule.matrices:
                row[spec.MEMORY_OF_RULE] = mine["momentum_buffer"].data_ptr()
        return row

    def held_addresses(self) -> list[int]:
        """The addresses that a recording of the rule's work holds."""
        tensors = [self.table] if self.for_rule is None else [self.table, self.for_rule]
        for p in (p for block in self.blocks for p in block.parameters):
            tensors += [p, *(value for value in self.state[p].values() if isinstance(value, Tensor))]
        return [tensor.data_ptr() for tensor in tensors]

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
        there = self.settings.send(now, lambda: settings_table(self.blocks))
        if not any(isinstance(lr, Tensor) for lr in lrs):
            return there
        table = there.clone()
        rates = [lr.detach().reshape(()).to(table) if isinstance(lr, Tensor) else table.new_full((), lr) for lr in lrs]
        both = torch.stack([*rates, table.new_zeros(())])[self.group_of]
        table[:, spec.RATE : spec.BIAS_RATE + 1] = both
        return table

    # rules that make steps in torch operations

    def matrices(self, ok: Tensor | None) -> list[Matrices]:
        """Nesterov's direction of the momentum on v, layers that are alike at once; steps are expected there."""
        self._along_rows("write_gradients", ok)
        assert self.for_rule is not None
        found, begin = list[Matrices](), 0
        for _, some in groupby(self.blocks, likeness):
            blocks = list(some)
            groups, units, columns = padded(blocks[0])
            size = torch.Size([len(blocks) * groups, units, columns])
            x = self.for_rule[(start := self.places[begin].start) : start + size.numel()].view(size)
            found.append(Matrices(blocks, x, self._column_scale(begin, blocks)))
            begin += len(blocks)
        return found

    def _column_scale(self, begin: int, blocks: Sequence[Block]) -> Tensor | None:
        """α β of each column of the matrices of layers that are alike, as `frame` has left them."""
        if not whitened(blocks[0]):
            return None
        count, (groups, _, inputs, kernel) = len(blocks), blocks[0].layout(blocks[0].weight).shape
        size, distances = [count, groups, inputs], [aligned(groups * inputs, FAST), inputs, 1]
        alpha = self.vectors[spec.ALPHA].as_strided(size, distances, spec.ALPHA * self.width + self.bases[begin])
        scale = alpha * self.layers[begin : begin + count, spec.BETA, None, None]
        scale = scale.view(count * groups, inputs)
        return scale if kernel == 1 else scale.repeat_interleave(kernel, 1)

    def constant_sizes(self) -> Tensor:
        """√(1 + mean μ²) of each block, 1 where it has no moments."""
        return self.layers[:, spec.CONSTANT] * self.layers[:, spec.BETA]

    def shrink(self, factors: Sequence[Tensor]) -> None:
        """As `RuleStep.shrink`, but the kernels do it when they move parameters, unless those are in groups."""
        self.layers[:, spec.KEPT].copy_(torch.cat([f if len(f) == 1 else f.new_ones(1) for f in factors]))
        shrink([(block, f) for block, f in zip(self.blocks, factors, strict=True) if len(f) > 1])

    def take_matrices(self, found: Sequence[Matrices]) -> None:
        """Nothing: the kernels read the steps where the rule has written them."""

    def stand_ins(self, ok: Tensor | None) -> list[list[nn.Parameter]]:
        """For each block parameters that are zero and have its gradients on v, for torch's rules to move."""
        self._along_rows("write_gradients", ok)
        assert self.for_rule is not None
        gradients, steps = self.for_rule.view(2, -1)
        steps.zero_()
        found: list[list[nn.Parameter]] = []
        for block, (start, bias, row, _) in zip(self.blocks, self.places, strict=True):
            lying = [(at, p.shape, p.stride()) for at, p in zip((start, bias), block.parameters, strict=False)]
            if block.rule.joint(block):
                lying = [(start, torch.Size([block.units, row]), (row, 1))]
            found.append([])
            for at, size, by in lying:
                found[-1].append(nn.Parameter(steps.as_strided(size, by, self.rule_size + at)))
                found[-1][-1].grad = gradients.as_strided(size, by, at)
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
