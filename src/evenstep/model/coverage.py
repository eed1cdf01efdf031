"""What an optimizer reports about itself: `opt.coverage()`, `opt.fired()`, and layers whose input was not seen."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from .survey import Coverage, Entry, Row, join, owners, why_plain

if TYPE_CHECKING:
    from ..statistics.batch import LayerStatistics
    from ..step.block import Block

    Staged = Iterable[tuple[Block, LayerStatistics | None]]

UNSEEN = (
    "no input seen so far (functional calls, eval mode, cross-attention and sparse tensors show none): "
    "stepsize scaling alone"
)


def coverage_of(
    groups: list[dict[str, Any]],
    blocks: list[Block],
    model: nn.Module | None = None,
    entries: Sequence[Entry] = (),
    left_out: dict[int, str] | None = None,
    state: Mapping[Tensor, dict[str, Any]] | None = None,
) -> Coverage:
    """One row per parameter of `groups`, in their order.

    `left_out` has the reasons, by id, for parameters of known layers that are in no entry. `state` is the optimizer's,
    to find layers that have moved without statistics.
    """
    known, reasons = {} if model is None else owners(model), dict(left_out or {})
    for entry in entries:
        if unfit := entry.unfit:
            reasons |= {id(p): unfit for p in [entry.weight, *entry.biases] if p is not None}
    of_block = {id(p): block for block in blocks for p in block.parameters}
    table = Coverage()
    for group in groups:
        names = group.get("param_names") or [f"parameter {k}" for k in range(len(group["params"]))]
        for name, p in zip(names, group["params"], strict=True):
            name, owner = known.get(id(p), (name, None))
            table.append(row(name, p, of_block.get(id(p)), owner, reasons, state or {}))
    return table


def row(
    name: str,
    p: Tensor,
    block: Block | None,
    owner: nn.Module | None,
    left_out: dict[int, str],
    state: Mapping[Tensor, dict[str, Any]],
) -> Row:
    """The row of one parameter. `block` is None if it does not train, `owner` if it belongs to no attached model."""
    layer = "" if owner is None else type(owner).__name__
    if block is None:
        return Row(name, layer, "frozen", "requires_grad is False")
    if block.entry is not None:
        blind = unseen_so_far(state.get(block.weight, {}))
        return Row(name, layer, "fan-in" if blind else block.treatment, why_treated(block, blind))
    if owner is None:
        return Row(name, layer, block.treatment, "no model is attached that has it")
    return Row(name, layer, block.treatment, left_out.get(id(p)) or why_plain(owner, name.rpartition(".")[2]))


def why_treated(block: Block, blind: bool) -> str:
    """What is special about a layer's treatment; empty if nothing. `blind`: it moved, and no input was ever seen."""
    entry = block.entry
    assert entry is not None
    reasons = []
    if block.alone:
        reasons.append("moves without its weight")
    elif block.treatment == "fan-in" and not entry.slot.input_visible:
        reasons.append("its input is not seen")
    elif block.treatment == "fan-in" and not entry.slot.output_visible:
        reasons.append("its output's gradient is not seen")
    elif block.treatment in ("whitened", "canonical") and not block.biases and not blind:
        reasons.append("no bias trains with it: implied bias")
    if blind:
        called = ", by the batch's squared gradients if it was called" if block.treatment == "canonical" else ""
        reasons.append(UNSEEN + called)
    if len(entry.places) > 1:
        reasons.append("tied: " + ", ".join(path for path, _ in entry.places))
    if entry.batch_dim == 1 and block.treatment != "plain":
        reasons.append("sequences taken as [time, batch, feature]")
    return "; ".join(reasons)


def unseen_so_far(state: dict[str, Any]) -> bool:
    """Whether a layer has moved though none of its inputs was ever seen: in fan-in coordinates (reads the device)."""
    mass, step = state.get("mass"), state.get("step")
    return mass is not None and step is not None and not mass.is_meta and bool(step > 0) and not mass > 0


def guard_rates(staged: Staged) -> dict[str, tuple[float, float]]:
    """How often each guard fired since the start, by `layer_name`: share of inputs raised, of units held back."""
    shares: dict[str, tuple[float, float]] = {}
    for block, stage in staged:
        if stage is not None and block.entry is not None and not block.alone:
            raised, held, steps = stage.fired.tolist()
            inputs, units = max(1, steps * stage.inputs), max(1, steps * block.units)
            shares[layer_name(block.entry)] = (raised / inputs, held / units)
    return shares


def layer_name(entry: Entry) -> str:
    """The name of a layer, or of its weight where a layer has several weights, as an attention has."""
    return entry.path if len(entry.kind.slots(entry.module)) == 1 else join(entry.path, entry.slot.weight)


def missing_statistics(staged: Staged, wait: bool) -> str | None:
    """A warning about the first layer that has a gradient but no statistics of this step; None if there is none.

    Statistics on another device are only read if `wait` allows the host to wait for them.
    """
    for block, stage in staged:
        entry = block.entry
        if stage is None or entry is None or not block.weight.requires_grad:
            continue
        readable = stage.device.type == "cpu" or (wait and stage.device.type != "meta")
        if readable and not stage.applied:
            return (
                f"layer '{entry.path}' ({type(entry.module).__name__}) has a gradient but saw no input since the last "
                "step (compiled without its hooks? then torch._dynamo.reset() helps; eval mode? a functional call?); "
                "using its last moments, or fan-in coordinates if it has none."
            )
    return None
