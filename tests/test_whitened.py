"""`Whitened` against slow loops on explicit v, and what torch promises of the rules it runs."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ConstantLR, CosineAnnealingLR, LambdaLR, OneCycleLR
from torch.testing import assert_close

import oracle
from evenstep import Whitened
from helpers import UNGUARDED, Forward, assert_follows, assert_same, coverage_of, fit, randn, twins
from rules import GUARDS, RULES, SETTINGS, TORCHS, RuleOnV, deep_network, drifting, without_decay

LINEAR = ["SGD", "momentum", "dampening", "nesterov"]  # in the gradient: they may step on explicit v


def drifting_mlp(steps):
    """Two layers, and batches whose inputs grow."""
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    return model, [((1 + k) * (1 + randn(6, 4)), randn(6, 3)) for k in range(steps)]


WAYS = {  # keywords of the rule, of both optimizers, of the reference, of `Whitened`; the size of the last batch
    "bare": ({}, UNGUARDED, {}, {}, 1.0),
    "explicit": ({}, UNGUARDED, {"explicit": True}, {}, 1.0),
    "guarded": ({"lr": 0.3}, GUARDS, {}, {}, 30.0),
    "guarded, joint": ({"lr": 0.3}, GUARDS, {"joint": True}, {"joint": True}, 30.0),
}


@pytest.mark.parametrize(
    ("name", "way"),
    [
        *[(name, "bare") for name in RULES if name != "Muon"],
        *[(name, "explicit") for name in LINEAR],
        *[(name, "guarded") for name in ("nesterov", "AdamW", "RMSprop")],
        *[(name, "guarded, joint") for name in ("AdamW", "Muon")],
    ],
)
def test_whitened_is_the_rule_on_the_gradients_on_v(name, way):
    """While the constants move. Guards act on the rule's whole step."""
    (cls, options), model = RULES[name], deep_network()
    more, guards, of_reference, of_whitened, shock = WAYS[way]
    options, settings = options | more, SETTINGS | guards
    reference = RuleOnV(model, without_decay(cls, options), **of_reference, **settings)
    optimizer = Whitened(model, cls, **options, **of_whitened, **settings)
    smallest = assert_follows(reference, optimizer, model, drifting(shock=shock), 1e-8)
    assert smallest == 1 if guards is UNGUARDED else smallest < 0.5


@pytest.mark.parametrize("joint", [False, True])
def test_a_layers_stepsize_falls_with_its_inputs(joint):
    model, settings = deep_network(), SETTINGS | UNGUARDED

    def rule(k, stand_ins):
        return torch.optim.AdamW(stand_ins, lr=0.02 / oracle.fan_in(reference.layers[k]) ** 0.4, weight_decay=0)

    reference = RuleOnV(model, rule, joint=joint, **settings)
    optimizer = Whitened(model, torch.optim.AdamW, lr=0.02, fan_in_power=0.4, joint=joint, **settings)
    assert_follows(reference, optimizer, model, drifting())


def test_joint_off_gives_muon_the_matrices_and_the_plain_rule_what_it_refuses():
    """Muon takes matrices alone: biases go to AdamW at `plain_lr`, as the parameters outside layers do."""
    (model, batches), settings = drifting_mlp(3), SETTINGS | UNGUARDED

    def both(k, stand_ins):
        matrix = torch.optim.Muon(stand_ins[:1], lr=0.05, weight_decay=0)
        bias = torch.optim.AdamW(stand_ins[1:], lr=0.01, weight_decay=0)
        return SimpleNamespace(step=lambda: (matrix.step(), bias.step()))

    optimizer = Whitened(model, torch.optim.Muon, lr=0.05, joint=False, plain_lr=0.01, **settings)
    assert_follows(RuleOnV(model, both, **settings), optimizer, model, batches, 1e-8)


def test_each_group_has_its_own_options_and_a_bias_those_of_its_group():
    (model, batches), settings = drifting_mlp(4), SETTINGS | GUARDS
    options = [{"lr": 0.05, "betas": (0.8, 0.9)}, {"lr": 0.01, "betas": (0.5, 0.6), "eps": 1e-3}, {"lr": 0.02}, {}]

    def groups(params, options):
        return [{"params": [p], **own} for p, own in zip(params, options, strict=True)]

    def rule(k, stand_ins):
        return torch.optim.AdamW(groups(stand_ins, options[2 * k : 2 * k + 2]), weight_decay=0)

    optimizer = Whitened(groups(model.parameters(), options), torch.optim.AdamW, model=model, **settings)
    assert_follows(RuleOnV(model, rule, **settings), optimizer, model, batches)


def plain_network():
    return nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.ReLU(), nn.Linear(6, 3, bias=False)).double()


def plain_batches(steps):
    return [(1 + randn(7, 4), randn(7, 3)) for _ in range(steps)]


