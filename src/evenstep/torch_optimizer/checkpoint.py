"""Checkpoints: what is written beside the state to know it again, and what must hold before any of it is loaded.

A state_dict of ours carries a seal, as a module's carries its `_metadata`: the format and who wrote it; and, once it is
written to a file, a sum of each tensor's bits and of each option, since torch.load checks none. One without a seal
(format 0, or taken apart by a framework) is checked by names and shapes alone.
"""

import warnings
import zlib
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..parallel import dtensor as shards
from ..statistics.batch import Stage
from ..step.block import Block

FORMAT = 1  # 0 had no seal, and no step counts under rules that keep none
MOMENTS = ("mx", "vx", "mass")
POSITIVE = ("vx", "mass", "sharing", "mg2", "square", "square_mass")
OURS = frozenset({*MOMENTS, *POSITIVE, "step", "momentum_buffer"})
WHOLE = (MOMENTS, ("square", "square_mass"))  # come together or not at all
RENAMED = {"EvenStep": "UnitStep"}  # classes that had another name in 0.1
SHOWN = 8  # problems named in one error

Shapes = set[tuple[int, ...]]
SCALAR: Shapes = {(), (1,)}


class Sealed(OrderedDict[str, Any]):
    """A state_dict with a seal. Its tensors are live, so their sums are taken when it is written, not before."""

    _evenstep: dict[str, Any]

    def __reduce__(self) -> tuple[Any, ...]:
        """Become a plain OrderedDict, which `weights_only` loading takes, with the seal as an attribute of it."""
        if "_evenstep" not in vars(self):
            return OrderedDict, (), None, None, iter(self.items())
        full = {
            **self._evenstep,
            "sums": bit_sums(self["state"]),
            "options": [option_sums(group) for group in self["param_groups"]],
        }
        return OrderedDict, (), {"_evenstep": {**full, "check": text_sum(full)}}, None, iter(self.items())

    def __deepcopy__(self, memo: dict[int, Any]) -> "Sealed":
        """A copy in memory, to be changed at will."""
        copied = Sealed({k: deepcopy(v, memo) for k, v in self.items()})
        vars(copied).update(deepcopy(vars(self)))
        return copied


def seal(state_dict: Mapping[str, Any], writer: str) -> Sealed:
    """The state_dict with its seal."""
    sealed = Sealed(state_dict)
    sealed._evenstep = {"format": FORMAT, "optimizer": writer}
    return sealed


def seal_of(state_dict: Any) -> dict[str, Any] | None:
    """The seal a state_dict came with, if any."""
    found = getattr(state_dict, "_evenstep", None)
    return found if isinstance(found, dict) else None


def bit_sums(state: Mapping[Any, Any]) -> dict[Any, dict[str, int]]:
    """The sum of every plain tensor's bits, read as integers: any one flipped bit changes it."""
    found = [
        (key, name, value)
        for key, kept in state.items()
        if isinstance(kept, Mapping)
        for name, value in kept.items()
        if type(value) is Tensor and not value.is_meta
    ]
    sums: dict[Any, dict[str, int]] = {}
    for (key, name, _), number in zip(found, on_host([bit_sum(value) for *_, value in found]), strict=True):
        sums.setdefault(key, {})[name] = number
    return sums


def bit_sum(value: Tensor) -> Tensor:
    """Σ of a tensor's elements read as integers of their size, modulo 2⁶⁴.

    >>> bit_sum(torch.tensor([1.0, -0.0])).item() == 0x3F800000 - 2**31
    True
    """
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return value.detach().contiguous().flatten().view(integers[value.element_size()]).sum(dtype=torch.int64)


def on_host(scalars: Sequence[Tensor]) -> list[Any]:
    """The values of 0-d tensors, with one wait per device."""
    values: list[Any] = [None] * len(scalars)
    for device in {scalar.device for scalar in scalars}:
        there = [k for k, scalar in enumerate(scalars) if scalar.device == device]
        for k, value in zip(there, torch.stack([scalars[k] for k in there]).tolist(), strict=True):
            values[k] = value
    return values


def option_sums(group: Mapping[str, Any]) -> dict[str, int]:
    """A checksum of each option of a group."""
    plain = {k: v.tolist() if isinstance(v, Tensor) else v for k, v in group.items() if k != "params"}
    return {k: text_sum(v) for k, v in plain.items()}


