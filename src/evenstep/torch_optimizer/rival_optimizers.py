"""Which parameters the attached optimizers train, so that a second optimizer on the same ones can warn."""

import gc
import weakref
from typing import Any

attached: "weakref.WeakSet[Any]" = weakref.WeakSet()


def claim(optimizer: Any) -> str | None:
    """Record that `optimizer` is attached; a warning if another attached optimizer trains some of its parameters."""
    attached.add(optimizer)
    if rivals(optimizer):
        gc.collect()  # a scheduler and its optimizer refer to each other, so a deleted one may still be waiting
    for name, shared in rivals(optimizer):
        return (
            f"{shared} of its {len(trained(optimizer))} parameters are also trained by another optimizer ({name}) that "
            f"is still attached to their model, so each would be moved twice. If that {name} is no longer used, call "
            "its detach(); else give each optimizer its own parameters."
        )
    return None


def rivals(optimizer: Any) -> list[tuple[str, int]]:
    """The class of each other optimizer, and how many of `optimizer`'s parameters it trains."""
    shared = [(type(other).__name__, len(trained(optimizer) & trained(other))) for other in attached - {optimizer}]
    return [(name, count) for name, count in shared if count]


def trained(optimizer: Any) -> set[int]:
    """The ids of the parameters that `optimizer` trains."""
    return {id(p) for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
