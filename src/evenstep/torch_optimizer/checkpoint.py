"""Checkpoints: the mark that a state_dict carries, and the checks it must pass before any of it is loaded.

The mark is an attribute, like the `_metadata` of a module's state_dict: the format, and the class that wrote it. A
plain dict has none, nor has one that a framework took apart; the names of its state are checked instead.
"""

import math
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import checks
from ..parallel import dtensor as shards
from ..statistics.batch import LayerStatistics
from ..step.block import Block

FORMAT = 2  # 0: no mark, no step counts under rules that keep none. 1: checksums; UnitStep was called EvenStep
MOMENTS = ("mx", "vx", "mass")
COMPLETE = (MOMENTS, ("square", "square_mass"))  # each of these comes whole or not at all
WIDE = frozenset({*MOMENTS, "sharing", "mg2", "square", "square_mass"})  # float32 or float64, never less
OWN = WIDE | {"step", "momentum_buffer"}  # names that mean the same under every rule
NONNEGATIVE = (WIDE - {"mx"}) | {"step", "exp_avg_sq", "max_exp_avg_sq", "square_avg"}
NUMBERS = ("step", "mu_product")  # Python numbers in older versions of torch
LISTED = 8  # problems named in one error

Shapes = set[tuple[int, ...]]
SCALAR: Shapes = {(), (1,)}


def marked(state_dict: Mapping[str, Any], writer: str) -> "OrderedDict[str, Any]":
    """The state_dict with its mark, which survives copies and `torch.load(..., weights_only=True)`."""
    found = OrderedDict(state_dict)
    vars(found)["_evenstep"] = {"format": FORMAT, "optimizer": writer}
    return found


def mark_of(state_dict: Any) -> Mapping[str, Any] | None:
    """The mark of a state_dict; None if it has none."""
    found = getattr(state_dict, "_evenstep", None)
    return found if isinstance(found, Mapping) else None


def mark_problems(mark: Mapping[str, Any], writer: str) -> list[str]:
    """Why a state_dict with this mark cannot be loaded by the class `writer`."""
    number, saved_by = mark.get("format"), mark.get("optimizer")
    if not isinstance(number, int) or number > FORMAT:
        return [f"its format is {number!r}, this version reads up to {FORMAT}: update evenstep"]
    if number < 2 and saved_by == "EvenStep":
        saved_by = "UnitStep"
    return [] if saved_by == writer else [f"it was saved by {saved_by}, not by {writer}"]


class Expected(NamedTuple):
    """What the state of one parameter must be.

    `shapes` by name, "*" for names of a torch rule; `required` names; `rule_dtype` is the dtype of what a torch rule
    keeps, None if the rule is not torch's, so that only names in `OWN` can be checked.
    """

    shapes: dict[str, Shapes]
    required: set[str]
    rule_dtype: torch.dtype | None


