"""Properties that hold for any shape, order, split and layout, against loops and explicit coordinates."""

import copy
import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.func import vmap
from torch.testing import assert_close

import evenstep
import oracle
from cases import LAYERS
from evenstep.math import change_of_variables as coordinates
from evenstep.math import constants, frame, guards, moments, stepsize
from helpers import UNGUARDED, assert_same, every_optimizer, fit, randn


def seeds():
    return st.integers(0, 2**31)


# Random layers against loops


@st.composite
def linears(draw):
    """A Linear and the shape of its input, with up to two dimensions of positions."""
    n, m = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    between = draw(st.lists(st.integers(1, 3), max_size=2))
    return partial(nn.Linear, n, m), (draw(st.integers(1, 4)), *between, n)


@st.composite
def convolutions(draw):
    """A convolution of one to three dimensions, transposed or not, and the shape of an input it accepts."""
    rank = draw(st.integers(1, 3))
    transposed = draw(st.booleans())
    groups = draw(st.integers(1, 3))
    channels, outputs = groups * draw(st.integers(1, 2)), groups * draw(st.integers(1, 2))
    kernel, stride, dilation = (tuple(draw(st.integers(1, top)) for _ in range(rank)) for top in (3, 3, 2))
    reach = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
    padding = tuple(draw(st.integers(0, min(2, r))) for r in reach)
    size = [draw(st.integers(r + 1, r + 3)) if not transposed else draw(st.integers(2, 4)) for r in reach]
    cls = getattr(nn, f"Conv{'Transpose' if transposed else ''}{rank}d")
    build = partial(cls, channels, outputs, kernel, stride, padding, dilation=dilation, groups=groups)
    if transposed:
        # torch wants an output_padding below stride or dilation, and an output of at least one position
        extra = [draw(st.integers(0, max(s, d) - 1)) for s, d in zip(stride, dilation, strict=True)]
        build = partial(build, output_padding=tuple(extra))
    return build, (draw(st.integers(1, 3)), channels, *size)


def step_and_truth(build, shape, dtype):
    """A first step of WhitenedSGD from zero weights on a linear loss, the truth by loops, and the size of rounding."""
    layer = build().to(dtype)
    with torch.no_grad():
        layer.weight.zero_()
        layer.bias.zero_()
    optimizer = evenstep.WhitenedSGD(layer, lr=0.5, damping=0.1, **UNGUARDED)
    x = (0.5 + torch.randn(shape)).to(dtype)
    y = layer(x)
    g = torch.randn(y.shape).to(dtype)
    ((y.double() * g.double()).sum() / len(x)).backward()
    optimizer.step()
    x, g = x.double(), g.double()
    mean, var = oracle.mean_var(oracle.rows(layer, x, y))
    spread = oracle.damped(var, 0.1)
    beta = torch.ones(oracle.units(layer)).double() * (oracle.fan_in(layer) * oracle.sharing(layer, x, y)) ** -0.25
    # an input that never varies in a layer where none does: α² = 0
    alpha = torch.where(spread > 0, spread, math.inf).rsqrt()
    c = oracle.Constants(mean, alpha, beta)
    truth = oracle.quasi_diagonal(layer, *oracle.naive_gradients(layer, x, g, mean), c)
    sizes = oracle.naive_gradients(layer, x.abs(), g.abs(), -mean.abs())
    scale = oracle.quasi_diagonal(layer, *sizes, c._replace(mu=-mean.abs()))
    return layer, [-0.5 * t for t in truth], [0.5 * t for t in scale]


def assert_within_rounding(layer, truth, scale, dtype):
    """Errors below `dtype`'s rounding, measured on the same sums without their signs."""
    factor = {torch.float64: 1e4, torch.float32: 1e3, torch.bfloat16: 4}[dtype]
    for p, expected, size in zip((layer.weight, layer.bias), truth, scale, strict=True):
        error = (p.detach().double() - expected).abs()
        assert (error <= factor * torch.finfo(dtype).eps * size + 1e-30).all(), (error / size).max()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@given(case=linears(), seed=seeds())
