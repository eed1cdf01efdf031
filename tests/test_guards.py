"""The two guards: what they bound, that they leave quiet training alone, and that they see no ReLU rescaling.

`test_properties.py` holds WhitenedSGD to the reference over kinds of layers; here each guard is taken on its own, and
then through every optimizer that has it.
"""

import copy
import itertools

import pytest
import torch
from torch import nn
from torch.func import vmap
from torch.nn import functional
from torch.testing import assert_close

import evenstep
import oracle
from evenstep.math import guards
from helpers import UNGUARDED, classify, descend, randn, still, twins, weights

OPTIMIZERS = {
    "WhitenedSGD": lambda model, **k: evenstep.WhitenedSGD(model, **{"lr": 0.05, "momentum": 0.5, **k}),
    "UnitStep": lambda model, **k: evenstep.UnitStep(model, **{"lr": 0.01, **k}),
    "Whitened(AdamW)": lambda model, **k: evenstep.Whitened(model, torch.optim.AdamW, **{"lr": 1e-3, **k}),
    "CanonicalSGD": lambda model, **k: evenstep.CanonicalSGD(model, **{"lr": 1e-4, **k}),
}
every_optimizer = pytest.mark.parametrize("build", OPTIMIZERS.values(), ids=OPTIMIZERS)


