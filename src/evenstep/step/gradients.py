"""Gradients of parameters, as this rank has them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..parallel import dtensor


def gradient(p: Tensor) -> Tensor:
    """The gradient of a parameter that has one: what this rank has of it."""
    assert p.grad is not None
    return p.grad if type(p.grad) is Tensor else dtensor.local(p.grad)


def all_finite(grads: Sequence[Tensor], device: torch.device | None = None) -> Tensor:
    """Whether all are finite, as a bool on the device, by default that of the first."""
    some = [g for g in grads if g.numel()]
    device = device or next((g.device for g in grads), torch.device("cpu"))
    if not some:
        return torch.ones((), dtype=torch.bool, device=device)
    return torch.stack([n.to(device) for n in torch._foreach_norm(some, float("inf"))]).isfinite().all()
