"""The table of `opt.coverage()`: how each parameter is treated, and why."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor, nn

from .known_layers import kind_of, of_class
from .survey import Entry, join, lookup

if TYPE_CHECKING:
    from ..step.block import Block

UNSEEN = "no input seen so far (functional calls, eval mode, cross-attention, sparse tensors): stepsize scaling alone"


class Row(NamedTuple):
    """One parameter: its name, the class of its layer, its treatment, and the reason if there is something to say."""

    parameter: str
    layer: str
    treatment: str
    reason: str


class Coverage(list[Row]):
    """The rows of `opt.coverage()`; prints as a table."""

    def __str__(self) -> str:
        """Aligned columns, one line per parameter."""
        table = [Row._fields, *self]
        widths = [max(len(row[k]) for row in table) for k in range(len(Row._fields))]
        return "\n".join("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in table)

    def summary(self) -> str:
        """The number of parameters with each treatment, in one line.

        >>> Coverage([Row("a", "Linear", "whitened", ""), Row("b", "", "plain", "")]).summary()
        '1 whitened, 1 plain'
        """
        counts = Counter(row.treatment for row in self)
        return ", ".join(f"{count} {treatment}" for treatment, count in counts.items()) or "no parameters"


def coverage_of(
    groups: list[dict[str, Any]],
    blocks: "list[Block]",
    model: nn.Module | None,
    entries: Sequence[Entry],
    left_out: Mapping[int, str],
    state: Mapping[Tensor, dict[str, Any]],
    remark: "Callable[[Block, Tensor], str]",
) -> Coverage:
    """One row per parameter of `groups`, in their order.

    `left_out` has the reasons, by id, for parameters of known layers that are in no entry. `state` is the optimizer's,
    to find layers that have moved without statistics. `remark` is what the optimizer adds.
    """
    owners: dict[int, tuple[str, nn.Module]] = {}  # the first name of each parameter, and the module that has it
    for path, module in () if model is None else model.named_modules():
        for name, p in module._parameters.items():
            owners.setdefault(id(p), (join(path, name), module))
    reasons = {id(p): entry.unfit for entry in entries for p in [entry.weight, *entry.biases]} | dict(left_out)
    of_block = {id(p): block for block in blocks for p in block.parameters}
    table = Coverage()
    for group in groups:
        names = group.get("param_names") or [f"parameter {k}" for k in range(len(group["params"]))]
        for name, p in zip(names, group["params"], strict=True):
            name, owner = owners.get(id(p), (name, None))
            block = of_block.get(id(p))
            if block is None:
                treatment, why = "frozen", ["requires_grad is False"]
            elif block.entry is None:
                treatment, why = block.coordinates.name, [remark(block, p), reasons.get(id(p)) or why_plain(owner)]
            else:
                blind = unseen_so_far(state.get(block.weight, {}))
                treatment = "fan-in" if blind else block.coordinates.name
                why = [remark(block, p), *why_treated(block, block.entry, blind)]
            kind = "" if owner is None else type(owner).__name__
            table.append(Row(name, kind, treatment, "; ".join(filter(None, why))))
    return table


def why_treated(block: "Block", entry: Entry, blind: bool) -> list[str]:
    """What is special about a layer's treatment. `blind`: it moved, and no input was ever seen."""
    fan_in = block.coordinates.name == "fan-in" and not block.alone
    implied = block.coordinates.name in ("whitened", "canonical") and not (block.biases or block.alone or blind)
    remarks = {
        "moves without its weight": block.alone,
        "its input is not seen": fan_in and not entry.slot.input_visible,
        "its output's gradient is not seen": fan_in and not entry.slot.output_visible,
        "no bias trains with it: implied bias": implied,
        UNSEEN: blind,
        "tied: " + ", ".join(path for path, _ in entry.places): len(entry.places) > 1,
        "sequences taken as [time, batch, feature]": entry.batch_dim == 1 and block.coordinates.name != "plain",
    }
    return [remark for remark, holds in remarks.items() if holds]


def unseen_so_far(state: Mapping[str, Any]) -> bool:
    """Whether a layer has moved though none of its inputs was ever seen: in fan-in coordinates (reads the device)."""
    mass, step = state.get("mass"), state.get("step")
    return mass is not None and step is not None and not mass.is_meta and bool(step > 0) and not mass > 0


def why_plain(owner: nn.Module | None) -> str:
    """Why a parameter of `owner` that is in no entry is plain."""
    if owner is None:
        return "no model is attached that has it"
    cls, kind = type(owner), kind_of(owner)
    if kind is None and any(of_class(base) for base in cls.__mro__):
        return f"{cls.__module__}.{cls.__name__} has a forward of its own"
    if kind is None:
        return f"no whitened form for {cls.__name__}"
    if any(lookup(owner, slot.weight) is None for slot in kind.slots(owner)):
        return "its layer's weight is computed from other parameters"
    return "not the bias of one layer alone"
