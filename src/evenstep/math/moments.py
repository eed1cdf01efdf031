"""Batch and running moments of a layer's inputs (§2.3), kept so that float32 suffices.

A hook sees a batch in pieces (micro-batches, repeated calls, recomputed forwards), so a batch is first gathered as
sums about a centre, `Sums`. Once per step the sums become the batch's moments and join the running average, `Running`.
"""

import math
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from .segments import WHOLE, Whole

Number = TypeVar("Number", float, Tensor)


class Sums(NamedTuple):
    """Sums over a batch: the number of rows, Σ(x − centre) and Σ(x − centre)² for each input."""

    rows: Tensor
    first: Tensor
    second: Tensor


class Running(NamedTuple):
    """Running mean and variance of each input; `mass` is the sum of all batches' weights, 0 before the first."""

    mx: Tensor
    vx: Tensor
    mass: Tensor


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype moments are kept in: float32, or float64 for float64 data.

    >>> accumulation_dtype(torch.bfloat16)
    torch.float32
    """
    return torch.promote_types(dtype, torch.float32)


def sum_about(x: Tensor, centre: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Σ(x − c) and Σ(x − c)² over every dimension of `x` but `dim`, in the dtype of `centre`.

    >>> sum_about(torch.tensor([[1.0, 4.0], [3.0, 6.0]]), torch.tensor([1.0, 5.0]), dim=1)
    (tensor([2., 0.]), tensor([4., 2.]))
    """
    dim, rank = dim % x.dim(), x.dim()
    others = [d for d in range(rank) if d != dim]
    deviation = x.to(centre.dtype) - (centre if dim == rank - 1 else centre.view(-1, *[1] * (rank - 1 - dim)))
    if not others:
        return deviation, deviation * deviation
    return deviation.sum(others), (deviation * deviation).sum(others)


