"""Methods of the study: this library's, torch's, and rivals from their own packages, which are not rewritten here.

A method is written as its name with options, as in `normuon,momentum=0.9`. Options go to the optimizer's class; for
Muon and its kin `plain_lr` is the lr of AdamW, which moves all that is no hidden weight. Weight decay is 0 by default.
"""

import ast
import importlib
import inspect
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import evenstep
from evenstep.coordinates.plain_size import PlainSize
from evenstep.even_step import EvenStep
from evenstep.math.change_of_variables import Scales
from evenstep.math.constants import plain_size
from evenstep.math.polar import MUON
from evenstep.rules.orthogonal import OrthogonalRule

RIVALS = Path(__file__).parents[2] / ".rivals"
PLAIN_LR = 3e-3  # of AdamW beside Muon; EvenStep's is the same
Build = Callable[[nn.Module, float | Tensor, dict[str, Any]], "list[Any]"]


# minimax from 0.005 in three steps (0.5 to 1.5), and from 0.003 in four (0.79 to 1.21)
STEEP = ((8.2987, -24.4305, 18.0903), (3.9152, -2.9211, 0.5592), (3.1746, -2.3804, 0.4978))
FOUR = ((8.3837, -24.7659, 18.3571), (4.0434, -3.0114, 0.5695), (3.5056, -2.6267, 0.5257), (2.4901, -1.8343, 0.4368))


class MissingRivals(ImportError):
    """Rivals' packages are not installed."""


@dataclass(frozen=True)
class Method:
    """How to build the optimizers of a model; `lr` is the usual one, `captured` whether a CUDA graph can hold a step.

    Optimizers that can be captured are built with lr as a tensor.
    """

    build: Build
    lr: float
    rival: bool = True
    captured: bool = True
    options: dict[str, Any] = field(default_factory=dict)


def parse(text: str) -> tuple[Method, dict[str, Any]]:
    """The method and all its options of `name,option=value,...`."""
    name, *pairs = text.split(",")
    if name not in METHODS:
        raise ValueError(f"unknown method {name!r}: it should be one of {', '.join(METHODS)}")
    options = dict(METHODS[name].options)
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not (key and equals and value):
            raise ValueError(f"{text!r}: {pair!r} should be option=value")
        options[key] = value_of(value)
    return METHODS[name], options


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


# this library's


def ours(cls: type, **fixed: Any) -> Method:
    """An optimizer of this library at its default lr."""
    lr = inspect.signature(cls).parameters["lr"].default
    return Method(lambda model, lr, options: [cls(model, lr=lr, capturable=True, **options)], lr, False, options=fixed)


class OwnNorMuon(OrthogonalRule):
    """The rule without balls: a step is lr · √max(1, units/inputs) times the polar factor, its norm kept."""

    def state(self, momentum: float) -> Any:
        return {name: field for name, field in super().state(momentum).items() if name != "radius"}

    def _lengths(self, step: Any, ok: Tensor | None) -> list[Tensor]:
        return [torch.full((b.groups,), (b.units / b.groups) ** 0.5, device=b.weight.device) for b in step.blocks]


def partly(power: float, centre: float) -> type[PlainSize]:
    """Coordinates with this power of α and this share of the mean taken out: (1, 1) is whitening, (0, 0) plain."""

    class Partly(PlainSize):
        def at(self, state: Any, batch: Any, layers: Any) -> Scales:
            whitened = super(PlainSize, self).at(state, batch, layers)
            mu, alpha, damping = centre * whitened.mu, whitened.alpha**power, layers.group["damping"]
            over, biased = layers.inputs, layers.biased
            beta, constant = plain_size(mu, alpha, whitened.spread, damping, biased=biased, over=over)
            return whitened._replace(mu=mu, alpha=alpha, beta=beta, constant=constant)

    return Partly


def variant(power: float = 1, centre: float = 1, rule: OrthogonalRule | None = None, **fixed: Any) -> Method:
    """`EvenStep` in other coordinates, which the GPU's kernels do not know, or by another rule."""
    coordinates = EvenStep.coordinates if (power, centre) == (1, 1) else partly(power, centre)
    cls = type("Variant", (EvenStep,), {"coordinates": coordinates, "rule": rule or EvenStep.rule})
    return ours(cls, **fixed)


# torch's, and packages'


def package(name: str) -> Any:
    """A module of the folder that `make rivals` fills."""
    if RIVALS.is_dir() and str(RIVALS) not in sys.path:
        sys.path.append(str(RIVALS))
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise MissingRivals(f"{name} is not installed in {RIVALS.name}: run `make rivals`") from error


class Scaled:
    """An optimizer whose class wants lr as a number, with lr as a tensor, so that a CUDA graph can hold its steps.

    It moves stand-ins that are zero at lr 1, and the parameters by lr times that. This is the class's own step wherever
    that is lr times something that does not depend on the weights: without weight decay.
    """

    def __init__(self, cls: type, params: list[nn.Parameter], lr: float | Tensor, **options: Any) -> None:
        if options.get("weight_decay"):
            raise ValueError(f"{cls.__name__}: weight decay depends on the weights, which it does not see here")
        self.stand_ins = [nn.Parameter(torch.zeros_like(p)) for p in params]
        self.inner = cls(self.stand_ins, lr=1.0, **options)
        self.param_groups = [{"params": params, "lr": lr}]

    @torch.no_grad()
    def step(self) -> None:
        group = self.param_groups[0]
        used = [(q, p) for q, p in zip(self.stand_ins, group["params"], strict=True) if p.grad is not None]
        for q, p in used:
            q.zero_()
            q.grad = p.grad
        self.inner.step()
        torch._foreach_add_([p for _, p in used], torch._foreach_mul([q for q, _ in used], group["lr"]))


