"""The two guards: what they bound, that they leave quiet training alone, and that they see no ReLU rescaling."""

import copy
import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional
from torch.testing import assert_close

import evenstep
import oracle
from cases import LAYERS, OPTIMIZERS
from helpers import UNGUARDED, assert_follows, classify, descend, images, randn, small_network, still, twins, weights

GUARDED = {name: OPTIMIZERS[name] for name in ("whitened", "canonical", "unitstep", "whitened-adamw")}
every_guarded = pytest.mark.parametrize("case", GUARDED.values(), ids=GUARDED)


@pytest.mark.parametrize(("cls", "lr"), [(evenstep.WhitenedSGD, 0.5), (evenstep.CanonicalSGD, 0.1)])
@given(
    seed=st.integers(0, 2**31),
    name=st.sampled_from(["linear", "linear-biasless", "padded-zeros", "grouped", "transposed-grouped"]),
    shock=st.sampled_from([1.0, 0.03, 30.0]),
    frozen=st.booleans(),
)
def test_guards_follow_their_definition(cls, lr, seed, name, shock, frozen):
    """Both, with stale moments, against loops over inputs and units; a frozen bias is part of its unit.

    For rules of torch and UnitStep see test_whitened.py and test_even_step.py.
    """
    torch.manual_seed(seed)
    case = LAYERS[name]
    model = nn.Sequential(case.layer(), nn.Tanh())
    if frozen and model[0].bias is not None:
        model[0].bias.requires_grad_(False)
    inputs = [case.inputs(4), case.inputs(4), shock * case.inputs(4)]
    batches = [(x, randn(*model(x).shape)) for x in inputs]
    keywords = {"lr": lr, "damping": 0.1, "fresh_max": 2.0, "trust": 0.1, "momentum": 0.5}
    coordinates = "canonical" if cls is evenstep.CanonicalSGD else "whitened"
    reference = oracle.OnV(model, coordinates=coordinates, **keywords)
    assert_follows(reference, cls(model, **keywords), model, batches, 1e-8)


def test_units_that_start_at_zero_are_measured_by_the_floor():
    """s₀ stands in for a length of 0, so that a unit at zero can leave it."""
    model = nn.Sequential(nn.Linear(4, 3)).double()
    with torch.no_grad():
        model[0].weight[:2].zero_()
        model[0].bias[:2].zero_()
    reference = oracle.OnV(model, lr=0.5, trust=0.1)
    batches = [(1 + randn(6, 4), randn(6, 3)) for _ in range(2)]
    optimizer = evenstep.WhitenedSGD(model, lr=0.5, trust=0.1, damping=0.0, fresh_max=None)
    assert assert_follows(reference, optimizer, model, batches) < 0.01
    assert model[0].weight[:2].abs().min() > 0


@every_guarded
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_step_on_which_no_guard_fired_is_bit_equal_to_one_without_guards(case, dtype):
    """Every step is made twice from the same state; the data drift, and one batch in four is a shock."""
    model, twin = twins(lambda: small_network().to(dtype))
    lr = case.keywords["lr"] / 10
    guarded, bare = case.build(model, lr=lr), case.build(twin, lr=lr, **UNGUARDED)
    work, quiet, loud = 0.0, 0, 0
    for k, (x, y) in enumerate(images(64) for _ in range(32)):
        twin.load_state_dict(model.state_dict())
        bare.load_state_dict(copy.deepcopy(guarded.state_dict()))
        bare.param_groups[0].update(UNGUARDED)
        for optimizer, m in ((guarded, model), (bare, twin)):
            classify(optimizer, m, [((30 if k % 4 == 3 else 1 + 0.02 * k) * x.to(dtype), y)])
        before, work = work, (k + 1) * sum(raised + held for raised, held in guarded.fired().values())
        fired, moved_alike = work > before + 1e-6, all(still(model, weights(twin)))
        assert moved_alike or fired
        quiet, loud = quiet + (not fired), loud + (not moved_alike)
    assert quiet >= 5 and loud >= 5


