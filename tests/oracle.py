"""Slow and obvious truths in float64, which share nothing with the library.

Layers are taken as torch defines them, constants are one number per input and per unit, and every weight says by two
index tensors which input it meets and which unit it feeds (`places`).
"""

import copy
import itertools
import math
from typing import NamedTuple

import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.testing import assert_close

TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, *TRANSPOSED)
TRUST_FLOOR = 1e-3


class Constants(NamedTuple):
    """μ and α per input, β per unit; not squared. The bias has a scale of its own beside β."""

    mu: torch.Tensor
    alpha: torch.Tensor
    beta: torch.Tensor
    bias: float = 1.0


def forward(layer, x, w, b):
    """The layer's output on `x` with any weight and bias, as torch computes it."""
    return functional_call(layer, {"weight": w} if b is None else {"weight": w, "bias": b}, x)


def places(layer):
    """For every weight the input it meets and the unit it feeds: two index tensors shaped like the weight."""
    shape, groups = layer.weight.shape, getattr(layer, "groups", 1)
    channel, unit = torch.empty(shape, dtype=torch.long), torch.empty(shape, dtype=torch.long)
    for a, b in itertools.product(range(shape[0]), range(shape[1])):
        group = a // (shape[0] // groups)
        own, other = a, group * shape[1] + b
        channel[a, b], unit[a, b] = (own, other) if isinstance(layer, TRANSPOSED) else (other, own)
    return channel, unit


def units(layer):
    """How many units, or output channels, the layer has."""
    return layer.out_features if isinstance(layer, nn.Linear) else layer.out_channels


def fan_in(layer):
    """n of §3.5: inputs per unit, with the kernel's area."""
    if isinstance(layer, nn.Linear):
        return layer.in_features
    return layer.in_channels // layer.groups * math.prod(layer.kernel_size)


def sharing(layer, x, y):
    """S: how often each example uses a weight."""
    if isinstance(layer, nn.Linear):
        return math.prod(x.shape[1:-1])
    return math.prod((x if isinstance(layer, TRANSPOSED) else y).shape[2:])


def rows(layer, x, y):
    """Every input vector the layer met, [row, input]; a transposed convolution also meets the zeros between."""
    if isinstance(layer, nn.Linear):
        return x.reshape(-1, x.shape[-1])
    found = [x[b][(slice(None), *at)] for b in range(len(x)) for at in itertools.product(*map(range, x.shape[2:]))]
    if isinstance(layer, TRANSPOSED):
        between = y.numel() // y.shape[1] - len(found)
        found += [torch.zeros_like(found[0])] * between
    return torch.stack(found)


class Moments:
    """The paper's two running averages (§2.3), mx and mx2, and the sum of their weights so far."""

    def __init__(self, decay):
        self.decay, self.mx, self.mx2, self.weight = decay, 0.0, 0.0, 0.0

    def update(self, x):
        """One more batch, [row, input]."""
        self.mx = self.decay * self.mx + (1 - self.decay) * x.mean(0)
        self.mx2 = self.decay * self.mx2 + (1 - self.decay) * (x * x).mean(0)
        self.weight = self.decay * self.weight + (1 - self.decay)

    def mean_var(self):
        """Mean and variance, the weights normalized to 1."""
        mean = self.mx / self.weight
        return mean, self.mx2 / self.weight - mean * mean


def mean_var(x):
    """Mean and variance over rows, in two passes."""
    mean = x.mean(0)
    return mean, ((x - mean) ** 2).mean(0)


def sum_per_unit(unit, values, count):
    """Σ of `values` over the weights of each unit."""
    return values.new_zeros(count).index_add(0, unit.flatten(), values.flatten())


def to_w(layer, v, v0, c):
    """w(v) and w_0(v) of eq. 2; `v0` is a list, one for each bias that the weight serves."""
    if not v0:
        return biasless(layer, v, c), []
    channel, unit = places(layer)
    w = c.alpha[channel] * c.beta[unit] * v
    level = sum_per_unit(unit, c.mu[channel] * w, len(c.beta))
    return w, [c.bias * c.beta * b - level for b in v0]


