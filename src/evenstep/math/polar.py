"""Orthogonal factors of matrices, many at once."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Quintic = tuple[float, float, float]  # a, b, c of x ← a x + b x³ + c x⁵, on singular values

# Muon's, which is the same in every step: it pushes values from 0.01 to 1 to about one, fast
MUON: Quintic = (3.4445, -4.7750, 2.0315)
# The three that together come as close to one as possible from 0.01 to 1 (0.73 to 1.27), as in Polar Express: each is
# the best for the range that the one before leaves. They do what four of Muon's do.
MINIMAX: Sequence[Quintic] = ((8.0934, -23.6204, 17.4462), (3.6366, -2.7219, 0.5365), (2.6613, -1.9772, 0.4526))

SHORT = 1e-30  # least squared norm of a matrix that counts: squares of less are denormal in float32
LEAST = 1e-3  # least mean square of a line, relative to the matrix's
MEMORY = 0.95  # weight of the old value in the mean squares of lines


def inverse_norm(gram: Tensor) -> Tensor:
    """1/‖x‖ of each matrix of a batch, from the diagonal of x xᵀ."""
    wide = torch.promote_types(gram.dtype, torch.float32)
    return gram.diagonal(dim1=-2, dim2=-1).sum(-1, dtype=wide).clamp(min=SHORT).rsqrt()


def polynomial(gram: Tensor, quintic: Quintic, short: Tensor | None = None) -> Tensor:
    """a + b g + c g² of each matrix of a batch; with `short`, of short² g, times short."""
    a, b, c = quintic
    if short is not None:
        short = short.to(gram.dtype)[:, None, None]
        gram = gram * short * short
    found = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
    found.diagonal(dim1=-2, dim2=-1).add_(a)
    return found if short is None else found * short


def polar(
    x: Tensor,
    quintics: Sequence[Quintic] = MINIMAX,
    inverse_norm: Callable[[Tensor], Tensor] = inverse_norm,
    polynomial: Callable[[Tensor, Quintic, Tensor | None], Tensor] = polynomial,
) -> Tensor:
    """Orthogonal factor of each matrix of a batch [batch, row, column], by Newton–Schulz iteration; zero stays zero.

    Singular values come out between about 0.7 and 1.3, which is all that a direction needs. Products are as wide as
    `x`: bfloat16 is enough. A matrix shorter than √SHORT comes out shorter.

    x ← p(x xᵀ) x with p(g) = a + b g + c g², and the smaller one of x xᵀ and xᵀ x. The matrix is not divided by its
    norm, but the first p is, since ‖x‖² is the trace of g: only products pass over all of a matrix.
    """
    tall = x.shape[-2] > x.shape[-1]
    for k, quintic in enumerate(quintics):
        gram = x.mT @ x if tall else x @ x.mT
        factor = polynomial(gram, quintic, inverse_norm(gram) if k == 0 else None)
        x = x @ factor if tall else factor @ x
    return x


def rows_are_longer(units: int, columns: int) -> bool:
    """Whether the lines whose mean squares are kept are the rows: the lines of the longer side."""
    return units >= columns


def line_sums(factor: Tensor, weights: int, scale: Tensor | None, *, by_row: bool) -> tuple[Tensor, Tensor]:
    """Σ f² of each line, a row or a column, and Σ (s f)² of its weights.

    The first `weights` columns are weights, which move by s times a step; the others are biases.
    """
    square, wide = factor * factor, torch.promote_types(factor.dtype, torch.float32)
    by = factor.new_ones(1, weights, dtype=wide) if scale is None else scale.square()
    by = torch.constant_pad_nd(by, (0, factor.shape[-1] - weights))
    if not by_row:
        sums = square.sum(-2, dtype=wide)
        return sums, sums * by
    return square.sum(-1, dtype=wide), (square @ by.to(square.dtype).unsqueeze(-1)).squeeze(-1).to(wide)


def even_lines(
    sums: Tensor, moved: Tensor, old: Tensor, lengths: Tensor, others: int, ok: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The running mean squares of lines, [batch, line], and what brings all lines to one length (NorMuon).

    `sums` and `moved` are `line_sums`, of lines of `others` elements; the matrices come to the given `lengths`. The
    means stay `old` where the mask `ok` says so. A line whose mean square is below LEAST of the matrix's gets a shorter
    step: it may be rounding alone, as the gradient of a bias in front of a batch norm is.
    """
    lines, tiny = old.shape[1], torch.finfo(sums.dtype).tiny
    mean = torch.lerp(old, sums[:, :lines] / others, 1 - MEMORY)
    even = torch.maximum(mean, (LEAST * mean.mean(-1, keepdim=True)).clamp(min=tiny)).rsqrt()
    length = (moved[:, :lines] * even.square()).sum(-1).sqrt()
    even = even * torch.where(length > 0, lengths / length, 0).unsqueeze(-1)
    return mean if ok is None else torch.where(ok, mean, old), even


def scale_lines(factor: Tensor, scale: Tensor, *, by_row: bool, out: Tensor) -> None:
    """Write the factor with each line times its scale; lines behind the last scale are zero."""
    scale = torch.constant_pad_nd(scale.to(out.dtype), (0, factor.shape[-2 if by_row else -1] - scale.shape[1]))
    torch.mul(factor, scale.unsqueeze(-1 if by_row else -2), out=out)
