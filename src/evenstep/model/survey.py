"""Which parameter of a model belongs to which layer, and how it is treated: the survey behind `opt.coverage()`."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

from ..parallel import dtensor as shards
from .layers import LayerKind, Slot, batch_second, check_layout, kind_of, overrides_forward


class Row(NamedTuple):
    """One parameter: its name, the kind of its layer, its treatment, and why."""

    parameter: str
    layer: str
    treatment: str
    reason: str


class Coverage(list[Row]):
    """The rows of `opt.coverage()`; prints as a table."""

    def __str__(self) -> str:
        """Columns aligned, one line a parameter."""
        table = [Row._fields, *self]
        widths = [max(len(row[k]) for row in table) for k in range(len(Row._fields))]
        return "\n".join("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in table)

    def summary(self) -> str:
        """How many parameters got which treatment, in one line.

        >>> Coverage([Row("a", "Linear", "whitened", ""), Row("b", "", "plain", "")]).summary()
        '1 whitened, 1 plain'
        """
        names = list(dict.fromkeys(row.treatment for row in self))
        return ", ".join(f"{sum(row.treatment == n for row in self)} {n}" for n in names) or "no parameters"


@dataclass(eq=False)
class Entry:
    """One weight of the model with every place that uses it: one, or several where weights are tied."""

    kind: LayerKind
    slot: Slot
    batch_dim: int
    places: list[tuple[str, nn.Module]] = field(default_factory=list)

    @property
    def path(self) -> str:
        """Name of the layer, for messages: that of its first place."""
        return self.places[0][0]

    @property
    def name(self) -> str:
        """The name of the weight at its first place, which no other entry of the model has."""
        return f"{self.path}.{self.slot.weight}"

    @property
    def module(self) -> nn.Module:
        """The module of its first place."""
        return self.places[0][1]

    @property
    def home(self) -> tuple[dict[str, nn.Parameter | None], str]:
        """The parameters among which the weight is, and its name there."""
        owner, _, last = self.slot.weight.rpartition(".")
        return self.module.get_submodule(owner)._parameters, last

    @property
    def weight(self) -> Tensor:
        """The weight as it is now: looked up each time, since frameworks replace parameters."""
        weight = lookup(self.module, self.slot.weight)
        if weight is None:
            raise RuntimeError(
                f"layer '{self.path}' no longer has a parameter '{self.slot.weight}'; call opt.refresh() after "
                "changing a model"
            )
        return weight

    @property
    def shape(self) -> torch.Size:
        """The whole weight's in the core's layout, [group, unit, input, kernel]."""
        return self._layout(self.weight).shape

    def _layout(self, weight: Tensor) -> Tensor:
        return self.kind.matrix(self.module, torch.empty(weight.shape, device="meta"))

    @property
    def unfit(self) -> str | None:
        """Why the layer, though known, cannot have coordinates as its parameters lie on ranks; None if it can."""
        weight, biases = self.weight, self.biases
        if not any(shards.sharded(p) for p in [weight, *biases]):
            return None
        return shards.why_unfit(weight, self._layout(weight), biases)

    @property
    def biases(self) -> list[Tensor | None]:
        """The bias at each place, each once; None for a place without one."""
        found = [lookup(module, self.slot.bias) for _, module in self.places]
        return [b for k, b in enumerate(found) if not any(b is other for other in found[:k])]


def lookup(module: nn.Module, name: str | None) -> Tensor | None:
    """The parameter `name` of `module` (dots allowed); None if it has none, or computes it from others."""
    if name is None:
        return None
    owner, _, last = name.rpartition(".")
    return module.get_submodule(owner)._parameters.get(last)


def survey(model: nn.Module, wanted: Callable[[str, Tensor], str | None]) -> tuple[list[Entry], dict[int, str]]:
    """The model's entries, and for weights left out the reason, by id.

    `wanted(name, weight)` gives a reason to leave a weight out, or None.
    """
    entries: dict[int, Entry] = {}
    reasons: dict[int, str] = {}
    second = any(batch_second(module) for module in model.modules())
    known = Known(model)
    for path, module, kind, slot in slots(model):
        weight = lookup(module, slot.weight)
        if weight is None:
            continue
        reason = wanted(join(path, slot.weight), weight) or known.why_shared(weight, kind, kind.groups(module))
        if reason:
            reasons |= {id(p): reason for p in (weight, lookup(module, slot.bias)) if p is not None}
            continue
        check_layout(path, module, kind, weight)
        entry = entries.setdefault(id(weight), Entry(kind, slot, int(second)))
        entry.places.append((path, module))
        bias = lookup(module, slot.bias)
        if bias is not None and slot.bias is not None and (reason := wanted(join(path, slot.bias), bias)):
            reasons[id(bias)] = reason
            entry.slot = slot._replace(bias=None)
    return list(entries.values()), reasons


def slots(model: nn.Module) -> Iterator[tuple[str, nn.Module, LayerKind, Slot]]:
    """Every slot of every known layer; a layer inside a known one (an attention's out_proj) belongs to that one."""
    inner: set[nn.Module] = set()
    for path, module in model.named_modules():
        kind = kind_of(module)
        if kind is not None and module not in inner:
            inner.update(module.modules())
            for slot in kind.slots(module):
                yield path, module, kind, slot


class Known:
    """Which layers and modules of a model have which weight."""

    def __init__(self, model: nn.Module) -> None:
        """`shapes` has the kind and groups of each slot by its weight's name, `holders` who has each parameter."""
        self.shapes = {join(path, slot.weight): (kind, kind.groups(m)) for path, m, kind, slot in slots(model)}
        self.holders: dict[int, list[tuple[str, str, nn.Module]]] = {}
        for path, module in model.named_modules():
            for name, parameter in module._parameters.items():
                self.holders.setdefault(id(parameter), []).append((name, path, module))

    def why_shared(self, weight: Tensor, kind: LayerKind, groups: int) -> str | None:
        """Why a weight with several owners cannot have one entry; None if it can."""
        for name, path, module in self.holders[id(weight)]:
            if self.shapes.get(join(path, name)) != (kind, groups):
                return f"shared with {type(module).__name__} '{path}'"
        return None


def join(path: str, name: str) -> str:
    """Dotted name below a module's path.

    >>> join("", "weight"), join("conv", "weight")
    ('weight', 'conv.weight')
    """
    return f"{path}.{name}" if path else name


def owners(model: nn.Module) -> dict[int, tuple[str, nn.Module]]:
    """For each parameter, by id, its first name and the module that holds it."""
    found: dict[int, tuple[str, nn.Module]] = {}
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                found.setdefault(id(parameter), (join(path, name), module))
    return found


def why_plain(owner: nn.Module, name: str) -> str:
    """Why the parameter `name` of `owner`, which no entry holds, is plain."""
    if isinstance(owner, ParametrizationList):
        return "its layer's weight is computed from it"
    if overrides_forward(owner):
        return f"{described(type(owner))} has a forward of its own"
    kind = kind_of(owner)
    if kind is None:
        return f"no whitened form for {type(owner).__name__}"
    if any(lookup(owner, slot.weight) is None for slot in kind.slots(owner)):
        return f"its layer's weight is computed{'' if name.endswith('bias') else ' from it'}"
    return "not the bias of one layer alone"


def described(cls: type[nn.Module]) -> str:
    """A class by its name, or in full where it is called like one of torch.nn's.

    >>> described(nn.Linear)
    'Linear'
    """
    return f"{cls.__module__}.{cls.__name__}" if getattr(nn, cls.__name__, cls) is not cls else cls.__name__
