"""Parameter groups with and without weight decay."""

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn

from . import options

NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.modules.batchnorm._NormBase)  # the last: batch and instance norm


def decay_groups(model: nn.Module, weight_decay: float, *, exclude: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Two groups for an optimizer: parameters that decay, and parameters that do not.

    Weights of two or more dimensions decay, embeddings included; biases and other vectors, parameters of norms, and
    names that match a pattern in `exclude` do not. Groups keep names, list a tied parameter once, and include frozen
    parameters. Pass the model, too: `EvenStep(decay_groups(model, 0.1), model=model)`.

    >>> model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 4), nn.LayerNorm(4))
    >>> for group in decay_groups(model, 0.1):
    ...     print(group["weight_decay"], [name for name, _ in group["params"]])
    0.1 ['0.weight', '1.weight']
    0.0 ['1.bias', '2.weight', '2.bias']
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"decay_groups: model must be a module; got {type(model).__name__}.")
    options.check("decay_groups", {"weight_decay": weight_decay, "exclude": exclude})
    in_norms = {id(p) for module in model.modules() if isinstance(module, NORMS) for p in module.parameters()}

    def decays(name: str, p: Tensor) -> bool:
        return p.dim() > 1 and id(p) not in in_norms and not any(fnmatchcase(name, pattern) for pattern in exclude)

    named = list(model.named_parameters())
    parts = [[pair for pair in named if decays(*pair) is side] for side in (True, False)]
    rates = [float(weight_decay), 0.0]
    return [{"params": part, "weight_decay": rate} for part, rate in zip(parts, rates, strict=True) if part]
