"""Operations in place on lists of tensors: torch's foreach kernels, or one by one where a compiler traces them.

Inductor fuses single operations by itself. Of foreach operations its GPU code is wrong in torch 2.11: it reads buffers
that it has already overwritten, or an assertion of its scheduler fails.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def copy_(targets: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Write each value over its target."""
    if torch.compiler.is_compiling():
        for target, value in zip(targets, values, strict=True):
            target.copy_(value)
    elif targets:
        torch._foreach_copy_(list(targets), list(values))


def add_(targets: Sequence[Tensor], values: Sequence[Tensor], alpha: float = 1.0) -> None:
    """Add `alpha` times each value to its target."""
    if torch.compiler.is_compiling():
        for target, value in zip(targets, values, strict=True):
            target.add_(value, alpha=alpha)
    elif targets:
        torch._foreach_add_(list(targets), list(values), alpha=alpha)


def zero_(targets: Sequence[Tensor]) -> None:
    """Fill the targets with zeros."""
    if torch.compiler.is_compiling():
        for target in targets:
            target.zero_()
    elif targets:
        torch._foreach_zero_(list(targets))
