"""Which blocks can move together, and where their units and inputs then lie: end to end in one tensor each."""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..math.constants import STEADY
from ..math.moments import accumulation_dtype
from ..math.segments import Segments
from ..rules.given import Given
from ..statistics.batch import LayerStatistics
from .block import Block
from .triton import host as step_kernel
from .triton import tables


def fits(block: Block, stage: LayerStatistics | None) -> bool:
    """Whether a block can move together with others: plain tensors, units as rows in memory, at most one bias."""
    weight, group = block.weight, block.group
    if group["foreach"] is False or not rows_serve(weight, group["capturable"]):
        return False
    if block.alone or block.treatment == "canonical" or (stage is not None and stage.stuffed):
        return False
    biases = [*block.biases, *frozen_bias(block)]
    if any(type(t) not in (Tensor, torch.nn.Parameter) for t in (weight, *biases)) or not weight.numel():
        return False
    if stage is not None and block.treatment == "whitened" and stage.inputs != inputs_of(block):
        return False
    if weight.device.type != "cpu" and not tables.pieces(block, block.units, weight.numel() // block.units):
        return False
    alike = all((b.device, b.dtype, b.numel()) == (weight.device, weight.dtype, block.units) for b in biases)
    lying = all(t.is_contiguous() for t in biases) and not any(t.is_neg() for t in (weight, *biases))
    return len(biases) < 2 and alike and lying and inner(block) is not None


def shows(block: Block, joint: bool) -> bool:
    """Whether kernels can show a block to a torch rule; one that sees a matrix sees its columns in their own order."""
    *_, kernel = block.matrix(block.weight).shape
    return block.weight.is_cuda and (not joint or inner(block) == kernel)


def rows_serve(weight: Tensor, capturable: bool) -> bool:
    """Whether rows of such a weight can be read twice: on the CPU, or by the kernels."""
    if torch.compiler.is_compiling():
        return False
    if weight.device.type == "cpu":
        exact = weight.dtype == accumulation_dtype(weight.dtype)
        return not capturable and exact
    return step_kernel.serves(weight)


def arrange(
    candidates: Sequence[tuple[Block, LayerStatistics | None]],
    blocks: Sequence[Block],
    state: Any,
    joint: Callable[[Block], bool] | None = None,
) -> tuple[list["Layout"], list[Block]]:
    """Layouts for those of the candidates that can move together, and what is left of `blocks`.

    With `joint` a torch rule gives the steps, and sees as one matrix the blocks for which it holds. Bare tensors
    without any layer go one by one on a GPU, where the kernels' tables may be larger than they are.
    """
    found: dict[Any, list[tuple[Block, LayerStatistics | None]]] = {}
    for block, stage in candidates:
        if fits(block, stage) and uniform(block, stage, state) and (joint is None or shows(block, joint(block))):
            momentum = block.group["momentum"] if joint is None else 0.0
            key = block.weight.device, block.weight.dtype, momentum
            found.setdefault(key, []).append((block, stage))
    if not any(block.entry is not None for block, _ in candidates):
        found = {key: some for key, some in found.items() if key[0].type == "cpu"}
    layouts = [
        Layout([b for b, _ in some], [s for _, s in some], momentum, joint) for (*_, momentum), some in found.items()
    ]
    taken = {id(block) for some in found.values() for block, _ in some}
    return layouts, [block for block in blocks if id(block) not in taken]


def uniform(block: Block, stage: LayerStatistics | None, state: Any) -> bool:
    """Whether state has the dtypes it was made with: a model or a checkpoint of another dtype brings others."""
    wide = accumulation_dtype(block.weight.dtype)
    kept = [state[block.weight].get(name) for name in ("mx", "vx", "mass", "sharing", "square", "square_mass")]
    kept += [] if stage is None else [stage.slots, stage.centre, stage.tally]
    held = [state[p].get("momentum_buffer") for p in block.parameters]
    return all(t is None or t.dtype == wide for t in kept) and all(
        t is None or t.dtype == block.weight.dtype for t in held
    )


def frozen_bias(block: Block) -> list[Tensor]:
    """A bias of the layer that does not train with it, but is part of its units' length."""
    return [] if block.entry is None or block.biases else [b for b in block.entry.biases if b is not None]


def inputs_of(block: Block) -> int:
    """How many inputs the layer has by its weight: it may have got another one since it is watched."""
    groups, _, inputs, _ = block.matrix(block.weight).shape
    return groups * inputs


def as_they_lie(tensors: Sequence[Tensor]) -> list[Any]:
    """Which tensors these are, and how they lie in memory."""
    return [(id(t), type(t), t.device, t.dtype, t.shape, t.stride()) for t in tensors]


def inner(block: Block) -> int | None:
    """How the weight lies in memory: the distance between two inputs of a row; None if units are not rows."""
    m = block.matrix(block.weight)
    if m.data_ptr() != block.weight.data_ptr():
        return None
    return m.shape[3] if m.is_contiguous() else 1 if m.transpose(2, 3).is_contiguous() else None


def as_rows(block: Block, tensor: Tensor, inner: int) -> Tensor:
    """A tensor like the weight as [group, unit, column], columns in the weight's order in memory."""
    m = block.matrix(tensor)
    m = m if inner == m.shape[3] else m.transpose(2, 3)
    return m.reshape(*m.shape[:2], -1)


# what groups may have beside lr
SETTINGS = (
    "maximize", "weight_decay", "decay", "damping", "fresh_max", "trust", "eps", "sharing", "plain_lr", "plain_at",
)  # fmt: skip


class Layout:
    """Where the blocks' units and inputs lie; made once for a set of blocks."""

    def __init__(
        self,
        blocks: Sequence[Block],
        stages: Sequence[LayerStatistics | None],
        momentum: float,
        joint: Callable[[Block], bool] | None = None,
    ) -> None:
        """All on one device and in one dtype, with one momentum, of which there is none where a torch rule steps."""
        self.blocks, self.stages, self.momentum = list(blocks), list(stages), momentum
        self.given = None if joint is None else Given(blocks, joint)
        self.parameters = [p for block in blocks for p in block.parameters]
        weight = blocks[0].weight
        self.device, self.stored, self.dtype = weight.device, weight.dtype, accumulation_dtype(weight.dtype)
        self.inner = [int(inner(b) or 1) for b in blocks]
        self.shapes = [b.matrix(b.weight).shape for b in blocks]
        self.sizes = [s[:2].numel() for s in self.shapes]
        self.total = sum(self.sizes)
        self.units = Segments.of(self.sizes, self.device)
        self.guarded = [k for k, s in enumerate(stages) if s is not None]
        self.shared = [k for k in self.guarded if blocks[k].treatment != "plain"]
        self.moving = [k for k in self.shared if blocks[k].treatment == "whitened"]
        self.outside = [k for k, b in enumerate(blocks) if b.entry is None]
        self.biased = [k for k, b in enumerate(blocks) if b.biases]
        self.unbiased = [k for k in self.moving if not blocks[k].biases]
        self.levels = [next(iter(b.biases or frozen_bias(b)), None) for b in blocks]
        frozen = [(b, frozen_bias(b)) for b in blocks if b.entry is not None]
        self.resting = [(b, as_they_lie(biases)) for b, biases in frozen if biases]
        # an input that no layer has ends the list: it stands for all inputs of blocks without moments
        self.input_sizes = [self.shapes[k][0] * self.shapes[k][2] for k in self.moving]
        self.identity = sum(self.input_sizes)
        self.inputs = Segments.of([*self.input_sizes, 1], self.device)
        self.base = dict(zip(self.moving, Segments.of([*self.input_sizes, 1]).offsets.tolist(), strict=False))
        self.steady = self.inputs.widen(self.tensor([*(0 if blocks[k].biases else STEADY for k in self.moving), 0.0]))
        self.fan_in = self.tensor([blocks[k].fan_in for k in self.shared])
        self.unit_of_bias = self._units_of(self.biased)
        self.plain_room: Any = None  # what the CPU keeps from step to step
        self.all_seen = False  # whether the host knows that every layer was called before this step
        self.captured = False  # whether a CUDA graph holds its addresses
        groups = [g for b in blocks for g in (b.group, *b.bias_groups)]
        self.param_groups = list({id(g): g for g in groups}.values())
        self._group()
        self._column()
        self._adopt()

    @cached_property
    def by(self) -> str:
        """What makes the step: kernels in "triton" or "c", or "torch"."""
        if self.device.type == "cuda":
            return "triton"
        return "torch"

    @property
    def whole(self) -> bool:
        """Whether layers have the biases that do not train with them, as they were."""
        return all(as_they_lie(frozen_bias(block)) == then for block, then in self.resting)

    def settings(self) -> list[Any]:
        """All settings of the groups but lr, to see whether they have changed."""
        return [[*map(group.get, SETTINGS)] for group in self.param_groups]

    def tensor(self, values: Sequence[Any], dtype: torch.dtype | None = None) -> Tensor:
        """Numbers as a tensor of this layout."""
        return torch.tensor(values, dtype=dtype or self.dtype).to(self.device, non_blocking=True)

    def index(self, blocks: Sequence[int]) -> Tensor:
        """Numbers of blocks as an index."""
        return self.tensor(blocks, torch.int64)

    def _units_of(self, blocks: list[int]) -> Tensor | None:
        """The units of some blocks, as an index into all; None for all of them."""
        if len(blocks) == len(self.blocks):
            return None
        starts = Segments.of(self.sizes).offsets.tolist()
        return self.index([j for k in blocks for j in range(starts[k], starts[k] + self.sizes[k])])

    def _group(self) -> None:
        """Groups of units that see the same inputs, end to end, and the group of each unit."""
        sizes: list[int] = []
        kernel: list[int] = []
        unbiased: list[bool] = []
        owner: list[int] = []
        last, without = sum(self.shapes[k][0] for k in self.moving), {*self.unbiased}
        for k, (groups, units, inputs, area) in enumerate(self.shapes):
            if k in self.base:
                owner += [len(sizes) + j for j in range(groups) for _ in range(units)]
                sizes += [inputs] * groups
                kernel += [area] * groups
                unbiased += [k in without] * groups
            else:
                owner += [last] * (groups * units)
        self.groups = Segments.of([*sizes, 1], self.device)
        self.group_of_unit = self.index(owner)
        self.kernel = self.tensor([*kernel, 0])
        self.group_unbiased = self.tensor([*unbiased, False], torch.bool)

    def _column(self) -> None:
        """For each column of each group of the moving blocks, end to end, which input it is."""
        found, self.column_sizes = [], []
        for k in self.moving:
            groups, _, inputs, area = self.shapes[k]
            one = (torch.arange(inputs * area) // self.inner[k]) % inputs
            found.append((self.base[k] + torch.arange(groups)[:, None] * inputs + one).flatten())
            self.column_sizes.append(groups * inputs * area)
        self.column = torch.cat([*found, torch.arange(0)]).to(self.device)

    def _adopt(self) -> None:
        """Let the guards' counters of all layers be views of one tensor."""
        stages = [s for k in self.guarded if (s := self.stages[k]) is not None]
        if stages:
            self.last, self.fired = (torch.stack([getattr(s, n) for s in stages]) for n in ("last", "fired"))
            for stage, last, fired in zip(stages, self.last, self.fired, strict=True):
                stage.last, stage.fired = last, fired

    def momentum_of(self, state: Any, p: Tensor) -> Tensor:
        """The momentum buffer of `p`, laid out in memory as `p` is."""
        buffer: Tensor = state[p]["momentum_buffer"]
        if buffer.stride() != p.stride():
            buffer = state[p]["momentum_buffer"] = torch.empty_like(p).copy_(buffer)
        return buffer

    def staged(self, blocks: list[int]) -> list[LayerStatistics]:
        """The stages of some blocks."""
        return [s for k in blocks if (s := self.stages[k]) is not None]
