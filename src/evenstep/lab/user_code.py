"""A model, and inputs for it, from a user's file; an error in it is reported with its file and line."""

import difflib
import importlib.util
import math
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves

from .usage import UsageError

T = TypeVar("T")
FORM = "give FILE.py, or FILE.py:FUNCTION with the function that builds the model"
MOST = 2**30  # numbers in an input


def load(target: str) -> tuple[nn.Module, ModuleType, Path]:
    """The model that FILE.py:FUNCTION builds (FUNCTION is `model` if left out), the file as a module, and its path."""
    name, _, function = target.partition(":") if target.endswith(".py") else target.rpartition(":")
    path, function = Path(name), function or "model"
    if not (name and function.isidentifier()):
        raise UsageError(f"{target!r} names no function in a Python file; {FORM}")
    module = imported(path)
    if not callable(getattr(module, function, None)):
        raise UsageError(f"{path} has no function {function!r}{others(module, function)}")
    return model_of(path, getattr(module, function), f"{path}:{function}"), module, path


def others(module: ModuleType, wanted: str) -> str:
    """The functions that a file has, the nearest name alone if there is one, in words behind an error."""
    names = [n for n, v in vars(module).items() if callable(v) and getattr(v, "__module__", "") == module.__name__]
    near = difflib.get_close_matches(wanted, names, n=1)
    return f"; did you mean {near[0]!r}?" if near else f"; it has: {', '.join(names) or 'none'}"


def model_of(path: Path, build: Callable[[], Any], target: str) -> nn.Module:
    """The model that a user's function returns, if it can be trained."""
    model = guarded(path, build)
    if not isinstance(model, nn.Module):
        raise UsageError(f"{target} returned {type(model).__name__}; it should return a torch.nn.Module")
    _check(model, target)
    return model


def _check(model: nn.Module, target: str) -> None:
    """Refuse a model whose parameters cannot be trained as they are."""
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise UsageError(f"{target}: {name} has no shape yet; call the model once on a batch before it is returned")
        if parameter.is_meta:
            raise UsageError(f"{target}: {name} is on the device meta and has no values; build the model on the CPU")
    if not any(p.requires_grad and p.numel() for p in model.parameters()):
        raise UsageError(f"{target} returned a model without parameters to train")


def imported(path: Path) -> ModuleType:
    """The file at `path` as a module that can import files beside it."""
    name = f"{path.stem} of the user" if path.stem in sys.modules else path.stem  # a file may be called random.py
    spec = importlib.util.spec_from_file_location(name, path) if path.is_file() else None
    if spec is None or spec.loader is None:
        raise UsageError(f"{path} is {'not a Python file' if path.exists() else 'not there'}; {FORM}")
    module, loader = importlib.util.module_from_spec(spec), spec.loader
    sys.path.insert(0, str(path.parent))
    sys.modules[name] = module  # dataclasses and pickle look it up there
    try:
        guarded(path, lambda: loader.exec_module(module))
    except UsageError:
        del sys.modules[name]
        raise
    finally:
        sys.path.remove(str(path.parent))
    return module


def inputs(shape: str | None, module: ModuleType, path: Path) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Arguments of the model: random numbers of a shape such as "8x3x32x32", or the result of the file's `inputs()`."""
    if shape is not None:
        try:
            return (torch.randn(sizes(shape)),), {}
        except RuntimeError as error:
            raise UsageError(f"--input {shape} does not fit into memory here; give a smaller shape") from error
    if not callable(getattr(module, "inputs", None)):
        return None
    arguments = guarded(path, module.inputs)
    if isinstance(arguments, dict):
        return (), arguments
    return arguments if isinstance(arguments, tuple) else (arguments,), {}


def sizes(shape: str) -> list[int]:
    """The sizes in a shape such as "8x3x32x32"."""
    words = shape.lower().split("x")
    if not all(word.isascii() and word.isdigit() and word.strip("0") for word in words):
        raise UsageError(f"--input must be a shape such as 8x3x32x32; got {shape!r}")
    if len(words) > 64 or sum(map(len, words)) > 1000 or math.prod(map(int, words)) > MOST:
        raise UsageError(f"--input must have at most 64 sizes and {MOST:,} numbers, 4 GiB; got {shape[:100]!r}")
    return [int(word) for word in words]


def guarded(path: Path, action: Callable[[], T], way_out: str = "") -> T:
    """Run the user's code; a failure becomes a UsageError of one line with the place in their file, and a way out."""
    try:
        return action()
    except UsageError:
        raise
    except (Exception, SystemExit) as error:
        frames = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).resolve() == path.resolve()]
        line = error.lineno if isinstance(error, SyntaxError) else frames[-1].lineno if frames else None
        text = error.msg if isinstance(error, SyntaxError) else str(error)
        place = f"{path}:{line}" if line else str(path)
        message = ": ".join(filter(None, [place, type(error).__name__, " ".join(text.split())]))
        raise UsageError("; ".join(filter(None, [message, way_out]))) from error


def scalar(output: Any) -> Tensor:
    """A loss from a model's output: its own `loss` if it has one, else the mean square of its numbers."""
    if isinstance(own := getattr(output, "loss", None), Tensor) and own.requires_grad:
        return own.mean()
    leaves = [t for t in tree_leaves(output) if isinstance(t, Tensor) and t.is_floating_point() and t.requires_grad]
    if not leaves:
        raise UsageError("the model's output has no tensor that depends on its parameters, so it cannot be trained")
    return torch.stack([t.float().square().mean() for t in leaves]).sum()
