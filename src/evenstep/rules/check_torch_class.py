"""A class of torch's optimizers, checked and ready to run on v."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


class TorchClass:
    """A torch rule ready to run on proxies: an instance without parameters, and how to make another."""

    def __init__(self, owner: str, rule: Any, keywords: dict[str, Any], **flags: bool | None) -> None:
        """Try the rule on two small matrices; an error says why it cannot serve.

        Of `flags` it gets those that it knows and that are not None.
        """
        cls = getattr(rule, "func", rule)
        self.name = getattr(cls, "__name__", repr(cls))
        if not (isinstance(cls, type) and issubclass(cls, Optimizer)):
            raise ValueError(f"{owner}: base must be a torch.optim.Optimizer class; got {rule!r}.")
        self.is_torchs = cls.__module__.startswith("torch.")
        known = inspect.signature(cls).parameters
        keywords = {**keywords, **{k: v for k, v in flags.items() if k in known and v is not None}}
        if "weight_decay" in known:
            keywords["weight_decay"] = 0  # the optimizer decays w itself
        self.make = partial(rule, **keywords)
        try:
            self.instance: Optimizer = self.make([nn.Parameter(torch.zeros(2, 2))])
        except TypeError as error:
            raise ValueError(f"{owner}: {self.name} does not take these keywords: {error}.") from error
        if "lr" not in self.instance.defaults:
            raise ValueError(f"{owner}: {self.name} has no keyword lr; a rule here must have one.")
        self.born_with_state = bool(self.instance.state)  # Adagrad's accumulator
        quiet = {k: False for k in ("foreach", "fused", "capturable", "differentiable") if k in keywords}
        refused = f"{owner}: {self.name} cannot run in whitened coordinates: "
        try:
            (still, kept), (moved, _) = (trial(partial(self.make, **quiet), start) for start in (0.0, 1.0))
        except (TypeError, RuntimeError) as error:  # it wants a closure, or sparse gradients
            raise ValueError(f"{refused}{error}.") from error
        self.keeps = set(kept)
        self.scalars = {k for k, v in kept.items() if isinstance(v, Tensor) and not v.dim()}
        self.shaped_apart = {k for k, v in kept.items() if isinstance(v, Tensor) and v.shape != still.shape}
        self.counts = "step" in self.keeps
        self.elementwise = torch.allclose(still, trial(partial(self.make, **quiet), 0.0, apart=True)[0], atol=1e-14)
        if not torch.allclose(still, moved, rtol=1e-6, atol=1e-14):
            raise ValueError(f"{refused}its step depends on the parameter.")

    def first_state(self, q: nn.Parameter) -> dict[str, Any]:
        """The state of a new proxy, where the rule makes it at construction."""
        return dict(self.make([q]).state[q]) if self.born_with_state else {}


def trial(make: Callable[..., Optimizer], start: float, apart: bool = False) -> tuple[Tensor, dict[str, Any]]:
    """How far a rule moves a small matrix that starts at `start` in two steps, and what it keeps.

    With `apart` each element is a matrix of its own.
    """
    shape = (6, 1, 1) if apart else (1, 2, 3)
    params = [nn.Parameter(p) for p in torch.full(shape, start, dtype=torch.float64)]
    optimizer = make(params)
    for grad in ([[1.0, -2.0, 0.3], [0.5, 3.0, -1.0]], [[-1.0, 1.0, 0.7], [2.0, 0.1, -0.4]]):
        for p, g in zip(params, torch.tensor(grad, dtype=torch.float64).view(shape), strict=True):
            p.grad = g.clone()
        optimizer.step()
    return torch.stack([p.detach() for p in params]).view(2, 3) - start, dict(optimizer.state[params[0]])
