"""Every hyperparameter, declared once: its meaning, for docstrings and docs/api.md, and the values allowed.

The annotated attributes of a `preset` say which it takes. Errors name the owner, what is allowed and what came.
"""

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, TypeVar

from torch import Tensor
from torch import distributed as dist
from typing_extensions import dataclass_transform  # which torch itself needs; typing has it from Python 3.11 on

Class = TypeVar("Class", bound=type)
Allowed = tuple[str, Callable[[Any], bool]]  # what is allowed, in words and as a test


def is_number(value: Any, whole: bool = False) -> bool:
    """A finite real number, not a bool."""
    return isinstance(value, int if whole else int | float) and not isinstance(value, bool) and math.isfinite(value)


def one_of(*values: Any) -> Allowed:
    """A value out of a short list."""
    return f"one of {', '.join(map(repr, values))}", lambda v: v in values


def is_rate(lr: Any) -> bool:
    """A finite number of at least 0, or a one-element tensor of one."""
    if isinstance(lr, Tensor) and not lr.is_complex():
        if lr.numel() != 1:
            raise ValueError("Tensor lr must be 1-element")
        lr = 0.0 if lr.is_meta else lr.item()
    return is_number(lr) and bool(lr >= 0)


def is_group(group: Any) -> bool:
    """A `process_group`."""
    return group is None or group is False or (dist.is_available() and isinstance(group, dist.ProcessGroup))


def has_no_nan(value: Any) -> bool:
    """Whether a value, or a list of them, has no float that is NaN."""
    values = value if isinstance(value, list | tuple) else [value]
    return not any(isinstance(v, float) and math.isnan(v) for v in values)


class Option(NamedTuple):
    """A hyperparameter: its meaning, what is allowed, and torch's own words where it is a keyword of torch's."""

    meaning: str
    allowed: Allowed = ("without nan", has_no_nan)
    torch: str = ""


RATE = "a finite number >= 0 or a one-element tensor", is_rate
NONNEGATIVE = "a finite number >= 0", lambda v: is_number(v) and v >= 0
NONNEGATIVE_OR_NONE = "a finite number >= 0, or None", lambda v: v is None or (is_number(v) and v >= 0)
POSITIVE_OR_NONE = "a finite number > 0, or None to turn it off", lambda v: v is None or (is_number(v) and v > 0)
FRACTION = "in [0, 1)", lambda v: is_number(v) and 0 <= v < 1
ROWS = "a whole number > 0, or None for all of them", lambda v: v is None or (is_number(v, whole=True) and v > 0)
PATTERNS = "a list of name patterns", lambda v: not isinstance(v, str)
GROUP = "None (the world group), False (never reduce) or a group of torch.distributed with this process", is_group
FLAG, FLAG_OR_NONE = one_of(True, False), one_of(None, True, False)

