"""Between a layer's weights w and its whitened coordinates v (eqs. 2 and 3).

    v_ij = w_ij / (α_i β_j)        v_0j = (w_0j + Σ_i μ_i w_ij) / β_j

A gradient goes to v, any rule makes a step there, the step comes back to w; v itself is never stored. Weights are
shaped [group, unit, input, kernel], biases [group, unit]: μ and α are the same for all kernel positions (App. B).
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


def per_input(x: Tensor) -> Tensor:
    """[group, input] → [group, 1, input, 1], which broadcasts to a weight."""
    return x.unsqueeze(-2).unsqueeze(-1)


def per_unit(x: Tensor) -> Tensor:
    """[group, unit] → [group, unit, 1, 1], which broadcasts to a weight; a 0-d tensor stays."""
    return x.unsqueeze(-1).unsqueeze(-1) if x.dim() else x


def mean_response(weight: Tensor, mu: Tensor) -> Tensor:
    """Σ_i μ_i w_ij for each unit: the layer's response to the mean input, less its bias."""
    return (weight * per_input(mu)).sum((-2, -1))


def scaled(weight: Tensor, c: Scales) -> Tensor:
    """α_i β_j x_ij: a gradient or a step on weights, between w and v."""
    if c.alpha is None:
        return weight if c.beta is None else weight * per_unit(c.beta)
    scale = per_input(c.alpha)
    return weight * (scale if c.beta is None else scale * per_unit(c.beta))


def gradient_to_v(weight_grad: Tensor, bias_grad: Tensor, c: Scales) -> tuple[Tensor, Tensor]:
    """Gradient on v from the gradient on w: α_i β_j (G_ij − μ_i b_j) and β_j b_j.

    `bias_grad` is ⟨g_j⟩; where a weight serves several biases, their sum.
    """
    return weights_to_v(weight_grad, bias_grad, c), bias_grad if c.beta is None else c.beta * bias_grad


def weights_to_v(weight_grad: Tensor, bias_grad: Tensor | None, c: Scales) -> Tensor:
    """The weights' part of `gradient_to_v`; with None that of a layer without (trainable) bias: the implied-b form.

    Departs from the paper, which has a bias in every layer: β_j (α∘G_j)(I − k ûûᵀ). Inputs that are not centred lost by
    a factor of two (docs/guards.md).
    """
    if bias_grad is None:
        return project(scaled(weight_grad, c), c)
    if c.mu is not None:
        weight_grad = torch.addcmul(weight_grad, per_input(c.mu), per_unit(bias_grad), value=-1)
    return scaled(weight_grad, c)


def step_to_w(weight_step: Tensor, bias_step: Tensor, c: Scales) -> tuple[Tensor, Tensor]:
    """Step on w from a step on v: δw_ij = α_i β_j δv_ij, δw_0j = β_j δv_0j − Σ_i μ_i δw_ij (eq. 3)."""
    step = scaled(weight_step, c)
    bias_step = bias_step if c.beta is None else c.beta * bias_step
    return step, bias_step if c.mu is None else bias_step - mean_response(step, c.mu)


def step_to_w_biasless(weight_step: Tensor, c: Scales) -> Tensor:
    """Step on w of a layer without (trainable) bias: δw_j = β_j α ∘ (δv_j (I − k ûûᵀ))."""
    return scaled(project(weight_step, c), c)


def project(weight: Tensor, c: Scales) -> Tensor:
    """The symmetric factor of a layer without bias: x (I − k ûûᵀ), u = α∘μ over inputs and kernel, k = 1 − 1/√(1+‖u‖²).

    Without a bias row, the inverse of eq. 4's block is α(I − ûûᵀ‖u‖²/(1+‖u‖²))α; this is its square root between
    the two α.
    """
    if c.mu is None or c.alpha is None:
        return weight
    u = per_input(c.alpha * c.mu)
    norm2 = weight.shape[-1] * (u * u).sum((-2, -1), keepdim=True)
    # k/‖u‖² written so that it is right (1/2) at u = 0
    root = (1 + norm2).sqrt()
    along = (weight * u).sum((-2, -1), keepdim=True)
    return weight - along * u / (root * (1 + root))