def to_v(layer, w, w0, c):
    """v(w) and v_0(w): the inverse of `to_w`."""
    if not w0:
        return biasless(layer, w, c, inverse=True), []
    channel, unit = places(layer)
    level = sum_per_unit(unit, c.mu[channel] * w, len(c.beta))
    return w / (c.alpha[channel] * c.beta[unit]), [(b + level) / (c.bias * c.beta) for b in w0]


def biasless(layer, v, c, inverse=False):
    """w_j = β_j α ∘ ((I − k ûûᵀ) v_j), u = α∘μ, k = 1 − 1/√(1+‖u‖²), by a dense matrix for each unit; or v(w)."""
    channel, unit = places(layer)
    w = torch.zeros_like(v)
    for j in range(len(c.beta)):
        mine = unit == j
        alpha, u = c.alpha[channel[mine]], (c.alpha * c.mu)[channel[mine]]
        k = 1 - 1 / (1 + u @ u).sqrt()
        direction = u / u.norm() if u.any() else u
        matrix = c.beta[j] * torch.diag(alpha) @ (torch.eye(len(u)).double() - k * torch.outer(direction, direction))
        w = w.index_put((mine,), (torch.linalg.inv(matrix) if inverse else matrix) @ v[mine])
    return w


def surrogate(mu, var, bias=True):
    """Eq. 4's block for α = β = 1, μ = 0 and E[g²] = 1: E[x x'] of decorrelated inputs, x_0 = 1 first."""
    x = torch.cat([torch.ones(1).double(), mu]) if bias else mu
    matrix = torch.outer(x, x)
    for i in range(len(mu)):
        matrix[i + bias, i + bias] = var[i] + mu[i] ** 2
    return matrix


def natural_gradient(grad, biases, rows, shared=1):
    """What a dense layer descends by: its gradient times β² and the inverse of the surrogate curvature of `rows`.

    `shared` is S. With several biases each has the level of the weight's step, and its own gradient.
    """
    beta2, (mean, var) = (rows.shape[1] * shared) ** -0.5, mean_var(rows)
    if not biases:
        return beta2 * grad @ torch.linalg.inv(surrogate(mean, var, bias=False)), []
    total = sum(biases)
    both = beta2 * torch.cat([total.unsqueeze(1), grad], 1) @ torch.linalg.inv(surrogate(mean, var))
    return both[:, 1:], [both[:, 0] + beta2 * (b - total) for b in biases]


def block_matrix(mu, alpha2, beta2):
    """The matrix of §2.2 for one unit, its corner corrected to 1 + Σ α_i² μ_i²."""
    matrix = torch.diag(torch.cat([1 + (alpha2 * mu**2).sum().view(1), alpha2]))
    matrix[0, 1:] = matrix[1:, 0] = -alpha2 * mu
    return beta2 * matrix


def foreseen(q, mean, weight):
    """max(q_i, (1 − weight)(μ_i/5)²), one input at a time; `weight` is that of the batches so far."""
    return torch.stack([max(one, (1 - weight) * (m / 5) ** 2) for one, m in zip(q, mean, strict=True)])


def fresh_max(var, q, tau):
    """m_i = max(v_i, q_i/τ), one input at a time."""
    return torch.stack([max(v, one / tau) for v, one in zip(var, q, strict=True)])


