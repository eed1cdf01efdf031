"""The paper's claims, each against something slower: one test or a few for every claim that needs no long training.

docs/paper.md says which test shows which equation; the last test here holds it to that.
"""

import copy
import importlib
import itertools
import math
import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.autograd.functional import hessian
from torch.testing import assert_close

import evenstep
import oracle
from cases import LAYERS
from evenstep.math import change_of_variables as coordinates
from evenstep.math import constants, stepsize
from helpers import PAPER, UNGUARDED, assert_same, fit, moved_by, randn

CLOSE = {"rtol": 1e-9, "atol": 1e-12}


def canonical(mx, vx, mg2):
    """Eq. 5 without damping, as the optimizer puts it together."""
    return constants.Constants(mx, constants.inverse(vx), constants.canonical_beta2(mg2, 0.0))


def one_group(*tensors):
    """Tensors in the core's shapes for a dense layer: [group, ...] with one group."""
    return tuple(t.unsqueeze(0) for t in tensors)


def dense_weight(w):
    """[unit, input] as [group, unit, input, kernel]."""
    return w.unsqueeze(0).unsqueeze(-1)


def random_constants(inputs, units):
    """μ, α, β with nothing special about them."""
    return oracle.Constants(randn(inputs), 0.5 + torch.rand(inputs).double(), 0.5 + torch.rand(units).double())


def in_core(c):
    """The oracle's constants as the library keeps them."""
    return constants.Constants(*one_group(c.mu, c.alpha**2, c.beta**2))


# §2.1: the update


HYPERPARAMETERS = {"undamped": {}, "damped": {"damping": 0.2}, "momentum": {"damping": 0.2, "momentum": 0.8}}


@pytest.mark.parametrize("bias", ["trained", "frozen"])
@pytest.mark.parametrize("keywords", HYPERPARAMETERS.values(), ids=HYPERPARAMETERS)
@pytest.mark.parametrize("name", LAYERS)
def test_eq3_is_gradient_descent_on_v(name, keywords, bias):
    """WhitenedSGD without guards is autograd's gradient descent on explicit v, while the constants move."""
    model = nn.Sequential(LAYERS[name].layer(), nn.Tanh())  # something nonlinear after it
    if model[0].bias is not None:
        model[0].bias.requires_grad_(bias == "trained")
    inputs = [LAYERS[name].inputs() * (1 + 0.3 * k) for k in range(4)]
    batches = [(x, randn(*model(x).shape)) for x in inputs]
    reference = oracle.OnV(model, lr=0.3, decay=0.6, **keywords)
    fit(evenstep.WhitenedSGD(model, lr=0.3, decay=0.6, **PAPER | keywords), model, batches)
    for x, t in batches:
        reference.step(x, t)
    oracle.assert_same_parameters(reference, model)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("coordinates", ["whitened", "canonical", "fan-in"])
def test_a_deep_network_descends_on_v_of_all_layers_at_once(coordinates, momentum):
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 3, 2, stride=2), nn.Softplus(),
        nn.Flatten(), nn.Linear(12, 5, bias=False), nn.Softplus(), nn.Linear(5, 3),
    ).double()  # fmt: skip
    batches = [(1 + randn(5, 2, 4, 4), randn(5, 3)) for _ in range(4)]
    lr = 0.002 if coordinates == "canonical" else 0.05
    reference = oracle.OnV(model, lr=lr, momentum=momentum, coordinates=coordinates, damping=0.1)
    cls = {"whitened": evenstep.WhitenedSGD, "canonical": evenstep.CanonicalSGD, "fan-in": evenstep.FanInSGD}
    keywords = {"trust": None} if coordinates == "fan-in" else {**UNGUARDED, "damping": 0.1}
    fit(cls[coordinates](model, lr=lr, momentum=momentum, **keywords), model, batches)
    for x, t in batches:
        reference.step(x, t)
    oracle.assert_same_parameters(reference, model)