def text_sum(value: Any) -> int:
    """A checksum of a value as it prints.

    >>> text_sum({"lr": 0.1}) == text_sum({"nr": 0.1})
    False
    """
    return zlib.crc32(repr(value).encode())


def altered(state_dict: Any, writer: str) -> tuple[list[str], list[str]]:
    """What is not as it was written: reasons to refuse the state_dict, and options that differ (edited, perhaps)."""
    found = seal_of(state_dict)
    if found is None or not complete(state_dict):
        return [], []
    if not isinstance(found.get("format"), int) or found["format"] > FORMAT:
        return [f"its format is {found.get('format')!r}, this version reads up to {FORMAT}: update evenstep"], []
    if RENAMED.get(str(found.get("optimizer")), found.get("optimizer")) != writer:
        return [f"it was saved by {found.get('optimizer')}, not by {writer}"], []
    if "check" in found and found["check"] != text_sum({k: v for k, v in found.items() if k != "check"}):
        return ["its seal is damaged"], []
    state, now = state_dict["state"], bit_sums(state_dict["state"])
    wrong = [
        f"{name} of parameter {key} is {'damaged' if name in state.get(key, {}) else 'missing'}"
        for key, names in found.get("sums", {}).items()
        for name, number in names.items()
        if now.get(key, {}).get(name) != number and not edited(state.get(key), name)
    ]
    edits = [
        f"{name} of group {k}"
        for k, (group, options) in enumerate(zip(state_dict["param_groups"], found.get("options", []), strict=False))
        for name, number in option_sums(group).items()
        if options.get(name, number) != number
    ]
    return wrong, edits


def edited(kept: Any, name: str) -> bool:
    """Whether a value is no plain tensor any more: older torch keeps steps as numbers, frameworks shard tensors."""
    return isinstance(kept, Mapping) and name in kept and type(kept[name]) is not Tensor


def complete(state_dict: Any) -> bool:
    """Whether it has the two parts of an optimizer's."""
    return isinstance(state_dict, Mapping) and {"state", "param_groups"} <= set(state_dict)


def by_name(state_dict: Any, groups: Sequence[Mapping[str, Any]]) -> Any:
    """The state_dict with the parameters of each group in our order, where it has the same names in another one."""
    if not complete(state_dict) or len(state_dict["param_groups"]) != len(groups):
        return state_dict
    pairs = zip(state_dict["param_groups"], groups, strict=True)
    return {**state_dict, "param_groups": [in_order(theirs, ours.get("param_names", ())) for theirs, ours in pairs]}


def in_order(group: Mapping[str, Any], names: Sequence[str]) -> Mapping[str, Any]:
    """A saved group with its parameters in the order of `names`, if these are its own.

    >>> in_order({"params": [0, 1], "param_names": ["a", "b"]}, ["b", "a"])
    {'params': [1, 0], 'param_names': ['b', 'a']}
    """
    places = dict(zip(group.get("param_names", ()), group.get("params", ()), strict=False))
    if places.keys() != set(names) or not len(places) == len(names) == len(group["params"]):
        return group
    return {**group, "params": [places[name] for name in names], "param_names": list(names)}


class Wanted(NamedTuple):
    """What a parameter's state may and must have: shapes by name ("*": a rule's other names), names that never lack."""

    shapes: dict[str, Shapes]
    required: set[str]


def misfits(
    state_dict: Any,
    groups: Sequence[Mapping[str, Any]],
    wanted: Mapping[Tensor, Wanted],
    known: set[str],
    sealed: bool,
) -> list[str]:
    """What of a state_dict does not fit this optimizer; without a seal its names must fit, too."""
    if not complete(state_dict):
        got = sorted(map(str, state_dict))[:4] if isinstance(state_dict, Mapping) else type(state_dict).__name__
        return [f"an optimizer's has 'state' and 'param_groups'; got {got}"]
    saved, state = state_dict["param_groups"], state_dict["state"]
    if len(saved) != len(groups):
        return [f"loaded state dict has a different number of parameter groups: {len(saved)}, here {len(groups)}"]
    sizes = [(len(theirs.get("params", ())), len(ours["params"])) for theirs, ours in zip(saved, groups, strict=True)]
    if any(theirs != ours for theirs, ours in sizes):
        return [
            "loaded state dict contains a parameter group that doesn't match the size of optimizer's group: "
            + ", ".join(f"group {k} has {theirs}, here {ours}" for k, (theirs, ours) in enumerate(sizes))
        ]
    keys = [key for group in saved for key in group["params"]]
    strange = [f"state of an unknown parameter {key}" for key in state if isinstance(key, int) and key not in keys]
    params = [p for group in groups for p in group["params"]]
    names = [name for group in groups for name in group.get("param_names", map(str, range(len(group["params"]))))]
    found = [
        f"'{name}' {problem}"
        for key, name, p in zip(keys, names, params, strict=True)
        if key in state
        for problem in state_problems(state[key], wanted.get(p, Wanted({}, set())), None if sealed else known)
    ]
    return strange + found