def network(dtype=torch.float32):
    return nn.Sequential(
        nn.Conv2d(2, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(32, 24), nn.ReLU(),
        nn.Linear(24, 4),
    ).to(dtype)  # fmt: skip


def batches(count, size=64, dtype=torch.float32):
    """Independent inputs, with a label that can be learned."""
    found = []
    for _ in range(count):
        x = 0.5 + torch.randn(size, 2, 4, 4, dtype=dtype)
        found.append((x, x.mean((2, 3)).mul(8).sum(1).long().remainder(4)))
    return found


class Dense:
    """A dense layer's weights, step and moments, as the reference takes them and as the core does."""

    def __init__(self, units=5, inputs=7):
        self.layer = nn.Linear(inputs, units).double()
        self.w, self.b = randn(units, inputs), randn(units)
        self.dw, self.db = (randn(units, 1).exp() * t for t in (randn(units, inputs), randn(units, 1)))
        self.db = self.db.squeeze(1)
        self.mu, self.spread = randn(inputs), randn(inputs).exp()
        self.fresh = torch.maximum(self.spread, randn(inputs).exp())

    def core(self):
        """In the core's shapes: [group, unit, input, kernel], [group, unit], [group, input]."""
        matrices = (t[None, :, :, None] for t in (self.w, self.dw))
        (w, dw), (b, db) = matrices, (self.b[None], self.db[None])
        return w, b, dw, db, *(t[None] for t in (self.mu, self.spread, self.fresh))


# the functions


@pytest.mark.parametrize("tau", [0.5, 1.0, 4.0])
def test_fresh_max_is_its_definition(tau):
    vx, q = randn(40).exp(), 2 * randn(40).exp()
    raised, fired = guards.fresh_max(vx, q, tau)
    assert_close(raised, oracle.fresh_max(vx, q, tau))
    assert 0 < fired.sum() == sum(one / tau > v for v, one in zip(vx.tolist(), q.tolist(), strict=True)) < 40
    assert torch.equal(raised[q / tau <= vx], vx[q / tau <= vx])


@pytest.mark.parametrize("radius", [0.01, 0.3, 3.0])
@pytest.mark.parametrize("bias", [True, False])
def test_trust_radius_is_its_definition(radius, bias):
    d = Dense()
    d.w[0], d.b[0] = 0.0, 0.0  # a unit that starts at zero
    d.dw[1], d.db[1] = 0.0, 0.0  # one that does not move
    w, b, dw, db, mu, spread, fresh = d.core()
    biases, moves = ([d.b], [d.db]) if bias else ([], [])
    unit2 = guards.squared_length(w, b if bias else None, mu, spread)
    step2 = guards.squared_length(dw, db if bias else None, mu, fresh)
    factor, held = guards.trust_factor(unit2, step2, radius, oracle.TRUST_FLOOR)
    expected = oracle.trust_factors(d.layer, d.w, biases, d.dw, moves, d.mu, d.spread, d.fresh, radius)
    assert_close(factor.squeeze(0), expected)
    assert held.sum() == (expected < 1).sum() and factor[0, 1] == 1 and factor[0, 0] < 1


def test_a_held_unit_moves_exactly_its_radius_and_the_others_stay_as_they_are():
    d = Dense(units=30)
    w, b, dw, db, mu, spread, fresh = d.core()
    unit2, step2 = guards.squared_length(w, b, mu, spread), guards.squared_length(dw, db, mu, fresh)
    factor, held = guards.trust_factor(unit2, step2, 0.5, 1e-3)
    moved = dw * factor[..., None, None], db * factor
    after = guards.squared_length(*moved, mu, fresh)
    over = step2 > 0.25 * unit2
    assert torch.equal(held, over) and 0 < over.sum() < 30
    assert_close(after[over].sqrt(), 0.5 * unit2[over].sqrt())
    assert torch.equal(moved[0][~over], dw[~over]) and torch.equal(moved[1][~over], db[~over])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_factors_are_finite_for_extreme_lengths(dtype):
    unit2 = torch.tensor([0.0, 0.0, 1e30, 1e-30, 1e30], dtype=dtype)
    step2 = torch.tensor([0.0, 1e30, 0.0, 1e30, 1e-30], dtype=dtype)
    factor, held = guards.trust_factor(unit2, step2, 0.1, 1e-3)
    assert factor.isfinite().all() and (factor >= 0).all() and (factor <= 1).all()
    assert factor[[0, 2, 4]].eq(1).all() and held.sum() == 2
    raised, _ = guards.fresh_max(unit2, step2, 4.0)
    assert raised.isfinite().all()


def test_guards_run_under_vmap():
    many = [Dense().core() for _ in range(4)]
    stacked = [torch.stack(column) for column in zip(*many, strict=True)]
    radii = torch.rand(4).double()

    def both(w, b, dw, db, mu, spread, fresh, radius):
        raised, inputs = guards.fresh_max(spread, fresh, 2.0)
        unit2 = guards.squared_length(w, b, mu, raised)
        step2 = guards.squared_length(dw, db, mu, fresh)
        factor, units = guards.trust_factor(unit2, step2, radius, 1e-3)
        return raised, inputs, factor, units

    loop = zip(*(both(*one, radius) for one, radius in zip(many, radii, strict=True)), strict=True)
    for together, single in zip(vmap(both)(*stacked, radii), loop, strict=True):
        assert_close(together, torch.stack(single))


# through the optimizers


@every_optimizer
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_step_on_which_no_guard_fired_is_bit_equal_to_one_without_guards(build, dtype):
    """Every step is made twice from the same state; the data drift, and one batch in four is a shock."""
    model, twin = twins(lambda: network(dtype))
    guarded, bare = build(model), build(twin, **UNGUARDED)
    work, quiet, loud = 0.0, 0, 0
    for k, (x, y) in enumerate(batches(32, dtype=dtype)):
        twin.load_state_dict(model.state_dict())
        bare.load_state_dict(copy.deepcopy(guarded.state_dict()))
        bare.param_groups[0].update(UNGUARDED)
        for optimizer, m in ((guarded, model), (bare, twin)):
            classify(optimizer, m, [((30 if k % 4 == 3 else 1 + 0.02 * k) * x, y)])
        before, work = work, (k + 1) * sum(raised + held for raised, held in guarded.fired().values())
        fired, moved_alike = work > before + 1e-6, all(still(model, weights(twin)))
        assert moved_alike or fired
        quiet, loud = quiet + (not fired), loud + (not moved_alike)
    assert quiet >= 5 and loud >= 5


@pytest.mark.parametrize(
    ("name", "lr"), [("WhitenedSGD", 0.05), ("UnitStep", 1e-3), ("Whitened(AdamW)", 1e-4), ("CanonicalSGD", 1e-4)]
)
def test_on_quiet_data_each_guard_fires_on_less_than_one_percent(name, lr):
    """Independent inputs, small stepsizes; of all inputs, and of all units, over all layers and steps."""
    widths = [20, 100, 100, 10]
    model = nn.Sequential(*[m for n, k in itertools.pairwise(widths) for m in (nn.Linear(n, k), nn.ReLU())])
    optimizer, teacher = OPTIMIZERS[name](model[:-1], lr=lr), torch.randn(20, 10)
    inputs = [0.5 + torch.randn(64, 20) for _ in range(200)]
    classify(optimizer, model[:-1], [(x, (x @ teacher).argmax(1)) for x in inputs])
    shares = list(optimizer.fired().values())
    raised = sum(share * n for (share, _), n in zip(shares, widths[:-1], strict=True)) / sum(widths[:-1])
    held = sum(share * n for (_, share), n in zip(shares, widths[1:], strict=True)) / sum(widths[1:])
    assert raised < 0.01 and held < 0.01


@every_optimizer
def test_counters_tell_what_fired(build):
    """A grown input raises variances, a tiny radius holds every unit, and each is counted without the other."""
    data = batches(4)
    for on, keywords in ((0, {"fresh_max": 4.0, "trust": None}), (1, {"fresh_max": None, "trust": 1e-6})):
        model = network()
        optimizer = build(model, **keywords)
        classify(optimizer, model, [*data[:3], (30 * data[3][0], data[3][1])])
        share = optimizer.fired()["0"]
        assert share[1 - on] == 0
        assert_close(share[on], 0.25 if on == 0 else 1.0)


@every_optimizer
@pytest.mark.parametrize("tau", [1.0, 4.0])
def test_no_whitened_input_exceeds_tau_on_the_current_batch(build, tau):
    """The step must be one in coordinates where <z²> ≤ τ: as if the variance had been raised by hand."""
    model, data = network(torch.float64), batches(4, dtype=torch.float64)
    data[3] = (30 * data[3][0], data[3][1])
    classify(optimizer := build(model, fresh_max=tau, trust=None, damping=0.0), model, data[:3])
    layer, state = model[0], optimizer.state[model[0].weight]
    x = data[3][0].movedim(1, -1).flatten(0, 2)
    mean, var = state["mx"].clone(), state["vx"].clone()
    q = ((x - mean) ** 2).mean(0)
    m = oracle.fresh_max(var, q, tau)
    assert (q / var > 4).any() and (q / m <= tau * (1 + 1e-12)).all()

    twin = copy.deepcopy(model)
    by_hand = build(twin, fresh_max=None, trust=None, damping=0.0)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0]["fresh_max"] = None
    by_hand.load_state_dict(saved)
    by_hand.state[twin[0].weight]["vx"].copy_(m)
    classify(optimizer, model, data[3:])
    classify(by_hand, twin, data[3:])
    assert_close(layer.weight.detach(), twin[0].weight.detach(), rtol=1e-9, atol=1e-12)
    assert_close(layer.bias.detach(), twin[0].bias.detach(), rtol=1e-9, atol=1e-12)


