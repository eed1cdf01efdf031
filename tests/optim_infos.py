"""Our optimizers as rows of torch's own optimizer tests: `OptimizerInfo`s to stand in for its `optim_db`.

Those tests build an optimizer from bare tensors and keywords alone, often at its default stepsize. Bare tensors have no
layers, so that a rule which is linear in the gradient is plain SG there: it gets torch's own default for SGD.
"""

import unittest
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.lr_scheduler import ConstantLR, ExponentialLR, LinearLR, PolynomialLR, ReduceLROnPlateau, StepLR
from torch.testing._internal.common_methods_invocations import DecorateInfo
from torch.testing._internal.common_optimizers import (
    ErrorOptimizerInput,
    OptimizerInfo,
    OptimizerInput,
    get_error_inputs_for_all_optims,
)

import evenstep


class WhitenedSGD(evenstep.WhitenedSGD):
    def __init__(self, params: Any, lr: Any = 1e-3, **keywords: Any) -> None:
        super().__init__(params, lr, **keywords)


class FanInSGD(evenstep.FanInSGD):
    def __init__(self, params: Any, lr: Any = 1e-3, **keywords: Any) -> None:
        super().__init__(params, lr, **keywords)


class CanonicalSGD(evenstep.CanonicalSGD):
    def __init__(self, params: Any, lr: Any = 1e-3, plain_lr: Any = None, **keywords: Any) -> None:
        super().__init__(params, lr, plain_lr=plain_lr, **keywords)


class WhitenedBySGD(evenstep.Whitened):
    def __init__(self, params: Any, **keywords: Any) -> None:
        super().__init__(params, torch.optim.SGD, **keywords)


class WhitenedByAdamW(evenstep.Whitened):
    def __init__(self, params: Any, **keywords: Any) -> None:
        super().__init__(params, torch.optim.AdamW, **keywords)


class WhitenedByMuon(evenstep.Whitened):
    def __init__(self, params: Any, lr: Any = 1e-3, **keywords: Any) -> None:
        plain = {"plain_lr": lr if isinstance(lr, float) else 1e-3}  # of AdamW, which bare tensors go to
        super().__init__(params, torch.optim.Muon, lr=lr, **{**plain, **keywords})


SCHEDULES = (
    [lambda opt: StepLR(opt, gamma=0.9, step_size=10)],
    [lambda opt: LinearLR(opt, start_factor=0.4, end_factor=0.8, total_iters=4)],
    [lambda opt: ConstantLR(opt, factor=0.4, total_iters=4)],
    [lambda opt: PolynomialLR(opt, power=0.9, total_iters=4)],
    [
        lambda opt: StepLR(opt, gamma=0.99, step_size=10),
        lambda opt: ExponentialLR(opt, gamma=0.99),
        ReduceLROnPlateau,
    ],
)


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


def errors(owner: str, **messages: str) -> Callable[..., list[ErrorOptimizerInput]]:
    """What gives the inputs that are refused: torch's, ours for all, and a bad value per keyword in `messages`."""
    bad = {
        "lr": (-1.0, r"Invalid learning rate: -1\.0"),
        "weight_decay": (-1.0, r"Invalid weight_decay value: -1\.0"),
        "foreach": ("yes", rf"{owner}: foreach must be one of None, True, False; got 'yes'\."),
        "trust": (0.0, rf"{owner}: trust must be a finite number > 0, or None to turn it off; got 0\.0\."),
        "exclude": ("head.*", rf"{owner}: exclude must be a list of name patterns; got the string 'head\.\*'\."),
        **{keyword: (-0.5, message) for keyword, message in messages.items()},
    }

    def wrong(device: Any, dtype: Any) -> list[ErrorOptimizerInput]:
        real, complex_ = (torch.rand(2, 3, device=device, dtype=t) for t in (dtype, torch.complex64))
        return [
            *get_error_inputs_for_all_optims(device, dtype),
            ErrorOptimizerInput(
                OptimizerInput([complex_], {}, "complex parameters"),
                error_type=ValueError,
                error_regex=f"{owner}: complex parameters are not supported",
            ),
            *(
                ErrorOptimizerInput(OptimizerInput([real], {k: value}, k), error_type=ValueError, error_regex=message)
                for k, (value, message) in bad.items()
            ),
        ]

    return wrong


def info(cls: type, configurations: Any, wrong: Any, **more: Any) -> OptimizerInfo:
    """A row: what holds for all of ours."""
    return OptimizerInfo(
        cls,
        optim_inputs_func=configurations,
        optim_error_inputs_func=wrong,
        scheduler_inputs=SCHEDULES,
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
        **more,
    )


def rows() -> list[OptimizerInfo]:
    """One row per public optimizer, and one of `Whitened` per rule it is run with."""
    moments = {"damping and decay": {"damping": 0.0, "decay": 0.5, "fresh_max": None}}
    return [
        info(
            evenstep.BlockNaturalSGD,
            inputs(
                network={"block": "network"},
                weight={"block": "weight", "momentum": 0.9},
                unbounded={"bounded": False},
                eps={"eps": 1e-3, "bias_correction": False},
            ),
            errors("BlockNaturalSGD", momentum="Invalid momentum value: -0.5", eps="Invalid epsilon value: -0.5"),
        ),
        info(
            CanonicalSGD,
            inputs(momentum={"momentum": 0.9}, plain_lr={"plain_lr": 1e-2}, **moments),
            errors("CanonicalSGD", momentum="Invalid momentum value: -0.5", decay="decay must be in"),
        ),
        info(
            evenstep.UnitStep,
            inputs(momentum={"momentum": 0.0}, eps={"eps": 1e-3}, plain_lr={"plain_lr": 1e-2}, **moments),
            errors("UnitStep", momentum="Invalid momentum value: -0.5", eps="Invalid epsilon value: -0.5"),
        ),
        info(
            FanInSGD,
            inputs(momentum={"momentum": 0.9}, sharing={"sharing": 4.0}),
            errors("FanInSGD", momentum="Invalid momentum value: -0.5", sharing="sharing must be"),
        ),
        info(
            WhitenedByAdamW,
            inputs(capturable=False, amsgrad={"amsgrad": True, "betas": (0.8, 0.9)}, **moments),
            errors("WhitenedByAdamW", eps="Invalid epsilon value: -0.5", damping="damping must be"),
        ),
        info(
            WhitenedByMuon,
            inputs(nesterov={"nesterov": False}, apart={"joint": False}, **moments),
            errors("WhitenedByMuon", momentum="momentum should be|Invalid momentum value: -0.5"),
        ),
        info(
            WhitenedBySGD,
            inputs(
                momentum={"momentum": 0.9, "dampening": 0.5}, nesterov={"momentum": 0.9, "nesterov": True}, **moments
            ),
            errors("WhitenedBySGD", momentum="Invalid momentum value: -0.5", plain_lr="plain_lr must be"),
        ),
        info(
            WhitenedSGD,
            inputs(momentum={"momentum": 0.9}, plain_lr={"plain_lr": 1e-2}, **moments),
            errors("WhitenedSGD", momentum="Invalid momentum value: -0.5", fresh_max="fresh_max must be"),
        ),
    ]
