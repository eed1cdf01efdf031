"""What the step kernels go by: a row per block of addresses, one of shapes and one of settings.

Triton's kernels and the C ones read the same tables. C gets the names below from here; Triton's code has the numbers.
"""

from typing import Any

import torch
from torch import Tensor

# columns of the table of addresses; the last two are C's alone
(
    WEIGHT,
    GRAD,
    BUFFER,
    LEVEL,
    BIAS_GRAD,
    BIAS_BUFFER,
    SLOTS,
    TALLY,
    CENTRE,
    MX,
    VX,
    MASS,
    SHARING,
    SQUARE,
    SQUARE_MASS,
    SHOWN,
    BIAS_SHOWN,
    GIVEN,
    BIAS_GIVEN,
    STEP,
    BIAS_STEP,
) = range(21)
ADDRESSES = STEP
# of the table of shapes
(
    COLUMNS,
    INPUTS,
    INNER,
    PER_GROUP,
    BASE,
    START,
    FLAGS,
    UNITS,
    ALL_INPUTS,
    SLOT_COUNT,
    GUARD,
    PIECES,
    SHOWN_ROW,
    BIAS_SHOWN_ROW,
    SHAPES,
) = range(15)
# and of the table of settings
(
    RATE,
    BIAS_RATE,
    RATIO,
    DECAYED,
    BIAS_DECAYED,
    RADIUS,
    DAMPING,
    TAU,
    MEMORY,
    EPS,
    UNIT_DAMPING,
    DECLARED,
    FAN_IN,
    SETTINGS,
) = range(14)
# flags: the bias trains; moments; counted; maximize; β; outside layers
TRAINED, MOVING, GUARDED, FLIPPED, SHARED, OUTSIDE = 1, 2, 4, 8, 16, 32
LONG, FEW = 16384, 264  # columns of a row that one program of Triton's would be long with, unless there are many rows
PIECE, LEAST = 1024, 64  # columns of a piece, at most and at least
KEPT = ("mx", "vx", "mass", "sharing", "square", "square_mass")  # state of the weight, in the order of addresses


def shapes(layout: Any) -> list[list[int]]:
    """The table of shapes."""
    starts, rows = [0, *torch.tensor(layout.sizes).cumsum(0).tolist()], []
    shared, guarded = {*layout.shared}, {k: place for place, k in enumerate(layout.guarded)}
    for k, block in enumerate(layout.blocks):
        groups, units, inputs, area = layout.shapes[k]
        moving, stage = k in layout.base, layout.stages[k]
        flags = TRAINED * bool(block.biases) + MOVING * moving + FLIPPED * bool(block.group["maximize"])
        flags += GUARDED * (stage is not None) + SHARED * (k in shared) + OUTSIDE * (block.entry is None)
        rows.append([
            inputs * area, inputs if moving else 1, layout.inner[k], units, layout.base.get(k, layout.identity),
            starts[k], flags, groups * units, groups * inputs if moving else 0,
            stage.slot_count if moving else 0, guarded.get(k, -1), 1,
            *((0, 0) if layout.given is None else (layout.given.places[k].apart, layout.given.places[k].bias_apart)),
        ])  # fmt: skip
    return rows


def pieces(block: Any, units: int, columns: int) -> int:
    """Into how many rows of their own Triton's programs take a row; 1 if it is taken whole, 0 if there is no good way.

    Rows of a layer would need sums over their pieces of all that guards go by.
    """
    if columns <= LONG or units >= FEW:
        return 1
    lengths = [n for n in range(PIECE, LEAST - 1, -1) if columns % n == 0] if block.entry is None else []
    even = [n for n in lengths if n % 8 == 0]
    return columns // (even or lengths)[0] if lengths else 0


def settings(layout: Any) -> list[list[float]]:
    """The table of settings; a stepsize that is a tensor on another device stands as 0."""
    rows, shared = [], {*layout.shared}
    for k, block in enumerate(layout.blocks):
        g, stage = block.group, layout.stages[k]
        both = g["lr"], block.bias_groups[0]["lr"] if block.bias_groups else 0.0
        radius = torch.inf if stage is None or g["trust"] is None else g["trust"]
        tau, declared = g.get("fresh_max"), g.get("sharing")
        rows.append([
            *(0.0 if isinstance(r, Tensor) and not r.is_cpu else float(r) for r in both),
            block.share,
            g["weight_decay"], block.bias_groups[0]["weight_decay"] if block.bias_groups else 0.0, radius,
            g.get("damping", 0.0), torch.inf if tau is None else tau, g.get("decay", 0.0), g.get("eps", 0.0),
            0.0 if block.entry is None else g.get("damping", 0.0), torch.nan if declared is None else declared,
            float(block.fan_in) if k in shared else 1.0,
        ])  # fmt: skip
    return rows


def gradient_like(p: Tensor) -> Tensor:
    """A parameter's gradient as numbers in the parameter's own dtype and layout: itself, in most cases."""
    grad = p.grad
    assert grad is not None
    plain = grad.dtype == p.dtype and grad.stride() == p.stride() and grad.shape == p.shape
    if plain and type(grad) is Tensor and not (grad.is_neg() or grad._is_zerotensor()):
        return grad
    found = torch.empty_like(p)
    found.copy_(grad)  # of a subclass, it may give one of that subclass, which has no memory of its own
    return found
