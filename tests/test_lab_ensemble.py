"""Members of an ensemble train as separate runs of the public optimizers do."""

import copy
import math
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional

import evenstep
from evenstep.lab import feed, sweep, together, turns
from evenstep.lab.data import Text
from evenstep.lab.ensemble import FORWARDS, Ensemble
from evenstep.lab.evaluate import evaluate
from evenstep.lab.methods import METHODS, Method, OwnBatchSGD, PlainCoordinates
from evenstep.lab.models import MODELS
from evenstep.lab.stacked import elementwise, linear
from evenstep.lab.trial import Trial, run
from small_images import small_arrays

RATES = [0.3, 0.02, 0.1]


def network(batch_norm=False):
    norm = [nn.BatchNorm2d(4)] if batch_norm else []
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), *norm, nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(4, 6, 3, stride=2, groups=2, bias=False), nn.ReLU(), nn.Flatten(),
        nn.Linear(6, 5), nn.LayerNorm(5), nn.ReLU(), nn.Linear(5, 3),
    ).double()  # fmt: skip


def torch_rule(rule, **options):
    return lambda model, lr: rule(model.parameters(), lr=lr, **options)


def whitened(cls, *arguments, **options):
    return lambda model, lr: cls(model, *arguments, lr=lr, **options)


BUILDERS = {
    "SGD": torch_rule(torch.optim.SGD),
    "SGD, momentum, decay": torch_rule(torch.optim.SGD, momentum=0.9, nesterov=True, weight_decay=0.1),
    "Adam": torch_rule(torch.optim.Adam),
    "AdamW": torch_rule(torch.optim.AdamW, weight_decay=0.1),
    "RMSprop": torch_rule(torch.optim.RMSprop),
    "Adagrad": torch_rule(torch.optim.Adagrad),
    "FanInSGD": whitened(evenstep.FanInSGD, momentum=0.5),
    "WhitenedSGD": whitened(evenstep.WhitenedSGD, momentum=0.9, weight_decay=0.1),
    "WhitenedSGD, the paper's": whitened(evenstep.WhitenedSGD, damping=1e-3, fresh_max=None, trust=None),
    "WhitenedSGD, sharing, excluded": whitened(evenstep.WhitenedSGD, sharing=2.0, exclude=["7.*"], plain_lr=0.01),
    "own batch": whitened(OwnBatchSGD, trust=None),
    "CanonicalSGD": whitened(evenstep.CanonicalSGD),
    "UnitStep": whitened(evenstep.UnitStep),
    "UnitStep, decay": whitened(evenstep.UnitStep, weight_decay=0.1, momentum=0.0),
    "Whitened(AdamW)": whitened(evenstep.Whitened, torch.optim.AdamW, betas=(0.8, 0.9), weight_decay=0.1),
    "Whitened(SGD), joint": whitened(evenstep.Whitened, torch.optim.SGD, momentum=0.9, joint=True),
    "Whitened(Muon)": whitened(evenstep.Whitened, torch.optim.Muon),
    "Muon": whitened(PlainCoordinates, torch.optim.Muon, trust=None),
}


def shocking_batches(steps=7):
    """Two batches a step, the last of them smaller; in the fourth the inputs grow, so that guards fire."""
    for k in range(steps):
        size = 3 if k == steps - 1 else 5
        yield (30.0 if k == 3 else 1.0) * torch.randn(2, size, 2, 6, 6).double(), torch.randint(0, 3, (2, size))


def alone(model, optimizer, batches):
    for x, y in batches:
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model.state_dict()


def assert_equals_separate_runs(build, forward, *, batch_norm=False, tolerance=1e-9):
    models, source = [network(batch_norm) for _ in RATES], [0, 1, 1]
    batches = list(shocking_batches())
    ensemble = Ensemble(copy.deepcopy(models), build, RATES, source=source, forward=forward)
    for x, y in batches:
        ensemble.step(x, y)
    optimizers = [build(model, lr=rate) for model, rate in zip(models, RATES, strict=True)]
    for e, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
        expected = alone(model, optimizer, [(x[source[e]], y[source[e]]) for x, y in batches])
        for name, value in ensemble.member(e).state_dict().items():
            torch.testing.assert_close(value, expected[name], rtol=tolerance, atol=tolerance, msg=f"{name} of {e}")
    return optimizers


