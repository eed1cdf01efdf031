"""Layers called several times or not at all, and weights that several layers share: one update from pooled moments."""

import math

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import evenstep
import oracle
from helpers import PAPER, coverage_of, every_optimizer, moved_by, randn, tied, twice, weights


def met_by(first, x):
    """What the weight meets for an input, in both of its places."""
    return torch.cat([x, torch.tanh(first(x)) + 1]).detach()


@every_optimizer
def test_an_unused_layer_is_left_alone_and_keeps_its_moments(case):
    model = twice().double()
    optimizer = case.build(model)
    moved_by(optimizer, model.spare(model(randn(5, 3))).square().mean())
    kept = {k: v.clone() for k, v in optimizer.state[model.spare.weight].items()}
    moved = moved_by(optimizer, model(randn(5, 3)).square().mean())
    assert not moved[model.spare.weight].any() and not moved[model.spare.bias].any()
    assert moved[model.layer.weight].any()
    assert all(torch.equal(v, kept[k]) for k, v in optimizer.state[model.spare.weight].items())


SHARED = {  # a model, the layer that its input meets first, and what coverage() says of the weight
    "called twice": (twice, "layer", ""),
    "tied": (lambda: tied(nn.Linear(3, 3)), "one", "tied: one, two"),
    "tied with its bias": (lambda: tied(nn.Linear(3, 3), share_bias=True), "one", "tied: one, two"),
}


@pytest.mark.parametrize("trust", [None, 0.1])
@pytest.mark.parametrize("shared", SHARED)
def test_a_weight_used_twice_has_one_update_from_pooled_moments_with_the_sum_of_its_biases(shared, trust):
    """Rows of both uses are pooled, S is summed, the gradient is the sum: one step on v.

    The guard has one factor for the weight and its biases, the tightest.
    """
    build, name, reason = SHARED[shared]
    model, x, lr = build().double(), randn(6, 3), 5.0 if trust else 0.2
    first = model.get_submodule(name)
    met, used = met_by(first, x), first if shared == "called twice" else model
    (weight, *biases), (w, *b) = used.parameters(), weights(used)
    optimizer = evenstep.WhitenedSGD(model, lr=lr, **PAPER | {"trust": trust})
    assert coverage_of(optimizer)[f"{name}.weight"] == ("whitened", reason)
    moved = moved_by(optimizer, oracle.log_cosh(model(x), x).mean())
    assert optimizer.state[weight]["sharing"] == 2
    dw, db = oracle.natural_gradient(weight.grad, [bias.grad for bias in biases], met, shared=2)
    dw, db = -lr * dw, [-lr * d for d in db]
    factor = torch.ones(3).double()
    if trust:
        mean, var = oracle.mean_var(met)
        factor = oracle.trust_factors(first, w, b, dw, db, mean, var, var, trust)
        assert (factor < 1).all()
    assert_close(moved[weight], factor.view(-1, 1) * dw)
    for bias, d in zip(biases, db, strict=True):
        assert_close(moved[bias], factor * d)


def test_a_tied_weight_with_a_bias_at_one_place_only_takes_the_biasless_form():
    """No bias goes with every use of the weight, so none can be its x_0 = 1; the one there is moves alone."""
    model, x = tied(nn.Linear(3, 3, bias=False)).double(), randn(6, 3)
    met, (weight, bias) = met_by(model.one, x), model.parameters()
    optimizer = evenstep.WhitenedSGD(model, lr=0.2, **PAPER)
    assert [how for how, _ in coverage_of(optimizer).values()] == ["whitened", "fan-in"]
    moved = moved_by(optimizer, model(x).square().mean())
    assert_close(moved[weight], -0.2 * oracle.natural_gradient(weight.grad, [], met, shared=2)[0])
    assert_close(moved[bias], -0.2 / math.sqrt(3 * 2) * bias.grad)


@pytest.mark.parametrize("block", ["network", "unit"])
def test_blocks_of_tied_weights_have_length_eta(block):
    """A unit's block is its weights and all its biases, each counted once (eqs. 9 and 10)."""
    model = tied(nn.Linear(3, 3)).double()
    optimizer = evenstep.BlockNaturalSGD(model, lr=0.1, block=block, bounded=False)
    moved = moved_by(optimizer, model(randn(5, 3)).square().mean())
    units = torch.cat([moved[model.one.weight], *(moved[m.bias].unsqueeze(1) for m in (model.one, model.two))], 1)
    lengths = units.norm().view(1) if block == "network" else units.norm(dim=1)
    assert_close(lengths, 0.1 * torch.ones_like(lengths))


def test_tied_convolutions_may_differ_in_stride():
    """S is the sum of the output positions of both places."""
    model = nn.Sequential(nn.Conv1d(2, 2, 3), nn.Conv1d(2, 2, 3, stride=2)).double()
    model[1].weight = model[0].weight
    moved = moved_by(evenstep.FanInSGD(model, lr=1.0), model(randn(4, 2, 9)).square().mean())
    assert_close(moved[model[0].weight], -model[0].weight.grad / math.sqrt(2 * 3 * (7 + 3)))


@pytest.mark.parametrize("order", ["embedding, one", "one, embedding", "one, embedding, two"])
def test_a_weight_shared_by_layers_of_different_kinds_names_them(order):
    """coverage() lists it under the first of them, whichever that is."""
    model, weight = nn.Module(), nn.Parameter(torch.randn(5, 3))
    for name in order.split(", "):
        model.add_module(name, nn.Embedding(5, 3) if name == "embedding" else nn.Linear(3, 5, bias=False))
        model.get_submodule(name).weight = weight
    owners = [f"{type(module).__name__} '{name}'" for name, module in model.named_children()]
    model.other = nn.Linear(3, 3)
    row = evenstep.WhitenedSGD(model).coverage()[0]
    kind = type(next(model.children())).__name__
    assert row == (f"{order.split(', ')[0]}.weight", kind, "plain", f"shared by {', '.join(owners)}")
