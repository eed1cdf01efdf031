"""Which parameters of a model belong to which layer: its weights, each with every place that uses it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ..parallel import dtensor as shards
from .known_layers import batch_second, check_layout, kind_of
from .layer_kinds import LayerKind, Slot


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
    def label(self) -> str:
        """The path of the layer, or the name of its weight where a layer has several, as an attention has."""
        return self.path if len(self.kind.slots(self.module)) == 1 else join(self.path, self.slot.weight)

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
    layouts = {join(path, slot.weight): (kind, kind.groups(m)) for path, m, kind, slot in slots(model)}
    users: dict[int, Users] = {}
    for path, module in model.named_modules():
        for name, p in module._parameters.items():
            users.setdefault(id(p), {})[join(path, name)] = path, module
    for path, module, kind, slot in slots(model):
        weight, bias = lookup(module, slot.weight), lookup(module, slot.bias)
        if weight is None:
            continue
        unwanted = None if bias is None or slot.bias is None else wanted(join(path, slot.bias), bias)
        excluded, sharing = wanted(join(path, slot.weight), weight), users[id(weight)]
        if excluded or any(layouts.get(name) != (kind, kind.groups(module)) for name in sharing):
            first = next(iter(sharing.values()))[1]  # under whose name coverage() lists it
            reasons[id(weight)] = excluded or shared_with(sharing, first)
            if bias is not None:
                reasons[id(bias)] = unwanted or f"its weight is {excluded or shared_with(sharing, module)}"
            continue
        check_layout(path, module, kind, weight)
        entry = entries.setdefault(id(weight), Entry(kind, slot, int(second)))
        entry.places.append((path, module))
        if unwanted:
            reasons[id(bias)] = unwanted
            entry.slot = slot._replace(bias=None)
    return list(entries.values()), reasons


Users = dict[str, tuple[str, nn.Module]]  # the paths and modules that have a parameter, by its name there


def shared_with(users: Users, owner: nn.Module) -> str:
    """The users of a parameter but `owner`."""
    others = [f"{type(module).__name__} '{path}'" for path, module in users.values() if module is not owner]
    return "shared with " + (", ".join(others) or "another parameter of its module")


def slots(model: nn.Module) -> Iterator[tuple[str, nn.Module, LayerKind, Slot]]:
    """Every slot of every known layer; modules inside a layer, such as an attention's out_proj, belong to it."""
    inner: set[nn.Module] = set()
    for path, module in model.named_modules():
        kind = kind_of(module)
        if kind is not None and module not in inner:
            inner.update(module.modules())
            for slot in kind.slots(module):
                yield path, module, kind, slot


def join(path: str, name: str) -> str:
    """Dotted name below a module's path.

    >>> join("", "weight"), join("conv", "weight")
    ('weight', 'conv.weight')
    """
    return f"{path}.{name}" if path else name