@pytest.mark.parametrize("name", BUILDERS)
def test_members_equal_separate_runs(name):
    optimizers = assert_equals_separate_runs(BUILDERS[name], "each")
    if name in ("WhitenedSGD", "UnitStep", "Whitened(AdamW)"):
        raised, held = zip(*(share for o in optimizers for share in o.fired().values()), strict=True)
        assert max(raised) > 0 and max(held) > 0


@pytest.mark.parametrize("name", ["SGD", "WhitenedSGD", "CanonicalSGD", "UnitStep", "Whitened(AdamW)", "own batch"])
def test_all_at_once_equals_one_after_the_other(name):
    assert_equals_separate_runs(BUILDERS[name], "vmap")


@pytest.mark.parametrize("forward", FORWARDS)
def test_batch_norm_keeps_running_statistics_per_member(forward):
    assert_equals_separate_runs(BUILDERS["SGD"], forward, batch_norm=True, tolerance=1e-7)


@pytest.mark.parametrize("forward", FORWARDS)
def test_members_may_share_one_batch(forward):
    models, (x, y) = [network() for _ in RATES], next(shocking_batches())
    build = BUILDERS["UnitStep"]
    ensemble = Ensemble(copy.deepcopy(models), build, RATES, forward=forward)
    ensemble.step(x[:1], y[:1])
    for e, model in enumerate(models):
        expected = alone(model, build(model, lr=RATES[e]), [(x[0], y[0])])
        torch.testing.assert_close(dict(ensemble.member(e).state_dict()), dict(expected))


def metrics(record):
    kept = ("epoch", "train_loss", "test_loss", "test_accuracy", "dead_share", "diverged")
    return [{k: row[k] for k in kept} for row in record["metrics"]]


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("sg", {"options": {"momentum": 0.9}, "augment": True}),
        ("batch-norm", {"decay_lr": True}),
        ("canonical", {"decay_lr": True}),
        ("evenstep", {"augment": True, "decay_lr": True}),
        ("whitened-adam", {}),
        ("muon", {}),
    ],
)
def test_records_equal_those_of_separate_trials(method, settings):
    arrays, rates = small_arrays(11), METHODS[method].stepsizes
    trials = [Trial(method, lr, s, epochs=2, batch_size=4, **settings) for lr, s in [(rates[0], 0), (rates[1], 7)]]
    heard = []
    found = together.run_together(trials, arrays, on_epoch=lambda trial, row: heard.append((trial.seed, row["epoch"])))
    assert heard == [(0, 1), (7, 1), (0, 2), (7, 2)]
    for trial, record in zip(trials, found, strict=True):
        expected = run(trial, arrays)
        assert record.keys() == expected.keys() and record["config"] == expected["config"]
        assert record["metrics"][0].keys() == expected["metrics"][0].keys() and record["environment"]["together"] == 2
        for row, other in zip(metrics(record), metrics(expected), strict=True):
            assert row == pytest.approx(other, rel=2e-4)


@pytest.mark.parametrize("forward", FORWARDS)
def test_members_may_differ_in_the_strength_of_l2(forward):
    arrays = small_arrays(11)
    networks = [{"l2": 0.3}, {"l2": 0.03}, {}]
    trials = [Trial("evenstep", 0.02, epochs=2, batch_size=4, model_options=network) for network in networks]
    strong, weak, without = (together.alike(trial) for trial in trials)
    assert strong == weak != without
    found = together.run_together(trials[:2], arrays, forward=forward)
    losses = [record["metrics"][-1]["train_loss"] for record in found]
    assert losses == pytest.approx([run(trial, arrays)["metrics"][-1]["train_loss"] for trial in trials[:2]], rel=2e-4)
    assert losses[0] != pytest.approx(losses[1], rel=1e-3)
    assert [record["config"]["model_options"] for record in found] == networks[:2]


@pytest.mark.parametrize("method", ["evenstep", "muon"])
def test_text_trains_together(method, monkeypatch):
    monkeypatch.setattr(feed, "TEXT_STEPS", 2)
    text = Text(torch.randint(0, 5, (3000,)), torch.randint(0, 5, (300,)), "letters", "abcde")
    trials = [Trial(method, lr, epochs=1, batch_size=2, model="transformer") for lr in (0.01, 0.05)]
    for trial, record in zip(trials, together.run_together(trials, text), strict=True):
        assert metrics(record)[0] == pytest.approx(metrics(run(trial, text))[0], rel=2e-4)


