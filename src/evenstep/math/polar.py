"""Orthogonal factors of matrices, many at once."""

import torch
from torch import Tensor

# Muon's quintic, x ← a x + b x³ + c x⁵ on singular values: it pushes those from 0.01 to 1 to about one, fast
QUINTIC = (3.4445, -4.7750, 2.0315)
LEAST = 1e-3  # least mean square of a line, relative to the matrix's


def polar(x: Tensor, steps: int) -> Tensor:
    """Orthogonal factor of each matrix of a batch [batch, row, column], by Newton–Schulz iteration; zero stays zero.

    Singular values come out between about 0.7 and 1.2, which is all that a direction needs. Products are as wide as
    `x`: bfloat16 is enough.
    """
    wide = x.shape[-2] > x.shape[-1]
    x = x.mT if wide else x
    x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=torch.finfo(x.dtype).tiny)
    a, b, c = QUINTIC
    for _ in range(steps):
        square = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return x.mT if wide else x


def rows_are_longer(units: int, columns: int) -> bool:
    """Whether the lines whose mean squares are kept are the rows: the lines of the longer side."""
    return units >= columns


def line_scales(square: Tensor) -> Tensor:
    """What brings lines of these running mean squares, [batch, line], to one length (NorMuon); 0 for a matrix of zeros.

    A line whose square is below `LEAST` of the mean gets a shorter step: it may be rounding alone, as the gradient of a
    bias in front of a batch norm is.
    """
    tiny = torch.finfo(square.dtype).tiny
    return torch.maximum(square, (LEAST * square.mean(-1, keepdim=True)).clamp(min=tiny)).rsqrt()
