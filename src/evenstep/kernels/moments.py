"""Sums of a layer's input in one pass over it, tally included: one launch per call of a layer.

Every program adds its part of the rows to a slot of its own, so that the order of additions, and with it the result,
is the same in every run. The plain version is the torch code of `hooks.Stage.see`.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from .launch import Launcher

SLOTS = 16
PROGRAMS = 768  # more than these only wait for each other
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
    width, step = 16 if inputs <= 16 else 32 if inputs <= 512 else 64, x.stride(look.dim)
    columns = -(-inputs // width)
    aligned = x.data_ptr() % 16 == 0
    even = aligned and step == 1 and inputs % 8 == 0 and all(stride % 8 == 0 for stride in strides)
    arguments = (x, stage.slots, stage.centre, stage.tally, stage.seen, stage.clock)
    numbers = (rows, look.zeros, look.applied, look.examples, inputs, step, *sizes[1:], *strides)
    _kernel()(
        (x.device.index, x.dtype, aligned, max(numbers) < 2**31),
        (columns, min(SLOTS, max(2, PROGRAMS // columns)), 1),
        arguments + numbers,
        4,
        DENSE=step == 1,
        EVEN=even,
        WIDTH=width,
        TALL=64 if width == 16 else 32,
    )


@cache
def _kernel() -> Launcher:
    from .triton_moments import add_moments

    return Launcher(add_moments)