def thinned(x: Tensor, dim: int, limit: int | None) -> Tensor:
    """A lattice of at most `limit` rows of `x`, inputs along `dim`: a view that spreads over examples and positions.

    Positions are thinned out first, so that as many examples as possible are looked at.

    >>> thinned(torch.zeros(8, 3, 32, 32), 1, 512).shape
    torch.Size([8, 3, 8, 8])
    >>> thinned(torch.zeros(100, 7), 1, 30).shape
    torch.Size([25, 7])
    """
    dim, rows = dim % x.dim(), x.numel() // max(1, x.shape[dim])
    if limit is None or rows <= limit:
        return x
    positions = [d for d in range(x.dim() - 1, 0, -1) if d != dim]
    for k, d in enumerate(positions):
        excess = -(-rows // limit)
        x, rows = every(x, d, math.ceil(excess ** (1 / (len(positions) - k))), rows)
    for d in ([0] if dim else []) + positions:  # examples, then what rounding has left over
        x, rows = every(x, d, -(-rows // limit), rows)
    return x


class Lattice(NamedTuple):
    """The rows that `thinned` keeps, for all tensors of one shape and one order in memory."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    rows: int
    whole: bool

    def of(self, x: Tensor) -> Tensor:
        """Those rows of `x`, in one operation."""
        return x if self.whole else x.as_strided(self.size, self.stride, x.storage_offset() + self.offset)


def lattice(x: Tensor, dim: int, limit: int | None) -> Lattice:
    """The lattice of tensors like `x`.

    >>> x = torch.arange(12.0).view(6, 2)
    >>> lattice(x, 1, 3).of(x)
    tensor([[ 2.,  3.],
            [ 6.,  7.],
            [10., 11.]])
    """
    found = thinned(x, dim, limit)
    rows, offset = found.numel() // max(1, found.shape[dim]), int(found.storage_offset() - x.storage_offset())
    return Lattice(tuple(found.shape), found.stride(), offset, rows, found is x)


def every(x: Tensor, dim: int, stride: int, rows: int) -> tuple[Tensor, int]:
    """Every `stride`-th slice along `dim`, from the middle of the first stride on, and how many rows remain."""
    size = x.shape[dim]
    stride = max(1, min(stride, size))
    if torch.compiler.is_compiling() and x.dim() > 3:
        stride = len([0] * stride)  # a number: compilers do not come to an end with several that are expressions
    kept = -(-(size - stride // 2) // stride)
    return x[(slice(None),) * dim + (slice(stride // 2, None, stride),)], rows // max(1, size) * kept


def recentre(sums: Sums, shift: Tensor) -> Sums:
    """The same batch summed about `centre + shift`: Σ(x−c−s) and Σ(x−c−s)².

    >>> recentre(Sums(torch.tensor(2.0), torch.tensor([2.0]), torch.tensor([4.0])), torch.tensor([1.0]))
    Sums(rows=tensor(2.), first=tensor([0.]), second=tensor([2.]))
    """
    rows, first, second = sums
    return Sums(rows, first - rows * shift, second - 2 * shift * first + rows * shift * shift)


def add_zeros(sums: Sums, zeros: Tensor, centre: Tensor) -> Sums:
    """The batch with `zeros` more rows of zeros, as a transposed convolution's zero-stuffed input has them."""
    rows, first, second = sums
    return Sums(rows + zeros, first - zeros * centre, second + zeros * centre * centre)


def usable(sums: Sums, over: Whole = WHOLE) -> Tensor:
    """Whether the batch has rows and finite sums: a bool on the device, for each layer."""
    return over.every(torch.isfinite(sums.first) & torch.isfinite(sums.second)) & (sums.rows > 0)


def batch_moments(sums: Sums, centre: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of the batch itself: ⟨x⟩ and ⟨(x − ⟨x⟩)²⟩; 0 where the batch is empty.

    >>> batch_moments(Sums(torch.tensor(2.0), torch.tensor([2.0]), torch.tensor([4.0])), torch.tensor([1.0]))
    (tensor([2.]), tensor([1.]))
    """
    rows = sums.rows.clamp(min=1)
    offset = sums.first / rows
    return centre + offset, torch.addcmul(sums.second / rows, offset, offset, value=-1).clamp(min=0)


def second_moment_about(sums: Sums, centre: Tensor, mx: Tensor) -> Tensor:
    """⟨(x − mx)²⟩ of the batch: its second moment about a mean that is not its own.

    >>> sums = Sums(torch.tensor(2.0), torch.tensor([2.0]), torch.tensor([4.0]))
    >>> second_moment_about(sums, torch.tensor([1.0]), torch.tensor([0.0]))
    tensor([5.])
    """
    moved = recentre(sums, mx - centre)
    return (moved.second / moved.rows.clamp(min=1)).clamp(min=0)


def gain(mass: Number, decay: Number | float) -> tuple[Number, Number]:
    """Weight of a new batch in a bias-corrected average, and the mass after it: m ← λm + (1−λ), k = (1−λ)/m.

    >>> gain(torch.tensor(0.0), 0.75)
    (tensor(1.), tensor(0.2500))
    """
    mass = decay * mass + (1 - decay)
    return (1 - decay) / mass, mass


def fold(running: Running, mean: Tensor, var: Tensor, decay: float | Tensor) -> Running:
    """The running moments after a batch with this mean and variance (§2.3).

    With k the batch's weight and d = ⟨x⟩ − mx:   mx ← mx + k d,   vx ← (1−k) vx + k var + k(1−k) d².
    In exact arithmetic this is mx2 − mx² of the paper's two averages; in float32 that difference cancels.

    Departs from the paper: the average is bias-corrected, so the first batch's moments are the first running ones.

    >>> fold(Running(torch.tensor([9.0]), torch.tensor([9.0]), torch.tensor(0.0)), torch.tensor([2.0]), \
torch.tensor([1.0]), 0.5)
    Running(mx=tensor([2.]), vx=tensor([1.]), mass=tensor(0.5000))
    """
    k, mass = gain(running.mass, decay)
    d = mean - running.mx
    step = k * d
    return Running(running.mx + step, torch.lerp(running.vx, var, k).addcmul_(step, d - step), mass)


def fold_mean(average: Tensor, value: Tensor, mass: Tensor, decay: float | Tensor) -> Tensor:
    """A bias-corrected running mean of `value` after one more observation; `mass` is the mass before it.

    >>> fold_mean(torch.tensor(4.0), torch.tensor(2.0), torch.tensor(0.5), 0.5)
    tensor(2.6667)
    """
    k, _ = gain(mass, decay)
    return average + k * (value - average)