def trust_factors(layer, w, biases, dw, dbiases, mu, spread, fresh_spread, radius, crowd=None):
    """min(1, c · max(‖u_j‖, s₀)/‖δu_j‖) of each unit, one unit at a time; with several biases the tightest.

    With `crowd`, c is at most so many times the geometric mean of ‖δu_j‖/max(‖u_j‖, s₀) over the units that
    move, but not under a tenth of itself.
    """
    channel, unit = places(layer)
    relative = torch.zeros(units(layer)).double()
    pairs = list(zip(biases, dbiases, strict=True)) or [(torch.zeros(units(layer)), torch.zeros(units(layer)))]
    for j in range(units(layer)):
        mine = unit == j
        i = channel[mine]
        lengths = [
            ((b[j] + mu[i] @ w[mine]) ** 2 + w[mine] ** 2 @ spread[i]).sqrt().clamp(min=TRUST_FLOOR) for b, _ in pairs
        ]
        moves = [((d[j] + mu[i] @ dw[mine]) ** 2 + dw[mine] ** 2 @ fresh_spread[i]).sqrt() for _, d in pairs]
        relative[j] = max(moves) / min(lengths)
    moving = [r for r in relative.tolist() if r > 0]
    if crowd is not None and moving:
        radius = min(radius, max(radius / 10, crowd * math.prod(moving) ** (1 / len(moving))))
    return torch.tensor([min(1.0, radius / r) if r > 0 else 1.0 for r in relative.tolist()], dtype=torch.float64)


def log_cosh(y, t):
    """A loss for each example that is neither linear nor quadratic."""
    d = y - t
    return (d + F.softplus(-2 * d)).flatten(1).sum(1)