SCHEDULES = {
    "constant": lambda o: ConstantLR(o, factor=1.0),
    "cosine": lambda o: CosineAnnealingLR(o, T_max=6),
    "lambda": lambda o: LambdaLR(o, [lambda k: 0.5**k, lambda k: 1 / (1 + k)]),
    "one cycle": lambda o: OneCycleLR(o, max_lr=[0.05, 0.02], total_steps=6),  # moves momentum or betas, too
}


@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        *[(name, "constant") for name in TORCHS if name != "Muon"],
        *[(name, schedule) for name in ("nesterov", "AdamW", "RMSprop") for schedule in SCHEDULES],
    ],
)
def test_identity_constants_give_the_rule_itself_with_its_groups_and_schedules(name, schedule):
    """Every layer is excluded, so that v is w."""
    (cls, keywords), (model, twin) = RULES[name], twins(plain_network)

    def groups(m):
        return [{"params": m[0].parameters(), "lr": 0.03}, {"params": [*m[1].parameters(), *m[3].parameters()]}]

    with pytest.warns(UserWarning, match="Whitened: no layer of this Sequential is covered"):
        optimizer = Whitened(groups(model), cls, model=model, exclude=["*"], **keywords)
    pairs = [(optimizer, model), (cls(groups(twin), **keywords | {"weight_decay": 0}), twin)]
    schedulers = [SCHEDULES[schedule](optimizer) for optimizer, _ in pairs]
    for batch in plain_batches(5):
        for (optimizer, m), scheduler in zip(pairs, schedulers, strict=True):
            fit(optimizer, m, [batch])
            scheduler.step()
    rates = [[group["lr"] for group in optimizer.param_groups] for optimizer, _ in pairs]
    assert rates[0] == rates[1] and (rates[0] == [0.03, keywords["lr"]]) == (schedule == "constant")
    assert_same(model, twin, rtol=1e-12, atol=1e-13)


def with_parameters_outside_layers():
    """Two layers, and parameters of one and two dimensions outside."""
    layers = {"first": nn.Linear(4, 6), "norm": nn.LayerNorm(6), "last": nn.Linear(6, 3)}
    model = Forward(lambda self, x: self.last(torch.tanh(self.norm(self.first(x)))) @ self.mix, **layers)
    model.mix = nn.Parameter(torch.eye(3))
    return model.double()


PLAIN = [
    partial(torch.optim.SGD, lr=0.03),
    partial(torch.optim.SGD, lr=0.03, momentum=0.5),
    partial(torch.optim.AdamW, lr=0.01, betas=(0.5, 0.6), eps=1e-2),
    partial(torch.optim.RMSprop, lr=0.01, alpha=0.5),
]
DEFAULT = partial(torch.optim.AdamW, lr=1e-3)


@pytest.mark.parametrize(
    ("base", "plain", "rule"),
    [
        (torch.optim.Muon, None, DEFAULT),
        (torch.optim.Muon, torch.optim.AdamW, DEFAULT),
        *[(base, plain, plain) for base in (torch.optim.Muon, torch.optim.AdamW) for plain in PLAIN],
    ],
    ids=lambda value: str(getattr(value, "keywords", None) or getattr(value, "__name__", value)),
)
def test_parameters_outside_layers_follow_the_plain_rule(base, plain, rule):
    """As that rule, options of its own and a schedule included, makes of the same gradients."""
    model = with_parameters_outside_layers()
    optimizer = Whitened(model, base, lr=0.02, plain=plain)
    outside = [model.norm.weight, model.norm.bias, model.mix]
    copies = [nn.Parameter(p.detach().clone()) for p in outside]
    by_hand = rule(copies, weight_decay=0)
    schedulers = [LambdaLR(one, lambda k: 0.5**k) for one in (optimizer, by_hand)]
    for batch in plain_batches(4):
        fit(optimizer, model, [batch])
        for p, q in zip(outside, copies, strict=True):
            q.grad = p.grad.clone()
        by_hand.step()
        for scheduler in schedulers:
            scheduler.step()
    for p, q in zip(outside, copies, strict=True):
        assert_close(p.detach(), q.detach(), rtol=1e-10, atol=1e-12)


def test_a_partial_of_muon_is_muon():
    """Its matrices are joint and the rest goes to AdamW, as for the class itself."""
    (model, twin), batches = twins(with_parameters_outside_layers), plain_batches(3)
    fit(Whitened(model, torch.optim.Muon, lr=0.02, ns_steps=4), model, batches)
    fit(Whitened(twin, partial(torch.optim.Muon, ns_steps=4), lr=0.02), twin, batches)
    assert_same(model, twin)


@pytest.mark.parametrize("joint", [True, False])
def test_coverage_says_what_a_second_rule_moves(joint):
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))
    rows = coverage_of(Whitened(model, torch.optim.Muon, joint=joint))
    assert rows["0.weight"] == ("whitened", "")
    assert rows["0.bias"] == ("whitened", "" if joint else "moved by AdamW")
    assert rows["1.bias"] == ("plain", "moved by AdamW; no whitened form for LayerNorm")
    assert not any("moved by" in reason for _, reason in coverage_of(Whitened(model, torch.optim.RMSprop)).values())
