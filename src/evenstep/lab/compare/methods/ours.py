"""This library's optimizers as methods."""

import inspect
from typing import Any

from torch import Tensor, nn

from .method import EVERYWHERE, Method


def ours(
    cls: type, tasks: tuple[str, ...] = EVERYWHERE, lr: float | None = None, label: str = "", **fixed: Any
) -> Method:
    """An optimizer of this library, at its default lr if it has one."""
    usual = lr or inspect.signature(cls).parameters["lr"].default

    def build(model: nn.Module, lr: float | Tensor, options: dict[str, Any]) -> list[Any]:
        return [cls(model, lr=lr, capturable=next(model.parameters()).is_cuda, **options)]

    return Method(build, usual, tasks, rival=False, options=fixed, label=label)