def rescale(first, second, units, kappa):
    """Multiply units of `first` by κ and divide what `second` makes of them; a ReLU network's function stays."""
    with torch.no_grad():
        first.weight[units] *= kappa
        first.bias[units] *= kappa
        second.weight[:, units] /= kappa


def relative_steps(old, new, mean, var, q, tau, damping):
    """‖δu_j‖/max(‖u_j‖, s₀) of each unit, the step measured with the fresh variance."""
    m = var if tau is None else oracle.fresh_max(var, q, tau)
    floor = damping * m.mean()
    w, b = old.weight.detach(), old.bias.detach()
    dw, db = new.weight.detach() - w, new.bias.detach() - b
    unit = ((b + w @ mean) ** 2 + w**2 @ (m + floor)).sqrt().clamp(min=1e-3)
    step = ((db + dw @ mean) ** 2 + dw**2 @ (torch.maximum(var, q) + floor)).sqrt()
    return step / unit


def dense_network():
    return nn.Sequential(nn.Linear(6, 20), nn.ReLU(), nn.Linear(20, 12), nn.ReLU(), nn.Linear(12, 4)).double()


def dense_batches(count):
    return [(0.5 + randn(32, 6), torch.randint(0, 4, (32,))) for _ in range(count)]


@every_optimizer
@pytest.mark.parametrize("tau", [None, 4.0])
@pytest.mark.parametrize("kappa", [0.01, 1.0, 100.0])
def test_trust_radius_bounds_every_units_step(build, kappa, tau):
    """‖δu_j‖ ≤ c·max(‖u_j‖, s₀) with stale moments too, in the layer after the rescaled units and in all others."""
    model, data = dense_network(), dense_batches(6)
    optimizer = build(model, lr=0.5, fresh_max=tau, damping=0.1, trust=0.05)
    classify(optimizer, model, data[:5])
    rescale(model[0], model[2], slice(0, 4), kappa)
    before, x = copy.deepcopy(model), data[5][0]
    seen = [x, torch.relu(model[0](x)).detach(), model[:4](x).detach()]
    moments = [[optimizer.state[layer.weight][k].clone() for k in ("mx", "vx")] for layer in model[::2]]
    classify(optimizer, model, data[5:])
    largest = 0.0
    for old, new, met, (mean, var) in zip(before[::2], model[::2], seen, moments, strict=True):
        relative = relative_steps(old, new, mean, var, ((met - mean) ** 2).mean(0), tau, 0.1)
        assert (relative <= 0.05 * (1 + 1e-9)).all()
        largest = max(largest, float(relative.max()))
    assert largest > 0.05 * (1 - 1e-9)


