"""A block's moments between steps: kept in the optimizer's state, read into a frame, joined by the batch after it."""

from typing import Any

import torch
from torch import Tensor

from ..math import update
from ..math.constants import STEADY, canonical_beta2, canonical_mg2, geometry_beta2
from ..math.guards import TRUST_FLOOR
from ..math.moments import Running, Sums, accumulation_dtype, fold_mean, usable
from ..parallel import dtensor as shards
from ..statistics.batch import LayerStatistics
from .block import Block

State = dict[str, Any]


def init(state: State, block: Block, stage: LayerStatistics | None) -> None:
    """Add to `state` the moments that this block's coordinates need and that it does not have yet."""
    if stage is None or block.treatment == "plain":
        return
    if "sharing" not in state:
        state["sharing"] = torch.ones_like(stage.rows)
    if block.treatment != "fan-in" and "mx" not in state:
        state["mx"], state["vx"] = (stage.centre.new_zeros(stage.inputs) for _ in range(2))
        state["mass"] = torch.zeros_like(stage.rows)
    if block.treatment == "canonical" and "mg2" not in state:
        state["mg2"] = stage.centre.new_zeros(stage.units)


def frame(state: State, block: Block, stage: LayerStatistics | None, *, linear: bool) -> update.Frame | update.Still:
    """The coordinates of this step: from the moments of earlier steps, and this batch's for the guards.

    A rule that normalizes (`linear` False) would keep one stray β of the two, so it gets β = 1.
    """
    groups, units, inputs, _ = block.matrix(shards.local(block.weight)).shape
    weight, group = block.weight, block.group
    if stage is None or block.treatment == "plain":
        one = torch.ones((), dtype=accumulation_dtype(weight.dtype), device=weight.device)
        return update.still_frame(one.expand(groups, inputs), one)
    beta2 = geometry_beta2(block.fan_in, sharing(state, stage, group)) if linear else torch.ones_like(stage.rows)
    if block.treatment == "fan-in":
        return update.still_frame(stage.centre.new_empty(()).expand(groups, inputs), beta2)
    if block.treatment == "canonical":
        started = state["mass"] > 0
        mg2 = torch.where(started, state["mg2"], batch_mg2(stage, group))
        beta2 = torch.where(started | (stage.applied > 0), canonical_beta2(mg2, group["damping"]), beta2)
        beta2 = (beta2[shards.row_numbers(weight)] if shards.sharded(weight) else beta2).view(groups, units)
    running, sums, centre = grouped(state, stage, block.groups)
    found = update.moving_frame(
        running,
        sums,
        centre,
        beta2,
        damping=group["damping"],
        fresh_max=group["fresh_max"],
        steady=0.0 if block.biases else STEADY,
    )
    return per_row(found, block) if block.rows_as_groups else found


def per_row(frame: update.Frame, block: Block) -> update.Frame:
    """The coordinates of a grouped layer for each row that this rank has."""
    assert block.entry is not None
    own = shards.row_numbers(block.weight) // block.entry.shape[1]
    constants = frame.constants._replace(mu=frame.constants.mu[own], alpha2=frame.constants.alpha2[own])
    return update.Frame(constants, frame.spread[own], frame.fresh_spread[own], frame.raised)


def unit_length2(block: Block, frame: update.Frame | update.Still) -> Tensor:
    """‖u_j‖² of the block's units, parts of them that do not train included; [group, unit] as the block has them."""
    weight, biases = block.whole()
    if block.alone:  # its own frame has no inputs
        frame = update.still_frame(
            frame.spread.new_empty(()).expand(weight.shape[0], weight.shape[2]), frame.constants.beta2
        )
        return update.unit_length2(weight, biases, frame).view(1, -1)
    return update.unit_length2(weight, biases, frame)


def guarded(
    block: Block,
    stage: LayerStatistics | None,
    frame: update.Frame | update.Still,
    weight_step: Tensor,
    bias_steps: Tensor | None,
    *,
    linear: bool,
) -> tuple[Tensor, Tensor | None]:
    """A step on w with every unit held to its trust radius; the stage counts what the guards did."""
    trust = block.group["trust"]
    if stage is not None and trust is not None:
        weight_step, bias_steps, held, largest = update.within_trust(
            unit_length2(block, frame),
            weight_step,
            bias_steps,
            frame,
            radius=trust,
            floor=TRUST_FLOOR,
            crowd=not linear,
            over=block.over,
        )
        stage.count_guards(frame.raised, held, largest)
    elif stage is not None and block.group.get("fresh_max") is not None:
        stage.count_guards(frame.raised, torch.zeros_like(frame.raised), torch.zeros_like(stage.rows))
    return weight_step, bias_steps


def commit(state: State, block: Block, stage: LayerStatistics | None, ok: Tensor | None) -> None:
    """Let the batch join the running moments, now that the step is made; `ok` masks a step that was not."""
    if stage is None or block.treatment == "plain":
        return
    put(state["sharing"], sharing(state, stage, block.group), ok)
    if block.treatment == "fan-in":
        return
    if block.treatment == "canonical":
        put(state["mg2"], mg2_after(state, stage, block.group), ok)
    running = Running(state["mx"], state["vx"], state["mass"])
    after = update.moments_after(running, stage.sums(), stage.centre, decay=block.group["decay"])
    for old, new in zip(running, after, strict=True):
        put(old, new, ok)
    recentre(state, stage)


def recentre(state: State, stage: LayerStatistics) -> None:
    """Sum the next batch about the running mean, or about its first row while there is none."""
    if "mx" in state:
        stage.centre.copy_(torch.where(state["mass"] > 0, state["mx"], torch.nan))
        stage.centre_is_mean = False


def grouped(state: State, stage: LayerStatistics, groups: int) -> tuple[Running, Sums, Tensor]:
    """Running moments, sums and centre with inputs as [group, input]."""

    def split(t: Tensor) -> Tensor:
        return t.view(groups, -1)

    sums = stage.sums()
    running = Running(split(state["mx"]), split(state["vx"]), state["mass"])
    return running, Sums(sums.rows, split(sums.first), split(sums.second)), split(stage.centre)


def sharing(state: State, stage: LayerStatistics, group: dict[str, Any]) -> Tensor:
    """S of this step: uses of the weight per example; the last one's where nothing was seen; or as declared."""
    if group.get("sharing") is not None:
        return torch.full_like(stage.rows, group["sharing"])
    return torch.where(stage.applied > 0, stage.applied / stage.examples.clamp(min=1), state["sharing"])


def mg2_after(state: State, stage: LayerStatistics, group: dict[str, Any]) -> Tensor:
    """The running S·E[g_j²] once this batch has joined it, if it is usable."""
    fresh = batch_mg2(stage, group)
    joined = fold_mean(state["mg2"], fresh, state["mass"], group["decay"])
    return torch.where(usable(stage.sums()) & fresh.isfinite().all(), joined, state["mg2"])


def batch_mg2(stage: LayerStatistics, group: dict[str, Any]) -> Tensor:
    """S·E[g_j²] of the batch alone."""
    return canonical_mg2(stage.g2, stage.examples, group["reduction"])


def put(old: Tensor, new: Tensor, ok: Tensor | None) -> None:
    """Write `new` over `old` in place, unless the mask `ok` says the step does not count."""
    old.copy_(new if ok is None else torch.where(ok, new, old))
