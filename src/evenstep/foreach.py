"""Operations in place on lists of tensors: torch's foreach kernels, or one by one where a compiler traces them.

Inductor fuses single operations by itself. Of foreach operations its GPU code is wrong in torch 2.11: it reads buffers
that it has already overwritten, or an assertion of its scheduler fails.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor


def _in_place(name: str, *lists: Sequence[Tensor], **options: float) -> None:
    if torch.compiler.is_compiling():
        for target, *values in zip(*lists, strict=True):
            getattr(target, name)(*values, **options)
    elif lists[0]:
        getattr(torch, f"_foreach_{name}")(*map(list, lists), **options)


copy_ = partial(_in_place, "copy_")  # targets, values
add_ = partial(_in_place, "add_")  # targets, values, alpha=1
zero_ = partial(_in_place, "zero_")  # targets
