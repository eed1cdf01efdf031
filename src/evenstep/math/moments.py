"""Batch and running moments of a layer's inputs (§2.3), kept so that float32 suffices.

A hook sees a batch in pieces (micro-batches, repeated calls, recomputed forwards), so a batch is first gathered as
sums about a centre, `Sums`. Once per step the sums become the batch's moments and join the running ones.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .segments import WHOLE, Whole


class Sums(NamedTuple):
    """Sums over a batch: the number of rows, Σ(x − centre) and Σ(x − centre)² for each input."""

    rows: Tensor
    first: Tensor
    second: Tensor


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype moments are kept in: float32, or float64 for float64 data."""
    return torch.promote_types(dtype, torch.float32)


def sum_about(x: Tensor, centre: Tensor, dim: int) -> Tensor:
    """Σ(x − c) and Σ(x − c)², stacked, over every dimension of `x` but `dim`, in the dtype of `centre`."""
    others, deviation = [d for d in range(x.dim()) if d != dim % x.dim()], deviation_from(x, centre, dim)
    return torch.stack([t.sum(others) if others else t for t in (deviation, deviation * deviation)])


def deviation_from(x: Tensor, centre: Tensor, dim: int) -> Tensor:
    """x − c, inputs along `dim`, in the dtype of `centre`."""
    behind = x.dim() - 1 - dim % x.dim()
    return x.to(centre.dtype) - (centre.view(-1, *[1] * behind) if behind else centre)


def thinned(x: Tensor, dim: int, limit: int | None) -> Tensor:
    """A lattice of at most `limit` rows of `x`, inputs along `dim`: a view that spreads over examples and positions.

    Positions are thinned out first, so that as many examples as possible are looked at.
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
    """The lattice of tensors like `x`."""
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
    """The same batch summed about `centre + shift`: Σ(x−c−s) and Σ(x−c−s)²."""
    rows, first, second = sums
    return Sums(rows, first - rows * shift, second - 2 * shift * first + rows * shift * shift)


def add_zeros(sums: Sums, zeros: Tensor, centre: Tensor) -> Sums:
    """The batch with `zeros` more rows of zeros, as a transposed convolution's zero-stuffed input has them."""
    rows, first, second = sums
    return Sums(rows + zeros, first - zeros * centre, second + zeros * centre * centre)


def usable(rows: Tensor, offset: Tensor, var: Tensor, over: Whole = WHOLE) -> Tensor:
    """Whether the batch has rows and finite moments: a bool on the device, for each layer."""
    return over.every(torch.isfinite(offset) & torch.isfinite(var)) & (rows > 0)


def batch_moments(sums: Sums) -> tuple[Tensor, Tensor]:
    """Mean of the batch, less the centre, and its variance: ⟨x⟩ − c and ⟨(x − ⟨x⟩)²⟩; 0 where the batch is empty."""
    rows = sums.rows.clamp(min=1)
    offset = sums.first / rows
    return offset, torch.addcmul(sums.second / rows, offset, offset, value=-1).clamp(min=0)


def moments_about(x: Tensor, centre: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """`batch_moments` of `x` itself, inputs along `dim`: on a CPU two operations instead of seven."""
    deviation, dim = deviation_from(x, centre, dim), dim % x.dim()
    rows = deviation if dim else deviation.unsqueeze(0)  # [row, input, ...]
    if dim == x.dim() - 1:
        rows = deviation.reshape(-1, x.shape[-1])
    offset, var = torch.batch_norm_update_stats(rows, None, None, 0.0)
    return offset, var


def gain(mass: Tensor, decay: float | Tensor) -> tuple[Tensor, Tensor]:
    """Weight of a new batch in a bias-corrected average, and the mass after it: m ← λm + (1−λ), k = (1−λ)/m."""
    mass = mass * decay + (1 - decay)
    return mass.reciprocal() * (1 - decay), mass  # torch takes far longer for a number over a tensor


def fold(mx: Tensor, vx: Tensor, mean: Tensor, var: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """The running mean and variance after a batch with this mean and variance, and weight k (§2.3).

    With d = ⟨x⟩ − mx:   mx ← mx + k d,   vx ← (1−k) vx + k var + k(1−k) d².
    In exact arithmetic this is mx2 − mx² of the paper's two averages; in float32 that difference cancels.

    Departs from the paper: the average is bias-corrected, so the first batch's moments are the first running ones.
    """
    d = mean - mx
    step = k * d
    return mx + step, torch.lerp(vx, var, k).addcmul_(step, d - step)


def fold_mean(average: Tensor, value: Tensor, mass: Tensor, decay: float | Tensor) -> Tensor:
    """A bias-corrected running mean of `value` after one more observation; `mass` is the mass before it."""
    k, _ = gain(mass, decay)
    return average + k * (value - average)