@pytest.mark.parametrize(
    ("name", "lr"), [("whitened", 0.05), ("unitstep", 1e-3), ("whitened-adamw", 1e-4), ("canonical", 1e-4)]
)
def test_on_quiet_data_each_guard_fires_on_less_than_one_percent(name, lr):
    """Independent inputs, small stepsizes; of all inputs, and of all units, over all layers and steps."""
    widths = [20, 100, 100, 10]
    model = nn.Sequential(*[m for n, k in itertools.pairwise(widths) for m in (nn.Linear(n, k), nn.ReLU())])
    optimizer, teacher = GUARDED[name].build(model[:-1], lr=lr), torch.randn(20, 10)
    inputs = [0.5 + torch.randn(64, 20) for _ in range(200)]
    classify(optimizer, model[:-1], [(x, (x @ teacher).argmax(1)) for x in inputs])
    shares = list(optimizer.fired().values())
    raised = sum(share * n for (share, _), n in zip(shares, widths[:-1], strict=True)) / sum(widths[:-1])
    held = sum(share * n for (_, share), n in zip(shares, widths[1:], strict=True)) / sum(widths[1:])
    assert raised < 0.01 and held < 0.01


@every_guarded
def test_counters_tell_what_fired(case):
    """A grown input raises variances, a tiny radius holds every unit, and each is counted without the other."""
    data = [images(64) for _ in range(4)]
    for on, keywords in ((0, {"fresh_max": 4.0, "trust": None}), (1, {"fresh_max": None, "trust": 1e-6})):
        model = small_network()
        optimizer = case.build(model, **keywords)
        classify(optimizer, model, [*data[:3], (30 * data[3][0], data[3][1])])
        share = optimizer.fired()["0"]
        assert share[1 - on] == 0
        assert_close(share[on], 0.25 if on == 0 else 1.0)


@pytest.mark.parametrize("name", ["whitened", "unitstep", "canonical"])
@pytest.mark.parametrize("kappa", [0.01, 100.0])
def test_held_steps_commute_with_the_rescaling_of_units(name, kappa):
    """Where every unit is held, the relative change, and so the function after the step, does not see κ.

    These rules keep each unit's direction under the rescaling of §4.4; the guard sets its length. Without damping, and
    with moments that know of the rescaling.
    """
    model = nn.Sequential(nn.Linear(6, 20), nn.ReLU(), nn.Linear(20, 12), nn.ReLU(), nn.Linear(12, 4)).double()
    twin, batch, x = copy.deepcopy(model), (0.5 + randn(32, 6), torch.randint(0, 4, (32,))), randn(50, 6)
    for k, units, scale in ((0, slice(0, 5), kappa), (2, slice(3, 6), 1 / kappa)):
        with torch.no_grad():
            twin[k].weight[units] *= scale
            twin[k].bias[units] *= scale
            twin[k + 2].weight[:, units] /= scale
    start = model(x)
    assert_close(twin(x), start)
    for m in (model, twin):
        optimizer = GUARDED[name].build(m, lr=1e9, momentum=0.0, damping=0.0, trust=0.02)
        classify(optimizer, m, [batch])
        assert min(held for _, held in optimizer.fired().values()) > 0.5  # the others are dead: they have no gradient
    assert (model(x) - start).abs().max() > 1e-3
    assert_close(model(x), twin(x), rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize(
    ("name", "lr"), [("whitened", 0.05), ("unitstep", 0.05), ("whitened-adamw", 1e-3), ("canonical", 1e-5)]
)
def test_a_deep_network_whose_signals_vanish_trains(name, lr):
    """PyTorch's initialization, 20 layers: without foresight its first step makes losses of 10¹⁸ and more."""
    torch.manual_seed(1)
    layers = [m for _ in range(20) for m in (nn.Linear(32, 32), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Linear(32, 4))
    optimizer = GUARDED[name].build(model, lr=lr)
    losses = []
    for _ in range(30):
        x = torch.randn(64, 32)
        loss = functional.cross_entropy(model(x), x[:, :4].argmax(1))
        descend(optimizer, loss)
        losses.append(loss.item())
    assert max(losses) < 100 * losses[0] and losses[-1] < 2 * losses[0] and optimizer.nonfinite_steps == 0
