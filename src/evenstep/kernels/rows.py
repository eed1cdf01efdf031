"""Both readings of all weights in one launch each: sums over every unit's row, then its motion.

A row is one program. The plain version is `together.PlainRows`; see there for what is computed.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..rows import Motion, Projection, RowSums
from .moments import available

KINDS = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
POINTERS = ("weight", "grad", "buffer", "level", "bias_grad", "bias_buffer")
SHAPE = ("columns", "inputs", "inner", "per_group", "base", "start", "flags")
TRAINED, MOVING, GUARDED, FLIPPED = 1, 2, 4, 8  # flags: the bias trains; moments; a trust radius; maximize
HANDS = 8  # pinned copies of the table: half of them in turn, the others for captured graphs


def serves(weight: Tensor) -> bool:
    """Whether the kernels can take a weight."""
    return weight.device.type == "cuda" and weight.dtype in KINDS and available()


class Table:
    """Where every block's tensors are, on the device; sent there when they have moved, without waiting."""

    def __init__(self, layout: Any) -> None:
        self.layout = layout
        blocks, device = layout.blocks, layout.device
        shapes = []
        starts = [0, *torch.tensor(layout.sizes).cumsum(0).tolist()]
        for k, block in enumerate(blocks):
            _, units, inputs, area = layout.shapes[k]
            moving = k in layout.base
            flags = TRAINED * bool(block.biases) + MOVING * moving + GUARDED * (layout.stages[k] is not None)
            flags += FLIPPED * bool(block.group["maximize"])
            base = layout.base.get(k, layout.identity)
            shapes.append([inputs * area, inputs if moving else 1, layout.inner[k], units, base, starts[k], flags])
        self.shape = torch.tensor(shapes, dtype=torch.int64).to(device)
        self.owner = layout.units.owner.to(torch.int32)
        self.pinned = torch.zeros(HANDS, len(blocks), len(POINTERS), dtype=torch.int64).pin_memory()
        self.pointers = torch.zeros(len(blocks), len(POINTERS), dtype=torch.int64, device=device)
        self.last: list[list[int]] = []
        self.turn, self.captured = 0, HANDS // 2
        self.sent = [torch.cuda.Event() for _ in range(HANDS // 2)]

    def update(self, tensors: list[list[Tensor | None]]) -> None:
        """Let the device know the addresses of these tensors."""
        now = [[0 if t is None else t.data_ptr() for t in row] for row in tensors]
        if torch.cuda.is_current_stream_capturing():
            if self.captured == HANDS:
                raise RuntimeError("this optimizer's step was captured in too many CUDA graphs; build a new optimizer.")
            hand, self.captured, self.last = self.captured, self.captured + 1, []
            self.pinned[hand] = torch.tensor(now)
            self.pointers.copy_(self.pinned[hand], non_blocking=True)
        elif now != self.last:
            hand, self.last = self.turn, now
            self.turn = (self.turn + 1) % len(self.sent)
            self.sent[hand].synchronize()  # of four steps ago
            self.pinned[hand] = torch.tensor(now)
            self.pointers.copy_(self.pinned[hand], non_blocking=True)
            self.sent[hand].record()


class TritonRows:
    """`together.PlainRows` in two launches, masked on the device."""

    def __init__(self, layout: Any, coordinates: Any, state: Any, momentum: float, ahead: bool) -> None:
        self.layout, self.coordinates, self.momentum, self.ahead = layout, coordinates, momentum, ahead
        if not hasattr(layout, "table"):
            layout.table = Table(layout)
        self.grads: list[Tensor] = []  # kept alive until the step is made
        layout.table.update([self._tensors(k, block, state) for k, block in enumerate(layout.blocks)])
        c, units = coordinates, sum(layout.sizes)
        self.beta = (
            c.beta
            if c.beta is not None
            else layout.__dict__.setdefault("_ones", torch.ones(len(layout.blocks), device=layout.device))
        )
        from ..together import project

        self.unbiased: Projection | None = project(layout, c)
        self.vectors = torch.stack([c.mu, c.alpha, c.frame.spread, c.frame.fresh_spread])
        self.out = torch.empty(8, units, device=layout.device)
        self._launch(0, self.out, self.out)
        self.square = self.out[0]

    def _tensors(self, k: int, block: Any, state: Any) -> list[Tensor | None]:
        from ..together import momentum_of

        biases = [block.weight, *block.biases]
        grads = []
        for p in biases:
            grad = p.grad
            if grad.dtype != p.dtype or grad.stride() != p.stride():
                grad = torch.empty_like(p).copy_(grad)
            self.grads.append(grad)
            grads.append(grad)
        held = [momentum_of(state, p) if self.momentum else None for p in biases]
        return [block.weight, grads[0], held[0], self.layout.levels[k], *(grads[1:] or [None]), *(held[1:] or [None])]

    def sums(self, guarded: bool) -> RowSums:
        """As the first launch has them."""
        return RowSums(*self.out[:7].unbind())

    def move(self, motion: Motion, ok: Tensor | None) -> None:
        """The second launch."""
        shrinks = self._shrinks()
        coefficients = torch.stack([motion.gain, motion.back, motion.bias])
        self._launch(1, coefficients, shrinks, ok)

    def _shrinks(self) -> Tensor:
        """What decay leaves of each block's weight and bias."""
        from ..motion import rates

        columns: list[list[Any]] = [[], []]
        for block in self.layout.blocks:
            groups = [block.group, *block.bias_groups]
            kept = [1 - r * g["weight_decay"] for r, g in zip(rates(block), groups, strict=True)]
            columns[0].append(kept[0])
            columns[1].append(kept[1] if len(kept) > 1 else 1.0)
        return torch.stack(self.layout.set("shrink", columns))

    def _launch(self, which: int, values: Tensor, shrinks: Tensor, ok: Tensor | None = None) -> None:
        lay, table = self.layout, self.layout.table
        kernel = _kernels()[which]
        widest = max(s[2] * s[3] for s in lay.shapes)
        kappa = self.unbiased.kappa if self.unbiased is not None else self.out[7]
        kernel[(sum(lay.sizes),)](
            table.pointers, table.shape, table.owner, self.vectors, self.beta, kappa, self.out, values, shrinks,
            ok if ok is not None else table.owner, self.vectors.shape[1], sum(lay.sizes), len(lay.blocks),
            MOMENTUM=self.momentum, HAS_MOMENTUM=bool(self.momentum), AHEAD=self.ahead,
            PROJECT=self.unbiased is not None, KIND=KINDS[lay.blocks[0].weight.dtype],
            BLOCK=256 if widest <= 256 else 1024, num_warps=2 if widest <= 256 else 4,
        )  # fmt: skip


@cache
def _kernels() -> tuple[Any, Any]:
    import triton
    import triton.language as tl

    @triton.jit
    def pointer(address, KIND: tl.constexpr):
        if KIND == "float32":
            return address.to(tl.pointer_type(tl.float32))
        elif KIND == "bfloat16":
            return address.to(tl.pointer_type(tl.bfloat16))
        else:
            return address.to(tl.pointer_type(tl.float16))

    @triton.jit
    def input_of(column, inputs, inner, base):
        return base + (column // inner) % inputs

    free = ("width", "units", "blocks")

    @triton.jit(do_not_specialize=free)
    def add_up(
        pointers, shape, owner, vectors, beta, kappa, out, values, shrinks, ok, width, units, blocks,
        MOMENTUM: tl.constexpr, HAS_MOMENTUM: tl.constexpr, AHEAD: tl.constexpr, PROJECT: tl.constexpr,
        KIND: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        unit = tl.program_id(0)
        block = tl.load(owner + unit).to(tl.int64)
        p, s = pointers + block * 6, shape + block * 7
        columns = tl.load(s).to(tl.int32)
        inputs, inner = tl.load(s + 1).to(tl.int32), tl.load(s + 2).to(tl.int32)
        row = unit - tl.load(s + 5)
        base = tl.where((tl.load(s + 6) & 2) != 0, tl.load(s + 4) + row // tl.load(s + 3) * inputs, tl.load(s + 4))
        flags = tl.load(s + 6)
        weight = pointer(tl.load(p), KIND) + row * columns
        grad = pointer(tl.load(p + 1), KIND) + row * columns
        buffer = pointer(tl.load(p + 2), KIND) + row * columns
        scale = tl.load(beta + block)
        sign = tl.where((flags & 8) != 0, -1.0, 1.0) * scale
        shift = 0.0
        direction = 0.0
        level = 0.0
        if tl.load(p + 3) != 0:
            level = tl.load(pointer(tl.load(p + 3), KIND) + row).to(tl.float32)
        if (flags & 1) != 0:
            shift = sign * tl.load(pointer(tl.load(p + 4), KIND) + row).to(tl.float32)
            direction = shift
            if HAS_MOMENTUM:
                held = MOMENTUM * tl.load(pointer(tl.load(p + 5), KIND) + row).to(tl.float32) + shift
                direction = held
                if AHEAD:
                    direction = shift + MOMENTUM * held
        square = shift * shift
        if PROJECT:
            if ((flags & 1) == 0) & ((flags & 2) != 0):
                total = tl.zeros([BLOCK], dtype=tl.float32)
                for begin in range(0, columns, BLOCK):
                    c = begin + tl.arange(0, BLOCK)
                    here = c < columns
                    i = input_of(c, inputs, inner, base)
                    mu = tl.load(vectors + i, mask=here, other=0.0)
                    alpha = tl.load(vectors + width + i, mask=here, other=0.0)
                    total += sign * tl.load(grad + c, mask=here, other=0.0).to(tl.float32) * alpha * alpha * mu
                shift = tl.load(kappa + unit) * tl.sum(total, 0)
        squares = tl.zeros([BLOCK], dtype=tl.float32)
        along = tl.zeros([BLOCK], dtype=tl.float32)
        stretch = tl.zeros([BLOCK], dtype=tl.float32)
        bend = tl.zeros([BLOCK], dtype=tl.float32)
        means = tl.zeros([BLOCK], dtype=tl.float32)
        lengths = tl.zeros([BLOCK], dtype=tl.float32)
        for begin in range(0, columns, BLOCK):
            c = begin + tl.arange(0, BLOCK)
            here = c < columns
            i = input_of(c, inputs, inner, base)
            mu = tl.load(vectors + i, mask=here, other=0.0)
            alpha = tl.load(vectors + width + i, mask=here, other=0.0)
            spread = tl.load(vectors + 2 * width + i, mask=here, other=0.0)
            fresh = tl.load(vectors + 3 * width + i, mask=here, other=0.0)
            u = alpha * mu
            on_v = sign * alpha * tl.load(grad + c, mask=here, other=0.0).to(tl.float32) - shift * u
            d = on_v
            if HAS_MOMENTUM:
                held = MOMENTUM * tl.load(buffer + c, mask=here, other=0.0).to(tl.float32) + on_v
                d = held
                if AHEAD:
                    d = on_v + MOMENTUM * held
            squares += on_v * on_v
            step = alpha * d
            along += mu * step
            stretch += fresh * step * step
            bend += fresh * alpha * u * step
            w = tl.load(weight + c, mask=here, other=0.0).to(tl.float32)
            means += mu * w
            lengths += w * w * spread
        tl.store(out + unit, square + tl.sum(squares, 0))
        tl.store(out + units + unit, tl.sum(along, 0))
        tl.store(out + 2 * units + unit, tl.sum(stretch, 0))
        tl.store(out + 3 * units + unit, tl.sum(bend, 0))
        tl.store(out + 4 * units + unit, level + tl.sum(means, 0))
        tl.store(out + 5 * units + unit, tl.sum(lengths, 0))
        tl.store(out + 6 * units + unit, direction)
        tl.store(out + 7 * units + unit, shift)

    @triton.jit(do_not_specialize=free)
    def move(
        pointers, shape, owner, vectors, beta, kappa, out, values, shrinks, ok, width, units, blocks,
        MOMENTUM: tl.constexpr, HAS_MOMENTUM: tl.constexpr, AHEAD: tl.constexpr, PROJECT: tl.constexpr,
        KIND: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        if tl.load(ok) == 0:
            return
        unit = tl.program_id(0)
        block = tl.load(owner + unit).to(tl.int64)
        p, s = pointers + block * 6, shape + block * 7
        columns, flags = tl.load(s).to(tl.int32), tl.load(s + 6)
        inputs, inner = tl.load(s + 1).to(tl.int32), tl.load(s + 2).to(tl.int32)
        row = unit - tl.load(s + 5)
        base = tl.where((flags & 2) != 0, tl.load(s + 4) + row // tl.load(s + 3) * inputs, tl.load(s + 4))
        weight = pointer(tl.load(p), KIND) + row * columns
        grad = pointer(tl.load(p + 1), KIND) + row * columns
        buffer = pointer(tl.load(p + 2), KIND) + row * columns
        sign = tl.where((flags & 8) != 0, -1.0, 1.0) * tl.load(beta + block)
        shift = tl.load(out + 7 * units + unit)
        gain, back = tl.load(values + unit), tl.load(values + units + unit)
        left = tl.load(shrinks + block)
        if (flags & 1) != 0:
            at = pointer(tl.load(p + 3), KIND) + row
            step = tl.load(values + 2 * units + unit)
            tl.store(at, tl.load(at).to(tl.float32) * tl.load(shrinks + blocks + block) + step)
            if HAS_MOMENTUM:
                at = pointer(tl.load(p + 5), KIND) + row
                tl.store(at, MOMENTUM * tl.load(at).to(tl.float32) + shift)
        for begin in range(0, columns, BLOCK):
            c = begin + tl.arange(0, BLOCK)
            here = c < columns
            i = input_of(c, inputs, inner, base)
            alpha = tl.load(vectors + width + i, mask=here, other=0.0)
            u = alpha * tl.load(vectors + i, mask=here, other=0.0)
            on_v = sign * alpha * tl.load(grad + c, mask=here, other=0.0).to(tl.float32) - shift * u
            d = on_v
            if HAS_MOMENTUM:
                held = MOMENTUM * tl.load(buffer + c, mask=here, other=0.0).to(tl.float32) + on_v
                tl.store(buffer + c, held, mask=here)
                d = held
                if AHEAD:
                    d = on_v + MOMENTUM * held
            w = tl.load(weight + c, mask=here, other=0.0).to(tl.float32)
            tl.store(weight + c, left * w + gain * alpha * (d - back * u), mask=here)

    return add_up, move
