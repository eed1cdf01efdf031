"""§2, §4 and App. D of the paper: each claim that needs no long training, against something slower.

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
from torch.testing import assert_close

import evenstep
import oracle
from cases import LAYERS
from evenstep.math import change_of_variables as coordinates
from helpers import PAPER, UNGUARDED, assert_follows, moved_by, randn
from rules import deep_network, drifting

HYPERPARAMETERS = {
    "undamped": {},
    "damped": {"damping": 0.2},
    "momentum": {"damping": 0.2, "momentum": 0.8},
    "guarded": {"damping": 0.1, "fresh_max": 4.0, "trust": 0.1},
}


@pytest.mark.parametrize("bias", ["trained", "frozen"])
@pytest.mark.parametrize("keywords", HYPERPARAMETERS.values(), ids=HYPERPARAMETERS)
@pytest.mark.parametrize("name", LAYERS)
def test_eq3_is_gradient_descent_on_v(name, keywords, bias):
    """WhitenedSGD is autograd's gradient descent on explicit v, while the constants move."""
    model = nn.Sequential(LAYERS[name].layer(), nn.Tanh())  # something nonlinear after it
    if model[0].bias is not None:
        model[0].bias.requires_grad_(bias == "trained")
    inputs = [LAYERS[name].inputs() * (1 + 0.3 * k) for k in range(4)]
    batches = [(x, randn(*model(x).shape)) for x in inputs]
    reference = oracle.OnV(model, lr=0.3, decay=0.6, **keywords)
    assert_follows(reference, evenstep.WhitenedSGD(model, lr=0.3, decay=0.6, **PAPER | keywords), model, batches)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("coordinates", ["whitened", "canonical", "fan-in"])
def test_a_deep_network_descends_on_v_of_all_layers_at_once(coordinates, momentum):
    model, batches = deep_network(), drifting(4)
    lr = 0.002 if coordinates == "canonical" else 0.05
    reference = oracle.OnV(model, lr=lr, momentum=momentum, coordinates=coordinates, damping=0.1)
    cls = {"whitened": evenstep.WhitenedSGD, "canonical": evenstep.CanonicalSGD, "fan-in": evenstep.FanInSGD}
    keywords = {"trust": None} if coordinates == "fan-in" else {**UNGUARDED, "damping": 0.1}
    assert_follows(reference, cls[coordinates](model, lr=lr, momentum=momentum, **keywords), model, batches)


def test_constants_move_and_the_forward_pass_stays():
    """Bit for bit the outputs and gradients of the network without the optimizer, after steps of length 0 (§4.1)."""
    model = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(48, 4)).double()
    untouched, moments = copy.deepcopy(model), []
    optimizer = evenstep.WhitenedSGD(model, lr=0.0)
    for k in range(3):
        x = k + randn(4, 2, 4, 4)
        assert torch.equal(model(x), untouched(x))
        for network in (model, untouched):
            network.zero_grad()
            network(x).square().sum().backward()
        assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), untouched.parameters(), strict=True))
        optimizer.step()
        moments.append(optimizer.state[model[0].weight]["mx"].clone())
    assert (moments[0] - moments[2]).abs().min() > 0.01


def test_update_is_the_block_matrix_times_the_gradient():
    """It inverts eq. 4's surrogate curvature. Its corner is 1 + Σ α_i² μ_i²; the printed one gives another step."""
    layer, x = nn.Linear(4, 3).double(), 1 + randn(9, 4)
    moved = moved_by(evenstep.WhitenedSGD(layer, lr=1.0, **PAPER), layer(x).sin().sum(1).mean())
    step, gradient = (
        torch.cat([bias.unsqueeze(1), weight], 1)
        for weight, bias in (moved.values(), (p.grad for p in layer.parameters()))
    )
    mean, var = oracle.mean_var(x)
    matrix = oracle.block_matrix(mean, 1 / var, 4**-0.5)
    assert_close(matrix @ oracle.surrogate(mean, var) / 4**-0.5, torch.eye(5).double())
    assert_close(step, -gradient @ matrix)
    matrix[0, 0] = 4**-0.5 * (1 + (mean / var).sum())
    assert (step + gradient @ matrix).abs().max() > 1e-3


