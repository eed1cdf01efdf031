"""Properties that hold for any shape and order, against loops and explicit coordinates."""

import copy
import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.testing import assert_close

import evenstep
import oracle
from evenstep.math import moments
from helpers import UNGUARDED, every_optimizer, fit, randn

SEEDS = st.integers(0, 2**31)


@st.composite
def linears(draw):
    """A Linear and the shape of its input, with up to two dimensions of positions."""
    n, m = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    between = draw(st.lists(st.integers(1, 3), max_size=2))
    return partial(nn.Linear, n, m), (draw(st.integers(2, 4)), *between, n)


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
    return build, (draw(st.integers(2, 3)), channels, *size)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-3)], ids=str)
@given(case=linears() | convolutions(), seed=SEEDS)
def test_a_layer_of_any_geometry_descends_on_v(dtype, tolerance, case, seed):
    """Any rank, groups, stride, dilation, padding, transposed or not."""
    torch.manual_seed(seed)
    build, shape = case
    model = nn.Sequential(build()).to(dtype)
    reference = oracle.OnV(copy.deepcopy(model).double(), lr=0.5, damping=0.1)
    x = (0.5 + torch.randn(shape)).to(dtype)
    x[0] = x[1] + 1  # every input varies, so that whitening magnifies no rounding
    t = torch.randn(model(x).shape).to(dtype)
    fit(evenstep.WhitenedSGD(model, lr=0.5, damping=0.1, **UNGUARDED), model, [(x, t)])
    reference.step(x.double(), t.double())
    oracle.assert_same_parameters(reference, model.double(), tolerance)


@every_optimizer
@given(seed=SEEDS, conv=st.booleans())
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


@pytest.mark.parametrize("shapes", [[(64, 3)], [(16, 7, 3)], [(70, 3), (10, 3), (30, 3)]])
@pytest.mark.parametrize(
    ("dtype", "levels", "decay", "tolerance"),
    [
        (torch.float64, [*range(6)], 0.0, 1e-9),
        (torch.float64, [*range(6)], 0.95, 1e-9),
        (torch.float32, [1000] * 6, 0.5, 0.01),
        (torch.bfloat16, [1000] * 6, 0.5, 0.01),
        (torch.float32, [0, *[10_000] * 11], 0.1, 0.3),
    ],
    ids=str,
)
def test_streamed_moments_equal_the_papers_two_averages(dtype, levels, decay, tolerance, shapes):
    """The kept mean and variance are mx and mx2 − mx² of the paper's loop, weights normalized.

    Also in low precision far from zero, where E[x²] − E[x]² would be off by whole multiples of 1/8, and after a jump,
    since sums follow the running mean. Batches of all sizes weigh the same (§2.3).
    """
    layer = nn.Linear(3, 2).to(dtype)
    optimizer, truth = evenstep.WhitenedSGD(layer, lr=0.0, decay=decay), oracle.Moments(decay)
    for k, level in enumerate(levels):
        x = (level + torch.randn(shapes[k % len(shapes)])).to(dtype)
        layer(x).sum().backward()
        optimizer.step()
        truth.update(x.double().reshape(-1, 3))
    state, (mean, var) = optimizer.state[layer.weight], truth.mean_var()
    assert state["vx"].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert_close(state["mx"].double(), mean, rtol=min(tolerance, 1e-6), atol=0)
    assert_close(state["vx"].double(), var, rtol=tolerance, atol=0)


@given(st.lists(st.integers(1, 40), min_size=2, max_size=4), st.integers(1, 200), st.data())
def test_a_lattice_of_rows_is_within_its_bound(shape, limit, data):
    dim = data.draw(st.integers(1, len(shape) - 1))
    x = torch.arange(math.prod(shape), dtype=torch.float64).view(shape)
    thin = moments.thinned(x, dim, limit)
    rows, kept = x.numel() // shape[dim], thin.numel() // shape[dim]
    assert thin is x if rows <= limit else 1 <= kept <= limit
    assert thin.shape[dim] == shape[dim], "all inputs are kept"
    assert thin.untyped_storage().data_ptr() == x.untyped_storage().data_ptr(), "nothing is copied"
    assert set(thin.flatten().tolist()) <= set(x.flatten().tolist())


def test_moments_of_a_lattice_are_near_those_of_all_rows():
    x, layer = 3 + 2 * randn(128, 5, 24, 24), nn.Conv2d(5, 1, 1).double()
    states = []
    for rows in (None, 1024):
        optimizer = evenstep.WhitenedSGD(layer, lr=0.0, rows=rows)
        fit(optimizer, layer, [(x, 0.0)])
        states.append(optimizer.state[layer.weight])
        optimizer.detach()
    exact, thin = states
    assert (exact["mx"] - thin["mx"]).abs().max() < 5 * 2 / 32
    assert (exact["vx"] / thin["vx"] - 1).abs().max() < 5 * 0.05
    assert not torch.equal(exact["vx"], thin["vx"])
