"""Checkpoints: the mark that a state_dict carries, the checks it must pass before any of it is loaded, and loading.

The mark is an attribute, like the `_metadata` of a module's state_dict: the format, and the class that wrote it. A
plain dict has none, nor has one that a framework took apart; the names of its state are checked instead. All checks
raise ValueError for the first thing that does not fit.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor

from ..coordinates.coordinates import Field, Schema
from ..parallel import dtensor
from ..step.block import Block
from ..step.state import fields_of, shape_of

FORMAT = 2  # 0: no mark, no step counts under rules that keep none. 1: checksums; UnitStep was called EvenStep
RENAMED = "0.1's EvenStep is UnitStep now: load it into UnitStep"
TORCHS_NONNEGATIVE = ("exp_avg_sq", "max_exp_avg_sq", "square_avg")
NUMBERS = ("step", "mu_product")  # Python numbers in older versions of torch
OPTIONAL = {"momentum_buffer", "step"}  # momentum may be asked for later; older formats had no counts
MOMENTUM = {"momentum_buffer": Field("parameter")}
WIDE = (torch.float32, torch.float64)
Shapes = set[tuple[int, ...]]
SCALAR: Shapes = {(), (1,)}
State = Mapping[str, Any]  # of one parameter, as saved


def marked(state_dict: Mapping[str, Any], writer: str) -> "OrderedDict[str, Any]":
    """The state_dict with its mark, which survives copies and `torch.load(..., weights_only=True)`."""
    found = OrderedDict(state_dict)
    vars(found)["_evenstep"] = {"format": FORMAT, "optimizer": writer}
    return found


def mark_of(state_dict: Any) -> Mapping[str, Any] | None:
    """The mark of a state_dict; None if it has none."""
    found = getattr(state_dict, "_evenstep", None)
    return found if isinstance(found, Mapping) else None


def check_mark(mark: Mapping[str, Any], writer: str) -> None:
    """Refuse a state_dict with this mark if the class `writer` cannot load it."""
    number, saved_by = mark.get("format"), mark.get("optimizer")
    if not isinstance(number, int) or number > FORMAT:
        raise ValueError(f"its format is {number!r}, this version reads up to {FORMAT}: update evenstep")
    renamed = number < 2 and saved_by == "EvenStep"
    if writer != ("UnitStep" if renamed else saved_by):
        raise ValueError(RENAMED if renamed else f"it was saved by {saved_by}, not by {writer}")


def check_structure(state_dict: Any, groups: Sequence[Mapping[str, Any]]) -> None:
    """Refuse what is no optimizer's state_dict, or has other numbers of parameters in its groups."""
    try:
        theirs = [len(group["params"]) for group in state_dict["param_groups"]]
        state_dict["state"].items()
    except (KeyError, TypeError, AttributeError):
        raise ValueError("it needs 'state', a dict, and 'param_groups', dicts with a list of 'params' each") from None
    ours = [len(group["params"]) for group in groups]
    if theirs != ours:
        raise ValueError(f"its groups have {theirs} parameters, here they have {ours}")


def in_order(saved: Mapping[str, Any], live: Mapping[str, Any]) -> Mapping[str, Any]:
    """A saved group with its parameters in the order of the live one, if only the order of their names differs."""
    keys, names = dict(zip(saved.get("param_names", ()), saved["params"], strict=False)), live.get("param_names", ())
    if keys.keys() != set(names) or not len(keys) == len(names) == len(saved["params"]):
        return saved
    return {**saved, "params": [keys[name] for name in names], "param_names": names}


