"""The optimizers whose steps are timed: the package's, in one or two versions, and torch's."""

import atexit
import importlib
import re
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from . import usage

BEFORE = "evenstep_before"  # the name under which another version of the package is imported
MOMENTUM = 0.9
LR = 1e-30  # so small that no weight moves: every contender times the same network
RULE_LR = 1e-15  # for guarded rules: squares of smaller steps are denormal, which slows a CPU down


class Contender(NamedTuple):
    """`build(package, model)` makes the optimizer; its time is divided by that of the contender `base`.

    Optimizers that are `packaged` come from `package`, so that two versions of it can be compared.
    """

    build: Callable[[Any, nn.Module], Optimizer]
    base: str = "sgd"
    packaged: bool = False


class MuonAndAdamW(Optimizer):
    """torch's Muon on matrices and AdamW on the other parameters, as Muon's users combine them."""

    def __init__(self, model: nn.Module) -> None:
        matrices = [p for p in model.parameters() if p.dim() == 2]
        others = [p for p in model.parameters() if p.dim() != 2]
        self.parts = [torch.optim.Muon(matrices, lr=LR), torch.optim.AdamW(others, lr=LR, fused=True)]
        super().__init__(model.parameters(), {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step both."""
        for part in self.parts:
            part.step()


def sgd(_: Any, model: nn.Module) -> Optimizer:
    """torch's SGD with momentum."""
    return torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)


def unit_step(package: Any, model: nn.Module) -> Optimizer:
    """UnitStep, which version 0.1 called EvenStep."""
    cls = getattr(package, "UnitStep", None) or package.EvenStep
    return cls(model, lr=LR, momentum=MOMENTUM)


def even_step(package: Any, model: nn.Module) -> Optimizer:
    """EvenStep as version 0.2 has it."""
    return importlib.import_module(f"{package.__name__}.even_step").EvenStep(model, lr=RULE_LR, plain_lr=None)


CONTENDERS = {
    "sgd": Contender(sgd),
    "batch-norm": Contender(sgd),  # on the network with batch norm
    "adamw-fused": Contender(lambda _, model: torch.optim.AdamW(model.parameters(), lr=LR, fused=True)),
    "muon": Contender(lambda _, model: MuonAndAdamW(model)),
    "whitened-sgd": Contender(
        lambda package, model: package.WhitenedSGD(model, lr=LR, momentum=MOMENTUM), packaged=True
    ),
    "unitstep": Contender(unit_step, packaged=True),
    "evenstep": Contender(even_step),
    "whitened-adamw": Contender(
        lambda package, model: package.Whitened(model, torch.optim.AdamW, lr=RULE_LR, fused=True),
        base="adamw-fused",
        packaged=True,
    ),
}


def load(folder: Path) -> ModuleType:
    """Import the `evenstep` package inside `folder` as `evenstep_before`, beside the current version.

    The files are copied and the word `evenstep` is renamed in them, so that imports, Triton kernels, names of torch
    operations and comparisons of module names all refer to the copy.
    """
    if BEFORE in sys.modules:
        return sys.modules[BEFORE]
    copy = Path(tempfile.mkdtemp(prefix="evenstep-before-"))
    atexit.register(shutil.rmtree, copy, ignore_errors=True)
    shutil.copytree(package_in(folder), copy / BEFORE, ignore=shutil.ignore_patterns("lab", "__pycache__"))
    for path in (copy / BEFORE).rglob("*.py"):
        path.write_text(re.sub(r"\bevenstep\b", BEFORE, path.read_text(encoding="utf-8")), encoding="utf-8")
    sys.path.insert(0, str(copy))
    try:
        return importlib.import_module(BEFORE)
    finally:
        sys.path.remove(str(copy))


def package_in(folder: Path) -> Path:
    """The package inside `folder`; a UsageError if there is none."""
    if not (folder / "evenstep" / "__init__.py").is_file():
        raise usage.UsageError(
            f"--against {folder} holds no evenstep package; give the src folder of another checkout, made for example "
            "by git worktree add ../before COMMIT"
        )
    return folder / "evenstep"