@pytest.mark.parametrize("name", ["linear", "padded-zeros", "padded-circular", "grouped", "transposed-grouped"])
def test_constants_change_and_the_function_does_not(name):
    """The function of w is that of v under any constants (eq. 2), written with x − μ as the paper does."""
    layer, x = LAYERS[name].layer(), LAYERS[name].inputs(2)
    w, b, y = layer.weight.detach(), layer.bias.detach(), layer(x).detach()
    for _ in range(3):
        c = random_constants(x.shape[-1 if name == "linear" else 1], oracle.units(layer))
        w, (b,) = oracle.to_w(layer, *oracle.to_v(layer, w, [b], c), c)
        assert_close(oracle.forward(layer, x, w, b), y)
    if name == "linear":
        v, (v0,) = oracle.to_v(layer, w, [b], c)
        assert_close(c.beta * (v0 + ((x - c.mu) * c.alpha) @ v.T), y)


def test_moving_constants_move_no_weight():
    """Steps of length 0 change the moments, and not a bit of the weights or of what the network answers."""
    model = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(48, 4)).double()
    before, x = copy.deepcopy(model), randn(3, 2, 4, 4)
    optimizer = evenstep.WhitenedSGD(model, lr=0.0)
    moments = []
    for k in range(3):
        fit(optimizer, model, [(k + randn(3, 2, 4, 4), randn(3, 4))])
        moments.append(optimizer.state[model[0].weight]["mx"].clone())
    assert (moments[0] - moments[2]).abs().min() > 0.01
    assert torch.equal(model(x), before(x))


# §2.2: the block matrix


def test_update_is_the_block_matrix_times_the_gradient():
    """The corner is 1 + Σ α_i² μ_i²; the printed 1 + Σ α_i² μ_i gives another step."""
    n, m = 4, 3
    grad, b, c = randn(m, n), randn(m), random_constants(4, 3)
    on_v = coordinates.gradient_to_v(dense_weight(grad), *one_group(b), in_core(c))
    dw, db = coordinates.step_to_w(*on_v, in_core(c))
    for j in range(m):
        matrix = oracle.block_matrix(c.mu, c.alpha**2, c.beta[j] ** 2)
        step = matrix @ torch.cat([b[j : j + 1], grad[j]])
        assert_close(torch.cat([db[0, j : j + 1], dw[0, j, :, 0]]), step)
        matrix[0, 0] = c.beta[j] ** 2 * (1 + (c.alpha**2 * c.mu).sum())
        assert (matrix @ torch.cat([b[j : j + 1], grad[j]]) - step).abs().max() > 1e-3


def test_block_matrix_inverts_the_surrogate_curvature():
    mu, var, g2 = randn(5), 0.1 + torch.rand(5).double(), 0.3
    matrix = oracle.block_matrix(mu, 1 / var, 1 / g2)
    assert_close(matrix @ (g2 * oracle.surrogate(mu, var)), torch.eye(6).double())


def test_without_a_bias_the_update_inverts_the_block_without_its_bias_row():
    """The implied b̂ of a layer without bias: α²(G − μ b̂) is the dense inverse times the gradient."""
    mu, var, grad, beta2 = randn(5), 0.1 + torch.rand(5).double(), randn(3, 5), 0.5 + torch.rand(3).double()
    c = constants.Constants(*one_group(mu, 1 / var, beta2))
    step = coordinates.step_to_w_biasless(coordinates.gradient_to_v_biasless(dense_weight(grad), c), c)
    truth = beta2.view(-1, 1) * (grad @ torch.linalg.inv(oracle.surrogate(mu, var, bias=False)))
    assert_close(step[0, :, :, 0], truth)
    implied = (grad * mu / var).sum(1) / (1 + (mu * mu / var).sum())
    assert_close(step[0, :, :, 0], beta2.view(-1, 1) * (grad - mu * implied.view(-1, 1)) / var)


# §2.3, App. A and B: canonical constants


def surrogate_of_v(c, j, mean, var, g2):
    """Eq. 4 for unit `j`: β_j² E[g_j²] times E[z_i²] on the diagonal, E[z_i] E[z_i'] off it."""
    z = torch.cat([torch.ones(1).double(), c.alpha2[0].sqrt() * (mean - c.mu[0])])
    z2 = torch.cat([torch.ones(1).double(), c.alpha2[0] * (var + (mean - c.mu[0]) ** 2)])
    matrix = torch.outer(z, z)
    matrix[range(len(z)), range(len(z))] = z2
    return c.beta2[0, j] * g2[j] * matrix