@pytest.mark.parametrize("name", ["WhitenedSGD", "UnitStep", "CanonicalSGD"])
@pytest.mark.parametrize("kappa", [0.01, 100.0])
def test_held_steps_commute_with_the_rescaling_of_units(name, kappa):
    """Where every unit is held, the relative change, and so the function after the step, does not see κ.

    These rules keep each unit's direction under the rescaling of §4.4; the guard sets its length. Without damping, and
    with moments that know of the rescaling.
    """
    model, data = dense_network(), dense_batches(1)
    twin = copy.deepcopy(model)
    rescale(twin[0], twin[2], slice(0, 5), kappa)
    rescale(twin[2], twin[4], slice(3, 6), 1 / kappa)
    x = randn(50, 6)
    assert_close(model(x), twin(x))
    for m in (model, twin):
        optimizer = OPTIMIZERS[name](m, lr=1e9, momentum=0.0, damping=0.0, trust=0.02)
        before = copy.deepcopy(m)
        classify(optimizer, m, data)
        seen = [data[0][0], torch.relu(before[0](data[0][0])).detach(), before[:4](data[0][0]).detach()]
        for old, new, met in zip(before[::2], m[::2], seen, strict=True):
            mean, var = oracle.mean_var(met)
            relative = relative_steps(old, new, mean, var, var, None, 0.0)
            moved = relative > 0  # a dead unit has no gradient
            assert_close(relative[moved], torch.full_like(relative[moved], 0.02)) if moved.any() else None
    assert (model(x) - before(x)).abs().max() > 1e-3
    assert_close(model(x), twin(x), rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize(
    ("name", "lr"), [("WhitenedSGD", 0.05), ("UnitStep", 0.05), ("Whitened(AdamW)", 1e-3), ("CanonicalSGD", 1e-5)]
)
def test_a_deep_network_whose_signals_vanish_trains(name, lr):
    """PyTorch's initialization, 20 layers: without foresight its first step makes losses of 10¹⁸ and more."""
    torch.manual_seed(1)
    layers = [m for _ in range(20) for m in (nn.Linear(32, 32), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Linear(32, 4))
    optimizer = OPTIMIZERS[name](model, lr=lr)
    losses = []
    for _ in range(30):
        x = torch.randn(64, 32)
        loss = functional.cross_entropy(model(x), x[:, :4].argmax(1))
        descend(optimizer, loss)
        losses.append(loss.item())
    assert max(losses) < 100 * losses[0] and losses[-1] < 2 * losses[0] and optimizer.nonfinite_steps == 0