def test_any_linear_follows_the_loop(dtype, case, seed):
    torch.manual_seed(seed)
    assert_within_rounding(*step_and_truth(*case, dtype), dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@given(case=convolutions(), seed=seeds())
def test_any_convolution_follows_the_loop(dtype, case, seed):
    """Any rank, groups, stride, dilation, padding, transposed or not: sums over examples, positions, offsets."""
    torch.manual_seed(seed)
    assert_within_rounding(*step_and_truth(*case, dtype), dtype)


# Order


@every_optimizer
@given(seed=seeds(), conv=st.booleans())
@settings(max_examples=5)
def test_permuting_inputs_or_units_permutes_the_update(case, seed, conv):
    torch.manual_seed(seed)
    layer = (nn.Conv2d(4, 3, 2) if conv else nn.Linear(4, 3)).double()
    at = (5, 4, 3, 3) if conv else (5, 4)
    to = (5, 3, 2, 2) if conv else (5, 3)
    batches = [(randn(*at) + k, randn(*to)) for k in range(3)]
    inputs, units = torch.randperm(4), torch.randperm(3)
    twin = copy.deepcopy(layer)
    with torch.no_grad():
        twin.weight.copy_(layer.weight[units][:, inputs])
        twin.bias.copy_(layer.bias[units])
    fit(case.build(layer), layer, batches)
    fit(case.build(twin), twin, [(x[:, inputs], t[:, units]) for x, t in batches])
    assert_close(twin.weight, layer.weight[units][:, inputs], rtol=1e-9, atol=1e-10)
    assert_close(twin.bias, layer.bias[units], rtol=1e-9, atol=1e-10)


def mixed_network():
    """Every kind of block: convolutions, a tensor without layer, linear layers with and without bias."""
    return nn.Sequential(
        nn.Conv2d(2, 4, 2), nn.Tanh(), nn.ConvTranspose2d(4, 2, 2), nn.LayerNorm(3), nn.Conv2d(2, 4, 2, groups=2),
        nn.Flatten(), nn.Linear(16, 4, bias=False), nn.Tanh(), nn.Linear(4, 3),
    ).double()  # fmt: skip


@every_optimizer
@given(seed=seeds(), sizes=st.lists(st.integers(1, 4), min_size=2, max_size=4))
@settings(max_examples=5)
def test_micro_batches_of_any_sizes_give_the_update_of_the_whole(case, seed, sizes):
    """Each micro-batch's loss is divided by the size of the whole batch."""
    torch.manual_seed(seed)
    total = sum(sizes)
    model = mixed_network()
    twin = copy.deepcopy(model)
    batches = [(randn(total, 2, 3, 3) + k, randn(total, 3)) for k in range(3)]
    fit(case.build(model), model, batches)
    optimizer = case.build(twin)
    for x, t in batches:
        optimizer.zero_grad()
        for part, target in zip(x.split(sizes), t.split(sizes), strict=True):
            (oracle.log_cosh(twin(part), target).sum() / total).backward()
        optimizer.step()
    assert_same(model, twin, rtol=1e-7, atol=1e-8)  # AdamW divides gradients that are rounding by their own size


@every_optimizer
def test_channels_last_equals_contiguous(case):
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Tanh(), nn.ConvTranspose2d(4, 2, 2, groups=2)).double()
    twin = copy.deepcopy(model).to(memory_format=torch.channels_last)
    batches = [(randn(4, 3, 4, 4) + k, randn(4, 2, 5, 5)) for k in range(3)]
    fit(case.build(model), model, batches)
    wide = [(x.to(memory_format=torch.channels_last), t) for x, t in batches]
    fit(case.build(twin), twin, wide)
    assert_same(model, twin, rtol=1e-9, atol=1e-11)
    assert twin[0].weight.is_contiguous(memory_format=torch.channels_last)


# Guards


