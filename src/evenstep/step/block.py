"""Parameters that take one step: a layer's weight with its biases, or one plain parameter.

A block presents its weight as the matrix that `math` works on, [unit, column], its biases as [bias, unit], and brings a
step back to the shapes of the parameters.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..coordinates.coordinates import Coordinates
from ..model.survey import Entry
from ..parallel import dtensor
from ..rules.rule import Rule, plain_share
from ..statistics.layer_statistics import LayerStatistics

Group = dict[str, Any]


@dataclass(eq=False)
class Block:
    """One weight and the biases that move with it, with their coordinates and rule.

    `entry` is the layer, None for a plain parameter. A bias whose weight moves without it, or not at all, is a block of
    its own: `alone`. `uses_plain_lr` marks parameters whose stepsize is the group's `plain_lr`.
    """

    weight: Tensor
    group: Group
    entry: Entry | None
    coordinates: Coordinates
    rule: Rule
    alone: bool = False
    uses_plain_lr: bool = False
    biases: list[Tensor] = field(default_factory=list)
    bias_groups: list[Group] = field(default_factory=list)
    statistics: LayerStatistics | None = None  # of the layer

    def __post_init__(self) -> None:
        """Find out what every step needs to know of the layer's layout."""
        self.layer = None if self.alone else self.entry
        self.sharded = dtensor.sharded(self.weight) or (self.entry is not None and dtensor.sharded(self.entry.weight))
        self.groups = 1 if self.entry is None else self.entry.shape[0]
        # whether this rank has some rows of a layer in groups: they count as groups of one unit
        self.rows_as_groups = self.entry is not None and self.groups > 1 and dtensor.sharded(self.weight)
        self._in_order: torch.Size | None = None  # the shape of `matrix`, if that is the weight in its own order
        if self.layer is not None and type(self.weight) in dtensor.PLAIN:
            m = self.layout(self.weight)
            if self.weight.is_contiguous() and m.is_contiguous() and m.data_ptr() == self.weight.data_ptr():
                self._in_order = torch.Size([m.shape[:2].numel(), m.shape[2:].numel()])

    def local(self, tensor: Tensor) -> Tensor:
        """This rank's part of a tensor of the block's: all of a plain one."""
        return dtensor.local(tensor) if self.sharded else tensor

    def matrix(self, tensor: Tensor) -> Tensor:
        """A tensor shaped like the weight, as [unit, column]."""
        if self._in_order is not None:
            return tensor if tensor.shape == self._in_order else tensor.reshape(self._in_order)
        return self.layout(tensor).flatten(2).flatten(0, 1)

    def layout(self, tensor: Tensor) -> Tensor:
        """A tensor shaped like the weight, as [group, unit, input, kernel].

        A unit of a plain parameter is a row, or the whole tensor if it is 1-D.
        """
        if self.layer is not None:
            return self._layer(tensor)
        if self.alone:
            return tensor.reshape(1, tensor.numel(), 1, 1)
        rows = tensor.shape[0] if tensor.dim() > 1 else 1
        return tensor.reshape(1, rows, tensor.shape[tensor.dim() > 1 :].numel(), 1)

    def _layer(self, tensor: Tensor) -> Tensor:
        """A tensor shaped like the layer's weight, or like this rank's rows of it."""
        assert self.entry is not None
        if self.rows_as_groups:
            return tensor.reshape(tensor.shape[0], 1, *self.entry.shape[2:])
        return self.entry.kind.matrix(self.entry.module, tensor)

    def unmatrix(self, matrix: Tensor) -> Tensor:
        """Back to the weight's shape."""
        weight = self.local(self.weight)
        if self.layer is None or self.rows_as_groups or self.layer.in_order:
            return matrix if matrix.shape == weight.shape else matrix.reshape(weight.shape)
        return self.layer.kind.unmatrix(self.layer.module, matrix.reshape(self.layout(weight).shape), weight)

    def group_of_rows(self) -> Tensor:
        """The group of each unit that this rank has."""
        found = torch.arange(self.groups, device=self.weight.device).repeat_interleave(self.units // self.groups)
        return dtensor.part(found, self.weight) if dtensor.sharded(self.weight) else found

    def whole(self) -> tuple[Tensor, list[Tensor]]:
        """The layer's weight as a matrix, and its biases, those that do not train included."""
        if self.alone and self.entry is not None:
            return self._layer(self.local(self.entry.weight)).flatten(2).flatten(0, 1), [self.local(self.weight)]
        return self.matrix(self.local(self.weight)), [self.local(b) for b in self.biases or self.frozen]

    @property
    def frozen(self) -> list[Tensor]:
        """Biases of the layer that do not train with it, but are part of its units' lengths."""
        return [] if self.entry is None or self.biases else [b for b in self.entry.biases if b is not None]

    @property
    def fan_in(self) -> int:
        """n of §3.5, with the kernel's area; at least 1."""
        if self.entry is None:
            return 1
        *_, inputs, kernel = self._layer(self.local(self.entry.weight)).shape
        return max(1, inputs * kernel)

    @property
    def units(self) -> int:
        """Number of units of the weight, over all groups and ranks."""
        if not dtensor.sharded(self.weight):
            return self.matrix(self.weight).shape[0]
        return self.weight.shape[0] if self.has_rows else 1

    @property
    def local_units(self) -> int:
        """Number of units this rank has."""
        return self.matrix(self.local(self.weight)).shape[0]

    @property
    def has_rows(self) -> bool:
        """Whether units are rows of the weight; otherwise the whole weight is one unit."""
        return self.entry is not None or self.weight.dim() > 1

    @property
    def parameters(self) -> list[Tensor]:
        """The weight, then the biases."""
        return [self.weight, *self.biases]

    @property
    def param_groups(self) -> list[Group]:
        """The groups of `parameters`."""
        return [self.group, *self.bias_groups]

    def rates(self) -> list[Any]:
        """The stepsizes of `parameters`: numbers or 0-d tensors."""
        found = [group["lr"] for group in self.param_groups]
        found = [lr.squeeze() if isinstance(lr, Tensor) else lr for lr in found]
        return [lr * plain_share(self.group) for lr in found] if self.uses_plain_lr else found


Choice = tuple[Coordinates, Rule, bool]  # of a block: its coordinates, its rule, whether it uses plain_lr
Choose = Callable[[Group, Entry | None, bool], Choice]  # from its group, its layer, whether it is a bias alone


def gather(
    groups: Iterable[Group], layers: Mapping[Entry, LayerStatistics], choose: Choose, trains: Callable[[Tensor], bool]
) -> list[Block]:
    """All blocks of the parameters in `groups` for which `trains` holds, those of `layers` first.

    A layer carries its biases if each of its places has a bias of its own that trains. Otherwise it takes the bias-less
    form, and the biases left over move alone.
    """
    group_of = {id(p): group for group in groups for p in group["params"] if trains(p)}
    entries = [entry for entry in layers if not entry.unfit]
    uses = Counter(id(b) for entry in entries for b in entry.biases if b is not None)
    found: list[Block] = []

    def add(p: Tensor, entry: Entry | None, alone: bool = False, biases: list[Tensor] | None = None) -> None:
        group, biases = group_of[id(p)], biases or []
        coordinates, rule, uses_plain_lr = choose(group, entry, alone)
        bias_groups = [group_of[id(b)] for b in biases]
        statistics = None if entry is None else layers[entry]
        found.append(Block(p, group, entry, coordinates, rule, alone, uses_plain_lr, biases, bias_groups, statistics))

    for entry in entries:
        biases = [b for b in entry.biases if b is not None and id(b) in group_of and uses[id(b)] == 1]
        carried = biases if len(biases) == len(entry.biases) else []
        if id(entry.weight) in group_of:
            add(entry.weight, entry, biases=carried)
        else:
            carried = []
        for b in biases:
            if not any(b is c for c in carried):
                add(b, entry, alone=True)
    taken = {id(p) for block in found for p in block.parameters}
    for group in groups:
        for p in group["params"]:
            if id(p) in group_of and id(p) not in taken:
                taken.add(id(p))
                add(p, None)
    return found


def gradient(p: Tensor) -> Tensor:
    """The gradient of a parameter that has one: what this rank has of it."""
    assert p.grad is not None
    return p.grad if type(p.grad) is Tensor else dtensor.local(p.grad)


def all_finite(grads: Sequence[Tensor], device: torch.device | None = None) -> Tensor:
    """Whether all are finite, as a bool on the device, by default that of the first.

    >>> all_finite([torch.tensor([1e30, -1e30])]), all_finite([torch.ones(2), torch.tensor([-torch.inf])])
    (tensor(True), tensor(False))
    """
    some = [g for g in grads if g.numel()]
    device = device or (grads[0].device if grads else torch.device("cpu"))
    if not some:
        return torch.ones((), dtype=torch.bool, device=device)

    def finite(order: float) -> Tensor:
        norms = torch._foreach_norm(some, order)
        return torch.stack([n if n.device == device else n.to(device) for n in norms]).isfinite().all()

    # the 2-norm takes a tenth of the time on a CPU, but large numbers overflow in it
    quick = not torch.compiler.is_compiling() and all(g.is_cpu for g in some)
    return ok if quick and (ok := finite(2.0)) else finite(float("inf"))
