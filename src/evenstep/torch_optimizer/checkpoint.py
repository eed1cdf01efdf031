"""Checkpoints: the mark that a state_dict carries, the checks it must pass before any of it is loaded, and loading.

The mark is an attribute, like the `_metadata` of a module's state_dict: the format, and the class that wrote it. A
plain dict has none, nor has one that a framework took apart; the names of its state are checked instead.
"""

import math
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import options
from ..coordinates.coordinates import Field, Schema
from ..parallel import dtensor
from ..step.block import Block
from ..step.state import fields_of, shape_of

FORMAT = 2  # 0: no mark, no step counts under rules that keep none. 1: checksums; UnitStep was called EvenStep
RENAMED = "0.1's EvenStep is UnitStep now: load it into UnitStep"
TORCHS_NONNEGATIVE = ("exp_avg_sq", "max_exp_avg_sq", "square_avg")
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
        return [] if writer == "UnitStep" else [RENAMED]
    return [] if saved_by == writer else [f"it was saved by {saved_by}, not by {writer}"]


class Expected(NamedTuple):
    """What the state of one parameter must be.

    `fields` are our own, with the shapes allowed: None for a field that other parameters of the optimizer have. What a
    torch rule keeps has one of `rule_shapes`, and `rule_dtype`: None if the rule is not torch's, so that only our own
    fields can be checked.
    """

    fields: dict[str, tuple[Field, Shapes | None]]
    rule_shapes: Shapes
    rule_dtype: torch.dtype | None


def expected_of(block: Block, own: Schema, torch_rule: bool) -> Iterator[tuple[Tensor, Expected]]:
    """What the state of each parameter of a block must be; `own` has all fields that the optimizer knows."""
    for p in block.parameters:
        shapes = {tuple(p.shape)} | SCALAR
        if p is block.weight and block.entry is not None and not block.alone:  # a rule may see the layer as one matrix
            columns = p.numel() // max(1, block.units)
            shapes |= {(block.units, columns + more) for more in range(len(block.entry.biases) + 1)}
        elif block.entry is None and block.group.get("joint") and p.dim() > 1:  # the model may be attached later
            shapes |= {(len(p), p[0].numel() + more) for more in range(2)}
        fields: dict[str, tuple[Field, Shapes | None]] = {name: (field, None) for name, field in own.items()}
        fields["step"] = Field("count", nonnegative=True), SCALAR
        if not torch_rule:
            fields["momentum_buffer"] = Field("parameter"), shapes
        for q, name, field in fields_of(block):
            if q is p:
                shape = tuple(shape_of(field, block, p))
                fields[name] = field, SCALAR if shape in SCALAR else {shape}
        yield p, Expected(fields, shapes, p.dtype if torch_rule else None)


def by_name(state_dict: Any, groups: Sequence[Mapping[str, Any]]) -> Any:
    """The state_dict with each group's parameters in the order of `groups`, if only the order of names differs."""
    if structure_problems(state_dict, groups):
        return state_dict
    ordered = []
    for saved, live in zip(state_dict["param_groups"], groups, strict=True):
        names, keys = list(live.get("param_names", ())), saved["params"]
        key_of = dict(zip(saved.get("param_names", ()), keys, strict=False))
        if key_of.keys() == set(names) and len(key_of) == len(names) == len(keys):
            saved = {**saved, "params": [key_of[name] for name in names], "param_names": names}
        ordered.append(saved)
    return {**state_dict, "param_groups": ordered}


def structure_problems(state_dict: Any, groups: Sequence[Mapping[str, Any]]) -> list[str]:
    """Why the groups of a state_dict, or the numbers of parameters in them, do not match `groups`."""
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= set(state_dict):
        got = sorted(map(str, state_dict))[:4] if isinstance(state_dict, Mapping) else type(state_dict).__name__
        return [f"an optimizer's has 'state' and 'param_groups'; got {got}"]
    saved = state_dict["param_groups"]
    lists = isinstance(saved, Sequence) and all(
        isinstance(group, Mapping) and isinstance(group.get("params"), Sequence) for group in saved
    )
    if not isinstance(state_dict["state"], Mapping) or not lists:
        return ["'state' must be a dict, 'param_groups' a list of dicts with a list of 'params' each"]
    if len(saved) != len(groups):
        return [f"loaded state dict has a different number of parameter groups: {len(saved)}, here {len(groups)}"]
    theirs, ours = ([len(group["params"]) for group in each] for each in (saved, groups))
    if theirs == ours:
        return []
    sizes = ", ".join(f"group {k} has {n}, here {ours[k]}" for k, n in enumerate(theirs))
    return [f"loaded state dict contains a parameter group that doesn't match the size of optimizer's group: {sizes}"]


def group_problems(owner: str, groups: Iterable[Mapping[str, Any]]) -> list[str]:
    """Hyperparameters of saved groups that a constructor would refuse, too."""
    found = []
    for k, group in enumerate(groups):
        try:
            options.check(owner, group)
        except ValueError as error:
            found.append(f"group {k}: {str(error).rstrip('.')}")
    return found