@pytest.mark.parametrize("forward", FORWARDS)
@pytest.mark.parametrize(("method", "settings"), [("sg", {}), ("whitening", {"options": {"trust": None}})])
def test_a_member_that_diverges_touches_no_other(method, settings, forward):
    arrays, rate = small_arrays(12), METHODS[method].stepsizes[0]
    trials = [Trial(method, lr, epochs=3, batch_size=4, **settings) for lr in (rate, 1e25, rate / 2)]
    good, bad, other = together.run_together(trials, arrays, forward=forward)
    quiet = together.run_together([trials[0], trials[2]], arrays, forward=forward)
    for record, expected in zip((good, other), quiet, strict=True):
        assert len(record["metrics"]) == 3
        for row, expected_row in zip(metrics(record), metrics(expected), strict=True):
            assert row == pytest.approx(expected_row, rel=1e-5)
    assert bad["metrics"][-1]["diverged"] and len(bad["metrics"]) < 3
    assert metrics(bad)[-1]["train_loss"] is None


def test_a_frozen_member_rests():
    ensemble = Ensemble([network(True) for _ in RATES], BUILDERS["SGD"], RATES)
    batches = list(shocking_batches(2))
    ensemble.step(*batches[0])
    ensemble.total[1] = math.inf
    ensemble.freeze_diverged()
    before = copy.deepcopy(ensemble.member(1).state_dict()), copy.deepcopy(ensemble.member(0).state_dict())
    ensemble.step(*batches[1])
    assert all(torch.equal(value, before[0][name]) for name, value in ensemble.member(1).state_dict().items())
    assert not torch.equal(ensemble.member(0).state_dict()["0.weight"], before[1]["0.weight"])


@pytest.mark.parametrize(
    ("rule", "options", "stacks", "scales"),
    [
        (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.1}, True, True),
        (torch.optim.AdamW, {}, True, True),
        (torch.optim.NAdam, {}, True, True),
        (torch.optim.RAdam, {}, True, True),
        (torch.optim.Muon, {}, False, True),
        (torch.optim.Rprop, {}, False, False),
        (torch.optim.LBFGS, {}, False, False),
    ],
)
def test_what_can_be_stacked_is_found_out(rule, options, stacks, scales):
    assert elementwise(torch_rule(rule, **options)) is stacks
    assert linear(torch_rule(rule, **options)) is scales


def test_reasons_to_run_alone(monkeypatch):
    arrays = small_arrays()
    assert not {name for name in METHODS if together.why_not(Trial(name, 0.1), arrays) is not None}

    def reason(build, **options):
        monkeypatch.setitem(METHODS, "other", Method("other", "other", build, (0.1,)))
        return together.why_not(Trial("other", 0.1, options=options), arrays)

    assert "Rprop is not elementwise" in reason(lambda model, **o: torch.optim.Rprop(model.parameters(), **o))
    assert "whole network" in reason(evenstep.BlockNaturalSGD)
    assert "not linear in lr" in reason(lambda model, **o: evenstep.Whitened(model, torch.optim.Rprop, **o))
    assert "to be made small" in reason(evenstep.UnitStep, maximize=True)

    def sharing_a_bias(channels, batch_norm):
        model = nn.Sequential(nn.Flatten(), nn.Linear(1024 * channels, 10), nn.ReLU(), nn.Linear(10, 10))
        model[3].bias = model[1].bias
        return model

    monkeypatch.setitem(MODELS, "paper_cnn", sharing_a_bias)
    assert "does not move with its layer" in reason(evenstep.UnitStep)


MIXED = [
    Trial(method, lr, seed, epochs=2, batch_size=4, **settings)
    for method, rates, settings in [
        ("evenstep", (0.02, 0.05), {"augment": True}),
        ("whitening", (0.1, 1e20), {"options": {"trust": None}}),  # the second diverges
        ("whitening-own", (0.1, 0.2), {"decay_lr": True}),
    ]
    for lr, seed in zip(rates, (0, 7), strict=True)
]


def without_time(record):
    rows = [{k: v for k, v in row.items() if k != "seconds"} for row in record["metrics"]]
    return record["config"], record["seed"], rows


