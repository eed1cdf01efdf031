"""Transformers' fused experts: one module with the stacked weights of all experts, [expert, unit, input].

`MixtralExperts`, `Qwen2MoeExperts` and some fifty classes like them take (hidden_states, indices, routing weights).
Each token goes through the experts that its row of indices names. An expert is a group with moments of its own.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .layer_kind import Args, Kwargs, LayerKind, Looks, Slot


class ExpertsKind(LayerKind):
    """A `gate_up_proj`, whose input is visible, and a `down_proj`, whose input is an activation inside the module."""

    def slots(self, module: nn.Module) -> Sequence[Slot]:
        """Both projections; the module's output mixes experts, so no gradient is visible."""
        return [
            Slot("gate_up_proj", "gate_up_proj_bias", output_visible=False),
            Slot("down_proj", "down_proj_bias", input_visible=False, output_visible=False),
        ]

    def matrix(self, module: nn.Module, weight: Tensor) -> Tensor:
        """[expert, unit, input], or [expert, input, unit] where transposed → [group, unit, input, 1]."""
        return (weight.mT if module.is_transposed else weight).unsqueeze(-1)

    def look(self, module: nn.Module, args: Args, kwargs: Kwargs, output: Any, batch_dim: int) -> Looks:
        """Counts as a Linear's on the same tokens (S is that of the layers around), and each expert's moments."""
        x = args[0] if args else kwargs["hidden_states"]
        (counts,) = super().look(module, (x,), {}, output, batch_dim)
        assert counts is not None
        indices = next(t for t in (*args, *kwargs.values()) if isinstance(t, Tensor) and not t.is_floating_point())
        rows = two_rows(x.detach(), indices, len(module.get_parameter("down_proj")))
        return [counts._replace(x=rows, dim=1), counts._replace(x=None)]


def two_rows(x: Tensor, indices: Tensor, experts: int) -> Tensor:
    """[2, expert · input]: m ± s, whose mean and variance are those of the tokens that each expert got.

    An expert without tokens gets the moments of all tokens. Statistics have one row count for all inputs of a layer,
    so every expert must have the same number of rows.
    """
    x = x.reshape(-1, x.shape[-1])
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    chosen = (indices.reshape(len(x), -1, 1) == torch.arange(experts, device=x.device)).any(1).to(x.dtype)
    tokens = chosen.sum(0)
    share = torch.where(tokens > 0, chosen / tokens.clamp(min=1), 1 / max(1, len(x))).T
    centre = x.mean(0)  # squares are summed about it, since float32 would cancel about 0
    deviation = x - centre
    with torch.autocast(x.device.type, enabled=False):
        offset, square = share @ deviation, share @ (deviation * deviation)
    spread = (square - offset * offset).clamp(min=0).sqrt()
    return (centre + torch.stack([offset + spread, offset - spread])).flatten(1)


def experts_of(module: nn.Module) -> LayerKind | None:
    """The kind of a module whose forward Transformers defines for stacked experts; None for any other module.

    Since version 5 they say whether they are transposed. A wrapped forward still has the module of the one it wraps; a
    subclass's own forward has not.
    """
    forward = getattr(type(module).forward, "__module__", "") or ""  # None, if the class was made by exec
    if not (forward.startswith("transformers.models.") and hasattr(module, "is_transposed")):
        return None
    stacked = [module._parameters.get(name) for name in ("gate_up_proj", "down_proj")]
    if any(w is None or w.dim() != 3 for w in stacked):
        return None
    # the fused step takes biases that are vectors; stacks with biases are transposed, so that it never gets them
    return EXPERTS if module.is_transposed or module._parameters.get("gate_up_proj_bias") is None else None


EXPERTS = ExpertsKind()
