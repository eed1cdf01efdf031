"""Reparametrization constants μ, α², β² from moments (eqs. 5 and 12, §3.5).

Inputs are indexed [group, input], units [group, unit]; a dense layer has one group. Everything is a tensor in, a
tensor out, so the same functions serve one layer or, under `torch.func.vmap`, many.
"""

import torch
from torch import Tensor

from .segments import WHOLE, Whole

STEADY = 1e-6  # least variance of an input over its squared mean, in a layer without bias: what float32 resolves


def damped(vx: Tensor, damping: float | Tensor, over: Whole = WHOLE) -> Tensor:
    """The variance kept in the paper's "suitable range": vx_i + damping · mean_i vx_i.

    Departs from the paper, which names no range: relative to the layer, so that it does not depend on the scale of
    the activations.
    """
    return vx + damping * over.mean(vx)


def inverse_root(x: Tensor) -> Tensor:
    """1/√x where x > tiny, else 0: an input that never varies, or a unit without gradient, takes no step."""
    return torch.rsqrt(torch.threshold(x, torch.finfo(x.dtype).tiny, torch.inf))


def geometry_beta2(fan_in: int | Tensor, sharing: Tensor) -> Tensor:
    """β² = 1/√(n·S), n the fan-in with the kernel's area, S how often a weight is shared per example (§3.5, eq. 12)."""
    return (fan_in * sharing).rsqrt()


def sharing(applied: Tensor, examples: Tensor, last: Tensor, declared: float | None = None) -> Tensor:
    """S of this step: uses of the weight per example; the last one's where nothing was seen; or as declared."""
    if declared is not None:
        return torch.full_like(last, declared)
    return torch.where(applied > 0, applied / examples.clamp(min=1), last)


def plain_size(
    mu: Tensor, alpha: Tensor, spread: Tensor, damping: float | Tensor, *, biased: bool, over: Whole = WHOLE
) -> tuple[Tensor, Tensor]:
    """β of a layer whose whitened steps are as long as plain ones, and the scale of its constant input over β.

    β² = Σ v_i / Σ v_i α_i²  with v_i = spread_i − damping · mean v: a step of one length in each coordinate then moves
    the layer's output as far as in plain coordinates, fluctuations about the mean counted. The constant input, whose
    weight is the bias, is as large as a typical input: √(1 + mean μ_i²). Without a bias the inputs' means count as
    inputs. Both are 1 where no input varies.
    """
    mean = over.mean(spread) * (1 / (1 + damping))
    v, one = spread - damping * mean, torch.ones_like(spread)
    power, whitened, means, count = over.totals(v, v * alpha * alpha, mu * mu, one)
    if not biased:
        power = power + means
    tiny = torch.finfo(spread.dtype).tiny
    known = (whitened > tiny) & (power > tiny)
    beta = torch.where(known, (power / whitened.clamp(min=tiny)).sqrt(), 1.0)
    constant = torch.where(known, (1 + means / count.clamp(min=1)).sqrt() / beta, 1.0)
    return beta, constant


def canonical_mg2(sum_g2: Tensor, examples: Tensor, reduction: str) -> Tensor:
    """S·E[g_j²] from Σ ĝ_j² over batch and positions, ĝ what autograd gives at the layer's output.

    With a mean loss ĝ = g/B, so it is B·Σĝ²; with a summed loss ĝ = g and it is Σĝ²/B. B counts examples, not rows.
    """
    examples = examples.clamp(min=1)
    return sum_g2 * examples if reduction == "mean" else sum_g2 / examples