@given(
    seed=seeds(),
    name=st.sampled_from(["linear", "linear-biasless", "padded-zeros", "grouped", "transposed-grouped"]),
    shock=st.sampled_from([1.0, 0.03, 30.0]),
)
@settings(max_examples=30)
def test_guards_follow_their_definition(seed, name, shock):
    """Fresh-max and trust radius together, through WhitenedSGD, against loops over inputs and units."""
    torch.manual_seed(seed)
    case = LAYERS[name]
    model = nn.Sequential(case.layer(), nn.Tanh())
    inputs = [case.inputs(4), case.inputs(4), shock * case.inputs(4)]
    batches = [(x, randn(*model(x).shape)) for x in inputs]
    keywords = {"lr": 0.5, "damping": 0.1, "fresh_max": 2.0, "trust": 0.1, "momentum": 0.5}
    reference = oracle.OnV(model, **keywords)
    fit(evenstep.WhitenedSGD(model, **keywords), model, batches)
    for x, t in batches:
        reference.step(x, t)
    oracle.assert_same_parameters(reference, model, 1e-8)


def test_units_that_start_at_zero_are_measured_by_the_floor():
    """s₀ stands in for a length of 0, so that a unit at zero can leave it."""
    model = nn.Sequential(nn.Linear(4, 3)).double()
    with torch.no_grad():
        model[0].weight[:2].zero_()
        model[0].bias[:2].zero_()
    reference = oracle.OnV(model, lr=0.5, trust=0.1)
    batches = [(1 + randn(6, 4), randn(6, 3)) for _ in range(2)]
    fit(evenstep.WhitenedSGD(model, lr=0.5, trust=0.1, damping=0.0, fresh_max=None), model, batches)
    first, _ = (reference.step(x, t)[0] for x, t in batches)
    assert (first[:2] < 0.01).all() and model[0].weight[:2].abs().min() > 0
    oracle.assert_same_parameters(reference, model)


def test_guards_that_do_not_fire_change_nothing():
    """With loose guards the steps are those without guards, bit for bit."""
    model = mixed_network()
    twin = copy.deepcopy(model)
    batches = [(randn(8, 2, 3, 3), randn(8, 3)) for _ in range(3)]
    fit(evenstep.WhitenedSGD(model, lr=0.1, fresh_max=1e6, trust=1e6), model, batches)
    fit(evenstep.WhitenedSGD(twin, lr=0.1, **UNGUARDED), twin, batches)
    assert_same(model, twin)


def test_trust_radius_bounds_the_relative_step_after_a_shock():
    """A unit rescaled by κ (function unchanged) moves the layer after it by at most c of every unit's length."""
    first, second = nn.Linear(4, 6).double(), nn.Linear(6, 3).double()
    model = nn.Sequential(first, nn.ReLU(), second)
    optimizer = evenstep.WhitenedSGD(model, lr=0.5, trust=0.1, fresh_max=None)
    fit(optimizer, model, [(randn(16, 4), randn(16, 3)) for _ in range(5)])
    x, t = randn(16, 4), randn(16, 3)
    with torch.no_grad():
        before = model(x)
        first.weight[2] *= 100
        first.bias[2] *= 100
        second.weight[:, 2] /= 100
        assert_close(model(x), before)
    state, old = optimizer.state[second.weight], copy.deepcopy(second)
    mu, var = state["mx"].clone(), state["vx"].clone()
    hidden = torch.relu(first(x)).detach()
    fit(optimizer, model, [(x, t)])
    floor = 0.1 * var.mean()
    fresh = torch.maximum(var, ((hidden - mu) ** 2).mean(0)) + floor
    dw, db = (second.weight - old.weight).detach(), (second.bias - old.bias).detach()
    w, b = old.weight.detach(), old.bias.detach()
    moved = ((db + dw @ mu) ** 2 + dw**2 @ fresh).sqrt()
    length = ((b + w @ mu) ** 2 + w**2 @ (var + floor)).sqrt()
    assert (moved <= 0.1 * length * (1 + 1e-9)).all() and (moved > 0.099 * length).any()


# Moments


