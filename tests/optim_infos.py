"""The library's optimizers as rows of torch's own optimizer tests: `OptimizerInfo`s that replace its `optim_db`.

Those tests build an optimizer from bare tensors and keywords alone, often at its default stepsize. Bare tensors have no
layers: a rule that is linear in the gradient is plain SG there, and gets torch's own default for SGD.
"""

import unittest
from collections.abc import Callable
from typing import Any

import torch
from torch.testing._internal.common_methods_invocations import DecorateInfo
from torch.testing._internal.common_optimizers import (
    ErrorOptimizerInput,
    OptimizerInfo,
    OptimizerInput,
    get_error_inputs_for_all_optims,
)

import evenstep


def preset(name: str, cls: type, *rule: type, **defaults: Any) -> Any:
    """A subclass that can be built from parameters alone."""

    def init(self: Any, params: Any, lr: Any = 1e-3, **keywords: Any) -> None:
        cls.__init__(self, params, *rule, lr=lr, **{**defaults, **keywords})

    return type(name, (cls,), {"__init__": init})


WhitenedSGD = preset("WhitenedSGD", evenstep.WhitenedSGD)
FanInSGD = preset("FanInSGD", evenstep.FanInSGD)
EvenStep = preset("EvenStep", evenstep.EvenStep, plain_lr=None)
CanonicalSGD = preset("CanonicalSGD", evenstep.CanonicalSGD, plain_lr=None)
WhitenedBySGD = preset("WhitenedBySGD", evenstep.Whitened, torch.optim.SGD)
WhitenedByAdamW = preset("WhitenedByAdamW", evenstep.Whitened, torch.optim.AdamW)


class WhitenedByMuon(evenstep.Whitened):
    """Bare tensors go to AdamW, at `plain_lr`."""

    def __init__(self, params: Any, lr: Any = 1e-3, **keywords: Any) -> None:
        plain = {"plain_lr": lr if isinstance(lr, float) else 1e-3}
        super().__init__(params, torch.optim.Muon, lr=lr, **{**plain, **keywords})


def inputs(*, capturable: bool = True, **own: dict[str, Any]) -> Callable[..., list[OptimizerInput]]:
    """What gives an optimizer's configurations: those that all share and its own, by name."""

    def configurations(device: Any, dtype: Any = None) -> list[OptimizerInput]:
        shared = {
            "default": {},
            "non-default lr": {"lr": 1e-2},
            "tensor lr": {"lr": torch.tensor(1e-3)},  # a new one each time: schedulers change it in place
            "weight decay": {"weight_decay": 0.1},
            "maximize": {"weight_decay": 0.1, "maximize": True},
            "guards off": {"trust": None},
        }
        on_device = capturable or torch.device(device).type != "cpu"
        chosen = {**shared, **own, **({"capturable": {"capturable": True}} if on_device else {})}
        return [OptimizerInput(None, dict(keywords), name) for name, keywords in chosen.items()]

    return configurations


TORCHS_NAMES = {"lr": "learning rate", "weight_decay": "weight_decay value"}
TORCHS_NAMES |= {"momentum": "momentum value", "eps": "epsilon value"}


def errors(*keywords: str) -> Callable[..., list[ErrorOptimizerInput]]:
    """What gives the inputs that are refused in torch's words; test_checkpoints.py has those with words of our own."""

    def wrong(device: Any, dtype: Any) -> list[ErrorOptimizerInput]:
        real, complex_ = (torch.rand(2, 3, device=device, dtype=t) for t in (dtype, torch.complex64))
        bad = [(real, {k: -0.5}, f"Invalid {TORCHS_NAMES[k]}: -0.5") for k in ("lr", "weight_decay", *keywords)]
        return [
            *get_error_inputs_for_all_optims(device, dtype),
            *(
                ErrorOptimizerInput(OptimizerInput([p], chosen, ""), error_type=ValueError, error_regex=message)
                for p, chosen, message in [*bad, (complex_, {}, "complex parameters are not supported")]
            ),
        ]

    return wrong


def info(cls: type, configurations: Any, wrong: Any) -> OptimizerInfo:
    """A row, with what is true of all optimizers of the library."""
    return OptimizerInfo(
        cls,
        optim_inputs_func=configurations,
        optim_error_inputs_func=wrong,
        supported_impls=("foreach",),
        not_og_supported_flags=("foreach", "maximize", "capturable"),
        supports_complex=False,
        has_capturable_arg=True,
        skips=(
            DecorateInfo(
                unittest.skip("it looks for a private function of torch's own modules"),
                "TestOptimRenewed",
                "test_defaults_changed_to_foreach",
            ),
        ),
    )


MOMENTS = {"damping and decay": {"damping": 0.0, "decay": 0.5, "fresh_max": None}}
MOMENTUM = {"momentum": {"momentum": 0.9}}
PLAIN_LR = {"plain_lr": {"plain_lr": 1e-2}}


def rows() -> list[OptimizerInfo]:
    """One row per public optimizer, and one of `Whitened` per rule it is run with."""
    unit = inputs(momentum={"momentum": 0.0}, eps={"eps": 1e-3}, **PLAIN_LR, **MOMENTS)
    even = inputs(momentum={"momentum": 0.0}, head={"head": None}, **PLAIN_LR, **MOMENTS)
    natural = inputs(
        network={"block": "network"},
        weight={"block": "weight", "momentum": 0.9},
        unbounded={"bounded": False},
        eps={"eps": 1e-3, "bias_correction": False},
    )
    adam = inputs(capturable=False, amsgrad={"amsgrad": True, "betas": (0.8, 0.9)}, **MOMENTS)
    muon = inputs(nesterov={"nesterov": False}, apart={"joint": False}, **MOMENTS)
    sgd = {"momentum": {"momentum": 0.9, "dampening": 0.5}, "nesterov": {"momentum": 0.9, "nesterov": True}}
    return [
        info(evenstep.BlockNaturalSGD, natural, errors("momentum", "eps")),
        info(CanonicalSGD, inputs(**MOMENTUM, **PLAIN_LR, **MOMENTS), errors("momentum")),
        info(EvenStep, even, errors("momentum")),
        info(evenstep.UnitStep, unit, errors("momentum", "eps")),
        info(FanInSGD, inputs(**MOMENTUM, sharing={"sharing": 4.0}), errors("momentum")),
        info(WhitenedByAdamW, adam, errors("eps")),
        info(WhitenedByMuon, muon, errors()),
        info(WhitenedBySGD, inputs(**sgd, **MOMENTS), errors("momentum")),
        info(WhitenedSGD, inputs(**MOMENTUM, **PLAIN_LR, **MOMENTS), errors("momentum")),
    ]
