"""The methods that are compared: each a network with or without batch norm, an optimizer, and stepsizes to try."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import evenstep


@dataclass(frozen=True)
class Method:
    """A row of the comparison.

    `optimizer(model, lr=…, **options)` builds the optimizer, `graph_options` let it be captured in a CUDA graph;
    the default `stepsizes` are half a decade apart and bracket the best one for the demo: the paper's CNN at
    batch 64 on the embedded images.
    """

    name: str
    label: str
    optimizer: Callable[..., Optimizer]
    stepsizes: tuple[float, ...]
    batch_norm: bool = False
    graph_options: dict[str, Any] = field(default_factory=dict)


def _torch(rule: Callable[..., Optimizer]) -> Callable[..., Optimizer]:
    """A torch optimizer class as a function of the module."""

    def build(model: nn.Module, **options: Any) -> Optimizer:
        return rule(model.parameters(), **options)

    return build


class PlainCoordinates(evenstep.Whitened):
    """A torch rule with layers as matrices, in plain coordinates: what `Whitened` is compared with."""

    coordinates = "plain"


class ScaledUnitStep(evenstep.UnitStep):
    """UnitStep with the factor (n·S)^(−1/4) on each layer's step that a normalizing rule keeps of eq. 12's β."""

    linear = True


class ScaledWhitened(evenstep.Whitened):
    """`Whitened` with the same factor."""

    linear = True


class OwnBatchSGD(evenstep.WhitenedSGD):
    """Whitening by the mean and variance of the current batch itself, as batch norm takes them: App. D warns of it."""

    def _advance(self, blocks: list[Any], ok: Tensor | None) -> None:
        """As ever, but first forget."""
        self.forget(self.state.values())
        super()._advance(blocks, ok)

    def forget(self, states: Iterable[dict[str, Tensor]]) -> None:
        """Forget earlier batches: a layer that knows none uses its own, as at the first step."""
        for state in states:
            if "mass" in state:
                state["mass"].zero_()


def _on_v(cls: type[evenstep.Whitened], base: type[Optimizer], **fixed: Any) -> Callable[..., Optimizer]:
    """A torch rule in the coordinates of `cls`."""

    def build(model: nn.Module, **options: Any) -> Optimizer:
        return cls(model, base, **{**fixed, **options})

    return build


FUSED, CAPTURABLE = {"fused": True}, {"capturable": True}

METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        Method("sg", "SG", _torch(torch.optim.SGD), (0.03, 0.1, 0.3, 1.0), graph_options=FUSED),
        Method("fan-in", "SG ÷ √(n·S)", evenstep.FanInSGD, (1.0, 3.0, 10.0, 30.0)),
        Method("batch-norm", "SG + batch norm", _torch(torch.optim.SGD), (0.03, 0.1, 0.3, 1.0), True, FUSED),
        Method("whitening", "whitening", evenstep.WhitenedSGD, (1.0, 3.0, 10.0, 30.0)),
        Method("whitening-own", "whitening, the batch's own moments", OwnBatchSGD, (1.0, 3.0, 10.0, 30.0)),
        Method("canonical", "canonical", evenstep.CanonicalSGD, (3e-4, 1e-3, 3e-3, 1e-2)),
        Method("adam", "Adam", _torch(torch.optim.Adam), (3e-4, 1e-3, 3e-3, 1e-2), False, CAPTURABLE),
        Method("rmsprop", "RMSProp", _torch(torch.optim.RMSprop), (1e-4, 3e-4, 1e-3, 3e-3), False, CAPTURABLE),
        Method("evenstep", "UnitStep", evenstep.UnitStep, (0.02, 0.05, 0.1, 0.2)),
        Method("evenstep-beta", "UnitStep, β of eq. 12", ScaledUnitStep, (0.05, 0.1, 0.2, 0.4)),
        Method(
            "whitened-adam",
            "Adam, whitened",
            _on_v(evenstep.Whitened, torch.optim.AdamW, betas=(0.9, 0.99)),
            (3e-4, 1e-3, 3e-3, 1e-2),
            graph_options=CAPTURABLE,
        ),
        Method(
            "whitened-adam-beta",
            "Adam, whitened, β of eq. 12",
            _on_v(ScaledWhitened, torch.optim.AdamW, betas=(0.9, 0.99)),
            (3e-3, 1e-2, 3e-2),
            graph_options=CAPTURABLE,
        ),
        Method(
            "whitened-muon",
            "Muon, whitened",
            _on_v(evenstep.Whitened, torch.optim.Muon),
            (3e-3, 1e-2, 3e-2, 1e-1),
            graph_options=CAPTURABLE,
        ),
        Method(
            "muon",
            "Muon",
            _on_v(PlainCoordinates, torch.optim.Muon, trust=None),
            (3e-3, 1e-2, 3e-2, 1e-1),
            graph_options=CAPTURABLE,
        ),
    )
}
