"""Sums of a layer's input in one pass over it, tally included: one launch per call of a layer.

Every program adds its part of the rows to a slot of its own, so that the order of additions, and with it the result,
is the same in every run. The plain version is `LayerStatistics._add`. Compiled code calls the kernel by an operation
that the compiler does not look into: of the plain version it makes reductions and copies that cost ten times as much.
"""

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..math.moments import thinned
from .launch import Launcher, on

SLOTS = 16
PROGRAMS = 768  # more than these only wait for each other
TALL = {16: 64, 32: 32}  # rows at a time, for so many inputs; by measurement on an H200
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
    """Whether the kernel can take this input."""
    return (
        x.is_cuda
        and len(slots) == SLOTS
        and x.dtype in KINDS
        and slots.dtype == torch.float32
        and type(x) is Tensor
        and x.dim() <= 5
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
        call = calls[kind] = prepare(x, look.dim, (look.zeros, look.applied, look.examples))
    launch(call, x, slots, stage.centre, stage.tally, stage.seen, stage.clock)
    return True


def add_compiled(x: Tensor, look: Any, limit: int | None, *tensors: Tensor) -> bool:
    """`add` for compiled code, to a stage's slots, centre, tally and seen, by its clock.

    It hands over the whole tensor, whose lattice is found when it runs. Under autocast that is the tensor as the layer
    takes it, since the compiler has no other in memory.
    """
    if not serves(x, tensors[0]):
        return False
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    torch.ops.evenstep.add_moments(x, *tensors, look.dim % x.dim(), limit, look.zeros, look.applied, look.examples)
    return True


def _add_moments(
    x: Tensor, slots: Tensor, centre: Tensor, tally: Tensor, seen: Tensor, clock: Tensor,
    dim: int, limit: int | None, zeros: int, applied: int, examples: int,
) -> None:  # fmt: skip
    """The kernel as an operation of torch's: `torch.library.custom_op` would take the host twice as long."""
    x = thinned(x, dim, limit)
    launch(prepare(x, dim, (zeros, applied, examples)), x, slots, centre, tally, seen, clock)


OPERATIONS = torch.library.Library("evenstep", "DEF")  # type: ignore[no-untyped-call]
OPERATIONS.define(  # type: ignore[no-untyped-call]
    "add_moments(Tensor x, Tensor(a!) slots, Tensor(b!) centre, Tensor(c!) tally, Tensor(d!) seen, Tensor clock, "
    "int dim, int? limit, SymInt zeros, SymInt applied, SymInt examples) -> ()",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout),  # inputs may lie as the compiler likes
)
OPERATIONS.impl("add_moments", _add_moments, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
torch.library.register_fake("evenstep::add_moments", lambda *arguments: None, lib=OPERATIONS)


def prepare(x: Tensor, dim: int, counts: tuple[int, int, int]) -> Call:
    """The call for tensors like `x`, inputs along `dim`; `counts` are added to the tally behind the rows."""
    others = merged([(x.shape[d], x.stride(d)) for d in range(x.dim()) if d != dim % x.dim()])
    sizes, strides = zip(*[(1, 0)] * (4 - len(others)), *others, strict=True)
    inputs, step = x.shape[dim], x.stride(dim)
    width = 16 if inputs <= 16 else 32
    columns, aligned = -(-inputs // width), x.data_ptr() % 16 == 0
    even = aligned and step == 1 and inputs % 8 == 0 and all(stride % 8 == 0 for stride in strides)
    numbers = (x.numel() // inputs, *counts, inputs, step, *sizes[1:], *strides)
    return Call(
        (x.device.index, x.dtype, aligned, max(numbers) < 2**31),
        (columns, min(SLOTS, max(2, PROGRAMS // columns)), 1),
        numbers,
        {"DENSE": step == 1, "EVEN": even, "LINE": len(others) < 2, "WIDTH": width, "TALL": TALL[width]},
    )


def merged(dims: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Sizes and strides of the same elements in the same order, with as few dimensions as possible.

    >>> merged([(16, 1024), (1, 7), (64, 16), (2, 3)])
    [(1024, 16), (2, 3)]
    """
    found: list[tuple[int, int]] = []
    for size, stride in dims:
        if size == 1:
            continue
        if found and found[-1][1] == size * stride:
            found[-1] = found[-1][0] * size, stride
        else:
            found.append((size, stride))
    return found


def launch(call: Call, *tensors: Tensor) -> None:
    """Run the kernel."""
    with on(tensors[0].device):
        _kernel()(call.key, call.grid, tensors + call.numbers, 4, **call.constants)


@cache
def _kernel() -> Launcher:
    from .triton_input_sums import add_moments

    return Launcher(add_moments)