OPTIONS = {
    "params": Option("the model itself, or what torch takes: tensors, groups, named parameters"),
    "lr": Option("stepsize: a number or a one-element tensor", RATE, "Invalid learning rate: "),
    "model": Option("the model to watch, when `params` are tensors or groups"),
    "momentum": Option("of the rule, on v", FRACTION, "Invalid momentum value: "),
    "weight_decay": Option(
        "decoupled, on w, which shrinks by lr · weight_decay", NONNEGATIVE, "Invalid weight_decay value: "
    ),
    "decay": Option("weight of the old value in running averages", FRACTION),
    "damping": Option("added to variances and `UnitStep`'s mean squares, relative to the layer's mean", NONNEGATIVE),
    "fresh_max": Option("τ of the fresh-max guard; None turns it off", POSITIVE_OR_NONE),
    "trust": Option("c of the trust radius; None turns it off", POSITIVE_OR_NONE),
    "rows": Option("how many rows of a layer's input a forward looks at, evenly spread; None for all", ROWS),
    "eps": Option("μ of eq. 11, absolute, inside the root", NONNEGATIVE, "Invalid epsilon value: "),
    "plain_lr": Option(
        "`lr` of parameters outside layers (None: as layers); follows `lr` and its schedules", NONNEGATIVE_OR_NONE
    ),
    "head": Option('name or pattern of the head\'s weight: "auto" is the layer called last, None no layer'),
    "sharing": Option("S of every layer, when it is not to be counted", POSITIVE_OR_NONE),
    "exclude": Option("name patterns (`fnmatch`) kept in plain coordinates", PATTERNS),
    "maximize": Option("ascend", FLAG),
    "foreach": Option("False steps layer by layer, in less memory; `Whitened` hands it to its rule, too", FLAG_OR_NONE),
    "block": Option('what shares a denominator: "network", "unit", "weight"', one_of("network", "unit", "weight")),
    "bounded": Option("eq. 11's running mean square; False: the batch's own", FLAG),
    "bias_correction": Option('of that running mean; False makes `block="weight"` RMSProp exactly', FLAG),
    "reduction": Option('how the loss reduces the batch: "mean" or "sum"', one_of("mean", "sum")),
    "scaler": Option("the GradScaler in use, whose factor is taken out of g²"),
    "base": Option("the torch class, or a partial of it"),
    "base_kwargs": Option("the keywords of `base` itself, its `lr` among them"),
    "joint": Option("show the rule a layer as one matrix, bias as a column; None: for Muon alone", FLAG),
    "fan_in_power": Option("a layer's stepsize is divided by this power of its inputs per unit", NONNEGATIVE_OR_NONE),
    "plain": Option("the rule for parameters outside layers; None: `base`, or AdamW beside Muon"),
    "capturable": Option("`step()` never reads the device, on a CPU either, and can be captured in a CUDA graph", FLAG),
    "process_group": Option("the processes that train one network: None is the world group, False is no group", GROUP),
}
NOT_IN_GROUPS = ("self", "params", "model", "scaler", "process_group", "base", "base_kwargs", "plain", "__class__")


def for_groups(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The hyperparameters that groups have, of all arguments of a constructor."""
    return {name: value for name, value in arguments.items() if name not in NOT_IN_GROUPS}


@dataclass_transform(eq_default=False)
def preset(cls: Class) -> Class:
    """Make the annotated attributes of an optimizer class its keywords, as a dataclass does."""
    made: Any = explained(dataclass(eq=False, repr=False)(cls))
    for field in fields(made):
        if field.name in vars(made):
            delattr(made, field.name)  # the values that count are the groups'
    return cls


def check(owner: str, group: Mapping[str, Any]) -> None:
    """Check all hyperparameters of a group: defaults, groups that override them, saved groups."""
    for name, value in group.items():
        words, holds = OPTIONS.get("plain_lr" if name == "plain_at" else name, Option("of a base rule")).allowed
        if not holds(value):
            raise refusal(owner, name, value, words)


def refusal(owner: str, name: str, value: Any, allowed: str) -> ValueError:
    """The error for a value that is not allowed; torch's own words come first where the keyword is torch's."""
    torchs = OPTIONS[name].torch if name in OPTIONS else ""
    words = f"{torchs}{value}. " if torchs else ""
    return ValueError(f"{words}{owner}: {name} must be {allowed}; got {value!r}.")


def explained(cls: Class) -> Class:
    """Let a class's docstring end with the keywords of its constructor, their defaults and what they mean."""
    lines = [inspect.cleandoc(cls.__doc__ or ""), "", "Keywords:", ""]
    for name, parameter in list(inspect.signature(cls).parameters.items()):
        stars = "**" if parameter.kind is parameter.VAR_KEYWORD else ""
        default = "" if parameter.default is parameter.empty else f" (default {parameter.default!r})"
        lines.append(f"    {stars}{name}{default}: {OPTIONS[name].meaning}.")
    cls.__doc__ = "\n".join(lines)
    return cls
