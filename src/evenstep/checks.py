"""What may be asked of an optimizer: every message names the owner, what is allowed and what came."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

TORCH = {  # torch's own words for its own keywords; they come first, what is allowed follows
    "lr": "Invalid learning rate: ",
    "momentum": "Invalid momentum value: ",
    "weight_decay": "Invalid weight_decay value: ",
    "eps": "Invalid epsilon value: ",
}
FLAGS = {"foreach": (None, True, False), "maximize": (True, False), "capturable": (True, False), "joint": (True, False)}


def refuse(owner: str, name: str, value: Any, allowed: str) -> ValueError:
    """The error for a value that is not allowed.

    >>> refuse("WhitenedSGD", "damping", -1.0, "a finite number >= 0")
    ValueError('WhitenedSGD: damping must be a finite number >= 0; got -1.0.')
    >>> refuse("WhitenedSGD", "momentum", -0.5, "in [0, 1)")
    ValueError('Invalid momentum value: -0.5. WhitenedSGD: momentum must be in [0, 1); got -0.5.')
    """
    words = f"{TORCH[name]}{value}. " if name in TORCH else ""
    return ValueError(f"{words}{owner}: {name} must be {allowed}; got {value!r}.")


def nonnegative(owner: str, **values: Any) -> None:
    """Each value a finite number of at least 0, or None where that means a default."""
    for name, value in values.items():
        if value is not None and not (is_number(value) and math.isfinite(value) and value >= 0):
            raise refuse(owner, name, value, "a finite number >= 0")


def positive_or_none(owner: str, **values: Any) -> None:
    """Each value a finite number above 0, or None to turn a guard off."""
    for name, value in values.items():
        if value is not None and not (is_number(value) and math.isfinite(value) and value > 0):
            raise refuse(owner, name, value, "a finite number > 0, or None to turn it off")


def fraction(owner: str, **values: Any) -> None:
    """Each value in [0, 1).

    >>> fraction("WhitenedSGD", decay=1.5)
    Traceback (most recent call last):
    ValueError: WhitenedSGD: decay must be in [0, 1); got 1.5.
    """
    for name, value in values.items():
        if not (is_number(value) and 0 <= value < 1):
            raise refuse(owner, name, value, "in [0, 1)")


def one_of(owner: str, name: str, value: Any, allowed: Iterable[Any]) -> None:
    """A value out of a short list."""
    allowed = list(allowed)
    if value not in allowed:
        raise refuse(owner, name, value, f"one of {', '.join(map(repr, allowed))}")


def is_number(value: Any) -> bool:
    """A real number, not a bool."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def learning_rate(owner: str, lr: Any) -> None:
    """A finite number of at least 0, or a one-element tensor of one.

    >>> learning_rate("UnitStep", torch.tensor(torch.nan))
    Traceback (most recent call last):
    ValueError: Invalid learning rate: nan. UnitStep: lr must be a finite number >= 0 or a one-element tensor; got \
tensor(nan).
    """
    value = lr
    if isinstance(lr, Tensor) and not lr.is_complex():
        if lr.numel() != 1:
            raise ValueError("Tensor lr must be 1-element")
        value = 0.0 if lr.is_meta else lr.item()
    if not is_number(value) or not math.isfinite(value) or value < 0:
        raise refuse(owner, "lr", lr, "a finite number >= 0 or a one-element tensor")


def hyperparameters(owner: str, group: Mapping[str, Any]) -> None:
    """Every hyperparameter of a group; called for defaults, for groups that override them and for saved groups."""
    learning_rate(owner, group["lr"])
    at_least_0 = ("damping", "eps", "fan_in_power", "plain_lr", "plain_at", "weight_decay")
    nonnegative(owner, **{k: group[k] for k in at_least_0 if k in group})
    fraction(owner, **{k: group[k] for k in ("decay", "momentum") if k in group})
    positive_or_none(owner, **{k: group[k] for k in ("fresh_max", "trust", "sharing") if k in group})
    rows = group.get("rows")
    if rows is not None and not (isinstance(rows, int) and not isinstance(rows, bool) and rows > 0):
        raise ValueError(f"{owner}: rows must be a whole number > 0, or None for all of them; got {rows!r}.")
    for name, allowed in FLAGS.items():
        if name in group:
            one_of(owner, name, group[name], allowed)
    if isinstance(group.get("exclude"), str):
        raise ValueError(f"{owner}: exclude must be a list of name patterns; got the string {group['exclude']!r}.")
    for name, value in group.items():  # those of a base rule, too
        if any(isinstance(v, float) and math.isnan(v) for v in (value if isinstance(value, list | tuple) else [value])):
            raise refuse(owner, name, value, "without nan")


def parameters_of(owner: str, params: Any, model: nn.Module | None) -> tuple[Any, nn.Module | None]:
    """What torch's constructor takes, and the model to watch, from a module or from parameters and `model=`."""
    if not isinstance(params, nn.Module):
        return params, model
    if model is not None and model is not params:
        raise ValueError(
            f"{owner}: give the model once, as the first argument or as model=; got two different modules."
        )
    named = list(params.named_parameters())
    if not named:
        raise ValueError(f"{owner}: the module {type(params).__name__} has no parameters to train.")
    for name, p in named:
        if isinstance(p, nn.parameter.UninitializedParameter):
            raise ValueError(f"{owner}: parameter '{name}' is not initialized yet; run one forward pass first.")
    return named, params


def supported(owner: str, params: Iterable[Tensor]) -> None:
    """Real, dense parameters alone."""
    for p in params:
        if p.is_complex():
            raise ValueError(f"{owner}: complex parameters are not supported; train torch.view_as_real(p) instead.")
        if p.layout != torch.strided:
            raise ValueError(f"{owner}: parameters must be dense; got layout {p.layout}.")