def test_canonical_constants_make_the_surrogate_the_identity():
    mean, var, g2 = randn(4), 0.1 + torch.rand(4).double(), 0.1 + torch.rand(3).double()
    c = canonical(*one_group(mean, var, g2))
    for j in range(3):
        assert_close(surrogate_of_v(c, j, mean, var, g2), torch.eye(5).double())
    off = canonical(*one_group(mean + 0.1, var, g2))
    assert (surrogate_of_v(off, 0, mean, var, g2) - torch.eye(5)).abs().max() > 0.01


def test_canonical_constants_make_the_curvature_the_identity_on_data():
    """Where inputs are independent of each other and of g, the empirical Fisher matrix on v is I (5 standard errors).

    The constants are what CanonicalSGD gathered from the same data through its hooks.
    """
    count, n, m = 40_000, 3, 2
    x = torch.tensor([1.0, -2.0, 0.5]).double() + torch.tensor([2.0, 0.3, 1.0]).double() * randn(count, n)
    g = torch.tensor([0.2, 3.0]).double() * (randn(count, m) + 0.3)
    layer = nn.Linear(n, m).double()
    optimizer = evenstep.CanonicalSGD(layer, lr=0.0, damping=0.0, rows=None)
    (layer(x) * g).sum(1).mean().backward()
    optimizer.step()
    state = optimizer.state[layer.weight]
    mu, alpha, beta = state["mx"], state["vx"].rsqrt(), state["mg2"].rsqrt()
    z = torch.cat([torch.ones(count, 1).double(), alpha * (x - mu)], 1)
    for j in range(m):
        on_v = beta[j] * g[:, j : j + 1] * z
        products = on_v.unsqueeze(2) * on_v.unsqueeze(1)
        error = products.std(0) / math.sqrt(count)
        # the corner is exactly 1 by the choice of β, and has no error to measure
        assert ((products.mean(0) - torch.eye(n + 1)).abs() <= 5 * error + 1e-9).all()
        assert error.max() < 0.03


def sigmoid_energy(y, t):
    return torch.nn.functional.softplus(y * t).flatten(1).sum(1)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("sizes", [[6], [1, 3, 2]])
@pytest.mark.parametrize("name", ["linear", "linear-sequence", "grouped", "transposed2d"])
def test_canonical_g2_is_that_of_single_examples(name, sizes, reduction):
    """S·E[g²] from hooks on batches equals one backward per example, whatever the reduction and the micro-batches."""
    case = LAYERS[name]
    model, x = nn.Sequential(case.layer()), case.inputs(6)
    t = randn(6, *model(x).shape[1:])
    reference = oracle.OnV(model, lr=0.1, coordinates="canonical")
    truth = reference.squared(0, x, t, sigmoid_energy)
    reference.step(x, t, sigmoid_energy)
    optimizer = evenstep.CanonicalSGD(model, lr=0.1, reduction=reduction, **PAPER)
    for part, target in zip(x.split(sizes), t.split(sizes), strict=True):
        total = sigmoid_energy(model(part), target).sum()
        (total / 6 if reduction == "mean" else total).backward()
    optimizer.step()
    assert_close(optimizer.state[model[0].weight]["mg2"], truth)
    oracle.assert_same_parameters(reference, model)


# §3.1: the benign function


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


# §3.2–3.3: eqs. 7 to 11


def spd(n):
    a = randn(n, n)
    return a @ a.T + 0.1 * torch.eye(n).double()


def test_eq9_solves_the_trust_region_problem():
    """Eq. 7: no step of the same length in the metric descends faster, and the length is η (δᵀGδ = η²)."""
    metric, grad = spd(5), randn(5)
    step = stepsize.trust_step(grad, torch.linalg.solve(metric, grad), 0.3)
    assert_close(step @ metric @ step, torch.tensor(0.09).double())
    others = randn(5000, 5)
    others *= 0.3 / ((others @ metric) * others).sum(1, keepdim=True).sqrt()
    assert (others @ grad > step @ grad).all()
    nearby = step + 1e-4 * randn(5000, 5)
    nearby *= 0.3 / ((nearby @ metric) * nearby).sum(1, keepdim=True).sqrt()
    assert (nearby @ grad - step @ grad).min() > -1e-12


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


