"""Which parameters the attached optimizers train, so that a second optimizer on the same ones can warn."""

import gc
import weakref
from typing import Any, Protocol


class Claimant(Protocol):
    """Anything with parameter groups, as `torch.optim.Optimizer` has them."""

    param_groups: list[dict[str, Any]]


_claimants: "weakref.WeakSet[Claimant]" = weakref.WeakSet()


def claim(optimizer: Claimant) -> str | None:
    """Record that `optimizer` is attached; a warning if another attached optimizer trains some of its parameters."""
    _claimants.add(optimizer)
    if _rival(optimizer) is not None:
        gc.collect()  # a scheduler and its optimizer refer to each other, so a deleted one may still be waiting
    rival = _rival(optimizer)
    if rival is None:
        return None
    ours, theirs, name = _trained(optimizer), _trained(rival), type(rival).__name__
    return (
        f"{len(ours & theirs)} of its {len(ours)} parameters are also trained by another optimizer, a {name} that is "
        f"still attached to their model, so each would be moved twice; if that {name} is no longer used, call its "
        "detach(), else give each optimizer its own parameters."
    )


def release(optimizer: Claimant) -> None:
    """Record that `optimizer` is detached."""
    _claimants.discard(optimizer)


def _rival(optimizer: Claimant) -> Claimant | None:
    """Another attached optimizer that trains some of the parameters of `optimizer`."""
    ours = _trained(optimizer)
    return next((other for other in _claimants if other is not optimizer and ours & _trained(other)), None)


def _trained(optimizer: Claimant) -> set[int]:
    """The ids of the parameters that `optimizer` trains."""
    return {id(p) for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