def saved_of(state_dict: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> dict[Tensor, State]:
    """What a state_dict that fits in structure has saved of each live parameter."""
    state, keys = state_dict["state"], [key for group in state_dict["param_groups"] for key in group["params"]]
    if unknown := [key for key in state if isinstance(key, int) and key not in keys]:
        raise ValueError(f"it has state of unknown parameters: {unknown}")
    if not all(isinstance(kept, Mapping) for kept in state.values()):
        raise ValueError("the state of each parameter must be a dict")
    return dict(zip((p for group in groups for p in group["params"]), (state.get(k, {}) for k in keys), strict=True))


def check_state(
    label: str, kept: State, p: Tensor, block: Block, own: Schema, names: Set[str] | None, torchs: bool
) -> None:
    """Refuse what was saved of a block's parameter unless it is what the schemas say.

    `own` has all fields that the optimizer knows: a layer's state may be loaded before the model is attached. `names`
    are what a rule keeps besides, None for a marked state_dict; it has the parameter's dtype if the rule is `torchs`.
    """
    fields = {**own, **({} if torchs else MOMENTUM), **dict.fromkeys(NUMBERS, Field("count", nonnegative=True))}
    of_rule = shapes_of_rule(block, p)
    shapes = {"momentum_buffer": of_rule, **dict.fromkeys(NUMBERS, SCALAR)}
    required = set()
    for q, name, field in fields_of(block):
        if q is p:
            shape = tuple(shape_of(field, block, p))
            fields[name], shapes[name] = field, SCALAR if shape in SCALAR else {shape}
            required.add(name)
    required -= OPTIONAL
    if names is not None and (unknown := sorted(kept.keys() - fields.keys() - names)):
        hint = f" ({RENAMED})" if "square_mass" in unknown else ""
        raise ValueError(f"{label} has {', '.join(unknown)}, which is no state of this optimizer{hint}")
    whole = names is not None or required & kept.keys()  # marked, of a parameter that was in no layer, or was in one
    if kept and whole and (lacking := sorted(required - kept.keys())):
        raise ValueError(f"{label} lacks {', '.join(lacking)}")
    for name, value in kept.items():
        what, known = f"{label} has {name}", fields.get(name)
        if name in NUMBERS and isinstance(value, int | float) and not isinstance(value, bool):
            value = torch.tensor(float(value))
        if known is not None:
            check_value(what, value, shapes.get(name), None if known.per == "parameter" else WIDE, known.nonnegative)
        elif torchs:
            check_value(what, value, of_rule, (p.dtype,), name in TORCHS_NONNEGATIVE)


def shapes_of_rule(block: Block, p: Tensor) -> Shapes:
    """Shapes of what a rule keeps of a parameter: its own, or those of the layer as one matrix, biases as columns."""
    if p is block.weight and block.entry is not None and not block.alone:
        units, biases = block.units, len(block.entry.biases)
    elif block.entry is None and block.group.get("joint") and p.dim() > 1:  # the model may be attached later
        units, biases = len(p), 1
    else:
        return {tuple(p.shape)}
    return {tuple(p.shape)} | {(units, p.numel() // max(1, units) + more) for more in range(biases + 1)}


def check_value(
    what: str, value: Any, shapes: Shapes | None, dtypes: Sequence[torch.dtype] | None, nonnegative: bool
) -> None:
    """Refuse a value of another kind; None allows any shape, any dtype of floating-point numbers."""
    kind = f"tensor ({value.dtype}, {value.layout})" if isinstance(value, Tensor) else type(value).__name__
    if not isinstance(value, Tensor) or value.layout != torch.strided or not value.is_floating_point():
        raise ValueError(f"{what} of type {kind}; a dense floating-point tensor is allowed")
    if shapes and tuple(value.shape) not in shapes:
        allowed = " or ".join(str(list(shape)) for shape in sorted(shapes))
        raise ValueError(f"{what} of shape {list(value.shape)}; {allowed} is allowed")
    if dtypes and value.dtype not in dtypes:
        allowed = " or ".join(map(str, dtypes))
        raise ValueError(f"{what} of type {kind}; {allowed} is allowed")
    least, own = 0.0 if nonnegative else torch.finfo(value.dtype).min, dtensor.local(value)
    if not (value.is_meta or ((own >= least) & (own < torch.inf)).all()):
        raise ValueError(f"{what} with values that are {'negative or ' if nonnegative else ''}not finite")


def step_count(p: Tensor, count: float) -> Tensor:
    """A count of steps beside a parameter, in the dtype that torch has for them."""
    dtype = torch.promote_types(torch.get_default_dtype(), torch.float32)
    return torch.tensor(float(count), dtype=dtype, device=p.device)


def restore(
    state: Mapping[Tensor, dict[str, Any]], saved: Mapping[Tensor, State], live: Mapping[Tensor, State]
) -> None:
    """Put what was `saved` of each parameter into its state, in the dtype it was saved in.

    Values are copied into `live` tensors where there are any.
    """
    for p, kept in saved.items():
        for name, value in kept.items():
            if name == "step":  # torch has a rule of its own for their device, and would share the saved one
                count = state[p][name]
                state[p][name] = count.detach().clone() if isinstance(count, Tensor) else step_count(p, count)
            elif isinstance(value, Tensor):
                old: Any = live.get(p, {}).get(name)
                new = dtensor.matched(value, old).detach()
                fits = isinstance(old, Tensor) and (old.shape, old.dtype, old.device) == (
                    new.shape,
                    new.dtype,
                    p.device,
                )
                state[p][name] = old.copy_(new) if fits else new.to(p.device, copy=True)
