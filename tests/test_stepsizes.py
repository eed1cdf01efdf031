"""§3 and App. C of the paper: trust radii, blocks, RMSProp and the fan-in trick, each against something slower."""

import copy
import itertools
import math

import pytest
import torch
from torch import nn
from torch.autograd.functional import hessian
from torch.testing import assert_close

import evenstep
import oracle
from cases import LAYERS
from evenstep.math import guards, stepsize
from helpers import assert_same, fit, moved_by, randn

CLOSE = {"rtol": 1e-9, "atol": 1e-12}


def benign(w):
    """Eq. 6."""
    return 0.5 * w[0] ** 2 + torch.log(torch.exp(w[1]) + torch.exp(-w[1]))


def gradient_of(f, w):
    w = w.clone().requires_grad_()
    return torch.autograd.grad(f(w), w)[0]


def newton(f, w):
    """The gradient and (∇²f)⁻¹∇f."""
    grad = gradient_of(f, w)
    return grad, torch.linalg.solve(hessian(f, w), grad)


def test_benign_function_gives_the_printed_numbers():
    w = torch.tensor([3.0, 3.0]).double()
    grad, natural = newton(benign, w)
    assert_close(-grad, torch.tensor([-3.0, -1.0]).double(), rtol=0, atol=0.01)
    assert_close(-natural, torch.tensor([-3.0, -100.86]).double(), rtol=0, atol=0.005)
    moved = w + stepsize.natural_step(natural, 0.0297)
    assert_close(moved, torch.tensor([2.911, 0.0]).double(), rtol=0, atol=0.005)
    assert_close(-gradient_of(benign, moved), torch.tensor([-2.9, 0.0]).double(), rtol=0, atol=0.02)
    # γ = 1 would now be right: 1/0.0297 is 33 times the stepsize that was needed, not ten
    grad, natural = newton(benign, moved)
    assert (moved + stepsize.natural_step(natural, 1.0)).abs().max() < 1e-6


def test_a_radius_per_block_does_not_wait_for_the_worst_block():
    """From (3, 3), eq. 9 spends its radius on the flat coordinate; eq. 10 moves both."""
    w = torch.tensor([3.0, 3.0]).double()
    grad, natural = newton(benign, w)
    whole = stepsize.trust_step(grad, natural, 0.5)
    blocks = stepsize.trust_step(grad.view(2, 1), natural.view(2, 1), 0.5, dim=1).view(2)
    curvature = hessian(benign, w)
    assert_close(whole @ curvature @ whole, torch.tensor(0.25).double())
    assert_close(curvature.diagonal() * blocks**2, torch.tensor([0.25, 0.25]).double())
    assert_close(blocks[0], torch.tensor(-0.5).double())
    assert abs(whole[0]) < 0.17


def spd(n):
    a = randn(n, n)
    return a @ a.T + 0.1 * torch.eye(n).double()


def test_eq9_solves_the_trust_region_problem():
    """Eq. 7: no step of the same length in the metric descends faster, and the length is η (δᵀGδ = η²)."""
    metric, grad = spd(5), randn(5)
    step = stepsize.trust_step(grad, torch.linalg.solve(metric, grad), 0.3)
    assert_close(step @ metric @ step, torch.tensor(0.09).double())
    others = torch.cat([randn(5000, 5), step + 1e-3 * randn(5000, 5)])
    others *= 0.3 / ((others @ metric) * others).sum(1, keepdim=True).sqrt()
    assert (others @ grad > step @ grad).all()


def test_eq8_solves_the_penalized_problem_and_is_eq9_with_another_name_for_the_length():
    metric, grad, gamma = spd(4), randn(4), 0.7
    natural = torch.linalg.solve(metric, grad)
    step = stepsize.natural_step(natural, gamma)
    slope = gradient_of(lambda d: d @ grad + d @ metric @ d / (2 * gamma), step)
    assert_close(slope, torch.zeros(4).double())
    eta = gamma * (grad @ natural).sqrt()
    assert_close(step, stepsize.trust_step(grad, natural, float(eta)))


def test_eq10_has_length_eta_in_every_block_and_blocks_decouple():
    metrics, grad = torch.stack([spd(4) for _ in range(3)]), randn(3, 4)
    natural = torch.linalg.solve(metrics, grad)
    step = stepsize.trust_step(grad, natural, 0.2, dim=1)
    assert_close(torch.einsum("bi,bij,bj->b", step, metrics, step), torch.ones(3).double() * 0.04)
    grad[1] *= 100
    natural[1] *= -3
    again = stepsize.trust_step(grad, natural, 0.2, dim=1)
    assert torch.equal(again[[0, 2]], step[[0, 2]]) and not torch.equal(again[1], step[1])
    assert not torch.allclose(stepsize.trust_step(grad, natural, 0.2)[0], again[0])


def two_layers():
    """A grouped transposed convolution and a linear layer, eight units in all, and batches for them."""
    model = nn.Sequential(nn.ConvTranspose2d(4, 4, 2, groups=2), nn.Tanh(), nn.Flatten(), nn.Linear(36, 4)).double()
    return model, lambda scale=1.0: (scale * randn(5, 4, 2, 2), randn(5, 4))


