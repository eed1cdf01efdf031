"""Sums of a layer's input in one pass over it, tally included: one launch per call of a layer.

Every program adds its part of the rows to a slot of its own, so that the order of additions, and with it the result,
is the same in every run. The plain version is the torch code of `hooks.Stage.see`.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor

SLOTS = 16
KINDS = (torch.float32, torch.bfloat16, torch.float16)


@cache
def available() -> bool:
    """Whether Triton is there."""
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return True


def slots(like: Tensor, device: torch.device | None = None) -> int:
    """How many slots sums need: several where the kernel runs."""
    return SLOTS if (device or like.device).type == "cuda" and available() else 1


def serves(x: Tensor, slots: Tensor) -> bool:
    """Whether the kernel can take this input; compiled code takes the plain version, which it fuses by itself."""
    return (
        x.is_cuda
        and len(slots) == SLOTS
        and x.dtype in KINDS
        and slots.dtype == torch.float32
        and type(x) is Tensor
        and x.dim() <= 5
        and not torch.compiler.is_compiling()
    )


def add(x: Tensor, look: Any, stage: Any) -> None:
    """Add the sums of `x` and the tally of `look` to `stage`."""
    others = [d for d in range(x.dim()) if d != look.dim % x.dim()]
    sizes = [1] * (4 - len(others)) + [x.shape[d] for d in others]
    strides = [0] * (4 - len(others)) + [x.stride(d) for d in others]
    rows, inputs = x.numel() // x.shape[look.dim], stage.inputs
    width = 16 if inputs <= 16 else 32 if inputs <= 512 else 64
    _kernel()[(-(-inputs // width), SLOTS)](
        x,
        stage.slots,
        stage.centre,
        stage.tally,
        stage.seen,
        stage.clock,
        rows,
        look.zeros,
        look.applied,
        look.examples,
        inputs,
        x.stride(look.dim),
        *sizes[1:],
        *strides,
        WIDTH=width,
        TALL=2048 // width,
        SLOTS=SLOTS,
        num_warps=4,
    )


@cache
def _kernel() -> Any:
    import triton
    import triton.language as tl

    free = ("rows", "zeros", "applied", "examples", "inputs", "n1", "n2", "n3", "s0", "s1", "s2", "s3")

    @triton.jit(do_not_specialize=free)
    def add_moments(
        x, slots, centre, tally, seen, clock, rows, zeros, applied, examples, inputs, step, n1, n2, n3, s0, s1, s2, s3,
        WIDTH: tl.constexpr, TALL: tl.constexpr, SLOTS: tl.constexpr,
    ):  # fmt: skip
        block, slot = tl.program_id(0), tl.program_id(1)
        c = block * WIDTH + tl.arange(0, WIDTH)
        inside = c < inputs
        column = c.to(tl.int64) * step
        middle = tl.load(centre + c, mask=inside, other=0.0)
        first_row = tl.load(x + column, mask=inside, other=0.0).to(tl.float32)
        # every program sees either NaN, and takes the first row, or what another has put there: the first row
        middle = tl.where(middle == middle, middle, first_row)
        if slot == 0:
            tl.store(centre + c, middle, mask=inside)
        each = (rows + SLOTS - 1) // SLOTS
        start, stop = slot * each, tl.minimum(slot * each + each, rows)
        first = tl.zeros([TALL, WIDTH], dtype=tl.float32)
        second = tl.zeros([TALL, WIDTH], dtype=tl.float32)
        for begin in range(start, stop, TALL):
            r = begin + tl.arange(0, TALL)
            d3, rest = r % n3, r // n3
            d2, rest = rest % n2, rest // n2
            d1, d0 = rest % n1, rest // n1
            offset = d0.to(tl.int64) * s0 + d1.to(tl.int64) * s1 + d2.to(tl.int64) * s2 + d3.to(tl.int64) * s3
            here = (r < stop)[:, None] & inside[None, :]
            value = tl.load(x + offset[:, None] + column[None, :], mask=here, other=0.0).to(tl.float32)
            away = tl.where(here, value - middle[None, :], 0.0)
            first += away
            second += away * away
        mine = slots + slot * 2 * inputs + c
        tl.store(mine, tl.load(mine, mask=inside, other=0.0) + tl.sum(first, 0), mask=inside)
        tl.store(mine + inputs, tl.load(mine + inputs, mask=inside, other=0.0) + tl.sum(second, 0), mask=inside)
        if (block == 0) & (slot == 0):
            tl.store(tally, tl.load(tally) + rows)
            tl.store(tally + 1, tl.load(tally + 1) + zeros)
            tl.store(tally + 2, tl.load(tally + 2) + applied)
            now = tl.load(clock)
            tl.store(tally + 3, tl.load(tally + 3) + tl.where(tl.load(seen) != now, examples, 0))
            tl.store(seen, now)

    return add_moments