@pytest.mark.parametrize("eps", [0.0, 0.1])
def test_eq11_is_no_longer_than_eta_by_jensen(eps):
    """With E over the same batch's examples the length is at most η, and η for equal examples and eps = 0."""
    metric, grads = spd(4), randn(7, 4)
    square = torch.einsum("bi,ij,bj->b", grads, torch.linalg.inv(metric), grads)
    natural = torch.linalg.solve(metric, grads.mean(0))
    step = -0.3 * stepsize.normalized(natural, square.mean(), eps)
    assert (step @ metric @ step).sqrt() < 0.3
    alone = -0.3 * stepsize.normalized(torch.linalg.solve(metric, grads[0]), square[0], eps)
    assert_close((alone @ metric @ alone).sqrt(), 0.3 * (square[0] / (square[0] + eps)).sqrt())


def two_layers():
    """A grouped transposed convolution and a linear layer, eight units in all, and batches for them."""
    model = nn.Sequential(nn.ConvTranspose2d(4, 4, 2, groups=2), nn.Tanh(), nn.Flatten(), nn.Linear(36, 4)).double()
    return model, lambda scale=1.0: (scale * randn(5, 4, 2, 2), randn(5, 4))


def unit_steps(block):
    """What every unit of both layers moves by, its bias first, in a step with small inputs and one with large ones."""
    model, batch = two_layers()
    optimizer = evenstep.BlockNaturalSGD(model, lr=0.02, block=block, bounded=False)
    for scale in (1.0, 10.0):
        x, t = batch(scale)
        moved = moved_by(optimizer, oracle.log_cosh(model(x), t).mean())
        yield [
            torch.cat([moved[layer.bias][j : j + 1], moved[layer.weight][oracle.places(layer)[1] == j]])
            for layer in (model[0], model[3])
            for j in range(4)
        ]


def test_eq9_for_a_network_has_length_eta():
    for steps in unit_steps("network"):
        assert_close(torch.cat(steps).norm().item(), 0.02)


def test_eq10_for_a_network_has_length_eta_per_unit():
    for steps in unit_steps("unit"):
        assert_close([step.norm().item() for step in steps], [0.02] * 8)


@pytest.mark.parametrize("block", ["network", "unit", "weight"])
def test_eq11_is_bounded_by_eta_over_the_root_of_one_minus_decay(block):
    """η at the first step, never above η/√(1−decay), and close to that when a gradient jumps."""
    decay, lr = 0.9, 0.01
    layer = nn.Linear(3, 2).double()
    optimizer = evenstep.BlockNaturalSGD(layer, lr=lr, block=block, decay=decay, eps=0.0)
    lengths = []
    for k in range(60):
        before = [p.detach().clone() for p in layer.parameters()]
        for p in layer.parameters():
            p.grad = (1e4 if k == 40 else 1.0) * torch.randn_like(p)
        optimizer.step()
        dw, db = (p.detach() - old for p, old in zip(layer.parameters(), before, strict=True))
        step = torch.cat([dw, db.unsqueeze(1)], 1)
        lengths.append({"network": step.norm().view(1), "unit": step.norm(dim=1), "weight": step.abs()}[block])
    longest = torch.stack([length.max() for length in lengths])
    assert_close(lengths[0], torch.full_like(lengths[0], lr))
    assert longest.max() <= lr / math.sqrt(1 - decay) * (1 + 1e-6)
    assert longest[40] > 0.99 * lr / math.sqrt(1 - decay)


