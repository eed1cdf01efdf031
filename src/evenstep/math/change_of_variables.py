"""Between a layer's weights w and its whitened coordinates v (eqs. 2 and 3).

    v_ij = w_ij / (α_i β_j)        v_0j = (w_0j + Σ_i μ_i w_ij) / β_j

A gradient goes to v, any rule makes a step there, the step comes back to w; v itself is never stored. A layer's weights
are a matrix [unit, column] with a column per input and kernel position, biases are [unit]. μ and α are [column], alike
for all kernel positions (App. B), or [unit, column] where units have inputs of their own, as in grouped convolutions.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Scales(NamedTuple):
    """The coordinates of a step: μ, α and spreads per input (None: μ = 0, α = 1), β per unit or layer (None: 1).

    They may be None since a parameter outside layers may be too large for tensors of zeros and ones beside it.
    """

    mu: Tensor | None = None
    alpha: Tensor | None = None
    spread: Tensor | None = None  # 1/α², the metric that measures a unit
    fresh: Tensor | None = None  # the metric that measures its step: with this batch's second moment where larger
    raised: Tensor | None = None  # per layer: inputs that the fresh-max guard changed
    beta: Tensor | None = None
    constant: Tensor | None = None  # per layer: scale of the bias, the constant input's weight, over β (None: 1)


def per_unit(x: Tensor) -> Tensor:
    """[unit] → [unit, 1], which broadcasts to a matrix; a 0-d tensor stays."""
    return x.unsqueeze(-1) if x.dim() else x


def response(weight: Tensor, x: Tensor) -> Tensor:
    """Σ_i x_i w_ij for each unit: with x = μ the layer's response to the mean input, less its bias."""
    if weight.is_cpu and x.dim() == 1:
        return torch.mv(weight, x)  # takes a third of the time there
    found: Tensor = torch.linalg.vecdot(weight, x)
    return found


def scaled(weight: Tensor, c: Scales) -> Tensor:
    """α_i β_j x_ij: a gradient or a step on weights, between w and v.

    For biases the gradient is β_j ⟨g_j⟩ on v, and the step β_j δv_0j − Σ_i μ_i δw_ij on w (eq. 3).
    """
    if c.alpha is None:
        return weight if c.beta is None else weight * per_unit(c.beta)
    if c.beta is None or c.beta.dim() == 0:
        return weight * (c.alpha if c.beta is None else c.alpha * c.beta)
    return weight * c.alpha * per_unit(c.beta)


def weights_to_v(weight_grad: Tensor, bias_grad: Tensor | None, c: Scales) -> Tensor:
    """Gradient on v from the gradient on w: α_i β_j (G_ij − μ_i b_j), with b_j = ⟨g_j⟩ as [unit, 1].

    Where a weight serves several biases, b is their sum; with None it is the b implied by a layer without a bias.
    Departs from the paper, which has a (trainable) bias in every layer: β_j (α∘G_j)(I − k ûûᵀ). Inputs that are not
    centred lost by a factor of two (docs/guards.md).
    """
    if bias_grad is None:
        return project(scaled(weight_grad, c), c)
    if c.mu is not None:
        weight_grad = torch.addcmul(weight_grad, c.mu, bias_grad, value=-1)
    return scaled(weight_grad, c)


def step_to_w_biasless(weight_step: Tensor, c: Scales) -> Tensor:
    """Step on w of a layer without (trainable) bias: δw_j = β_j α ∘ (δv_j (I − k ûûᵀ))."""
    return scaled(project(weight_step, c), c)


def project(weight: Tensor, c: Scales) -> Tensor:
    """The symmetric factor of a layer without bias: x (I − k ûûᵀ), u = α∘μ, k = 1 − 1/√(1+‖u‖²).

    Without a bias row, the inverse of eq. 4's block is α(I − ûûᵀ‖u‖²/(1+‖u‖²))α; this is its square root between
    the two α.
    """
    if c.mu is None or c.alpha is None:
        return weight
    u = c.alpha * c.mu
    # k/‖u‖² written so that it is right (1/2) at u = 0
    root = (1 + (u * u).sum(-1, keepdim=True)).sqrt()
    return torch.addcmul(weight, per_unit(response(weight, u)), u / (root * (1 + root)), value=-1)