def all_state_problems(
    state_dict: Mapping[str, Any],
    groups: Sequence[Mapping[str, Any]],
    expected: Mapping[Tensor, Expected],
    known: set[str] | None,
) -> list[str]:
    """What is wrong with the state of a state_dict whose structure fits.

    Without a mark, names that are neither ours nor in `known` are refused, and all of ours must be there (None: it has
    a mark).
    """
    keys = [key for group in state_dict["param_groups"] for key in group["params"]]
    params = [p for group in groups for p in group["params"]]
    names = [name for group in groups for name in group.get("param_names", map(str, range(len(group["params"]))))]
    state = state_dict["state"]
    found = [f"state of an unknown parameter {key}" for key in state if isinstance(key, int) and key not in keys]
    for key, name, p in zip(keys, names, params, strict=True):
        if key in state:
            found += [f"'{name}' {problem}" for problem in state_problems(state[key], expected[p], known)]
    return found


def state_problems(kept: Any, expected: Expected, known: set[str] | None) -> Iterator[str]:
    """What is wrong with the state of one parameter."""
    if not isinstance(kept, Mapping):
        yield f"has {described(kept)} for its state; a dict is allowed"
        return
    optional = {"momentum_buffer", "step"}  # momentum may be asked for later; older formats had no counts
    required = {name for name, (_, shapes) in expected.fields.items() if shapes is not None} - optional
    if known is not None:
        allowed = known | {"momentum_buffer"} | expected.fields.keys()
        for name in [name for name in kept if name not in allowed]:
            hint = f" ({RENAMED})" if name == "square_mass" else ""
            yield f"has {name}, which is no state of this optimizer{hint}"
        required |= known & {"step"}
    elif not required & kept.keys():
        required = set()
    if kept and (lacking := sorted(required - kept.keys())):
        yield f"lacks {', '.join(lacking)}"
    for name, value in kept.items():
        checked = expected.rule_dtype is not None or name in expected.fields
        if checked and (problem := value_problem(name, value, expected)):
            yield f"has {name} {problem}"


def value_problem(name: str, value: Any, expected: Expected) -> str | None:
    """What is wrong with one value of a parameter's state."""
    if name in NUMBERS and isinstance(value, int | float) and not isinstance(value, bool):
        return None if math.isfinite(value) and value >= 0 else f"= {value}; a finite number >= 0 is allowed"
    if not isinstance(value, Tensor) or value.layout != torch.strided or not value.is_floating_point():
        return f"of type {described(value)}; a dense floating-point tensor is allowed"
    field, shapes = expected.fields.get(name, (None, expected.rule_shapes))
    if shapes is not None and tuple(value.shape) not in shapes:
        return f"of shape {list(value.shape)}; {' or '.join(str(list(s)) for s in sorted(shapes))} is allowed"
    if field is not None and field.per != "parameter" and value.dtype not in (torch.float32, torch.float64):
        return f"of type {described(value)}; float32 or float64 is allowed"
    if field is None and value.dim() and value.dtype != (expected.rule_dtype or value.dtype):
        return f"of type {described(value)}; {expected.rule_dtype}, as its parameter, is allowed"
    nonnegative = name in TORCHS_NONNEGATIVE if field is None else field.nonnegative
    least, own = 0.0 if nonnegative else torch.finfo(value.dtype).min, dtensor.local(value)
    if value.is_meta or ((own >= least) & (own < torch.inf)).all():
        return None
    return "with values that are negative or not finite" if nonnegative else "with values not finite"


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


def step_count(p: Tensor, count: float) -> Tensor:
    """A count of steps beside a parameter, in the dtype that torch has for them."""
    wide = torch.get_default_dtype() == torch.float64
    return torch.tensor(float(count), dtype=torch.float64 if wide else torch.float32, device=p.device)


def restore(
    state: Mapping[Tensor, dict[str, Any]],
    params: Sequence[Tensor],
    saved: Sequence[Mapping[str, Any]],
    live: Mapping[Tensor, Mapping[str, Any]],
) -> None:
    """Put what was `saved` of each parameter into its state, in the dtype it was saved in.

    Values are copied into `live` tensors where there are any.
    """
    for p, kept in zip(params, saved, strict=True):
        for name, value in kept.items():
            if name == "step":  # torch has a rule of its own for their device, and would share the saved one
                count = state[p][name]
                state[p][name] = count.detach().clone() if isinstance(count, Tensor) else step_count(p, count)
            elif isinstance(value, Tensor):
                state[p][name] = restored(live.get(p, {}).get(name), value, p.device)


def restored(live: Any, saved: Tensor, device: torch.device) -> Tensor:
    """A saved tensor on the parameter's device in its own dtype, inside the live tensor if that fits."""
    saved = dtensor.matched(saved, live)
    if isinstance(live, Tensor) and live.shape == saved.shape and live.dtype == saved.dtype and live.device == device:
        return live.copy_(saved.detach())
    return saved.detach().to(device, copy=True)
