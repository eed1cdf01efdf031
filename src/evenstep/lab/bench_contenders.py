"""Whose training steps are timed: ours, torch's, and rivals where they are installed."""

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

import evenstep

from . import usage


class Muons(torch.optim.Optimizer):
    """torch's Muon on matrices and AdamW on the rest, as Muon's users do."""

    def __init__(self, model: nn.Module) -> None:
        matrices = [p for p in model.parameters() if p.dim() == 2]
        others = [p for p in model.parameters() if p.dim() != 2]
        self.parts = [torch.optim.Muon(matrices, lr=LR), torch.optim.AdamW(others, lr=LR, fused=True)]
        super().__init__(model.parameters(), {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Both."""
        for part in self.parts:
            part.step()


class KFAC(torch.optim.SGD):
    """SGD behind kfac-pytorch's preconditioner, as its users write it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), lr=LR, momentum=MOMENTUM)
        self.preconditioner = peer("kfac.preconditioner").KFACPreconditioner(model)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Precondition, then step."""
        self.preconditioner.step()
        super().step()


def peer(module: str) -> Any:
    """A rival's package, or a clear word that it is missing."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = PEERS[module.partition(".")[0]]
        raise usage.UsageError(f"this contender needs {package}, which cannot be imported ({error})") from error


PEERS = {
    "pytorch_optimizer": "the package pytorch_optimizer",
    "kfac": "kfac-pytorch (from its repository; the package kfac is another)",
    "singd": "the package singd",
}
MOMENTUM = 0.9
LR = 1e-30  # all contenders are to time the same network, not what they make of it; 1e-9 moves one whose signals vanish
RULE_LR = 1e-15  # of a rule that is guarded: squares of its steps are to be numbers, too, or processors take longer
CONTENDERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=LR, momentum=MOMENTUM),
    "adamw-fused": lambda m: torch.optim.AdamW(m.parameters(), lr=LR, fused=True),
    "muon": Muons,
    "whitened-sgd": lambda m: evenstep.WhitenedSGD(m, lr=LR, momentum=MOMENTUM),
    "evenstep": lambda m: evenstep.UnitStep(m, lr=LR, momentum=MOMENTUM),
    "evenstep-loop": lambda m: evenstep.UnitStep(m, lr=LR, momentum=MOMENTUM, foreach=False),
    "whitened-adamw": lambda m: evenstep.Whitened(m, torch.optim.AdamW, lr=RULE_LR, fused=True),
    "batch-norm": lambda m: torch.optim.SGD(m.parameters(), lr=LR, momentum=MOMENTUM),
    # rivals, where they are installed
    "shampoo": lambda m: peer("pytorch_optimizer").ScalableShampoo(m.parameters(), lr=LR),
    "soap": lambda m: peer("pytorch_optimizer").SOAP(m.parameters(), lr=LR),
    "kfac": KFAC,
    "singd": lambda m: peer("singd.optim.optimizer").SINGD(m, lr=LR, momentum=MOMENTUM),
}
NEEDS = {
    "shampoo": "pytorch_optimizer",
    "soap": "pytorch_optimizer",
    "kfac": "kfac.preconditioner",
    "singd": "singd.optim.optimizer",
}
ELSEWHERE = {"kfac", "singd"}  # keep their factors outside `state`
