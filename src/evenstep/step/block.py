"""Parameters that move together: a layer's weight with its biases, or one plain parameter.

The optimizers see nothing else. A block shows its tensors in the core's shapes, [group, unit, input, kernel] and
[bias, group, unit], and takes a step back to the parameters.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..math.segments import WHOLE, Whole
from ..math.stepsize import unit_square
from ..model.survey import Entry
from ..parallel import dtensor as shards

Group = dict[str, Any]


@dataclass(eq=False)
class Block:
    """One weight and the biases it carries.

    `treatment` is the coordinates it moves in: "whitened", "canonical", "fan-in" or "plain". `entry` is its layer,
    None for a plain parameter; a bias alone has the layer's entry and `alone` set. `aside` marks what does not move in
    coordinates of the optimizer's own scale, so that it takes `plain_lr`.
    """

    weight: Tensor
    group: Group
    treatment: str = "plain"
    entry: Entry | None = None
    alone: bool = False
    aside: bool = False
    biases: list[Tensor] = field(default_factory=list)
    bias_groups: list[Group] = field(default_factory=list)

    def matrix(self, tensor: Tensor) -> Tensor:
        """A tensor shaped like the weight, as [group, unit, input, kernel]; plain: a unit is a row, or all if 1-D."""
        if self.entry is not None and not self.alone:
            return self._layer(tensor)
        if self.alone:
            return tensor.reshape(1, tensor.numel(), 1, 1)
        rows = tensor.shape[0] if tensor.dim() > 1 else 1
        return tensor.reshape(1, rows, tensor.shape[tensor.dim() > 1 :].numel(), 1)

    def _layer(self, tensor: Tensor) -> Tensor:
        """A tensor like the layer's weight or this rank's rows of it: those of a grouped layer are groups of one."""
        assert self.entry is not None
        if self.rows_as_groups:
            return tensor.reshape(tensor.shape[0], 1, *self.entry.shape[2:])
        return self.entry.kind.matrix(self.entry.module, tensor)

    def unmatrix(self, matrix: Tensor) -> Tensor:
        """Back to the weight's shape."""
        if self.entry is not None and not self.alone and not self.rows_as_groups:
            return self.entry.kind.unmatrix(self.entry.module, matrix, shards.local(self.weight))
        return matrix.reshape(shards.local(self.weight).shape)

    def stack(self, tensors: list[Tensor]) -> Tensor | None:
        """Tensors shaped like the biases, as [bias, group, unit]; None if the block has no bias."""
        if not tensors or self.entry is None:
            return None
        size = tensors[0].numel()
        groups = size if self.rows_as_groups else self.groups
        rows = [tensor.reshape(groups, size // max(1, groups)) for tensor in tensors]
        return rows[0].unsqueeze(0) if len(rows) == 1 else torch.stack(rows)

    def whole(self) -> tuple[Tensor, Tensor | None]:
        """Weight and biases of the layer in the core's shapes, what does not train included."""
        if self.entry is None:
            return self.matrix(shards.local(self.weight)), None
        biases = [self.weight] if self.alone else [b for b in self.entry.biases if b is not None]
        return self._layer(shards.local(self.entry.weight)), self.stack([shards.local(b) for b in biases])

    def unstack(self, biases: Tensor | None) -> list[Tensor]:
        """Back to the shapes of the biases."""
        if biases is None:
            return []
        return [row.reshape(shards.local(b).shape) for row, b in zip(biases, self.biases, strict=True)]

    @property
    def groups(self) -> int:
        """In how many groups the layer's inputs and units fall."""
        return 1 if self.entry is None else self.entry.kind.groups(self.entry.module)

    @property
    def fan_in(self) -> int:
        """n of §3.5, with the kernel's area; 1 for a layer without inputs, whose biases train."""
        if self.entry is None:
            return 1
        *_, inputs, kernel = self._layer(shards.local(self.entry.weight)).shape
        return max(1, inputs * kernel)

    @property
    def share(self) -> float:
        """What the block gets of its group's lr: all of it, or, beside the layers, what `plain_lr` says."""
        return plain_share(self.group) if self.aside else 1.0

    @property
    def units(self) -> int:
        """How many units the weight has, over all groups and ranks."""
        if not shards.sharded(self.weight):
            return self.matrix(self.weight).shape[:2].numel()
        return self.weight.shape[0] if self.has_rows else 1

    @property
    def here(self) -> int:
        """How many of them this rank has."""
        return self.matrix(shards.local(self.weight)).shape[:2].numel()

    @property
    def has_rows(self) -> bool:
        """Whether units are rows of the weight; otherwise the whole of it is one."""
        return self.entry is not None or self.weight.dim() > 1

    @property
    def rows_as_groups(self) -> bool:
        """Whether this rank has some rows of a layer in groups."""
        return self.entry is not None and shards.sharded(self.weight) and self.groups > 1

    @property
    def over(self) -> Whole:
        """Reductions over all units, wherever they are."""
        return shards.over_units(self.weight) if self.has_rows else WHOLE

    def unit_square(self, on_weight: Tensor, on_bias: Tensor | None) -> Tensor:
        """Σ of squares of each unit this rank has something of: [group, unit]."""
        square = unit_square(on_weight, on_bias)
        if not shards.sharded(self.weight):
            return square
        split = shards.groups_along(self.weight, rows=False)
        split += [] if self.has_rows else shards.groups_along(self.weight, rows=True)
        return shards.Spread(split).reduced(square)

    @property
    def parameters(self) -> list[Tensor]:
        """The weight, then the biases."""
        return [self.weight, *self.biases]


def plain_share(group: dict[str, Any]) -> float:
    """What parameters outside layers get of their group's lr: `plain_lr` over `plain_at`, the lr it was given with.

    >>> [plain_share({"plain_lr": lr, "plain_at": 2.0}) for lr in (0.5, None, 0.0)]
    [0.25, 1.0, 0.0]
    >>> plain_share({"plain_lr": 0.5, "plain_at": 0.0}), plain_share({})  # no ratio; a rule without plain_lr
    (1.0, 1.0)
    """
    plain_lr, at = group.get("plain_lr"), group.get("plain_at")
    if plain_lr is None or (plain_lr and not at):
        return 1.0
    return float(plain_lr / at) if at else 0.0


def gather(
    groups: Iterable[Group], entries: Iterable[Entry], treatment: str, trains: Callable[[Tensor], bool]
) -> list[Block]:
    """All blocks of the parameters in `groups` for which `trains` holds, layers first.

    `treatment` is what the optimizer gives to layers. A layer all of whose places have a bias of their own that
    trains carries them; otherwise it takes the bias-less form and leftover biases move alone.
    """
    held = {id(p): group for group in groups for p in group["params"] if trains(p)}
    entries = [entry for entry in entries if not entry.unfit]
    uses = Counter(id(b) for entry in entries for b in entry.biases if b is not None)
    found: list[Block] = []
    for entry in entries:
        biases = [b for b in entry.biases if b is not None and id(b) in held and uses[id(b)] == 1]
        carried = biases if len(biases) == len(entry.biases) else []
        if id(entry.weight) in held:
            block = Block(entry.weight, held[id(entry.weight)], seen_as(entry, treatment), entry, biases=carried)
            block.bias_groups = [held[id(b)] for b in carried]
            block.aside = treatment == "canonical" != block.treatment
            found.append(block)
        else:
            carried = []
        rest = "plain" if treatment == "plain" else "fan-in"
        loose = [b for b in biases if not any(b is c for c in carried)]
        found += [Block(b, held[id(b)], rest, entry, alone=True, aside=treatment == "canonical") for b in loose]
    taken = {id(p) for block in found for p in block.parameters}
    plain = [p for group in groups for p in group["params"] if id(p) in held and id(p) not in taken]
    return found + [Block(p, held[id(p)], aside=True) for p in plain]


def seen_as(entry: Entry, treatment: str) -> str:
    """The treatment an entry can have: fan-in coordinates where its statistics are never shown."""
    if not entry.slot.input_visible and treatment != "plain":
        return "fan-in"
    return "fan-in" if treatment == "canonical" and not entry.slot.output_visible else treatment
