"""Methods by the names people type: a public class, a short name, `package.Class`, or `Whitened(Class)`."""

import difflib
import functools
import importlib
import inspect
import re
from typing import Any

import torch
from torch.optim import Optimizer

import evenstep
from evenstep.torch_optimizer.model_optimizer import ModelOptimizer

from .methods import METHODS, Method, plain, whitened
from .usage import UsageError, known_name

HOMES = {"evenstep": evenstep, "torch.optim": torch.optim}
NAMES = "EvenStep, UnitStep, WhitenedSGD, Whitened(AdamW), AdamW, SGD, ..., or package.Class"
LABELS = {method.label.lower(): method for method in METHODS.values()}


@functools.cache
def find(name: str) -> Method:
    """The method of that name; a UsageError suggests the nearest one.

    >>> find("EvenStep").name, find("torch.optim.AdamW").name, find("NAdam").label, find("Whitened(NAdam)").label
    ('evenstep', 'adamw', 'NAdam', 'Whitened(NAdam)')
    """
    home, _, short = name.rpartition(".")
    if short == "py":
        raise UsageError(f"{name} is no method; give your file before the options: evenstep sweep {name} --methods ...")
    if name in METHODS:
        return METHODS[name]
    if home in ("", *HOMES) and short.lower() in LABELS:
        return LABELS[short.lower()]
    if inner := re.fullmatch(r"(?:evenstep\.)?Whitened\((.+)\)", name):
        rule = optimizer_class(inner[1])
        if LABELS.get(f"whitened({rule.__name__})".lower()) is not None:
            return LABELS[f"whitened({rule.__name__})".lower()]
        return Method(f"Whitened({public(inner[1])})", f"Whitened({rule.__name__})", whitened(rule), around(rule))
    cls = optimizer_class(name)
    build = cls if issubclass(cls, ModelOptimizer) else plain(cls)
    return Method(public(name), cls.__name__, build, around(cls), capture_options=None)


def public(name: str) -> str:
    """A class's name as records know it: without the package if it is torch's or ours."""
    home, _, short = name.rpartition(".")
    return short if home in HOMES else name


def optimizer_class(name: str) -> type[Optimizer]:
    """The optimizer class of a name with or without its package; a UsageError says what is there instead."""
    home, _, short = name.rpartition(".")
    modules: list[Any] = [HOMES[home]] if home in HOMES else [module_of(home, name)] if home else [*HOMES.values()]
    for module in modules:
        found: Any = getattr(module, short, None)
        if is_optimizer(found):
            return found
    classes = [key for module in modules for key, value in vars(module).items() if is_optimizer(value)]
    if home:
        near = difflib.get_close_matches(short, classes, n=1)
        hint = f"did you mean {home}.{near[0]}?" if near else f"it has: {', '.join(classes) or 'none'}"
        raise UsageError(f"{home} has no optimizer class {short!r}; {hint}")
    listed = [m.label for m in METHODS.values() if m.label.isidentifier()]
    known_name(name, dict.fromkeys([*METHODS, *listed, *classes]), "method")
    raise AssertionError(name)  # a class is not an optimizer


def module_of(home: str, name: str) -> Any:
    """The module `home`, imported; a UsageError if it cannot be."""
    try:
        return importlib.import_module(home)
    except Exception as error:  # another package may raise anything
        raise UsageError(f"{name}: {home} cannot be imported ({error}); is it installed?") from error


def is_optimizer(value: Any) -> bool:
    """Whether this is a class of optimizers that can be built."""
    return isinstance(value, type) and issubclass(value, Optimizer) and value is not Optimizer


def around(cls: type[Optimizer]) -> tuple[float, ...]:
    """Four stepsizes about a class's default, half a decade apart; none where it has no default."""
    lr = inspect.signature(cls).parameters.get("lr")
    if lr is None or not isinstance(lr.default, int | float):
        return ()
    return tuple(float(f"{lr.default * factor:.2g}") for factor in (0.1, 10**-0.5, 1.0, 10**0.5))


def default_lr(method: Method) -> float:
    """The stepsize to begin with: the row's, or the default of the class; a UsageError if it has none."""
    lr = inspect.signature(method.optimizer).parameters.get("lr")
    found = method.lr or (lr.default if lr is not None else None)
    if not isinstance(found, int | float):
        raise UsageError(f"{method.label} has no default lr to begin with; give --lr")
    return float(found)
