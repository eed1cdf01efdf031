"""A method of the race, written as its name with options, as in `normuon,momentum=0.9`."""

import ast
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from torch import Tensor, nn

Build = Callable[[nn.Module, "float | Tensor", dict[str, Any]], "list[Any]"]
EVERYWHERE: tuple[str, ...] = ()
SOME = ("vgg", "gpt-384", "autoencoder")  # a classifier, a language model, a regression


class Capture(Enum):
    """How much of a training step a CUDA graph can hold."""

    STEP = "captured"
    BACKWARD = "step eager"
    NOTHING = "eager"


@dataclass(frozen=True)
class Method:
    """How to build the optimizers of a model, which get lr as a tensor where the whole step can be captured.

    `lr` is the usual one, the middle of the grid. `tasks` are those it runs on unless told otherwise. `authors` is the
    setting that its authors recommend, options and lr, where that is not on the grid. `packages` must be installed.
    """

    build: Build
    lr: float
    tasks: tuple[str, ...] = EVERYWHERE
    rival: bool = True
    capture: Capture = Capture.STEP
    options: dict[str, Any] = field(default_factory=dict)
    authors: tuple[str, float] | None = None
    packages: tuple[str, ...] = ()
    batch_norm: bool = False
    decay: bool = True  # of lr, by the task's schedule
    label: str = ""


def options_of(pairs: Iterable[str]) -> dict[str, Any]:
    """Options from texts `option=value`."""
    options = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not (key and equals and value):
            raise ValueError(f"{pair!r} should be option=value")
        options[key] = value_of(value)
    return options


def value_of(text: str) -> Any:
    """A Python literal, or the text itself where it is none.

    >>> value_of("0.9"), value_of("None"), value_of("auto")
    (0.9, None, 'auto')
    """
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def canonical(text: str) -> str:
    """The method's name with its options in order.

    >>> canonical("normuon,plain_lr=0.001,momentum=0.9")
    'normuon,momentum=0.9,plain_lr=0.001'
    """
    name, *pairs = text.split(",")
    return ",".join([name, *sorted(pairs)])
