"""The methods that are compared: a network with or without batch norm, an optimizer, and stepsizes to try."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

import evenstep
from evenstep.coordinates.coordinates import Coordinates


@dataclass(frozen=True)
class Method:
    """One row of a comparison.

    `optimizer(model, lr=…, **options)` builds the optimizer. With `capture_options` its step can be captured in a CUDA
    graph and its lr can be a tensor; None if it cannot. The default `stepsizes` are half a decade apart and bracket the
    best one for the demo: the paper's CNN at batch 64 on the embedded images.
    """

    name: str
    label: str
    optimizer: Callable[..., Optimizer]
    stepsizes: tuple[float, ...]
    batch_norm: bool = False
    capture_options: Mapping[str, Any] | None = field(default_factory=lambda: {"capturable": True})
    lr: float | None = None  # where a search begins, if not at the class's default


class PlainMuon(evenstep.Whitened):
    """Muon on layers as matrices in plain coordinates, without a guard: the rival of whitened Muon."""

    coordinates = Coordinates

    def __init__(self, model: nn.Module, **options: Any) -> None:
        super().__init__(model, torch.optim.Muon, **{"trust": None, **options})


class OwnBatchSGD(evenstep.WhitenedSGD):
    """Whitening by the moments of the current batch alone, as batch norm takes them; App. D warns of it."""

    def step(self, closure: Any = None) -> Any:
        """Forget earlier batches: without them the batch's own moments are used, as at the first step."""
        for state in self.state.values():
            if "mass" in state:
                state["mass"].zero_()
        return super().step(closure)


def plain(rule: Callable[..., Optimizer]) -> Callable[..., Optimizer]:
    """A torch optimizer class as a function of the module, with the signature of the class."""
    return functools.wraps(rule)(lambda model, **options: rule(model.parameters(), **options))


def whitened(rule: type[Optimizer], **fixed: Any) -> Callable[..., Optimizer]:
    """A torch rule in whitened coordinates, with the signature of the rule."""
    return functools.wraps(rule)(lambda model, **options: evenstep.Whitened(model, rule, **{**fixed, **options}))


SGD, FUSED = plain(torch.optim.SGD), {"fused": True}
DECADES = (3e-4, 1e-3, 3e-3, 1e-2)
MUON = (3e-3, 1e-2, 3e-2, 1e-1)

METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        Method("sg", "SGD", SGD, (0.03, 0.1, 0.3, 1.0), capture_options=FUSED, lr=0.1),
        Method("fan-in", "FanInSGD", evenstep.FanInSGD, (1.0, 3.0, 10.0, 30.0)),
        Method("batch-norm", "SGD + batch norm", SGD, (0.03, 0.1, 0.3, 1.0), True, FUSED, lr=0.1),
        Method("whitening", "WhitenedSGD", evenstep.WhitenedSGD, (1.0, 3.0, 10.0, 30.0)),
        Method("whitening-own", "WhitenedSGD, the batch's own moments", OwnBatchSGD, (1.0, 3.0, 10.0, 30.0)),
        Method("canonical", "CanonicalSGD", evenstep.CanonicalSGD, DECADES),
        Method("adam", "Adam", plain(torch.optim.Adam), DECADES),
        Method("adamw", "AdamW", plain(torch.optim.AdamW), DECADES),
        Method("rmsprop", "RMSprop", plain(torch.optim.RMSprop), (1e-4, 3e-4, 1e-3, 3e-3), lr=1e-3),
        Method("unitstep", "UnitStep", evenstep.UnitStep, (0.02, 0.05, 0.1, 0.2)),
        Method("evenstep", "EvenStep", evenstep.EvenStep, (0.0125, 0.025, 0.05, 0.1)),
        Method("whitened-adam", "Whitened(AdamW)", whitened(torch.optim.AdamW, betas=(0.9, 0.99)), DECADES),
        Method("whitened-muon", "Whitened(Muon)", whitened(torch.optim.Muon), MUON, lr=0.02),
        Method("muon", "Muon", PlainMuon, MUON, lr=0.02),
    )
}
