"""Operations in place on lists of tensors: torch's foreach kernels, or one by one where a compiler traces them.

Inductor fuses single operations by itself. Of foreach operations its GPU code is wrong in torch 2.11: it reads buffers
that it has already overwritten, or an assertion of its scheduler fails.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def add(values: Sequence[Tensor], others: Sequence[Tensor], alpha: float) -> list[Tensor]:
    """Each value and `alpha` times the other."""
    if torch.compiler.is_compiling():
        return [torch.add(value, other, alpha=alpha) for value, other in zip(values, others, strict=True)]
    return list(torch._foreach_add(list(values), list(others), alpha=alpha))


def mul_(targets: Sequence[Tensor], values: Sequence[Tensor | float]) -> list[Tensor]:
    """Multiply each target by its value, which broadcasts to it."""
    if torch.compiler.is_compiling() or not isinstance(values[0], Tensor):
        return [target.mul_(value) for target, value in zip(targets, values, strict=True)]
    torch._foreach_mul_(list(targets), list(values))
    return list(targets)


def copy_(targets: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Write each value over its target."""
    _run("copy_", targets, values)


def add_(targets: Sequence[Tensor], values: Sequence[Tensor], alpha: float = 1.0) -> None:
    """Add `alpha` times each value to its target."""
    _run("add_", targets, values, alpha=alpha)


def zero_(targets: Sequence[Tensor]) -> None:
    """Fill the targets with zeros."""
    _run("zero_", targets)


def _run(name: str, *lists: Sequence[Tensor], **options: float) -> None:
    if torch.compiler.is_compiling():
        for target, *values in zip(*lists, strict=True):
            getattr(target, name)(*values, **options)
    elif lists[0]:
        getattr(torch, f"_foreach_{name}")(*map(list, lists), **options)