@pytest.mark.parametrize(("at_once", "forward"), [(2, "each"), (12, "vmap")])
def test_ensembles_in_turn_give_what_they_give_one_after_the_other(at_once, forward):
    arrays = small_arrays(11)
    parts = [MIXED[k : k + 2] for k in (0, 2, 4)]
    expected = [together.run_together(part, arrays, forward=forward) for part in parts]
    found = list(together.run_interleaved(parts, arrays, at_once=at_once, forward=forward))
    assert len(found) == 3 and any(r["metrics"][-1]["diverged"] for rs in found for r in rs)
    assert [[without_time(r) for r in rs] for rs in found] == [[without_time(r) for r in rs] for rs in expected]
    shared = [{r["environment"]["together"] for r in rs} for rs in found]
    assert shared == ([{4}, {4}, {2}] if at_once == 2 else [{6}, {6}, {6}])  # the first two end in one round


def test_turns_are_taken_and_what_ends_makes_room():
    said = []

    def work(name, steps):
        for k in range(steps):
            said.append(f"{name}{k}")
            yield
        if name == "b":
            raise ValueError(name)
        return name

    found = turns.in_turn((work(name, steps) for name, steps in [("a", 3), ("b", 1), ("c", 1), ("d", 1)]), "cpu", 2)
    assert [next(found), next(found), next(found)] == ["a", "c", "d"]
    assert said == ["a0", "b0", "a1", "a2", "c0", "d0"]
    with pytest.raises(ValueError, match="b"):
        next(found)


def test_scores_are_those_of_each_member():
    arrays, models = small_arrays(23), [MODELS["paper_cnn"](batch_norm=True) for _ in RATES]
    for model in models:
        model(torch.randn(8, 3, 32, 32))
        with torch.no_grad():
            model[1].bias[:2] = -100.0  # two units that are dead
    for forward in FORWARDS:
        ensemble = Ensemble(models, BUILDERS["SGD"], RATES, forward=forward)
        for score, model in zip(ensemble.scores(arrays), models, strict=True):
            assert score == pytest.approx(evaluate(model, arrays, 5), rel=1e-5) and score["dead_share"] >= 2 / 226
            assert model.training


def test_unknown_forward_is_named():
    with pytest.raises(ValueError, match=r"forward must be one of each, vmap; got 'all'"):
        Ensemble([network()], BUILDERS["SGD"], [0.1], forward="all")


@pytest.mark.gpu
@pytest.mark.parametrize("forward", FORWARDS)
@pytest.mark.parametrize("method", ["sg", "batch-norm", "canonical", "evenstep", "whitened-adam", "muon"])
def test_captured_steps_equal_separate_trials(method, forward):
    arrays, rates = small_arrays(70), METHODS[method].stepsizes
    trials = [Trial(method, lr, s, epochs=2, batch_size=16, decay_lr=True) for lr, s in [(rates[0], 0), (rates[1], 7)]]
    train = partial(together.run_together, device="cuda", forward=forward)
    for trial, record in zip(trials, train(trials, arrays), strict=True):
        for row, other in zip(metrics(record), metrics(run(trial, arrays, "cuda")), strict=True):
            assert row["train_loss"] == pytest.approx(other["train_loss"], rel=0.02)


@pytest.mark.gpu
def test_captured_ensembles_in_turn_equal_separate_trials(tmp_path):
    """Five ensembles on four streams: some are captured while others are replayed, the last takes a stream over."""
    arrays = small_arrays(70)
    rates = {"sg": 0.03, "evenstep": 0.02, "whitening-own": 0.1, "batch-norm": 0.03, "canonical": 3e-4}
    trials = [
        Trial(method, scale * lr, seed, epochs=2, batch_size=16, augment=method == "sg")
        for method, lr in rates.items()
        for scale, seed in ((1, 0), (2, 7))
    ]
    found = sweep.sweep(trials, arrays, tmp_path / "records.jsonl", device="cuda", at_once=4)
    assert {r["environment"]["together"] for r in found} <= {2, 4, 6, 8}
    for trial, record in zip(trials, found, strict=True):
        for row, other in zip(metrics(record), metrics(run(trial, arrays, "cuda")), strict=True):
            assert row["train_loss"] == pytest.approx(other["train_loss"], rel=0.02)
