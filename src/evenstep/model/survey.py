"""Which parameters of a model belong to which layer: its weights, each with every place that uses it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..parallel import dtensor
from .known_layers import check_layout, kind_of
from .layer_kind import LayerKind, Slot


@dataclass(eq=False)
class Entry:
    """One weight of the model and every place that uses it: several where weights are tied.

    `shape` is that of the whole weight as [group, unit, input, kernel]; `in_order` is whether its numbers lie in that
    order in a contiguous weight.
    """

    kind: LayerKind
    slot: Slot
    shape: torch.Size
    in_order: bool
    batch_dim: int
    path: str  # of its first place: the name of the layer in messages
    module: nn.Module  # of its first place
    places: list[tuple[str, nn.Module]]

    @property
    def name(self) -> str:
        """The name of the weight at its first place; unique in the model."""
        return join(self.path, self.slot.weight)

    @property
    def label(self) -> str:
        """The path of the layer, or the name of its weight where a layer has several, as an attention has."""
        return self.path if len(self.kind.slots(self.module)) == 1 else self.name

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
    def biases(self) -> list[Tensor | None]:
        """The distinct biases of all places; None stands for a place without one."""
        biases = [lookup(module, self.slot.bias) for _, module in self.places]
        return list({id(b): b for b in biases}.values())

    @property
    def unfit(self) -> str | None:
        """Why a sharded layer cannot move in its coordinates; None if it can, or is not sharded."""
        weight = self.weight
        params = [weight, *(b for b in self.biases if b is not None)]
        if not any(dtensor.sharded(p) for p in params):
            return None
        if dtensor.groups_along(weight, rows=False):
            return "its weight is sharded along its inputs"
        if not self.in_order or self.shape[:2].numel() != weight.shape[0]:
            return "its weight is sharded along dim 0, which is not its units"
        if len({getattr(p, "placements", None) for p in params}) > 1:
            return "its bias is not sharded as its weight is"
        return None


def home(module: nn.Module, name: str) -> tuple[dict[str, nn.Parameter | None], str]:
    """The dict that contains the parameter `name` of `module` (dots allowed), and its key there."""
    owner, _, last = name.rpartition(".")
    return module.get_submodule(owner)._parameters, last


def lookup(module: nn.Module, name: str | None) -> Tensor | None:
    """The parameter `name` of `module` (dots allowed); None if it has none, or computes it from others."""
    if name is None:
        return None
    parameters, key = home(module, name)
    return parameters.get(key)


def survey(model: nn.Module, wanted: Callable[[str, Tensor], str | None]) -> tuple[list[Entry], dict[int, str]]:
    """The model's entries and, by id, the reason for each parameter of a known layer that is in none.

    `wanted(name, parameter)` gives a reason to leave a parameter out, or None.
    """
    entries: dict[int, Entry] = {}
    reasons: dict[int, str] = {}
    found = list(layers_of(model))
    layouts = {entry.name: (entry.kind, entry.shape) for entry in found}
    users: dict[int, dict[str, str]] = {}  # the modules that have a parameter, by its name there
    for path, module in model.named_modules():
        for name, p in module._parameters.items():
            users.setdefault(id(p), {})[join(path, name)] = f"{type(module).__name__} '{path}'"
    for entry in found:
        weight, bias, path = entry.weight, entry.biases[0], entry.path
        unwanted = None if bias is None or entry.slot.bias is None else wanted(join(path, entry.slot.bias), bias)
        why, sharing = wanted(entry.name, weight), users[id(weight)]
        if not why and any(layouts.get(name) != layouts[entry.name] for name in sharing):
            why = "shared by " + ", ".join(dict.fromkeys(sharing.values()))
        if why:
            reasons[id(weight)] = why
            if bias is not None:
                reasons[id(bias)] = unwanted or f"its weight is {why}"
            continue
        check_layout(path, entry.module, entry.kind, weight)
        if (tied := entries.setdefault(id(weight), entry)) is not entry:
            tied.places += entry.places
        if unwanted:
            reasons[id(bias)] = unwanted
            tied.slot = tied.slot._replace(bias=None)
    return list(entries.values()), reasons


def layers_of(model: nn.Module) -> Iterator[Entry]:
    """An entry for each place of each weight; modules inside a layer, such as an attention's out_proj, belong to it."""
    sequential = [module for module in model.modules() if isinstance(module, nn.MultiheadAttention | nn.RNNBase)]
    batch_dim = int(not all(module.batch_first for module in sequential))
    inner: set[nn.Module] = set()
    for path, module in model.named_modules():
        kind = kind_of(module)
        if kind is not None and module not in inner:
            inner.update(module.modules())
            for slot in kind.slots(module):
                weight = lookup(module, slot.weight)
                if weight is not None and not isinstance(weight, nn.parameter.UninitializedParameter):
                    matrix = kind.matrix(module, torch.empty(weight.shape, device="meta"))
                    in_order, places = matrix.is_contiguous(), [(path, module)]
                    yield Entry(kind, slot, matrix.shape, in_order, batch_dim, path, module, places)


def join(path: str, name: str) -> str:
    """Dotted name below a module's path, which is empty for the model itself."""
    return f"{path}.{name}" if path else name
