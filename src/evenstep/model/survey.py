"""Which parameter of a model belongs to which layer: the survey behind `opt.coverage()`."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

from ..parallel import dtensor as shards
from .kinds import LayerKind, Slot
from .layers import batch_second, check_layout, kind_of, overrides_forward


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
        names = list(dict.fromkeys(row.treatment for row in self))
        return ", ".join(f"{sum(row.treatment == n for row in self)} {n}" for n in names) or "no parameters"


@dataclass(eq=False)
class Entry:
    """One weight of the model and every place that uses it: several where weights are tied."""

    kind: LayerKind
    slot: Slot
    batch_dim: int
    places: list[tuple[str, nn.Module]] = field(default_factory=list)

    @property
    def path(self) -> str:
        """The name of the layer in messages: the path of its first place."""
        return self.places[0][0]

    @property
    def name(self) -> str:
        """The name of the weight at its first place; unique in the model."""
        return f"{self.path}.{self.slot.weight}"

    @property
    def module(self) -> nn.Module:
        """The module of its first place."""
        return self.places[0][1]

    @property
    def home(self) -> tuple[dict[str, nn.Parameter | None], str]:
        """The dict of parameters that contains the weight, and its key there."""
        owner, _, last = self.slot.weight.rpartition(".")
        return self.module.get_submodule(owner)._parameters, last

    @property
    def weight(self) -> Tensor:
        """The current weight: looked up each time, since frameworks replace parameters."""
        weight = lookup(self.module, self.slot.weight)
        if weight is None:
            raise RuntimeError(
                f"layer '{self.path}' no longer has a parameter '{self.slot.weight}'; call opt.refresh() after "
                "changing a model"
            )
        return weight

    @property
    def shape(self) -> torch.Size:
        """The shape of the whole weight as [group, unit, input, kernel]."""
        return self._layout(self.weight).shape

    def _layout(self, weight: Tensor) -> Tensor:
        return self.kind.matrix(self.module, torch.empty(weight.shape, device="meta"))

    @property
    def unfit(self) -> str | None:
        """Why the way in which ranks share the parameters rules out coordinates for the layer; None if it does not."""
        weight, biases = self.weight, self.biases
        if not any(shards.sharded(p) for p in [weight, *biases]):
            return None
        return shards.why_unfit(weight, self._layout(weight), biases)

    @property
    def biases(self) -> list[Tensor | None]:
        """The distinct biases of all places; None stands for a place without one."""
        biases = [lookup(module, self.slot.bias) for _, module in self.places]
        return [b for k, b in enumerate(biases) if not any(b is other for other in biases[:k])]


def lookup(module: nn.Module, name: str | None) -> Tensor | None:
    """The parameter `name` of `module` (dots allowed); None if it has none, or computes it from others."""
    if name is None:
        return None
    owner, _, last = name.rpartition(".")
    return module.get_submodule(owner)._parameters.get(last)


def survey(model: nn.Module, wanted: Callable[[str, Tensor], str | None]) -> tuple[list[Entry], dict[int, str]]:
    """The model's entries and, by id, the reason for each parameter of a known layer that is in none.

    `wanted(name, parameter)` gives a reason to leave a parameter out, or None.
    """
    entries: dict[int, Entry] = {}
    reasons: dict[int, str] = {}
    second = any(batch_second(module) for module in model.modules())
    known = Known(model)
    for path, module, kind, slot in slots(model):
        weight, bias = lookup(module, slot.weight), lookup(module, slot.bias)
        if weight is None:
            continue
        unwanted = None if bias is None or slot.bias is None else wanted(join(path, slot.bias), bias)
        excluded = wanted(join(path, slot.weight), weight)
        if excluded or known.mixed(weight, kind, kind.groups(module)):
            reasons[id(weight)] = excluded or known.others(weight)
            if bias is not None:
                reasons[id(bias)] = unwanted or f"its weight is {excluded or known.others(weight, module)}"
            continue
        check_layout(path, module, kind, weight)
        entry = entries.setdefault(id(weight), Entry(kind, slot, int(second)))
        entry.places.append((path, module))
        if unwanted:
            reasons[id(bias)] = unwanted
            entry.slot = slot._replace(bias=None)
    return list(entries.values()), reasons


def slots(model: nn.Module) -> Iterator[tuple[str, nn.Module, LayerKind, Slot]]:
    """Every slot of every known layer; modules inside a layer, such as an attention's out_proj, belong to it."""
    inner: set[nn.Module] = set()
    for path, module in model.named_modules():
        kind = kind_of(module)
        if kind is not None and module not in inner:
            inner.update(module.modules())
            for slot in kind.slots(module):
                yield path, module, kind, slot


class Known:
    """Which layers and modules of a model use which weight."""

    def __init__(self, model: nn.Module) -> None:
        """`shapes`: kind and groups of each slot, by its weight's name. `holders`: the modules with each parameter."""
        self.shapes = {join(path, slot.weight): (kind, kind.groups(m)) for path, m, kind, slot in slots(model)}
        self.holders: dict[int, list[tuple[str, str, nn.Module]]] = {}
        for path, module in model.named_modules():
            for name, parameter in module._parameters.items():
                self.holders.setdefault(id(parameter), []).append((name, path, module))

    def mixed(self, weight: Tensor, kind: LayerKind, groups: int) -> bool:
        """Whether the owners of a weight lay it out differently, so that it cannot have one entry."""
        return any(self.shapes.get(join(path, name)) != (kind, groups) for name, path, _ in self.holders[id(weight)])

    def others(self, weight: Tensor, owner: nn.Module | None = None) -> str:
        """The owners of a shared weight but `owner`; by default the first, under whose name coverage() lists it."""
        holders = self.holders[id(weight)]
        owner = holders[0][2] if owner is None else owner
        others = [f"{type(module).__name__} '{path}'" for _, path, module in holders if module is not owner]
        return "shared with " + (", ".join(others) or "another parameter of its module")


def join(path: str, name: str) -> str:
    """Dotted name below a module's path.

    >>> join("", "weight"), join("conv", "weight")
    ('weight', 'conv.weight')
    """
    return f"{path}.{name}" if path else name


def owners(model: nn.Module) -> dict[int, tuple[str, nn.Module]]:
    """For each parameter, by id, its first name and the module that has it under that name."""
    first: dict[int, tuple[str, nn.Module]] = {}
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                first.setdefault(id(parameter), (join(path, name), module))
    return first


def why_plain(owner: nn.Module, name: str) -> str:
    """Why the parameter `name` of `owner`, which is in no entry, is plain."""
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
    """The name of a class, with its module if torch.nn has another class of that name.

    >>> described(nn.Linear)
    'Linear'
    """
    return f"{cls.__module__}.{cls.__name__}" if getattr(nn, cls.__name__, cls) is not cls else cls.__name__
