"""Optimizers of torch and of other packages, as their users run them; none is rewritten here."""

import importlib
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .method import Build

RIVALS = Path(__file__).parents[5] / ".rivals"  # filled by `make rivals` in a checkout
PLAIN_LR = 3e-3  # of AdamW beside Muon; EvenStep's is the same


class MissingRivals(ImportError):
    """Rivals' packages are not installed."""


def package(name: str) -> Any:
    """A module of a rival's package."""
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
        self.params, self.param_groups = params, [{"params": params, "lr": lr}]

    @property
    def state(self) -> Any:
        """What the class keeps."""
        return self.inner.state

    @torch.no_grad()
    def step(self) -> None:
        """One step of the class, scaled by lr."""
        lr: Any = self.param_groups[0]["lr"]
        used = [(q, p) for q, p in zip(self.stand_ins, self.params, strict=True) if p.grad is not None]
        for q, p in used:
            q.zero_()
            q.grad = p.grad
        self.inner.step()
        steps = torch._foreach_mul([q for q, _ in used], lr)
        torch._foreach_add_([p for _, p in used], steps)


def scaled(cls: type, params: list[nn.Parameter], lr: float | Tensor, **options: Any) -> Any:
    """An optimizer that takes lr as a number, as it is or with lr in a tensor."""
    return Scaled(cls, params, lr, **options) if isinstance(lr, Tensor) else cls(params, lr=lr, **options)


def head(model: nn.Module) -> nn.Module:
    """The layer registered last, which is the head in all networks here."""
    return [m for m in model.modules() if isinstance(m, nn.Linear | nn.Conv2d)][-1]


def hidden(model: nn.Module, convolutions: bool) -> list[nn.Parameter]:
    """What users give to Muon: weights of dense layers but the head, of recurrent ones, of convolutions if wanted."""
    kinds = nn.Linear | nn.Conv2d if convolutions else nn.Linear
    layers = [m for m in model.modules() if isinstance(m, kinds | nn.RNNBase) and m is not head(model)]
    return [p for m in layers for name, p in m.named_parameters(recurse=False) if name.startswith("weight")]


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
        return [make(matrices, lr, **options), beside(model, matrices, lr, plain_lr)]

    return build


def beside(model: nn.Module, taken: list[nn.Parameter], lr: float | Tensor, plain_lr: float) -> torch.optim.Optimizer:
    """AdamW at `plain_lr` for the parameters that are not taken; lr in a tensor if the other one is."""
    chosen = {id(p) for p in taken}
    rest = [p for p in model.parameters() if id(p) not in chosen]
    return adamw(rest, torch.full_like(lr, plain_lr) if isinstance(lr, Tensor) else plain_lr)


def torch_muon(params: list[nn.Parameter], lr: float | Tensor, **options: Any) -> Any:
    """torch's Muon."""
    return scaled(torch.optim.Muon, params, lr, **{"weight_decay": 0.0, **options})


def muon_kin(name: str) -> Callable[..., Any]:
    """A class of pytorch_optimizer that has a group for Muon; those here take lr as a tensor."""

    def make(params: list[nn.Parameter], lr: float | Tensor, **options: Any) -> Any:
        cls = getattr(package("pytorch_optimizer"), name)
        return cls([{"params": params, "lr": lr, "use_muon": True}], **{"weight_decay": 0.0, **options})

    return make


def sgd(model: nn.Module, lr: float | Tensor, options: dict[str, Any]) -> list[Any]:
    """torch's SGD for all parameters."""
    return [scaled(torch.optim.SGD, list(model.parameters()), lr, **options)]


def of_torch(cls: type) -> Build:
    """One of torch's adaptive classes for all parameters, without weight decay."""

    def build(model: nn.Module, lr: float | Tensor, options: dict[str, Any]) -> list[Any]:
        params = list(model.parameters())
        return [cls(params, lr=lr, **{"weight_decay": 0.0, "capturable": params[0].is_cuda, **options})]

    return build


def whole_model(module: str, name: str) -> Build:
    """A class of a package for all parameters, without weight decay."""

    def build(model: nn.Module, lr: float | Tensor, options: dict[str, Any]) -> list[Any]:
        return [getattr(package(module), name)(list(model.parameters()), lr=lr, **{"weight_decay": 0.0, **options})]

    return build


def kron(model: nn.Module, lr: float | Tensor, options: dict[str, Any]) -> list[Any]:
    """PSGD-Kron, whose einsums of three matrices take gigabytes unless opt_einsum orders them."""
    known = torch.backends.opt_einsum.get_opt_einsum.__globals__  # torch looks for it at its own import alone
    known.update(_opt_einsum=package("opt_einsum"), enabled=True, strategy="auto")
    getattr(known["is_available"], "cache_clear", lambda: None)()
    return whole_model("pytorch_optimizer", "Kron")(model, lr, options)


def singd(model: nn.Module, lr: float | Tensor, options: dict[str, Any]) -> list[Any]:
    """SINGD for dense layers and convolutions; AdamW for the rest, if there is any."""
    options = dict(options)
    plain_lr = options.pop("plain_lr", PLAIN_LR)
    layers = [m for m in model.modules() if isinstance(m, nn.Linear | nn.Conv2d)]
    taken = [p for m in layers for p in m.parameters()]
    text = any(isinstance(m, nn.Embedding) for m in model.modules())  # whose loss is a mean over places, too
    average = "batch+sequence" if text else "batch"
    found = [package("singd.optim.optimizer").SINGD(model, taken, lr=lr, loss_average=average, **options)]
    return [*found, beside(model, taken, lr, plain_lr)] if len(taken) < len(list(model.parameters())) else found
