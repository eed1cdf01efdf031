"""Operations on lists of tensors: torch's foreach kernels, or one by one where a compiler traces them.

Inductor fuses single operations by itself. Of foreach operations its GPU code is wrong in torch 2.11: it reads buffers
that it has already overwritten, or an assertion of its scheduler fails.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor


def _run(name: str, *lists: Sequence[Tensor], **options: float) -> list[Tensor]:
    """The results, which are the first list itself where the operation is in place."""
    if torch.compiler.is_compiling():
        return [getattr(first, name)(*others, **options) for first, *others in zip(*lists, strict=True)]
    if not lists[0]:
        return []
    found = getattr(torch, f"_foreach_{name}")(*map(list, lists), **options)
    return list(lists[0] if found is None else found)


add = partial(_run, "add")  # values, others, alpha=1
mul = partial(_run, "mul")  # values, others
mul_ = partial(_run, "mul_")  # targets, values
copy_ = partial(_run, "copy_")  # targets, values
add_ = partial(_run, "add_")  # targets, values, alpha=1
addcmul = partial(_run, "addcmul")  # values, factors, factors, value=1
zero_ = partial(_run, "zero_")  # targets