@pytest.mark.parametrize("bounded", [True, False])
@pytest.mark.parametrize("block", ["unit", "weight"])
def test_blocks_of_a_network_decouple(block, bounded):
    """Another gradient in one unit leaves every other unit's steps as they were, bit for bit."""

    def steps(scale):
        torch.manual_seed(0)
        layer = nn.Linear(3, 4).double()
        optimizer = evenstep.BlockNaturalSGD(layer, lr=0.1, block=block, bounded=bounded)
        for _ in range(3):
            layer.weight.grad, layer.bias.grad = torch.randn(4, 3).double(), torch.randn(4).double()
            layer.weight.grad[1] *= scale
            layer.weight.grad[1, 0] += scale
            optimizer.step()
        return torch.cat([layer.weight.detach(), layer.bias.detach().unsqueeze(1)], 1)

    one, other = steps(1.0), steps(7.0)
    assert torch.equal(one[[0, 2, 3]], other[[0, 2, 3]]) and not torch.equal(one[1], other[1])


@pytest.mark.parametrize("bounded", [True, False])
@pytest.mark.parametrize("block", ["network", "unit", "weight"])
def test_a_zero_gradient_gives_a_zero_step(block, bounded):
    layer = nn.Linear(3, 2).double()
    optimizer = evenstep.BlockNaturalSGD(layer, lr=0.1, block=block, bounded=bounded, eps=0.0)
    before = copy.deepcopy(layer)
    for p in layer.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    assert_same(before, layer)


# §3.4: RMSProp


def by_weight(eps):
    """A network trained by eq. 11 with G = I for each weight; a copy of it as it was; and the batches."""
    model, batch = two_layers()
    twin, batches = copy.deepcopy(model), [batch() for _ in range(12)]
    keywords = {"lr": 0.01, "decay": 0.9, "eps": eps, "bias_correction": False}
    fit(evenstep.BlockNaturalSGD(model, block="weight", **keywords), model, batches)
    return model, twin, batches


@pytest.mark.parametrize("eps", [0.0, 1e-3])
def test_rmsprop_is_recovered(eps):
    """Eq. 11 with G = I for each weight follows R ← λR + (1−λ)g², w ← w − η g/√(μ + R), R_0 = 0."""
    model, twin, batches = by_weight(eps)
    running = [torch.zeros_like(p) for p in twin.parameters()]
    for x, t in batches:
        grads = torch.autograd.grad(oracle.log_cosh(twin(x), t).mean(), list(twin.parameters()))
        for p, g, r in zip(twin.parameters(), grads, running, strict=True):
            r.copy_(0.9 * r + 0.1 * g * g)
            p.data -= 0.01 * g / (eps + r).sqrt()
    assert_same(twin, model, **CLOSE)


def test_rmsprop_without_eps_is_torchs():
    model, twin, batches = by_weight(0.0)
    fit(torch.optim.RMSprop(twin.parameters(), lr=0.01, alpha=0.9, eps=0.0), twin, batches)
    assert_same(twin, model, **CLOSE)


# §3.5: the fan-in trick


def test_denominator_of_eq11_is_the_root_of_the_fan_in():
    """√(E[Σ x_i² g²]/E[g²]) is √n for inputs of unit variance independent of g, √(n+1) with the bias.

    Inputs are all corners of the cube {±1}ⁿ, each with every g, so that the assumptions hold exactly.
    """
    n = 4
    x = torch.tensor(list(itertools.product([-1.0, 1.0], repeat=n))).double()
    g = randn(5)
    on_weight = torch.einsum("e,bi->ebi", g, x).reshape(-1, 1, 1, n, 1)
    on_bias = g.repeat_interleave(len(x)).view(-1, 1, 1)
    g2 = (g * g).mean()
    squares = torch.stack([stepsize.unit_square(w, None) for w in on_weight]).mean()
    assert_close((squares / g2).sqrt().item(), math.sqrt(n))
    units = zip(on_weight, on_bias.unsqueeze(1), strict=True)
    squares = torch.stack([stepsize.unit_square(w, b) for w, b in units]).mean()
    assert_close((squares / g2).sqrt().item(), math.sqrt(n + 1))


