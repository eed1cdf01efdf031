"""What the tests run over: a row per optimizer, a row per kind of layer."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import evenstep
from evenstep.rules.orthogonal import OrthogonalRule


class WideEvenStep(evenstep.EvenStep):
    """`EvenStep` with matrix products in the weights' dtype on GPUs, too: bfloat16 rounds by per cents."""

    rule = OrthogonalRule(narrow=False)


class OptimizerCase(NamedTuple):
    """An optimizer class and the keywords to build it with."""

    cls: type[torch.optim.Optimizer]
    keywords: dict[str, Any]

    def build(self, model: Any, /, **more: Any) -> Any:
        """The optimizer of this row on `model`."""
        return self.cls(model, **{**self.keywords, **more})


class LayerCase(NamedTuple):
    """How to build a layer, and the shape of one example of its input."""

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]

    def layer(self) -> nn.Module:
        """A layer in float64."""
        return self.build().double()

    def inputs(self, batch: int = 6) -> Tensor:
        """Random inputs in float64 whose channels have means and scales of their own."""
        channels = self.shape[0 if is_conv(self.build()) else -1]
        level, scale = torch.randn(channels).double(), torch.rand(channels).double() + 0.5
        if is_conv(self.build()):
            level, scale = (t.view(-1, *[1] * (len(self.shape) - 1)) for t in (level, scale))
        return level + scale * torch.randn(batch, *self.shape, dtype=torch.float64)


def is_conv(layer: nn.Module) -> bool:
    """Whether channels come right after the batch."""
    return isinstance(layer, nn.modules.conv._ConvNd)


SGD = {"lr": 0.1}
OPTIMIZERS = {
    "whitened": OptimizerCase(evenstep.WhitenedSGD, SGD),
    "whitened-paper": OptimizerCase(
        evenstep.WhitenedSGD, SGD | {"damping": 0.0, "fresh_max": None, "trust": None, "momentum": 0.9}
    ),
    "whitened-decayed": OptimizerCase(evenstep.WhitenedSGD, SGD | {"momentum": 0.9, "weight_decay": 0.1}),
    "fan-in": OptimizerCase(evenstep.FanInSGD, SGD),
    "fan-in-momentum": OptimizerCase(evenstep.FanInSGD, SGD | {"momentum": 0.9}),
    "canonical": OptimizerCase(evenstep.CanonicalSGD, {"lr": 0.01}),
    "canonical-paper": OptimizerCase(
        evenstep.CanonicalSGD, {"lr": 0.01, "damping": 0.0, "fresh_max": None, "trust": None}
    ),
    "unitstep": OptimizerCase(evenstep.UnitStep, {"lr": 0.02}),
    "unitstep-decayed": OptimizerCase(evenstep.UnitStep, {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.0}),
    "evenstep": OptimizerCase(evenstep.EvenStep, {"lr": 0.02}),
    "evenstep-decayed": OptimizerCase(
        evenstep.EvenStep, {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.8, "head": None, "plain_lr": None}
    ),
    "whitened-sgd": OptimizerCase(
        evenstep.Whitened, {"base": torch.optim.SGD, "lr": 0.01, "momentum": 0.9, "nesterov": True}
    ),
    "whitened-adamw": OptimizerCase(evenstep.Whitened, {"base": torch.optim.AdamW, "lr": 0.01}),
    "whitened-muon": OptimizerCase(evenstep.Whitened, {"base": torch.optim.Muon, "lr": 0.01}),
    "network": OptimizerCase(evenstep.BlockNaturalSGD, {"lr": 0.01, "block": "network"}),
    "unit": OptimizerCase(evenstep.BlockNaturalSGD, {"lr": 0.01, "block": "unit", "momentum": 0.9}),
    "weight": OptimizerCase(evenstep.BlockNaturalSGD, {"lr": 0.01, "block": "weight"}),
    "network-unbounded": OptimizerCase(evenstep.BlockNaturalSGD, {"lr": 0.01, "block": "network", "bounded": False}),
    "unit-unbounded": OptimizerCase(evenstep.BlockNaturalSGD, {"lr": 0.01, "block": "unit", "bounded": False}),
}

HAND_WRITTEN = ("evenstep", "unitstep", "whitened", "canonical", "fan-in", "unit")
ONE_EACH = {name: OPTIMIZERS[name] for name in (*HAND_WRITTEN, "whitened-sgd", "whitened-adamw", "whitened-muon")}
RUNS_TORCH_RULES = (evenstep.Whitened, evenstep.EvenStep)  # which keep their step counts on the host