def expected_of(
    block: Block, layer: LayerStatistics | None, required: set[str], torch_rule: bool
) -> dict[Tensor, Expected]:
    """What the state of each parameter of a block must be."""
    found: dict[Tensor, Expected] = {}
    for p in block.parameters:
        own: Shapes = {tuple(p.shape)}
        leads = p is block.weight and block.entry is not None and not block.alone
        units = block.units if p is block.weight else p.numel()
        if leads and block.entry is not None:  # a rule may see the layer as one matrix, biases as columns
            own |= {(units, p.numel() // max(1, units) + more) for more in range(len(block.entry.biases) + 1)}
        elif block.entry is None and block.group.get("joint") and p.dim() > 1:  # the model may be attached later
            own |= {(len(p), p[0].numel() + more) for more in range(2)}
        shapes = dict.fromkeys(("step", "mass", "sharing", "square_mass"), SCALAR)
        shapes |= {"momentum_buffer": own, "square": own | SCALAR | {(units,)}, "*": own | SCALAR}
        if leads and layer is not None:
            shapes |= {"mx": {(layer.inputs,)}, "vx": {(layer.inputs,)}}
            shapes |= {"mg2": {(layer.units,)}} if layer.units else {}
        moments = set(MOMENTS) if leads and block.treatment in ("whitened", "canonical") else set()
        found[p] = Expected(shapes, required | moments, p.dtype if torch_rule else None)
    return found


def by_name(state_dict: Any, groups: Sequence[Mapping[str, Any]]) -> Any:
    """The state_dict with each group's parameters in the order of `groups`, if only the order of names differs."""
    if structure_problems(state_dict, groups):
        return state_dict
    pairs = zip(state_dict["param_groups"], groups, strict=True)
    return {**state_dict, "param_groups": [in_order(saved, live.get("param_names", ())) for saved, live in pairs]}


def in_order(group: Mapping[str, Any], names: Sequence[str]) -> Mapping[str, Any]:
    """A saved group with its parameters in the order of `names`, if it has the same names.

    >>> in_order({"params": [0, 1], "param_names": ["a", "b"]}, ["b", "a"])
    {'params': [1, 0], 'param_names': ['b', 'a']}
    """
    places = dict(zip(group.get("param_names", ()), group.get("params", ()), strict=False))
    if places.keys() != set(names) or not len(places) == len(names) == len(group["params"]):
        return group
    return {**group, "params": [places[name] for name in names], "param_names": list(names)}


def structure_problems(state_dict: Any, groups: Sequence[Mapping[str, Any]]) -> list[str]:
    """Why the groups of a state_dict, or the numbers of parameters in them, do not match `groups`."""
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= set(state_dict):
        got = sorted(map(str, state_dict))[:4] if isinstance(state_dict, Mapping) else type(state_dict).__name__
        return [f"an optimizer's has 'state' and 'param_groups'; got {got}"]
    state, saved = state_dict["state"], state_dict["param_groups"]
    lists = isinstance(saved, Sequence) and all(
        isinstance(group, Mapping) and isinstance(group.get("params"), Sequence) for group in saved
    )
    if not isinstance(state, Mapping) or not lists:
        return ["'state' must be a dict, 'param_groups' a list of dicts with a list of 'params' each"]
    if len(saved) != len(groups):
        return [f"loaded state dict has a different number of parameter groups: {len(saved)}, here {len(groups)}"]
    sizes = [(len(theirs["params"]), len(ours["params"])) for theirs, ours in zip(saved, groups, strict=True)]
    if any(theirs != ours for theirs, ours in sizes):
        return [
            "loaded state dict contains a parameter group that doesn't match the size of optimizer's group: "
            + ", ".join(f"group {k} has {theirs}, here {ours}" for k, (theirs, ours) in enumerate(sizes))
        ]
    return []


def group_problems(owner: str, groups: Iterable[Mapping[str, Any]], defaults: Mapping[str, Any]) -> list[str]:
    """Hyperparameters of saved groups that a constructor would refuse, too."""
    found = []
    for k, group in enumerate(groups):
        try:
            checks.hyperparameters(owner, {**defaults, **group})
        except ValueError as error:
            found.append(f"group {k}: {str(error).rstrip('.')}")
    return found


def all_state_problems(
    state_dict: Mapping[str, Any],
    groups: Sequence[Mapping[str, Any]],
    expected: Mapping[Tensor, Expected],
    known: set[str] | None,
) -> list[str]:
    """What is wrong with the state of a state_dict whose structure fits; names must be in `known` (None: any)."""
    keys = [key for group in state_dict["param_groups"] for key in group["params"]]
    params = [p for group in groups for p in group["params"]]
    names = [name for group in groups for name in group.get("param_names", map(str, range(len(group["params"]))))]
    state = state_dict["state"]
    unknown = [f"state of an unknown parameter {key}" for key in state if isinstance(key, int) and key not in keys]
    return unknown + [
        f"'{name}' {problem}"
        for key, name, p in zip(keys, names, params, strict=True)
        if key in state
        for problem in state_problems(state[key], expected[p], known)
    ]


def state_problems(kept: Any, expected: Expected, known: set[str] | None) -> list[str]:
    """What is wrong with the state of one parameter."""
    if not isinstance(kept, Mapping):
        return [f"has {described(kept)} for its state; a dict is allowed"]
    problems = []
    lacking = [name for some in COMPLETE for name in some if name not in kept and any(n in kept for n in some)]
    if known is not None:
        problems += [f"has {name}, which is no state of this optimizer" for name in kept if name not in known]
        lacking += [name for name in sorted(expected.required) if kept and name not in kept]
    if lacking:
        problems.append(f"lacks {', '.join(dict.fromkeys(lacking))}")
    checked = {name: value for name, value in kept.items() if name in OWN or expected.rule_dtype is not None}
    found = {name: value_problem(name, value, expected) for name, value in checked.items()}
    return problems + [f"has {name} {problem}" for name, problem in found.items() if problem]


def value_problem(name: str, value: Any, expected: Expected) -> str | None:
    """What is wrong with one value of a parameter's state."""
    if name in NUMBERS and checks.is_number(value):
        return None if math.isfinite(value) and value >= 0 else f"= {value}; a finite number >= 0 is allowed"
    if not isinstance(value, Tensor) or value.layout != torch.strided or not value.is_floating_point():
        return f"of type {described(value)}; a dense floating-point tensor is allowed"
    shapes = expected.shapes.get(name if name in OWN else "*")
    if shapes is not None and tuple(value.shape) not in shapes:
        return f"of shape {list(value.shape)}; {' or '.join(str(list(s)) for s in sorted(shapes))} is allowed"
    if name in WIDE and value.dtype not in (torch.float32, torch.float64):
        return f"of type {described(value)}; float32 or float64 is allowed"
    if name not in WIDE and value.dim() and value.dtype != (expected.rule_dtype or value.dtype):
        return f"of type {described(value)}; {expected.rule_dtype}, as its parameter, is allowed"
    if not value.is_meta and not valid(name, value):
        return "with values that are negative or not finite" if name in NONNEGATIVE else "with values not finite"
    return None


def valid(name: str, value: Tensor) -> bool:
    """Whether all values are finite, and not negative where they are squares or counts."""
    value = shards.local(value)
    least = 0.0 if name in NONNEGATIVE else torch.finfo(value.dtype).min
    return bool(((value >= least) & (value < torch.inf)).all())


def described(value: Any) -> str:
    """The type of a value.

    >>> described("text"), described(torch.eye(2).to_sparse()), described(torch.ones(1, dtype=torch.cfloat))
    ('str', 'tensor (torch.float32, torch.sparse_coo)', 'tensor (torch.complex64)')
    """
    if not isinstance(value, Tensor):
        return type(value).__name__
    layout = "" if value.layout == torch.strided else f", {value.layout}"
    return f"tensor ({value.dtype}{layout})"


def refuse(owner: str, problems: Sequence[str]) -> None:
    """Raise an error if there are problems."""
    if problems:
        more = f"; and {len(problems) - LISTED} more" if len(problems) > LISTED else ""
        raise ValueError(
            f"{owner}: this state_dict does not fit, and nothing was loaded: {'; '.join(problems[:LISTED])}{more}."
        )