@given(seed=seeds(), decay=st.sampled_from([0.0, 0.5, 0.95]), batches=st.integers(1, 6))
def test_streamed_moments_equal_the_papers_two_averages(seed, decay, batches):
    """In float64 the kept mean and variance are mx and mx2 − mx² of the paper's loop, weights normalized."""
    torch.manual_seed(seed)
    running = moments.Running(torch.zeros(3).double(), torch.zeros(3).double(), torch.zeros(()).double())
    truth, centre = oracle.Moments(decay), randn(3)
    for k in range(batches):
        x = randn(torch.randint(1, 5, ()).item(), 3) + k
        truth.update(x)
        sums = moments.Sums(torch.tensor(float(len(x))).double(), *moments.sum_about(x, centre, dim=1))
        running = frame.running_after(running, sums, centre, torch.tensor(True), decay=decay)
    mean, var = truth.mean_var()
    assert_close(running.mx, mean, rtol=1e-9, atol=1e-9)
    assert_close(running.vx, var, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shapes", [[(64, 3)] * 6, [(16, 7, 3)] * 6, [(70, 3), (10, 3), (30, 3)]])
def test_huge_mean_over_tiny_variance(shapes, dtype):
    """Mean 1000 and variance 1 in low precision: hooks and running average keep the variance to a percent.

    E[x²] − E[x]² would not: in float32 it is off by whole multiples of 1/8 here. Batches weigh the same in the running
    average whatever their size (§2.3).
    """
    layer = nn.Linear(3, 2).to(dtype)
    optimizer, truth = evenstep.WhitenedSGD(layer, lr=0.0, decay=0.5), oracle.Moments(0.5)
    for shape in shapes:
        x = (1000 + torch.randn(shape)).to(dtype)
        layer(x).sum().backward()
        optimizer.step()
        truth.update(x.double().reshape(-1, 3))
    mean, var = truth.mean_var()
    state = optimizer.state[layer.weight]
    assert state["vx"].dtype == torch.float32
    assert_close(state["mx"].double(), mean, rtol=1e-6, atol=0)
    assert_close(state["vx"].double(), var, rtol=0.01, atol=0)


def test_huge_mean_after_a_small_one():
    """Sums follow the running mean: inputs that drift from 0 to 10,000 keep their variance in float32."""
    layer = nn.Linear(3, 2)
    optimizer = evenstep.WhitenedSGD(layer, lr=0.0, decay=0.1)
    for k in range(12):
        x = (10_000 if k else 0) + torch.randn(64, 3)
        layer(x).sum().backward()
        optimizer.step()
    # 12 batches after the jump its weight, 0.1 to the power of 11, is nothing
    assert_close(optimizer.state[layer.weight]["vx"].double(), x.double().var(0), rtol=0.3, atol=0)


# vmap


def as_loop(f, count):
    """What `vmap(f)` should give, by a Python loop over the first dimension."""

    def looped(*args):
        results = [f(*(a[k] for a in args)) for k in range(count)]
        if isinstance(results[0], torch.Tensor):
            return torch.stack(results)
        return tuple(torch.stack(column) for column in zip(*results, strict=True))

    return looped


def flat(value):
    """A function's result as a flat tuple of tensors, nested tuples opened and None left out."""
    if isinstance(value, torch.Tensor):
        return (value,)
    return tuple(t for part in value if part is not None for t in flat(part))


G, M, N, K = 2, 3, 4, 5  # groups, units, inputs, kernel


def layer_update(weight, bias, weight_grad, bias_grad, rows, mx, vx, mass, lr):
    """Everything the core does for one layer in one step, each piece once."""
    running, centre = moments.Running(mx, vx, mass), mx + 0.1
    count = torch.tensor(float(rows.shape[0])).double()
    first, second = moments.sum_about(rows.flatten(1), centre.flatten(), dim=1)
    sums = moments.Sums(count, first.view_as(mx), second.view_as(mx))
    beta2 = constants.geometry_beta2(N * K, torch.tensor(9.0).double())
    usable = moments.usable(sums)
    found = frame.whitened_frame(running, sums, centre, usable, damping=0.1, fresh_max=1.0, steady=constants.STEADY)
    c = constants.Constants(found.mu, found.alpha**2, beta2)
    on_v = coordinates.gradient_to_v(weight_grad, bias_grad, c)
    steps = coordinates.step_to_w(-lr * on_v[0], -lr * on_v[1], c)
    unit2 = guards.squared_length(weight, bias, found.mu, found.spread)
    relative2 = guards.relative(unit2, guards.squared_length(*steps, found.mu, found.fresh), 1e-3)
    held = guards.trust_factor(unit2, relative2 * unit2, 0.1, 1e-3, guards.typical(relative2))
    alone = coordinates.step_to_w_biasless(coordinates.gradient_to_v_biasless(weight_grad, c), c)
    after = frame.running_after(running, sums, centre, usable, decay=0.9)
    return flat((found, steps, unit2, held, alone, after))


CORE = {
    "layer update": (
        layer_update,
        lambda: (randn(G, M, N, K), randn(G, M), randn(G, M, N, K), randn(G, M), randn(7, G, N), randn(G, N),
                 randn(G, N).exp(), torch.rand(()).double(), torch.rand(()).double()),
    ),
    "add zeros": (
        lambda f, s, z, c: flat(moments.add_zeros(moments.Sums(torch.tensor(3.0).double(), f, s), z, c)),
        lambda: (randn(N), randn(N), torch.rand(()).double(), randn(N)),
    ),
    "canonical": (
        lambda x, v, g: flat(constants.Constants(x, constants.inverse(v), constants.canonical_beta2(g, 0.1))),
        lambda: (randn(G, N), randn(G, N).exp(), randn(G, M).exp()),
    ),
    "canonical_mg2": (
        lambda g, b: flat([constants.canonical_mg2(g, b, r) for r in ("mean", "sum")]),
        lambda: (randn(M).exp(), torch.rand(()).double() * 9),
    ),
    "eq. 9": (lambda g, n: stepsize.trust_step(g, n, 0.3), lambda: (randn(M, N).exp(), randn(M, N).exp())),
    "eq. 10": (lambda g, n: stepsize.trust_step(g, n, 0.3, dim=1), lambda: (randn(M, N).exp(), randn(M, N).exp())),
    "eq. 11": (lambda g, r: stepsize.normalized(g, r, 1e-3), lambda: (randn(M, N), randn(M, N).exp())),
    "unit square": (stepsize.unit_square, lambda: (randn(G, M, N, K), randn(1, G, M))),
}  # fmt: skip


@pytest.mark.parametrize("name", CORE)
def test_core_is_the_same_under_vmap(name):
    """Many layers, or many stepsizes, at once: as a Python loop over them."""
    f, draw = CORE[name]
    args = [torch.stack(column) for column in zip(*(draw() for _ in range(3)), strict=True)]
    assert_close(flat(vmap(f)(*args)), flat(as_loop(f, 3)(*args)))


# rows


@given(
    st.lists(st.integers(1, 40), min_size=2, max_size=4),
    st.integers(1, 200),
    st.data(),
)
def test_a_lattice_of_rows_is_within_its_bound(shape, limit, data):
    dim = data.draw(st.integers(1, len(shape) - 1))
    x = torch.arange(math.prod(shape), dtype=torch.float64).view(shape)
    thin = moments.thinned(x, dim, limit)
    rows, kept = x.numel() // shape[dim], thin.numel() // shape[dim]
    assert 1 <= kept <= limit or kept == rows <= limit
    assert thin.shape[dim] == shape[dim], "all inputs are kept"
    assert thin.untyped_storage().data_ptr() == x.untyped_storage().data_ptr(), "nothing is copied"
    if rows <= limit:
        assert thin is x
    assert set(thin.flatten().tolist()) <= set(x.flatten().tolist())


def test_a_lattice_keeps_examples_before_positions():
    x = torch.zeros(64, 3, 32, 32)
    assert moments.thinned(x, 1, 1024).shape[0] == 64
    assert moments.thinned(x, 1, 64).shape == (64, 3, 1, 1)
    assert moments.thinned(x, 1, 16).shape == (16, 3, 1, 1)


def test_moments_of_a_lattice_are_near_those_of_all_rows():
    x = 3 + 2 * torch.randn(128, 5, 24, 24, dtype=torch.float64)
    found = []
    for limit in (None, 1024):
        thin = moments.thinned(x, 1, limit)
        sums = moments.Sums(torch.tensor(thin.numel() / 5), *moments.sum_about(thin, torch.zeros(5).double(), 1))
        found.append(moments.batch_moments(sums, torch.zeros(5).double()))
    (mean, var), (mean_thin, var_thin) = found
    assert (mean - mean_thin).abs().max() < 5 * 2 / 32 and (var / var_thin - 1).abs().max() < 5 * 0.05
