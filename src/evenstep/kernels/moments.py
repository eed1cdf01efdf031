"""Sums of a layer's input in one pass over it, tally included: one launch per call of a layer.

Every program adds its part of the rows to a slot of its own, so that the order of additions, and with it the result,
is the same in every run. The plain version is `stages.Stage._add`.
"""

from functools import cache
from typing import Any, NamedTuple

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


class Call(NamedTuple):
    """How the kernel is launched for tensors of one shape, layout and alignment."""

    key: tuple[Any, ...]
    grid: tuple[int, int, int]
    numbers: tuple[int, ...]
    constants: dict[str, Any]


def add(x: Tensor, look: Any, stage: Any, calls: dict[Any, Call]) -> bool:
    """Add the sums of `x` and the tally of `look` to `stage`; False if the kernel cannot.

    `calls` keeps what depends on the shape alone.
    """
    slots, kind = stage.slots, (x.device, x.dtype, x.data_ptr() % 16)
    call = calls.get(kind)
    if call is None:
        if not serves(x, slots):
            return False
        call = calls[kind] = prepare(x, look, stage.inputs)
    tensors = (x, slots, stage.centre, stage.tally, stage.seen, stage.clock)
    _kernel()(call.key, call.grid, tensors + call.numbers, 4, **call.constants)
    return True


def prepare(x: Tensor, look: Any, inputs: int) -> Call:
    """The call for tensors like `x`."""
    others = [d for d in range(x.dim()) if d != look.dim % x.dim()]
    sizes = [1] * (4 - len(others)) + [x.shape[d] for d in others]
    strides = [0] * (4 - len(others)) + [x.stride(d) for d in others]
    rows, step = x.numel() // x.shape[look.dim], x.stride(look.dim)
    width = 16 if inputs <= 16 else 32 if inputs <= 512 else 64
    columns, aligned = -(-inputs // width), x.data_ptr() % 16 == 0
    even = aligned and step == 1 and inputs % 8 == 0 and all(stride % 8 == 0 for stride in strides)
    numbers = (rows, look.zeros, look.applied, look.examples, inputs, step, *sizes[1:], *strides)
    return Call(
        (x.device.index, x.dtype, aligned, max(numbers) < 2**31),
        (columns, min(SLOTS, max(2, PROGRAMS // columns)), 1),
        numbers,
        {"DENSE": step == 1, "EVEN": even, "WIDTH": width, "TALL": 64 if width == 16 else 32},
    )


@cache
def _kernel() -> Launcher:
    from .triton_moments import add_moments

    return Launcher(add_moments)
