"""The methods of the race, a row each; those of `research.py` are for single jobs alone."""

from typing import Any

import torch

import evenstep

from .method import EVERYWHERE, SOME, Capture, Method, options_of
from .ours import ours
from .packages import adamw, kron, muon_kin, of_torch, sgd, singd, torch_muon, whole_model, with_adamw
from .research import VARIANTS

POP = ("pytorch_optimizer",)
NORMED = ("cnn", "vgg", "alexnet")  # tasks whose network has a version with batch norm
CONVOLUTIONS = ("cnn", "vgg", "alexnet", "resnet20", "resnet20-bn", "convnext", "vit")
MOMENTUM = {"momentum": 0.9}


METHODS: dict[str, Method] = {
    "evenstep": ours(evenstep.EvenStep, label="EvenStep"),
    "unitstep": ours(evenstep.UnitStep, label="UnitStep"),
    "sgd": Method(sgd, 0.05, options=MOMENTUM, authors=("weight_decay=0.0005", 0.1), label="SGD, momentum"),
    "adamw": Method(
        lambda model, lr, options: [adamw(model.parameters(), lr, **options)],
        1e-3,
        authors=("beta2=0.999,weight_decay=0.01", 1e-3),
        label="AdamW",
    ),
    "muon": Method(
        with_adamw(torch_muon, convolutions=False),
        0.02,
        authors=("plain_lr=0.0003,weight_decay=0.01", 0.02),
        label="Muon (torch)",
    ),
    "normuon": Method(
        with_adamw(muon_kin("NorMuon")),
        0.02,
        authors=("plain_lr=0.0003,weight_decay=0.01", 0.02),
        packages=POP,
        label="NorMuon",
    ),
    "soap": Method(
        whole_model("pytorch_optimizer", "SOAP"),
        3e-3,
        capture=Capture.BACKWARD,
        packages=POP,
        label="SOAP",
    ),
    # on a few tasks
    "whitened-adamw": ours(
        evenstep.Whitened, SOME, lr=1e-3, base=torch.optim.AdamW, betas=(0.9, 0.95), label="Whitened(AdamW)"
    ),
    "muon-conv": Method(with_adamw(muon_kin("Muon")), 0.02, CONVOLUTIONS, packages=POP, label="Muon, convolutions too"),
    "sgd-bn": Method(sgd, 0.05, NORMED, options=MOMENTUM, batch_norm=True, label="SGD, batch norm"),
    "adam": Method(of_torch(torch.optim.Adam), 1e-3, SOME, label="Adam"),
    "nadam": Method(of_torch(torch.optim.NAdam), 2e-3, SOME, label="NAdam"),
    "rmsprop": Method(of_torch(torch.optim.RMSprop), 1e-3, SOME, label="RMSprop"),
    "shampoo": Method(  # by default its matrices are made at step 1,000 for the first time
        whole_model("pytorch_optimizer", "ScalableShampoo"),
        1e-3,
        SOME,
        capture=Capture.BACKWARD,
        options={"preconditioning_compute_steps": 20, "graft_type": 3},  # 3: as long as RMSProp's steps
        packages=POP,
        label="Shampoo (scalable)",
    ),
    "kron": Method(kron, 1e-3, SOME, capture=Capture.BACKWARD, packages=(*POP, "opt_einsum"), label="PSGD-Kron"),
    "ademamix": Method(
        whole_model("pytorch_optimizer", "AdEMAMix"),
        1e-3,
        SOME,
        capture=Capture.BACKWARD,
        options={"t_alpha_beta3": "steps"},
        packages=POP,
        label="AdEMAMix",
    ),
    "schedule-free": Method(  # by its nature without decay: it averages weights instead
        whole_model("schedulefree", "AdamWScheduleFree"),
        2.5e-3,
        SOME,
        capture=Capture.BACKWARD,
        packages=("schedulefree",),
        decay=False,
        label="Schedule-Free AdamW",
    ),
    "lion": Method(
        whole_model("pytorch_optimizer", "Lion"),
        1e-4,
        SOME,
        capture=Capture.BACKWARD,
        authors=("weight_decay=0.1", 1e-4),
        packages=POP,
        label="Lion",
    ),
    "singd": Method(singd, 1e-3, SOME, capture=Capture.NOTHING, packages=("singd", "einops", "einconv"), label="SINGD"),
}


def parse(text: str) -> tuple[Method, dict[str, Any]]:
    """The method and all its options of `name,option=value,...`."""
    name, *pairs = text.split(",")
    method = METHODS.get(name) or VARIANTS.get(name)
    if method is None:
        raise ValueError(f"unknown method {name!r}: it should be one of {', '.join(METHODS)}")
    try:
        return method, {**method.options, **options_of(pairs)}
    except ValueError as error:
        raise ValueError(f"{text!r}: {error}") from None


__all__ = ["EVERYWHERE", "METHODS", "VARIANTS", "Method", "parse"]