class OnV:
    """Gradient descent on the explicit coordinates of every layer of an `nn.Sequential`, guards included.

    Constants come from the batches before, or from the batch itself if it is the first; `step` then keeps its
    moments. `coordinates` is "whitened", "canonical" or "fan-in".
    """

    crowd = None

    def __init__(
        self, model, *, lr, momentum=0.0, decay=0.95, damping=0.0, fresh_max=None, trust=None, coordinates="whitened"
    ):
        self.modules = [copy.deepcopy(module) for module in model]
        self.lr, self.momentum, self.decay, self.damping = lr, momentum, decay, damping
        self.fresh_max, self.trust, self.coordinates = fresh_max, trust, coordinates
        self.layers = [module for module in self.modules if isinstance(module, LAYERS)]
        self.w = [layer.weight.detach().clone() for layer in self.layers]
        self.b = [None if layer.bias is None else layer.bias.detach().clone() for layer in self.layers]
        self.carries = [layer.bias is not None and layer.bias.requires_grad for layer in self.layers]
        self.moments = [Moments(decay) for _ in self.layers]
        self.g2 = [Moments(decay) for _ in self.layers]
        self.buffers = [None for _ in self.layers]

    def run(self, x, w, b):
        """Inputs and outputs of every layer, and the network's output."""
        seen, k = [], 0
        for module in self.modules:
            if isinstance(module, LAYERS):
                y = forward(module, x, w[k], b[k])
                seen.append((x, y))
                x, k = y, k + 1
            else:
                x = module(x)
        return seen, x

    def step(self, x, t, energy=log_cosh):
        """One step on the mean of `energy` over the batch; its factors of the trust radius, layer by layer."""
        seen, _ = self.run(x, self.w, self.b)
        canonical = self.coordinates == "canonical"
        g2 = [self.squared(k, x, t, energy) if canonical else None for k in range(len(self.layers))]
        frames = [self.frame(k, *seen[k], g2[k]) for k in range(len(self.layers))]
        moved = [self.moved(k, frames[k][0], x, t, energy) for k in range(len(self.layers))]
        factors = []
        for k, layer in enumerate(self.layers):
            dw, db = moved[k][0] - self.w[k], [new - self.b[k] for new in moved[k][1]]
            factor = self.held(k, dw, db, *frames[k])
            factors.append(factor)
            self.w[k] = self.w[k] + factor[places(layer)[1]] * dw
            for d in db:
                self.b[k] = self.b[k] + factor * d
            self.moments[k].update(rows(layer, *seen[k]))
            if canonical:
                self.g2[k].update(g2[k].unsqueeze(0))
        return factors

    def squared(self, k, x, t, energy):
        """S·E[g²] at the output of layer `k`, one example at a time."""
        total = torch.zeros(units(self.layers[k])).double()
        for e in range(len(x)):
            seen, y = self.run(x[e : e + 1].clone().requires_grad_(), self.w, self.b)
            (g,) = torch.autograd.grad(energy(y, t[e : e + 1]).sum(), seen[k][1])
            units_last = g if isinstance(self.layers[k], nn.Linear) else g.movedim(1, -1)
            total += (units_last.reshape(-1, units_last.shape[-1]) ** 2).sum(0)
        return total / len(x)

    def frame(self, k, x, y, g2):
        """Constants of layer `k`, and the two variances that measure its units and their steps."""
        layer, met = self.layers[k], rows(self.layers[k], x, y)
        first = self.moments[k].weight == 0
        beta2 = torch.ones(units(layer)).double() / math.sqrt(fan_in(layer) * sharing(layer, x, y))
        if self.coordinates == "fan-in":
            one = torch.ones(met.shape[1]).double()
            return Constants(0 * one, one, beta2.sqrt()), one, one
        mean, var = mean_var(met) if first else self.moments[k].mean_var()
        q = foreseen(((met - mean) ** 2).mean(0), mean, self.moments[k].weight)
        m = var if self.fresh_max is None else fresh_max(var, q, self.fresh_max)
        floor = self.damping * m.mean()
        if self.coordinates == "canonical":
            mg2 = g2 if first else self.g2[k].mean_var()[0]
            beta2 = 1 / (mg2 + self.damping * mg2.mean())
        spread = m + floor
        return Constants(mean, spread.rsqrt(), beta2.sqrt()), spread, torch.maximum(var, q) + floor

    def moved(self, k, c, x, t, energy):
        """Weight and bias of layer `k` after a step on v, from autograd's gradient on v; before any trust radius."""
        layer, biases = self.layers[k], [self.b[k]] if self.carries[k] else []
        v, v0 = to_v(layer, self.w[k], biases, c)
        leaves = [t.detach().requires_grad_() for t in (v, *v0)]
        w, b = [*self.w], [*self.b]
        w[k], moved = to_w(layer, leaves[0], leaves[1:], c)
        b[k] = moved[0] if moved else b[k]
        grads = torch.autograd.grad(energy(self.run(x, w, b)[1], t).mean(), leaves)
        steps = self.steps(k, grads, [leaf.detach() for leaf in leaves])
        v, *v0 = (leaf.detach() + step for leaf, step in zip(leaves, steps, strict=True))
        return to_w(layer, v, v0, c)

    def steps(self, k, grads, v):
        """The steps of layer `k` on v, from the gradients on v: descent with momentum."""
        if self.buffers[k] is not None:
            grads = [self.momentum * old + new for old, new in zip(self.buffers[k], grads, strict=True)]
        self.buffers[k] = grads
        return [-self.lr * g for g in grads]

    def held(self, k, dw, db, c, spread, fresh_spread):
        """The trust factors of layer `k`; ones where there is no trust radius."""
        if self.trust is None:
            return torch.ones(units(self.layers[k])).double()
        # a frozen bias does not move, and is part of its unit
        biases, db = ([], []) if self.b[k] is None else ([self.b[k]], db or [torch.zeros_like(self.b[k])])
        measures = (c.mu, spread, fresh_spread)
        return trust_factors(self.layers[k], self.w[k], biases, dw, db, *measures, self.trust, self.crowd)


def assert_same_parameters(reference, model, tolerance=1e-9):
    """The weights and biases of `OnV` and of a model."""
    layers = [module for module in model if isinstance(module, LAYERS)]
    for layer, w, b in zip(layers, reference.w, reference.b, strict=True):
        assert_close(layer.weight.detach(), w, rtol=tolerance, atol=tolerance)
        if b is not None:
            assert_close(layer.bias.detach(), b, rtol=tolerance, atol=tolerance)
