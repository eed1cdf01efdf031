"""The parts of `math.polar` that are no products, each in one launch and one pass over the matrices of a batch."""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..math.polar import LEAST, MEMORY, SHORT, Quintic
from .input_sums import available
from .launch import Launcher, on

TINY = torch.finfo(torch.float32).tiny
BLOCK = 1024  # elements of a matrix at a time, by 4 warps of 8 neighbours each
LINE = 512  # columns of a row at a time
TILE = {"TALL": 32, "WIDTH": 64}  # rows and columns at a time, where columns are summed


def serves(x: Tensor) -> bool:
    """Whether the kernels take such matrices."""
    return x.is_cuda and x.dtype in (torch.float32, torch.bfloat16, torch.float16) and available()


def inverse_norm(gram: Tensor) -> Tensor:
    """As `math.polar.inverse_norm`."""
    batch, side, _ = gram.shape
    found = torch.empty(batch, device=gram.device)
    _launch("trace", gram, (batch, 1, 1), gram, found, side, LEAST=SHORT, BLOCK=BLOCK)
    return found


def polynomial(gram: Tensor, quintic: Quintic, short: Tensor | None = None) -> Tensor:
    """As `math.polar.polynomial`; it may write over `gram`."""
    batch, side, _ = gram.shape
    grid, a_b_c = (batch, -(-side * side // BLOCK), 1), quintic
    if short is not None:
        _launch("normalize", gram, grid, gram, short, side, EVEN=side % 8 == 0, BLOCK=BLOCK)
    square, scaled = gram @ gram, short is not None
    more = {"SCALED": scaled, "EVEN": side % 8 == 0, "BLOCK": BLOCK}
    _launch("combine", gram, grid, gram, square, gram if short is None else short, *a_b_c, side, **more)
    return square


def line_sums(factor: Tensor, weights: int, scale: Tensor | None, *, by_row: bool) -> tuple[Tensor, Tensor]:
    """As `math.polar.line_sums`."""
    batch, rows, columns = factor.shape
    sums = torch.empty(2, batch, rows if by_row else columns, device=factor.device)
    numbers = (factor, factor if scale is None else scale, *sums, rows, columns, weights)
    more = {"SCALED": scale is not None, "EVEN": columns % 8 == 0}
    if by_row:
        _launch("row_sums", factor, (rows, batch, 1), *numbers, **more, BLOCK=LINE)
    else:
        _launch("column_sums", factor, (-(-columns // TILE["WIDTH"]), batch, 1), *numbers, **more, **TILE)
    return sums[0], sums[1]


def even_lines(
    sums: Tensor, moved: Tensor, old: Tensor, lengths: Tensor, others: int, ok: Tensor | None
) -> tuple[Tensor, Tensor]:
    """As `math.polar.even_lines`."""
    batch, lines = old.shape
    found = torch.empty(2, batch, lines, device=old.device)
    numbers = (sums, moved, old, lengths, lengths if ok is None else ok, *found, lines, sums.shape[1], others)
    more = {"MASKED": ok is not None, "MEMORY": MEMORY, "LEAST": LEAST, "TINY": TINY, "BLOCK": BLOCK}
    _launch("even", old, (batch, 1, 1), *numbers, **more)
    return found[0], found[1]


def scale_lines(factor: Tensor, scale: Tensor, *, by_row: bool, out: Tensor) -> None:
    """As `math.polar.scale_lines`."""
    batch, rows, columns = factor.shape
    even = columns % 8 == 0 and out.data_ptr() % 16 == 0
    numbers = (factor, scale.contiguous(), out, rows, columns, scale.shape[1])
    _launch("scale_lines", out, (rows, batch, 1), *numbers, BY_ROW=by_row, EVEN=even, BLOCK=LINE)


def _launch(name: str, like: Tensor, grid: tuple[int, int, int], *arguments: Any, **constants: Any) -> None:
    """Launch a kernel whose builds differ by its constants, and by device, dtype and alignment of `like`."""
    key = like.device.index, like.dtype, like.data_ptr() % 16 == 0
    with on(like.device):
        _kernels()[name](key, grid, arguments, 4, **constants)


@cache
def _kernels() -> dict[str, Launcher]:
    from . import triton_matrices as code

    kernels = (code.trace, code.normalize, code.combine, code.row_sums, code.column_sums, code.even, code.scale_lines)
    return {kernel.__name__: Launcher(kernel) for kernel in kernels}
