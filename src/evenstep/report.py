"""The rows of `opt.coverage()`, from the blocks an optimizer would move."""

from typing import Any

from torch import Tensor, nn

from .blocks import Block
from .coverage import Coverage, Row, owners, why_plain


def coverage_of(
    groups: list[dict[str, Any]], blocks: list[Block], model: nn.Module | None, left_out: dict[int, str]
) -> Coverage:
    """One row per parameter of `groups`, in their order."""
    known = {} if model is None else owners(model)
    of_block = {id(p): block for block in blocks for p in block.parameters}
    table = Coverage()
    for group in groups:
        names = group.get("param_names") or [f"parameter {k}" for k in range(len(group["params"]))]
        for name, p in zip(names, group["params"], strict=True):
            name, owner = known.get(id(p), (name, None))
            table.append(row(name, p, of_block.get(id(p)), owner, left_out))
    return table


def row(name: str, p: Tensor, block: Block | None, owner: nn.Module | None, left_out: dict[int, str]) -> Row:
    """The row of one parameter; `block` is None where it does not train, `owner` where no model knows it."""
    layer = "" if owner is None else type(owner).__name__
    if block is None:
        return Row(name, layer, "frozen", "requires_grad is False")
    if block.entry is not None:
        return Row(name, layer, block.treatment, why_treated(block))
    if owner is None:
        return Row(name, layer, block.treatment, "no model is attached that has it")
    return Row(name, layer, block.treatment, left_out.get(id(p)) or why_plain(owner, name.rpartition(".")[2]))


def why_treated(block: Block) -> str:
    """What is special about a layer's treatment; empty if nothing."""
    entry = block.entry
    assert entry is not None
    reasons = []
    if block.alone:
        reasons.append("moves without its weight")
    elif block.treatment == "fan-in" and not entry.slot.seen:
        reasons.append("its input is not seen")
    elif block.treatment == "fan-in" and not entry.slot.shown:
        reasons.append("its output's gradient is not seen")
    elif block.treatment in ("whitened", "canonical") and not block.biases:
        reasons.append("no bias trains with it: implied bias")
    if len(entry.places) > 1:
        reasons.append("tied: " + ", ".join(path for path, _ in entry.places))
    if entry.batch_dim == 1 and block.treatment != "plain":
        reasons.append("sequences taken as [time, batch, feature]")
    return "; ".join(reasons)