@pytest.mark.parametrize("block", ["network", "unit"])
def test_eqs_9_and_10_for_a_network_have_length_eta(block):
    """In the whole network or in each of the units, its bias included, for small inputs and for large ones."""
    model, batch = two_layers()
    optimizer = evenstep.BlockNaturalSGD(model, lr=0.02, block=block, bounded=False)
    for scale in (1.0, 10.0):
        x, t = batch(scale)
        moved = moved_by(optimizer, oracle.log_cosh(model(x), t).mean())
        steps = [
            torch.cat([moved[layer.bias][j : j + 1], moved[layer.weight][oracle.places(layer)[1] == j]])
            for layer in (model[0], model[3])
            for j in range(4)
        ]
        lengths = [step.norm().item() for step in ([torch.cat(steps)] if block == "network" else steps)]
        assert_close(lengths, [0.02] * len(lengths))


def step_along(optimizer, layer, weight_grad, bias_grad):
    """What a step with these gradients moves the layer by, the bias in the last column."""
    moved = moved_by(optimizer, (layer.weight * weight_grad).sum() + (layer.bias * bias_grad).sum())
    return torch.cat([moved[layer.weight], moved[layer.bias].unsqueeze(1)], 1)


@pytest.mark.parametrize("block", ["network", "unit", "weight"])
def test_eq11_is_bounded_by_eta_over_the_root_of_one_minus_decay(block):
    """η at the first step, never above η/√(1−decay), and close to that when a gradient jumps."""
    decay, lr, layer = 0.9, 0.01, nn.Linear(3, 2).double()
    optimizer = evenstep.BlockNaturalSGD(layer, lr=lr, block=block, decay=decay, eps=0.0)
    lengths = []
    for k in range(60):
        scale = 1e4 if k == 40 else 1.0
        step = step_along(optimizer, layer, scale * randn(2, 3), scale * randn(2))
        lengths.append({"network": step.norm().view(1), "unit": step.norm(dim=1), "weight": step.abs()}[block])
    longest = torch.stack([length.max() for length in lengths])
    assert_close(lengths[0], torch.full_like(lengths[0], lr))
    assert longest.max() <= lr / math.sqrt(1 - decay) * (1 + 1e-6)
    assert longest[40] > 0.99 * lr / math.sqrt(1 - decay)


@pytest.mark.parametrize("bounded", [True, False])
@pytest.mark.parametrize("block", ["network", "unit", "weight"])
def test_a_zero_gradient_gives_a_zero_step(block, bounded):
    layer = nn.Linear(3, 2).double()
    optimizer = evenstep.BlockNaturalSGD(layer, lr=0.1, block=block, bounded=bounded, eps=0.0)
    assert not step_along(optimizer, layer, 0.0, 0.0).any()


@pytest.mark.parametrize("eps", [0.0, 1e-3])
def test_rmsprop_is_recovered(eps):
    """Eq. 11 with G = I for each weight follows R ← λR + (1−λ)g², w ← w − η g/√(μ + R), R_0 = 0 (§3.4).

    Without eps, which torch has outside the root, that is torch's.
    """
    model, batch = two_layers()
    copies, batches = [copy.deepcopy(model) for _ in range(2)], [batch() for _ in range(12)]
    keywords = {"lr": 0.01, "decay": 0.9, "eps": eps, "bias_correction": False}
    fit(evenstep.BlockNaturalSGD(model, block="weight", **keywords), model, batches)
    running = [torch.zeros_like(p) for p in model.parameters()]
    for x, t in batches:
        parameters = list(copies[0].parameters())
        grads = torch.autograd.grad(oracle.log_cosh(copies[0](x), t).mean(), parameters)
        for p, g, r in zip(parameters, grads, running, strict=True):
            r.copy_(0.9 * r + 0.1 * g * g)
            p.data -= 0.01 * g / (eps + r).sqrt()
    assert_same(copies[0], model, **CLOSE)
    if eps == 0:
        fit(torch.optim.RMSprop(copies[1].parameters(), lr=0.01, alpha=0.9, eps=0.0), copies[1], batches)
        assert_same(copies[1], model, **CLOSE)


def test_denominator_of_eq11_is_the_root_of_the_fan_in():
    """√(E[Σ x_i² g²]/E[g²]) is √n for inputs of unit variance independent of g, √(n+1) with the bias.

    Inputs are all corners of the cube {±1}ⁿ, each with every g, so that the assumptions hold exactly.
    """
    n = 4
    x = torch.tensor(list(itertools.product([-1.0, 1.0], repeat=n))).double()
    g = randn(5)
    on_weight = torch.einsum("e,bi->ebi", g, x).flatten(0, 1)  # an example where a layer has units
    on_bias, g2 = g.repeat_interleave(len(x)).view(1, -1), (g * g).mean()
    for bias, truth in ((None, n), (on_bias, n + 1)):
        square = guards.squared_length(guards.stretch(on_weight, None), bias).mean()
        assert_close((square / g2).sqrt().item(), math.sqrt(truth))


@pytest.mark.parametrize("name", LAYERS)
def test_fan_in_divides_by_the_root_of_n_times_s(name):
    case = LAYERS[name]
    layer, x = case.layer(), case.inputs()
    y = layer(x)
    rate = 0.7 / math.sqrt(oracle.fan_in(layer) * oracle.sharing(layer, x, y))
    optimizer = evenstep.FanInSGD(layer, lr=0.7)
    for p, moved in moved_by(optimizer, oracle.log_cosh(layer(x), randn(*y.shape)).mean()).items():
        assert_close(moved, -rate * p.grad)
