"""How long a step is (§3): eqs. 8 to 11, and the rules built on them.

A rule turns a gradient into a direction of descent; the optimizer multiplies it by −lr. Eqs. 8–11 are printed with
a plus sign in the paper; a descent step needs the minus.
"""

import torch
from torch import Tensor

from .constants import inverse_root
from .segments import WHOLE, Whole

LONG = 5.0  # length in whitened coordinates from which a layer's unit takes steps in proportion to its length


def natural_step(natural_grad: Tensor, gamma: float) -> Tensor:
    """Eq. 8, natural gradient with a stepsize: −γ G⁻¹⟨∇E⟩, given `natural_grad` = G⁻¹⟨∇E⟩."""
    return -gamma * natural_grad


def trust_step(grad: Tensor, natural_grad: Tensor, eta: float, dim: int | None = None) -> Tensor:
    """Eq. 9, natural gradient with a trust radius: −η G⁻¹⟨∇E⟩ / √(⟨∇E⟩ᵀG⁻¹⟨∇E⟩); with `dim`, eq. 10.

    The step δ has δᵀGδ = η². Along `dim` each block has its own denominator, so blocks do not feel each other; every
    index outside `dim` is a block.
    """
    product = grad * natural_grad
    square = product.sum() if dim is None else product.sum(dim, keepdim=True)
    return -eta * normalized(natural_grad, square)


def normalized(grad: Tensor, square: Tensor, eps: float | Tensor = 0.0) -> Tensor:
    """grad / √(eps + square): the common form of eqs. 9, 10 and 11; 0 where the denominator is 0.

    `square` is the block's squared length: this batch's own (eqs. 9, 10) or an expectation of it (eq. 11), and
    `eps` the paper's μ.
    """
    return grad * inverse_root(square + eps)


def unit_level(average: Tensor, square: Tensor, damping: float | Tensor, over: Whole = WHOLE) -> Tensor:
    """A unit's squared gradient: the larger of running mean and newest, plus a share of the layer's mean.

    Departs from eq. 11, whose μ is one absolute number: relative to the layer, as inputs are damped. Without it a tenth
    of a layer's units took whole steps along noise, and died.
    """
    return torch.maximum(average, square) + damping * over.mean(average)


def own_length(square: Tensor, usual: float = 1.0) -> Tensor:
    """The factor of a unit's even step, from its squared length: its length over the usual one, at least 1.

    In whitened coordinates the length of units is about 1, up to LONG. Rows of an embedding, a norm's gains and units
    with unnormalized inputs may be far longer: steps of lr alone would never shorten them.
    """
    return (square.sqrt() / usual).clamp(min=1)
