"""Parameters and groups: from the arguments of a constructor, and after the model has changed."""

from collections.abc import Iterable, Set
from typing import Any

import torch
from torch import Tensor, nn


def parameters_of(owner: str, params: Any, model: nn.Module | None) -> tuple[Any, nn.Module | None]:
    """What torch's constructor takes, and the model to watch, from a module or from parameters and `model=`."""
    if not isinstance(params, nn.Module):
        return params, model
    if model is not None and model is not params:
        raise ValueError(f"{owner}: give the model once, as the first argument or as model=; got two modules.")
    named = list(params.named_parameters())
    if not named:
        raise ValueError(f"{owner}: the module {type(params).__name__} has no parameters to train.")
    for name, p in named:
        if isinstance(p, nn.parameter.UninitializedParameter):
            raise ValueError(f"{owner}: parameter '{name}' is not initialized yet; run one forward pass first.")
    return named, params


def refuse_unsupported(owner: str, params: Iterable[Tensor]) -> None:
    """Refuse parameters that are not real and dense."""
    for p in params:
        if p.is_complex():
            raise ValueError(f"{owner}: complex parameters are not supported; train torch.view_as_real(p) instead.")
        if p.layout != torch.strided:
            raise ValueError(f"{owner}: parameters must be dense; got layout {p.layout}.")


def named(params: Any, model: nn.Module | None) -> Any:
    """Parameters with names as torch takes them: their own, the model's, or a number; a set torch refuses itself."""
    if isinstance(params, set):
        return params
    known = {} if model is None else {id(p): name for name, p in model.named_parameters()}
    params = [params] if isinstance(params, Tensor) else params
    return [p if isinstance(p, tuple) else (known.get(id(p), f"added.{k}"), p) for k, p in enumerate(params)]


def follow_model(groups: list[dict[str, Any]], model: nn.Module, members: Set[int]) -> None:
    """Drop from named groups those of the model's `members` (ids) that have left it; new ones join the first group."""
    old = {id(p) for group in groups for p in group["params"]}
    names = {id(p): name for name, p in model.named_parameters()}
    for group in groups:
        pairs = list(zip(group["param_names"], group["params"], strict=True))
        if group is groups[0]:
            pairs += [(name, p) for name, p in model.named_parameters() if id(p) not in old]
        stay = [(names.get(id(p), name), p) for name, p in pairs if id(p) in names or id(p) not in members]
        group["param_names"], group["params"] = [name for name, _ in stay], [p for _, p in stay]


def at_rest(groups: list[dict[str, Any]]) -> bool:
    """Whether all stepsizes are 0, as in a step that frameworks make to create state; never waits for a device."""
    lrs = [group["lr"] for group in groups]
    return not any(isinstance(lr, Tensor) and lr.device.type != "cpu" for lr in lrs) and not any(lrs)