# optimizers for `helpers.Net`, at stepsizes that keep rounding small: the fused step serves those written by hand on
# every device, and torch's rules where there are kernels
BY_HAND = {
    "sg": OptimizerCase(evenstep.WhitenedSGD, {"lr": 0.002}),
    "momentum": OptimizerCase(evenstep.WhitenedSGD, {"lr": 0.001, "momentum": 0.9, "weight_decay": 0.1}),
    "unguarded": OptimizerCase(evenstep.WhitenedSGD, {"lr": 1e-4, "momentum": 0.9, "trust": None, "fresh_max": None}),
    "fan-in": OptimizerCase(evenstep.FanInSGD, {"lr": 0.5, "momentum": 0.9, "trust": 0.1}),
    "unitstep": OptimizerCase(evenstep.UnitStep, {"lr": 0.03, "weight_decay": 0.1}),
    "unitstep-plain": OptimizerCase(evenstep.UnitStep, {"lr": 0.03, "momentum": 0.0, "maximize": True}),
    "unitstep-tight": OptimizerCase(evenstep.UnitStep, {"lr": 0.3, "trust": 0.02, "fresh_max": 0.8}),
    "unitstep-tensor-lr": OptimizerCase(evenstep.UnitStep, {"lr": torch.tensor(0.03)}),
}
ADAMW = {"base": torch.optim.AdamW, "lr": 0.01, "eps": 0.01}  # a large eps: Adam turns rounding errors into full steps
TORCH_RULES = {
    "adamw": OptimizerCase(evenstep.Whitened, ADAMW | {"weight_decay": 0.1}),
    "adamw-tight": OptimizerCase(
        evenstep.Whitened,
        ADAMW | {"lr": 0.1, "trust": 0.02, "fresh_max": 0.8, "fan_in_power": 0.25, "maximize": True},
    ),
    "adamw-tensor-lr": OptimizerCase(evenstep.Whitened, ADAMW | {"lr": torch.tensor(0.01)}),
    "muon": OptimizerCase(
        evenstep.Whitened,
        {"base": torch.optim.Muon, "lr": 0.02, "plain": partial(torch.optim.Adam, lr=0.01, eps=0.01)},
    ),
    "nesterov-joint": OptimizerCase(
        evenstep.Whitened, {"base": torch.optim.SGD, "lr": 0.001, "momentum": 0.9, "nesterov": True, "joint": True}
    ),
    "orthogonal": OptimizerCase(WideEvenStep, {"lr": 0.02, "weight_decay": 0.1, "head": None}),
    "unguarded-rule": OptimizerCase(
        evenstep.Whitened, {"base": torch.optim.RMSprop, "lr": 1e-3, "eps": 0.1, "trust": None, "fresh_max": None}
    ),
}

LAYERS = {
    "linear": LayerCase(lambda: nn.Linear(4, 3), (4,)),
    "linear-sequence": LayerCase(lambda: nn.Linear(4, 3), (5, 4)),
    "conv1d": LayerCase(lambda: nn.Conv1d(3, 4, 3), (3, 7)),
    "conv2d": LayerCase(lambda: nn.Conv2d(3, 4, 2), (3, 4, 5)),
    "conv3d": LayerCase(lambda: nn.Conv3d(2, 3, 2), (2, 3, 3, 4)),
    "strided": LayerCase(lambda: nn.Conv2d(3, 2, (3, 2), stride=(2, 1)), (3, 6, 4)),
    "padded-zeros": LayerCase(lambda: nn.Conv2d(3, 2, 3, padding=(2, 1)), (3, 4, 4)),
    "padded-reflect": LayerCase(lambda: nn.Conv2d(3, 2, 3, padding=(1, 2), padding_mode="reflect"), (3, 4, 4)),
    "padded-circular": LayerCase(lambda: nn.Conv2d(3, 2, 3, padding=1, padding_mode="circular"), (3, 4, 4)),
    "padded-same": LayerCase(lambda: nn.Conv1d(3, 2, 4, padding="same", dilation=2), (3, 6)),
    "grouped": LayerCase(lambda: nn.Conv2d(6, 4, 2, groups=2), (6, 4, 4)),
    "depthwise": LayerCase(lambda: nn.Conv1d(3, 6, 3, groups=3, padding=1), (3, 5)),
    "transposed1d": LayerCase(lambda: nn.ConvTranspose1d(3, 2, 3, stride=2), (3, 4)),
    "transposed2d": LayerCase(lambda: nn.ConvTranspose2d(3, 2, 3, stride=(2, 1), padding=1), (3, 4, 3)),
    "transposed3d": LayerCase(lambda: nn.ConvTranspose3d(2, 3, 2, stride=2), (2, 2, 3, 2)),
    "transposed-grouped": LayerCase(
        lambda: nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1, groups=2), (4, 3, 3)
    ),
    "linear-biasless": LayerCase(lambda: nn.Linear(4, 3, bias=False), (4,)),
    "conv2d-biasless": LayerCase(lambda: nn.Conv2d(4, 6, 2, groups=2, bias=False), (4, 3, 3)),
    "transposed-biasless": LayerCase(lambda: nn.ConvTranspose2d(4, 2, 3, stride=2, groups=2, bias=False), (4, 3, 3)),
}