def test_denominator_of_a_convolution_counts_kernel_area_and_positions():
    """For white inputs and gradients E[Σ (∂E/∂w)²]/E[g²] is n·S, n with the kernel's area (5 standard errors)."""
    layer = nn.Conv2d(2, 1, (2, 3), bias=False).double()
    count, x, g = 3000, randn(3000, 2, 4, 5), randn(3000, 1, 3, 3)
    patches = torch.nn.functional.unfold(x, (2, 3))
    per_example = torch.einsum("bnu,bu->bn", patches, g.flatten(1)).square().sum(1)
    truth = oracle.fan_in(layer) * oracle.sharing(layer, x, g)
    assert truth == 2 * 6 * 9
    assert abs(per_example.mean() - truth) < 5 * per_example.std() / math.sqrt(count)
    assert_close(constants.geometry_beta2(oracle.fan_in(layer), torch.tensor(9.0).double()).item(), truth**-0.5)


@pytest.mark.parametrize("name", LAYERS)
def test_fan_in_divides_by_the_root_of_n_times_s(name):
    case = LAYERS[name]
    layer, x = case.layer(), case.inputs()
    y = layer(x)
    rate = 0.7 / math.sqrt(oracle.fan_in(layer) * oracle.sharing(layer, x, y))
    optimizer = evenstep.FanInSGD(layer, lr=0.7)
    for p, moved in moved_by(optimizer, oracle.log_cosh(layer(x), randn(*y.shape)).mean()).items():
        assert_close(moved, -rate * p.grad)


# §4.1: against batch normalization


def test_whitening_leaves_the_forward_pass_alone():
    """Bit for bit, before and after steps, an example's output is that of the network without the optimizer."""
    model = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(48, 4)).double()
    optimizer = evenstep.WhitenedSGD(model, lr=0.1)
    for _ in range(3):
        untouched, x = copy.deepcopy(model), randn(4, 2, 4, 4)
        assert torch.equal(model(x), untouched(x))
        for network in (model, untouched):
            network.zero_grad()
            network(x).square().sum().backward()
        assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), untouched.parameters(), strict=True))
        optimizer.step()


def test_only_under_batch_norm_an_output_depends_on_its_batch():
    plain, normed = nn.Linear(3, 4).double(), nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).double()
    evenstep.WhitenedSGD(plain, lr=0.1)
    x, company = randn(1, 3), [randn(5, 3), 3 + randn(5, 3)]
    outputs = [[model(torch.cat([x, c]))[0] for c in company] for model in (plain, normed)]
    assert_close(*outputs[0])
    assert (outputs[1][0] - outputs[1][1]).abs().max() > 0.1


# §4.2: L2 as a term of the loss


def regularized_step(l2=0.0, weight_decay=0.0):
    """What a step moves the weight and the bias of one layer by."""
    torch.manual_seed(5)
    layer = nn.Linear(4, 3).double()
    groups = [{"params": [layer.weight], "weight_decay": weight_decay}, {"params": [layer.bias]}]
    optimizer = evenstep.WhitenedSGD(groups, lr=0.1, model=layer, **PAPER)
    w, x, t = layer.weight.detach().clone(), 2 + randn(6, 4), randn(6, 3)
    moved = moved_by(optimizer, oracle.log_cosh(layer(x), t).mean() + 0.5 * l2 * layer.weight.square().sum())
    return moved[layer.weight], moved[layer.bias], w, *oracle.mean_var(x)


def test_l2_in_the_loss_moves_the_bias_through_eq3_and_decoupled_decay_does_not():
    dw, db, w, mean, var = regularized_step()
    dw_l2, db_l2, *_ = regularized_step(l2=0.3)
    dw_decay, db_decay, *_ = regularized_step(weight_decay=0.3)
    extra = -0.1 * 0.3 * w / var / math.sqrt(4)
    assert_close(dw_l2 - dw, extra)
    assert_close(db_l2 - db, -extra @ mean)
    assert (db_l2 - db).abs().max() > 1e-3
    assert_close(dw_decay - dw, -0.1 * 0.3 * w)
    assert torch.equal(db_decay, db)


# App. C: separation


def cross_block(f, x):
    """The largest entry of ∂²f/∂x₁∂x₂ for x = (x₁, x₂), two and three coordinates."""
    return hessian(f, x)[:2, 2:].abs().max()