def test_without_a_bias_the_update_inverts_the_block_without_its_bias_row():
    """α²(G − μ b̂) with the implied b̂ is the dense inverse times the gradient."""
    layer, x = nn.Linear(5, 3, bias=False).double(), 1 + randn(9, 5)
    moved = moved_by(evenstep.WhitenedSGD(layer, lr=1.0, **PAPER), layer(x).sin().sum(1).mean())[layer.weight]
    grad, (mu, var) = layer.weight.grad, oracle.mean_var(x)
    assert_close(moved, -oracle.natural_gradient(grad, [], x)[0])
    implied = (grad * mu / var).sum(1) / (1 + (mu * mu / var).sum())
    assert_close(moved, -(5**-0.5) * (grad - mu * implied.view(-1, 1)) / var)


@pytest.mark.parametrize("decoupled", [True, False])
def test_l2_in_the_loss_moves_the_bias_through_eq3_and_decoupled_decay_does_not(decoupled):
    layer, x = nn.Linear(4, 3).double(), 2 + randn(6, 4)
    (w, b), decay = layer.parameters(), {"weight_decay": 0.3} if decoupled else {}
    optimizer = evenstep.WhitenedSGD([{"params": [w], **decay}, {"params": [b]}], lr=0.1, model=layer, **PAPER)
    before, (mean, var) = w.detach().clone(), oracle.mean_var(x)
    moved = moved_by(optimizer, 0 * layer(x).sum() + (0 if decoupled else 0.5 * 0.3 * w.square().sum()))
    expected = -0.1 * 0.3 * before / (1 if decoupled else var * math.sqrt(4))
    assert_close(moved[w], expected)
    assert_close(moved[b], torch.zeros(3).double() if decoupled else -expected @ mean)


def update(x, g, mu, alpha2, beta2):
    """δw and δw_0 of eq. 3 for a batch, x [B, n] and g [B, m]."""
    c = coordinates.Scales(mu, alpha2.sqrt(), beta=beta2.sqrt())
    step = coordinates.scaled(coordinates.weights_to_v(g.T @ x / len(x), coordinates.per_unit(g.mean(0)), c), c)
    return step, beta2 * g.mean(0) - coordinates.response(step, mu)


def test_own_mean_biases_the_step_as_app_d_says():
    """Exactly so over all equally likely batches of 3 out of 4 skewed and correlated examples.

    The bias of δw_0j for B independent examples is Σ β²α² [μ cov(x, g)/B − (1−1/B)/B · E[(x−μ)²(g − E g)]].
    """
    size, x = 3, randn(4, 2).exp()
    g = torch.sin(x @ randn(2, 2)) + 0.5
    mean, alpha2, beta2 = x.mean(0), 1 / x.var(0, correction=0), 1 / (g * g).mean(0)
    index = torch.tensor(list(itertools.product(range(4), repeat=size)))
    bx, bg = x[index], g[index]
    own = bx.mean(1)
    many = torch.func.vmap(update, in_dims=(0, 0, 0, None, None))
    dw_own, db_own = (t.mean(0) for t in many(bx, bg, own, alpha2, beta2))
    dw, db = (t.mean(0) for t in many(bx, bg, mean.expand_as(own), alpha2, beta2))
    dx, dg, bias = x - mean, (g - g.mean(0)) / len(x), db_own - db
    truth = mean.unsqueeze(1) * (dx.T @ dg) / size - (1 - 1 / size) / size * (dx**2).T @ dg
    assert_close(bias, beta2 * (alpha2 @ truth))
    assert_close(dw_own, (1 - 1 / size) * dw)
    assert bias.abs().min() > 1e-3


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


def test_docs_name_functions_and_tests_that_exist():
    """Every `module.name` and `test_file.py::test` that docs/paper.md mentions is there."""
    root = Path(__file__).parent.parent
    text = (root / "docs" / "paper.md").read_text()
    tests = re.findall(r"(test_\w+\.py)::(\w+)", text)
    for file, name in tests:
        assert f"def {name}(" in (root / "tests" / file).read_text(), f"{file}::{name}"
    source = root / "src"
    modules = {p.stem: ".".join(p.relative_to(source).with_suffix("").parts) for p in source.rglob("*.py")}
    named = [(m, n) for m, n in re.findall(r"`(\w+)\.(\w+)`", text) if m in modules]
    assert tests and named
    for module, name in named:
        assert hasattr(importlib.import_module(modules[module]), name), f"{module}.{name}"
