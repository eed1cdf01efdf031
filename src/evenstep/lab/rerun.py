"""The commands that make a comparison's runs again, derived from its records."""

import json
import shlex
from collections.abc import Sequence
from typing import Any

from .data.fashion import FASHION_NAME
from .labels import augmentations
from .methods import METHODS
from .summary import Series


def commands(found: Sequence[Series]) -> list[str]:
    """One `evenstep sweep` for all series without options at their method's own stepsizes, and one for each other."""
    usual = [s for s in found if not s.options and _own_grid(s)]
    groups = ([usual] if usual else []) + [[s] for s in found if s not in usual]
    return [command(group) for group in groups]


def command(found: Sequence[Series]) -> str:
    """The sweep that makes these series."""
    config, options = found[0].all_runs[0]["config"], found[0].options
    if "steps" in config:  # an epoch of so many steps is what `tune` alone makes
        return shlex.join(["evenstep", "tune", str(config.get("data")), "--method", found[0].method])
    own = config.get("judged_by") == "test_loss"  # a user's file
    words = ["evenstep", "sweep", *([str(config.get("data"))] if own else []), "--methods", *(s.method for s in found)]
    if not all(map(_own_grid, found)):
        words += ["--stepsizes", *map(number, found[0].runs)]
    words += ["--seeds", *sorted({str(run.get("seed")) for s in found for run in s.all_runs})]
    for flag, name in (("--epochs", "epochs"), ("--batch-size", "batch_size"), ("--model", "model")):
        words += [flag, str(config[name])] if name in config and not (own and name != "epochs") else []
    words += [] if own else ["--data", "fashion" if config.get("data") == FASHION_NAME else "DATA"]
    if names := augmentations(config.get("augment")):
        words += ["--augment", *names]
    words += ["--decay-lr"] if config.get("decay_lr") else []
    words += _pairs("--options", options) + _pairs("--model-options", config.get("model_options"))
    return shlex.join(words)


def number(value: float) -> str:
    """The shortest text that is read as the same number.

    >>> number(0.0123456789), number(1.0), number(1e30)
    ('0.0123456789', '1', '1e+30')
    """
    return min(f"{value:g}", repr(value), key=lambda text: (float(text) != value, len(text)))


def _pairs(flag: str, values: Any) -> list[str]:
    """A flag and its NAME=VALUE words; none if a record holds something other than options."""
    pairs = values.items() if isinstance(values, dict) else ()
    return [flag, *(f"{key}={json.dumps(value)}" for key, value in pairs)] if pairs else []


def _own_grid(series: Series) -> bool:
    """Whether the stepsizes are the method's default ones."""
    return series.method in METHODS and list(series.runs) == sorted(METHODS[series.method].stepsizes)