def along_axes(f, x, points=64):
    """App. C's sum f(0) + Σ_i ∫ x_iᵀ ∂f/∂x_i(0 … t x_i … 0) dt, by Gauss–Legendre quadrature."""
    nodes, weights = gauss_legendre(points)
    total = f(torch.zeros_like(x))
    for part in (slice(0, 2), slice(2, 5)):
        only = torch.zeros_like(x)
        only[part] = x[part]
        total = total + sum(w * (only @ gradient_of(f, t * only)) for t, w in zip(nodes, weights, strict=True))
    return total


def gauss_legendre(points):
    """Nodes and weights on [0, 1], from the eigenvectors of the Jacobi matrix (Golub and Welsch)."""
    k = torch.arange(1, points).double()
    off = k / (4 * k * k - 1).sqrt()
    values, vectors = torch.linalg.eigh(torch.diag(off, 1) + torch.diag(off, -1))
    return (values + 1) / 2, vectors[0] ** 2


def separated(x):
    """A sum of f₁(x₁) and f₂(x₂) that does not look like one."""
    return torch.log(torch.exp(torch.sin(x[0] * x[1])) * torch.exp(x[2:].square().sum().cos() * x[3]))


def coupled(x):
    return separated(x) + 0.1 * x[0] * x[3]


def test_a_separated_sum_is_a_block_diagonal_hessian():
    """Eqs. 13 and 14, both ways: the sum has no cross block, and what has none is the sum along its axes."""
    for _ in range(3):
        x = randn(5)
        assert cross_block(separated, x) < 1e-12 and cross_block(coupled, x) > 0.09
        assert_close(along_axes(separated, x), separated(x))
        assert abs(along_axes(coupled, x) - coupled(x)) > 0.05 * abs(x[0] * x[3])


def test_steps_per_block_optimize_the_terms_of_a_separated_sum_apart():
    """Eq. 10 in two blocks is the same as eq. 9 on each term alone, while eq. 9 on the whole is not."""

    def descend(f, x, dims):
        for _ in range(5):
            grad = gradient_of(f, x).view(dims)
            x = x + stepsize.trust_step(grad, grad, 0.1, dim=-1).flatten()
        return x

    first, second = (lambda x: x[0] ** 4 + x[0] * x[1]), (lambda x: torch.cosh(x).sum())
    x = randn(4)
    both = descend(lambda x: first(x[:2]) + second(x[2:]), x, (2, 2))
    assert_close(both, torch.cat([descend(first, x[:2], (1, 2)), descend(second, x[2:], (1, 2))]))
    assert not torch.allclose(both, descend(lambda x: first(x[:2]) + second(x[2:]), x, (1, 4)))


# App. D: constants from the batch itself


def own_mean_updates(x, g, mu, alpha2, beta2):
    """δw and δw_0 of eq. 3 for many batches at once, x [batch, B, n] and g [batch, B, m], each with its own μ."""

    def one(x, g, mu):
        c = constants.Constants(*one_group(mu, alpha2, beta2))
        grad, b = (g.T @ x) / len(x), g.mean(0)
        on_v = coordinates.gradient_to_v(dense_weight(grad), *one_group(b), c)
        dw, db = coordinates.step_to_w(*on_v, c)
        return dw[0, :, :, 0], db[0]

    return torch.func.vmap(one)(x, g, mu)


def population(atoms, n, m):
    """A finite set of equally likely examples (x, g), skewed and correlated, whose moments are exact sums."""
    x = randn(atoms, n).exp()
    return x, torch.sin(x @ randn(n, m)) + 0.5


def bias_of_iid_batches(x, g, size, alpha2, beta2):
    """App. D for B i.i.d. examples: Σ β²α² [μ cov(x, g)/B − (1−1/B)/B · E[(x−μ)²(g − E g)]]."""
    mu, mg = x.mean(0), g.mean(0)
    dx, dg = x - mu, g - mg
    cov, third = dx.T @ dg / len(x), (dx**2).T @ dg / len(x)
    inner = mu.view(-1, 1) * cov / size - (1 - 1 / size) / size * third
    return beta2 * (alpha2 @ inner)