def state_problems(kept: Any, wanted: Wanted, known: set[str] | None) -> list[str]:
    """What is wrong with one parameter's state; names are looked at if `known` ones are given."""
    if not isinstance(kept, Mapping):
        return [f"has no state but a {type(kept).__name__}"]
    problems = []
    lacking = [name for some in WHOLE for name in some if name not in kept and any(n in kept for n in some)]
    if known is not None:
        problems += [f"has {name}, which is no state of this optimizer" for name in kept if name not in known]
        lacking += [name for name in sorted(wanted.required) if kept and name not in kept]
    if lacking:
        problems.append(f"lacks {', '.join(dict.fromkeys(lacking))}")
    for name, value in kept.items():
        if isinstance(value, Tensor):
            shapes = wanted.shapes.get(name, None if name in OURS else wanted.shapes.get("*"))
            if shapes is not None and tuple(value.shape) not in shapes:
                problems.append(f"has {name} of shape {list(value.shape)}; {listed(shapes)} is wanted")
            elif name in MOMENTS + POSITIVE and not value.is_meta and not sound(name, value):
                problems.append(f"has {name} with values that are negative or not finite")
    return problems


def sound(name: str, value: Tensor) -> bool:
    """Whether moments are finite, and those that are squares or counts not negative."""
    value = shards.local(value)
    return bool(value.isfinite().all()) and (name not in POSITIVE or bool((value >= 0).all()))


def listed(wanted: Iterable[tuple[int, ...]]) -> str:
    """Shapes in words.

    >>> listed({(2, 3), ()})
    '[] or [2, 3]'
    """
    return " or ".join(str(list(shape)) for shape in sorted(wanted))


def wanted_of(block: Block, stage: Stage | None, required: set[str], rule: bool) -> dict[Tensor, Wanted]:
    """What the state of each of a block's parameters may and must have; `rule`: shapes of a rule's own names, too."""
    found: dict[Tensor, Wanted] = {}
    for p in block.parameters:
        own: Shapes = {tuple(p.shape)}
        leads = p is block.weight and block.entry is not None and not block.alone
        units = block.units if p is block.weight else p.numel()
        if leads and block.entry is not None:  # a layer may be shown to a rule as one matrix
            own |= {(units, p.numel() // max(1, units) + more) for more in range(len(block.entry.biases) + 1)}
        elif block.entry is None and block.group.get("joint") and p.dim() > 1:  # or was, or will be once it is attached
            own |= {(len(p), p[0].numel() + more) for more in range(2)}
        shapes = dict.fromkeys(("step", "mass", "sharing", "square_mass"), SCALAR)
        shapes |= {"momentum_buffer": own, "square": own | SCALAR | {(units,)}, **({"*": own | SCALAR} if rule else {})}
        if leads and stage is not None:
            shapes |= {"mx": {(stage.inputs,)}, "vx": {(stage.inputs,)}}
            shapes |= {"mg2": {(stage.units,)}} if stage.units else {}
        moments = set(MOMENTS) if leads and block.treatment in ("whitened", "canonical") else set()
        found[p] = Wanted(shapes, required | moments)
    return found


def refuse(owner: str, problems: Sequence[str]) -> None:
    """Raise what speaks against a checkpoint, if anything does."""
    if problems:
        more = f"; and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
        raise ValueError(
            f"{owner}: this state_dict does not fit, and nothing was loaded: {'; '.join(problems[:SHOWN])}{more}."
        )


def check_seal(owner: str, state_dict: Any, writer: str) -> None:
    """Refuse what was damaged since it was saved; warn of options that have changed."""
    damages, edits = altered(state_dict, writer)
    refuse(owner, damages)
    if edits:
        warnings.warn(
            f"{owner}: {', '.join(edits)} changed since this state_dict was saved: edited, or damaged?", stacklevel=3
        )
