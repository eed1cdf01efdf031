"""Helpers on parameter groups and state: devices, step counts, restored checkpoints, models that have changed."""

from collections.abc import Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor, nn

from ..parallel import dtensor


def at_rest(groups: list[dict[str, Any]]) -> bool:
    """Whether all stepsizes are 0, as in a step that frameworks make to create state; another device is not asked."""
    lrs = [group["lr"] for group in groups]
    return not any(isinstance(lr, Tensor) and lr.device.type != "cpu" for lr in lrs) and not any(lrs)


def follow(state: dict[str, Any], device: torch.device, keep_step: bool) -> None:
    """Move a parameter's state to the device the parameter is on now; torch's rules keep step counts on the CPU."""
    for name, value in state.items():
        if isinstance(value, Tensor) and value.device != device and not (keep_step and name == "step"):
            state[name] = value.to(device)


def step_count(p: Tensor, count: float) -> Tensor:
    """A count of steps beside a parameter, in the dtype that torch has for them."""
    wide = torch.get_default_dtype() == torch.float64
    return torch.tensor(float(count), dtype=torch.float64 if wide else torch.float32, device=p.device)


def restored(live: Any, saved: Tensor, device: torch.device) -> Tensor:
    """A saved tensor on the parameter's device in its own dtype, inside the live tensor if that fits."""
    saved = dtensor.matched(saved, live)
    if isinstance(live, Tensor) and live.shape == saved.shape and live.dtype == saved.dtype and live.device == device:
        return live.copy_(saved.detach())
    return saved.detach().to(device, copy=True)


def restore(
    state: Mapping[Tensor, dict[str, Any]],
    params: Sequence[Tensor],
    saved: Sequence[Mapping[str, Any]],
    live: Mapping[Tensor, Mapping[str, Any]],
) -> None:
    """Put what was `saved` of each parameter into its state, in the dtype it was saved in.

    Values are copied into `live` tensors where there are any.
    """
    for p, kept in zip(params, saved, strict=True):
        for name, value in kept.items():
            if name == "step":  # torch has a rule of its own for their device, and would share the saved one
                count = state[p][name]
                state[p][name] = count.detach().clone() if isinstance(count, Tensor) else step_count(p, count)
            elif isinstance(value, Tensor):
                state[p][name] = restored(live.get(p, {}).get(name), value, p.device)


def exchange(groups: list[dict[str, Any]], model: nn.Module, members: Set[int]) -> None:
    """Drop from named groups those of the model's `members` (ids) that have left it, and add what is new in it.

    New ones go to the first group, which is kept in the model's order.
    """
    names = {id(p): name for name, p in model.named_parameters()}
    held = {id(p) for group in groups for p in group["params"]}
    groups[0]["params"] += [p for p in model.parameters() if id(p) not in held]
    groups[0]["param_names"] += [name for name, p in model.named_parameters() if id(p) not in held]
    for group in groups:
        pairs = zip(group["param_names"], group["params"], strict=True)
        stay = [(names.get(id(p), name), p) for name, p in pairs if id(p) in names or id(p) not in members]
        if group is groups[0]:
            order = {i: k for k, i in enumerate(names)}
            stay.sort(key=lambda pair: order.get(id(pair[1]), len(order)))
        group["param_names"], group["params"] = [name for name, _ in stay], [p for _, p in stay]


def named(params: Any, model: nn.Module | None) -> Any:
    """Parameters with names as torch takes them: their own, the model's, or a number; a set torch refuses itself."""
    if isinstance(params, set):
        return params
    known = {} if model is None else {id(p): name for name, p in model.named_parameters()}
    given = [params] if isinstance(params, Tensor) else params
    return [p if isinstance(p, tuple) else (known.get(id(p), f"added.{k}"), p) for k, p in enumerate(given)]
