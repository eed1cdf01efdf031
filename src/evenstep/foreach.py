"""Operations on lists of tensors: torch's foreach kernels, or one by one where a compiler traces them.

Inductor fuses single operations by itself. Of foreach operations its GPU code is wrong in torch 2.11: it reads buffers
that it has already overwritten, or an assertion of its scheduler fails.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor


def _run(name: str, together: Callable[..., Any], *lists: Sequence[Tensor], **options: float) -> Sequence[Tensor]:
    """The results, which are the first list itself where the operation is in place."""
    if torch.compiler.is_compiling():
        return [getattr(first, name)(*others, **options) for first, *others in zip(*lists, strict=True)]
    if not lists[0]:
        return []
    found = together(*lists, **options)
    return lists[0] if found is None else found


add = partial(_run, "add", torch._foreach_add)  # values, others, alpha=1
add_ = partial(_run, "add_", torch._foreach_add_)  # targets, values, alpha=1
copy_ = partial(_run, "copy_", torch._foreach_copy_)  # targets, values
zero_ = partial(_run, "zero_", torch._foreach_zero_)  # targets