def test_own_mean_biases_the_step_as_app_d_says_exactly():
    """Over all equally likely batches of 3 examples out of 4, with var and cov of the batch's means summed out."""
    size, (x, g) = 3, population(4, 2, 2)
    alpha2, beta2 = 1 / x.var(0, correction=0), 1 / (g * g).mean(0)
    index = torch.tensor(list(itertools.product(range(4), repeat=size)))
    bx, bg = x[index], g[index]
    own, mg, mxg = bx.mean(1), bg.mean(1), torch.einsum("kbi,kbj->kij", bx, bg) / size
    dw_own, db_own = (t.mean(0) for t in own_mean_updates(bx, bg, own, alpha2, beta2))
    exact = x.mean(0).expand_as(own)
    dw, db = (t.mean(0) for t in own_mean_updates(bx, bg, exact, alpha2, beta2))

    def cov(a, b):
        return (a * b).mean(0) - a.mean(0) * b.mean(0)

    for j in range(2):
        terms = own.var(0, correction=0) * g[:, j].mean() + cov(own**2, mg[:, j : j + 1]) - cov(own, mxg[:, :, j])
        assert_close(db_own[j] - db[j], beta2[j] * (alpha2 @ terms))
    assert_close(db_own - db, bias_of_iid_batches(x, g, size, alpha2, beta2))
    assert_close(dw_own, (1 - 1 / size) * dw)
    assert (db_own - db).abs().min() > 1e-3


def test_own_mean_biases_the_step_as_app_d_says_by_sampling():
    """200,000 batches of 8 examples, within 5 standard errors; the bias itself is far larger than those."""
    size, count, (x, g) = 8, 200_000, population(50, 3, 2)
    alpha2, beta2 = 1 / x.var(0, correction=0), 1 / (g * g).mean(0)
    index = torch.randint(len(x), (count, size))
    bx, bg = x[index], g[index]
    own = bx.mean(1)
    dw_own, db_own = own_mean_updates(bx, bg, own, alpha2, beta2)
    dw, db = own_mean_updates(bx, bg, x.mean(0).expand_as(own), alpha2, beta2)
    bias, error = (db_own - db).mean(0), (db_own - db).std(0) / math.sqrt(count)
    truth = bias_of_iid_batches(x, g, size, alpha2, beta2)
    assert ((bias - truth).abs() < 5 * error).all() and (truth.abs() > 20 * error).any()
    shrunk = dw_own - (1 - 1 / size) * dw
    assert (shrunk.mean(0).abs() < 5 * shrunk.std(0) / math.sqrt(count)).all()


def test_constants_of_earlier_batches_make_the_step_linear_in_the_batch():
    """WhitenedSGD's second step is free of App. D's bias: the mean of its steps over two batches is that of both."""
    first, (a, b) = randn(6, 3), (randn(4, 3).exp(), randn(4, 3).exp())
    start = nn.Linear(3, 2).double()

    def second_step(x):
        layer = copy.deepcopy(start)
        optimizer = evenstep.WhitenedSGD(layer, lr=0.1, **PAPER)
        for batch in (first, x):
            moved = moved_by(optimizer, layer(batch).sin().sum(1).mean())
        return torch.cat([moved[layer.weight].flatten(), moved[layer.bias]])

    assert_close(second_step(torch.cat([a, b])), (second_step(a) + second_step(b)) / 2)


# The map from paper to code


def test_docs_name_functions_and_tests_that_exist():
    """Every `module.name` and `test_file.py::test` that docs/paper.md mentions is there."""
    root = Path(__file__).parent.parent
    text = (root / "docs" / "paper.md").read_text()
    tests = re.findall(r"(test_\w+\.py)::(\w+)", text)
    assert len(tests) > 20
    for file, name in tests:
        assert f"def {name}(" in (root / "tests" / file).read_text(), f"{file}::{name}"
    source = root / "src"
    modules = {p.stem: ".".join(p.relative_to(source).with_suffix("").parts) for p in source.rglob("*.py")}
    named = [(m, n) for m, n in re.findall(r"`(\w+)\.(\w+)`", text) if m in modules]
    assert len(named) > 15
    for module, name in named:
        assert hasattr(importlib.import_module(modules[module]), name), f"{module}.{name}"
