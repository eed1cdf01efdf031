"""Orthogonal factors of matrices, many at once."""

from collections.abc import Sequence

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


def polar(x: Tensor, quintics: Sequence[Quintic] = MINIMAX) -> Tensor:
    """Orthogonal factor of each matrix of a batch [batch, row, column], by Newton–Schulz iteration; zero stays zero.

    Singular values come out between about 0.7 and 1.3, which is all that a direction needs. Products are as wide as
    `x`: bfloat16 is enough. A matrix shorter than √SHORT comes out shorter.

    x ← p(x xᵀ) x with p(g) = a + b g + c g², and the smaller one of x xᵀ and xᵀ x. The matrix is not divided by its
    norm, but the first p is, since ‖x‖² is the trace of g: only products pass over all of a matrix.
    """
    tall = x.shape[-2] > x.shape[-1]
    for k, (a, b, c) in enumerate(quintics):
        gram = x.mT @ x if tall else x @ x.mT
        short = gram.diagonal(dim1=-2, dim2=-1).sum(-1).clamp(min=SHORT).rsqrt()[:, None, None] if k == 0 else None
        if short is not None:
            gram = gram * short * short
        factor = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        factor.diagonal(dim1=-2, dim2=-1).add_(a)
        if short is not None:
            factor *= short
        x = x @ factor if tall else factor @ x
    return x


def rows_are_longer(units: int, columns: int) -> bool:
    """Whether the lines whose mean squares are kept are the rows: the lines of the longer side."""
    return units >= columns


def line_scales(square: Tensor) -> Tensor:
    """What brings lines of these running mean squares, [batch, line], to one length (NorMuon); finite for zeros, too.

    A line whose square is below `LEAST` of the mean gets a shorter step: it may be rounding alone, as the gradient of a
    bias in front of a batch norm is.
    """
    tiny = torch.finfo(square.dtype).tiny
    return torch.maximum(square, (LEAST * square.mean(-1, keepdim=True)).clamp(min=tiny)).rsqrt()
