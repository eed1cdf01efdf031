"""Which parameters the attached optimizers train, so that a second optimizer on the same ones can warn."""

import gc
import weakref
from typing import Any

attached: "weakref.WeakSet[Any]" = weakref.WeakSet()


def claim(optimizer: Any) -> str | None:
    """Record that `optimizer` is attached; a warning if another attached optimizer trains some of its parameters."""
    attached.add(optimizer)
    ours = trained(optimizer)

    def rivals() -> list[Any]:
        return [other for other in attached if other is not optimizer and ours & trained(other)]

    if rivals():
        gc.collect()  # a scheduler and its optimizer refer to each other, so a deleted one may still be waiting
    for rival in rivals():
        name = type(rival).__name__
        return (
            f"{len(ours & trained(rival))} of its {len(ours)} parameters are also trained by another optimizer, a "
            f"{name} that is still attached to their model, so each would be moved twice; if that {name} is no longer "
            "used, call its detach(), else give each optimizer its own parameters."
        )
    return None


def trained(optimizer: Any) -> set[int]:
    """The ids of the parameters that `optimizer` trains."""
    return {id(p) for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