def head(model: nn.Module) -> nn.Module:
    """The layer registered last, which is the head in all networks here."""
    return [m for m in model.modules() if isinstance(m, nn.Linear | nn.Conv2d)][-1]


def hidden(model: nn.Module, convolutions: bool) -> list[nn.Parameter]:
    """Weights of dense layers, and of convolutions if wanted, but the head's: what users give to Muon."""
    kinds = nn.Linear | nn.Conv2d if convolutions else nn.Linear
    return [m.weight for m in model.modules() if isinstance(m, kinds) and m is not head(model)]


def adamw(params: Iterable[nn.Parameter], lr: float | Tensor, **options: Any) -> torch.optim.Optimizer:
    """torch's AdamW without weight decay; a step that a CUDA graph can hold, where there are CUDA tensors."""
    params = list(params)
    options = {"betas": (0.9, 0.95), "weight_decay": 0.0, **options}
    if "beta2" in options:
        options["betas"] = options["betas"][0], options.pop("beta2")
    return torch.optim.AdamW(params, lr=lr, capturable=params[0].is_cuda, **options)


def with_adamw(make: Callable[..., Any], convolutions: bool = True) -> Build:
    """An optimizer for hidden weights, and AdamW at `plain_lr` for the rest."""

    def build(model: nn.Module, lr: float | Tensor, options: dict[str, Any]) -> list[Any]:
        options = dict(options)
        plain_lr = options.pop("plain_lr", PLAIN_LR)
        matrices = hidden(model, convolutions)
        if not matrices:
            raise ValueError("no hidden weights for it: all dense layers are heads, and it takes no convolutions")
        chosen = {id(p) for p in matrices}
        rest = [p for p in model.parameters() if id(p) not in chosen]
        like_lr = torch.full_like(lr, plain_lr) if isinstance(lr, Tensor) else plain_lr
        return [make(matrices, lr, **options), adamw(rest, like_lr)]

    return build


def torch_muon(params: list[nn.Parameter], lr: float | Tensor, **options: Any) -> Any:
    """torch's Muon, which takes lr as a number."""
    return Scaled(torch.optim.Muon, params, lr, **{"weight_decay": 0.0, **options})


def muon_kin(name: str) -> Callable[..., Any]:
    """A class of pytorch_optimizer that has a group for Muon; those here take lr as a tensor."""

    def make(params: list[nn.Parameter], lr: float | Tensor, **options: Any) -> Any:
        cls = getattr(package("pytorch_optimizer"), name)
        return cls([{"params": params, "lr": lr, "use_muon": True}], **options)

    return make


def whole_model(name: str) -> Build:
    """A class of pytorch_optimizer for all parameters, without weight decay."""

    def build(model: nn.Module, lr: float | Tensor, options: dict[str, Any]) -> list[Any]:
        cls = getattr(package("pytorch_optimizer"), name)
        return [cls(list(model.parameters()), lr=lr, **{"weight_decay": 0.0, **options})]

    return build


METHODS: dict[str, Method] = {
    "evenstep": ours(EvenStep),
    "unitstep": ours(evenstep.UnitStep),
    # variants for research
    "own-normuon": variant(0, 0, OwnNorMuon(quintics=(MUON,) * 5), trust=None),
    "half": variant(0.5, 0),
    "plain": variant(0, 0),
    "centred": variant(0, 1),
    "no-radius": variant(rule=OwnNorMuon()),
    "least-03": variant(rule=OrthogonalRule(least=0.3)),
    "least-1": variant(rule=OrthogonalRule(least=1.0)),  # steps relative to the radius
    "five": variant(rule=OrthogonalRule(quintics=(MUON,) * 5)),  # instead of three minimax quintics
    "four": variant(rule=OrthogonalRule(quintics=(MUON,) * 4)),
    "steep": variant(rule=OrthogonalRule(quintics=STEEP)),
    "minimax-four": variant(rule=OrthogonalRule(quintics=FOUR)),
    # torch's
    "adamw": Method(lambda model, lr, options: [adamw(model.parameters(), lr, **options)], 3e-3),
    "sgd": Method(lambda model, lr, options: [Scaled(torch.optim.SGD, list(model.parameters()), lr, **options)], 0.1),
    "muon": Method(with_adamw(torch_muon, convolutions=False), 0.02),  # convolutions by AdamW
    # from packages
    "muon-conv": Method(with_adamw(muon_kin("Muon")), 0.02),
    "normuon": Method(with_adamw(muon_kin("NorMuon")), 0.02),
    "adamuon": Method(with_adamw(muon_kin("AdaMuon")), 0.02, captured=False),
    "soap": Method(whole_model("SOAP"), 3e-3, captured=False),
    "ademamix": Method(whole_model("AdEMAMix"), 1e-3, captured=False),
    "lion": Method(whole_model("Lion"), 1e-4, captured=False),
}
