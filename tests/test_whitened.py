"""`Whitened` and `UnitStep` against slow loops on explicit v, and what torch promises of the rules they run.

With β = 1: gradient on v is α_i (G_ij − μ_i b_j) and b_j, and whatever a rule remembers stays on v, untransported.
"""

import copy
import gc
import math
import weakref
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils.prune import l1_unstructured, remove
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

import evenstep
import oracle
from evenstep import Whitened
from evenstep.math import stepsize
from helpers import UNGUARDED, assert_same, descend, fit, is_finite, randn, still, through_a_file, twins, weights


class Base(torch.optim.Optimizer):
    """A third-party rule: subclasses say what to do with a parameter."""

    def __init__(self, params, lr=0.1, **options):
        super().__init__(params, {"lr": lr, **options})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.move(p, p.grad, group, self.state[p])


class Lion(Base):
    """Sign of an interpolated momentum; ignores the parameter's value."""

    def move(self, p, grad, group, state):
        m = state.setdefault("m", torch.zeros_like(p))
        p.sub_(group["lr"] * torch.sign(0.9 * m + 0.1 * grad))
        m.mul_(0.99).add_(grad, alpha=0.01)


class CountsInGroup(Base):
    """Keeps its step count in the group, as several published rules do: the steps shrink as 1/k."""

    def move(self, p, grad, group, state):
        if p is group["params"][0]:
            group["k"] = group.get("k", 0) + 1
        p.sub_(group["lr"] / group["k"] * grad)


class Lars(Base):
    """A step as long as the parameter."""

    def move(self, p, grad, group, state):
        p.sub_(group["lr"] * p.norm() * grad / grad.norm())


class Shrinking(Base):
    """Decays under a name of its own, and only a little."""

    def __init__(self, params, lr=0.1, shrink=1e-2):
        super().__init__(params, lr, shrink=shrink)

    def move(self, p, grad, group, state):
        p.sub_(group["lr"] * (grad + group["shrink"] * p))


class WithoutRate(torch.optim.Optimizer):
    """A rule that has no stepsize to speak of."""

    def __init__(self, params):
        super().__init__(params, {})


RULES = {
    "SGD": (torch.optim.SGD, {"lr": 0.05}),
    "momentum": (torch.optim.SGD, {"lr": 0.02, "momentum": 0.9}),
    "dampening": (torch.optim.SGD, {"lr": 0.02, "momentum": 0.9, "dampening": 0.3}),
    "nesterov": (torch.optim.SGD, {"lr": 0.02, "momentum": 0.9, "nesterov": True}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.02}),
    "Adam": (torch.optim.Adam, {"lr": 0.02, "betas": (0.5, 0.8), "amsgrad": True}),
    "NAdam": (torch.optim.NAdam, {"lr": 0.02}),
    "RAdam": (torch.optim.RAdam, {"lr": 0.02, "betas": (0.5, 0.6)}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.02, "momentum": 0.5, "centered": True}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.05, "initial_accumulator_value": 0.1, "lr_decay": 0.1}),
    "Adamax": (torch.optim.Adamax, {"lr": 0.02}),
    "Adadelta": (torch.optim.Adadelta, {"lr": 0.5}),
    "Muon": (torch.optim.Muon, {"lr": 0.05}),
    "Lion": (Lion, {"lr": 0.01}),
    "CountsInGroup": (CountsInGroup, {"lr": 0.01}),
}
ELEMENTWISE = [name for name in RULES if name != "Muon"]
TORCHS = [name for name in RULES if name not in ("Lion", "CountsInGroup")]
SETTINGS = {"decay": 0.6, "damping": 0.1}
GUARDS = {"fresh_max": 2.0, "trust": 0.1}


def network():
    """Convolutions with padding, stride and groups, a layer without bias, all in float64."""
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 6, 2, stride=2, groups=2), nn.Softplus(),
        nn.Flatten(), nn.Linear(24, 5, bias=False), nn.Softplus(), nn.Linear(5, 3),
    ).double()  # fmt: skip


def drifting(steps=5, shock=1.0):
    """Batches whose means and scales change from one to the next, so that the constants move; the last is a shock."""
    sizes = [1 + 0.3 * k for k in range(steps - 1)] + [shock]
    return [(size * (k / 3 + randn(5, 2, 4, 4)), randn(5, 3)) for k, size in enumerate(sizes)]


class RuleOnV(oracle.OnV):
    """A torch rule on the explicit v of every layer, recomputed from w at every step, whose steps have plain size.

    `build` makes the layer's own torch optimizer from stand-ins that start at zero at every step, or (`explicit`) that
    are v itself. `joint` shows it [weight | bias] as one matrix.
    """

    crowd = 3.0

    def __init__(self, model, build, *, joint=False, explicit=False, **keywords):
        super().__init__(model, lr=0.0, **keywords)
        self.build, self.joint, self.explicit = build, joint, explicit
        self.rules = [None] * len(self.layers)

    def squared(self, k, x, t, energy):
        return torch.ones(oracle.units(self.layers[k])).double()

    def frame(self, k, x, y, g2):
        c, spread, fresh = super().frame(k, x, y, g2)
        n = len(spread)
        variance = [float(s - self.damping / (1 + self.damping) * spread.sum() / n) for s in spread]
        means = sum(float(m) ** 2 for m in c.mu)
        power = sum(variance) + (0 if self.carries[k] else means)
        size = math.sqrt(power / sum(v / float(s) for v, s in zip(variance, spread, strict=True)))
        return c._replace(beta=torch.full_like(c.beta, size), bias=math.sqrt(1 + means / n) / size), spread, fresh

    def moved(self, k, c, x, t, energy):
        layer, biases = self.layers[k], [self.b[k]] if self.carries[k] else []
        grads, leaves = oracle.gradient_on_v(self.loss_of(k, x, t, energy), layer, self.w[k], biases, c)
        steps = self.steps(k, grads, [leaf.detach() for leaf in leaves])
        v, *v0 = (leaf.detach() + step for leaf, step in zip(leaves, steps, strict=True))
        return oracle.to_w(layer, v, v0, c) if biases else (oracle.to_w_biasless(layer, v, c), [])

    def steps(self, k, grads, v):
        """What the rule makes of the gradient."""
        layer, shapes = self.layers[k], [g.shape for g in grads]
        if self.joint:
            grads, v = [as_matrix(layer, *grads)], [as_matrix(layer, *v)]
        if self.rules[k] is None:
            stand_ins = [nn.Parameter(torch.zeros_like(g)) for g in grads]
            self.rules[k] = (self.build(k, stand_ins), stand_ins)
        rule, stand_ins = self.rules[k]
        starts = v if self.explicit else [torch.zeros_like(g) for g in grads]
        for q, start, g in zip(stand_ins, starts, grads, strict=True):
            q.data.copy_(start)
            q.grad = g.clone()
        rule.step()
        steps = [q.detach() - start for q, start in zip(stand_ins, starts, strict=True)]
        return as_parts(layer, steps[0], shapes) if self.joint else steps


def as_matrix(layer, weight, bias=None):
    """[unit, inputs · kernel + 1]; a transposed convolution (of one group) has its units in the second dimension."""
    rows = (weight.transpose(0, 1) if isinstance(layer, oracle.TRANSPOSED) else weight).flatten(1)
    return rows if bias is None else torch.cat([rows, bias.unsqueeze(1)], dim=1)


def as_parts(layer, matrix, shapes):
    """The inverse of `as_matrix`."""
    shape, *bias = shapes
    rows, last = (matrix[:, :-1], [matrix[:, -1]]) if bias else (matrix, [])
    if isinstance(layer, oracle.TRANSPOSED):
        return [rows.reshape(shape[1], shape[0], *shape[2:]).transpose(0, 1), *last]
    return [rows.reshape(shape), *last]


def same_as(cls, keywords):
    """A builder of the reference's rule, which never decays."""
    torchs = cls.__module__.startswith("torch.")
    return lambda k, stand_ins: cls(stand_ins, **{**keywords, **({"weight_decay": 0} if torchs else {})})


def assert_follows(reference, optimizer, model, batches, tolerance=1e-9):
    """Train a model and its reference on the same batches; the smallest trust factor of the reference."""
    fit(optimizer, model, batches)
    smallest = min(float(factor.min()) for x, t in batches for factor in reference.step(x, t))
    oracle.assert_same_parameters(reference, model, tolerance)
    return smallest


def drifting_mlp(steps):
    """Two layers, and batches whose inputs grow."""
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    return model, [((1 + k) * (1 + randn(6, 4)), randn(6, 3)) for k in range(steps)]


# the rule on v


@pytest.mark.parametrize(
    ("name", "explicit"),
    [*[(name, False) for name in ELEMENTWISE], *[(n, True) for n in ("SGD", "momentum", "dampening", "nesterov")]],
)
def test_whitened_is_the_rule_on_the_gradients_on_v(name, explicit):
    """Those that are linear in the gradient step on explicit v, while the constants move."""
    (cls, keywords), model, settings = RULES[name], network(), SETTINGS | UNGUARDED
    reference = RuleOnV(model, same_as(cls, keywords), explicit=explicit, **settings)
    assert_follows(reference, Whitened(model, cls, **keywords, **settings), model, drifting())


@pytest.mark.parametrize(
    ("name", "joint"), [("nesterov", False), ("AdamW", False), ("RMSprop", False), ("AdamW", True), ("Muon", True)]
)
def test_guards_act_on_the_rules_whole_step(name, joint):
    (cls, keywords), model, settings = RULES[name], network(), SETTINGS | GUARDS
    keywords = keywords | {"lr": 0.3}
    reference = RuleOnV(model, same_as(cls, keywords), joint=joint, **settings)
    optimizer = Whitened(model, cls, **keywords, **settings, **({} if name == "Muon" else {"joint": joint}))
    assert assert_follows(reference, optimizer, model, drifting(shock=30.0), 1e-8) < 0.5


@pytest.mark.parametrize("joint", [False, True])
def test_a_layers_stepsize_falls_with_its_inputs(joint):
    model, settings = network(), SETTINGS | UNGUARDED

    def rule(k, stand_ins):
        return torch.optim.AdamW(stand_ins, lr=0.02 / reference.w[k][0].numel() ** 0.4, weight_decay=0)

    reference = RuleOnV(model, rule, joint=joint, **settings)
    optimizer = Whitened(model, torch.optim.AdamW, lr=0.02, fan_in_power=0.4, joint=joint, **settings)
    assert_follows(reference, optimizer, model, drifting())


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    "layer",
    [
        lambda bias: nn.Linear(4, 6, bias=bias),
        lambda bias: nn.Conv2d(4, 6, 2, groups=2, bias=bias),
        lambda bias: nn.ConvTranspose2d(4, 6, 2, stride=2, bias=bias),
    ],
    ids=["linear", "grouped", "transposed"],
)
def test_muon_sees_a_layer_as_one_matrix_with_the_bias_as_a_column(layer, bias):
    model = nn.Sequential(layer(bias).double(), nn.Tanh())
    shape = (4,) if isinstance(model[0], nn.Linear) else (4, 3, 3)
    inputs = [(1 + 0.3 * k) * (1 + randn(6, *shape)) for k in range(4)]
    batches = [(x, randn(*model(x).shape)) for x in inputs]
    keywords, settings = {"lr": 0.05, "momentum": 0.8}, SETTINGS | UNGUARDED
    reference = RuleOnV(model, same_as(torch.optim.Muon, keywords), joint=True, **settings)
    assert_follows(reference, Whitened(model, torch.optim.Muon, **keywords, **settings), model, batches, 1e-8)


def test_joint_off_gives_muon_the_matrices_and_the_plain_rule_what_it_refuses():
    """Muon takes matrices alone: biases go to AdamW, as the parameters outside layers do."""
    (model, batches), settings = drifting_mlp(3), SETTINGS | UNGUARDED

    class Both:
        """A matrix under Muon, its bias under AdamW at `plain_lr`."""

        def __init__(self, stand_ins):
            self.parts = (
                torch.optim.Muon(stand_ins[:1], lr=0.05, weight_decay=0),
                torch.optim.AdamW(stand_ins[1:], lr=0.01, weight_decay=0),
            )

        def step(self):
            for part in self.parts:
                part.step()

    reference = RuleOnV(model, lambda k, stand_ins: Both(stand_ins), **settings)
    optimizer = Whitened(model, torch.optim.Muon, lr=0.05, joint=False, plain_lr=0.01, **settings)
    assert_follows(reference, optimizer, model, batches, 1e-8)


def test_each_group_has_its_own_options_and_a_bias_those_of_its_group():
    (model, batches), settings = drifting_mlp(4), SETTINGS | GUARDS
    options = [
        [{"lr": 0.05, "betas": (0.8, 0.9)}, {"lr": 0.01, "betas": (0.5, 0.6), "eps": 1e-3}],
        [{"lr": 0.02}, {"lr": 0.02}],
    ]

    def build(k, stand_ins):
        groups = [{"params": [q], **o} for q, o in zip(stand_ins, options[k], strict=True)]
        return torch.optim.AdamW(groups, weight_decay=0)

    reference = RuleOnV(model, build, **settings)
    groups = [
        {"params": [model[0].weight], **options[0][0]},
        {"params": [model[0].bias], **options[0][1]},
        {"params": model[2].parameters(), **options[1][0]},
    ]
    assert_follows(reference, Whitened(groups, torch.optim.AdamW, model=model, **settings), model, batches)


# identity constants: the rule itself

CLOSE = {"rtol": 1e-12, "atol": 1e-13}


def plain_network():
    return nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.ReLU(), nn.Linear(6, 3, bias=False)).double()


def plain_batches(steps=6):
    return [(1 + randn(7, 4), randn(7, 3)) for _ in range(steps)]


def uncovered(params, base, **keywords):
    """`Whitened` with every layer excluded, so that v is w."""
    with pytest.warns(UserWarning, match="Whitened: no layer of this Sequential is covered"):
        return Whitened(params, base, exclude=["*"], **keywords)


@pytest.mark.parametrize("name", [name for name in TORCHS if name != "Muon"])
def test_identity_constants_give_the_rule_itself(name):
    (cls, keywords), (model, twin), batches = RULES[name], twins(plain_network), plain_batches()
    fit(uncovered(model, cls, **keywords), model, batches)
    fit(cls(twin.parameters(), **{**keywords, "weight_decay": 0}), twin, batches)
    assert_same(model, twin, **CLOSE)


SCHEDULES = {
    "cosine": lambda o: CosineAnnealingLR(o, T_max=6),
    "lambda": lambda o: LambdaLR(o, [lambda k: 0.5**k, lambda k: 1 / (1 + k)]),
    "one cycle": lambda o: OneCycleLR(o, max_lr=[0.05, 0.02], total_steps=6),
}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", ["nesterov", "AdamW", "RMSprop"])
def test_schedules_and_groups_act_as_in_torch(name, schedule):
    """OneCycleLR moves momentum or betas too."""
    (cls, keywords), (model, twin) = RULES[name], twins(plain_network)

    def groups(m):
        return [{"params": m[0].parameters(), "lr": 0.03}, {"params": [*m[1].parameters(), *m[3].parameters()]}]

    optimizers = uncovered(groups(model), cls, model=model, **keywords), cls(groups(twin), **keywords, weight_decay=0)
    schedulers = [SCHEDULES[schedule](o) for o in optimizers]
    for one_batch in plain_batches(5):
        for optimizer, scheduler, m in zip(optimizers, schedulers, (model, twin), strict=True):
            fit(optimizer, m, [one_batch])
            scheduler.step()
    rates = [[group["lr"] for group in o.param_groups] for o in optimizers]
    assert rates[0] == rates[1] != [0.03, keywords["lr"]]
    assert_same(model, twin, **CLOSE)


def test_changing_a_group_by_hand_reaches_the_rule():
    (model, twin), batches = twins(plain_network), plain_batches()
    torchs = torch.optim.AdamW(twin.parameters(), 0.02, weight_decay=0)
    for optimizer, m in ((uncovered(model, torch.optim.AdamW, lr=0.02), model), (torchs, twin)):
        fit(optimizer, m, batches[:3])
        optimizer.param_groups[0].update(betas=(0.3, 0.5), eps=0.1, lr=0.1)
        fit(optimizer, m, batches[3:])
    assert_same(model, twin, **CLOSE)


@pytest.mark.parametrize("name", ["AdamW", "nesterov", "Muon"])
def test_a_schedule_scales_the_whitened_step(name):
    """Halving lr in the groups halves the step on w; guards off, since a held step does not scale."""
    (cls, keywords), (model, twin), batches = RULES[name], twins(network), drifting()
    optimizers = [Whitened(m, cls, **keywords, **UNGUARDED) for m in (model, twin)]
    for optimizer, m in zip(optimizers, (model, twin), strict=True):
        fit(optimizer, m, batches[:4])
    before = weights(model)
    LambdaLR(optimizers[1], lambda k: 0.5)
    for optimizer, m in zip(optimizers, (model, twin), strict=True):
        fit(optimizer, m, batches[4:])
    for p, q, old in zip(model.parameters(), twin.parameters(), before, strict=True):
        assert_close((p - old) / 2, q - old, rtol=1e-9, atol=1e-12)


# weight decay

LEAKING = partial(torch.optim.AdamW, weight_decay=0.5)


@pytest.mark.parametrize("cls", [torch.optim.AdamW, torch.optim.Muon, torch.optim.SGD, torch.optim.RMSprop, LEAKING])
@pytest.mark.parametrize("decay", [0.0, 0.2])
def test_the_rule_never_decays_and_ours_shrinks_w(cls, decay):
    """With zero gradients nothing moves but by our decay: AdamW's 0.01 and Muon's 0.1 do not leak."""
    model = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 3)).double()
    optimizer, before = Whitened(model, cls, lr=0.5, weight_decay=decay, plain_lr=0.5), weights(model)
    descend(optimizer, (0 * model(randn(5, 4))).sum())
    for p, old in zip(model.parameters(), before, strict=True):
        assert_close(p.detach(), old * (1 - 0.5 * decay), rtol=1e-14, atol=0)
    assert all(group["weight_decay"] == decay for group in optimizer.param_groups)


def test_decay_adds_to_the_whitened_step_and_follows_its_group():
    (model, twin), batches = twins(lambda: nn.Sequential(nn.Linear(4, 3)).double()), [(1 + randn(5, 4), randn(5, 3))]
    before = weights(model)
    for m, own, rest in ((model, 0.3, 0.05), (twin, 0.0, 0.0)):
        weight, bias = m.parameters()
        groups = [{"params": [weight], "weight_decay": own}, {"params": [bias], "lr": 0.1}]
        fit(Whitened(groups, torch.optim.AdamW, model=m, lr=0.02, weight_decay=rest), m, batches)
    shrinks = (0.02 * 0.3, 0.1 * 0.05)
    for p, q, old, shrink in zip(*(weights(m) for m in (model, twin)), before, shrinks, strict=True):
        assert_close(p, q - shrink * old, rtol=1e-12, atol=1e-14)


# the plain rule


class Outside(nn.Module):
    """Two layers, and a parameter of each dimension outside any layer."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 3)
        self.mix = nn.Parameter(torch.eye(3))
        self.double()

    def forward(self, x):
        return self.last(torch.tanh(self.norm(self.first(x)))) @ self.mix


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
    """As that rule, options of its own included, makes of the same gradients."""
    model = Outside()
    optimizer = Whitened(model, base, lr=0.02, plain=plain)
    outside = [model.norm.weight, model.norm.bias, model.mix]
    copies = [nn.Parameter(p.detach().clone()) for p in outside]
    by_hand = rule(copies, weight_decay=0)
    for _ in range(4):
        fit(optimizer, model, [(1 + randn(6, 4), randn(6, 3))])
        for p, q in zip(outside, copies, strict=True):
            q.grad = p.grad.clone()
        by_hand.step()
    for p, q in zip(outside, copies, strict=True):
        assert_close(p.detach(), q.detach(), rtol=1e-10, atol=1e-12)


def test_the_plain_rule_follows_schedules_at_its_own_rate():
    model = Outside()
    optimizer = Whitened(model, torch.optim.Muon, lr=0.02, plain=partial(torch.optim.SGD, lr=0.1))
    scheduler = LambdaLR(optimizer, lambda k: 0.5**k)
    for rate in (0.1, 0.05, 0.025):
        before = model.mix.detach().clone()
        fit(optimizer, model, [(1 + randn(6, 4), randn(6, 3))])
        scheduler.step()
        assert_close(model.mix.detach() - before, -rate * model.mix.grad, rtol=1e-9, atol=1e-12)


def test_a_partial_of_muon_is_muon():
    """Its matrices are joint and the rest goes to AdamW, as for the class itself."""
    (model, twin), batches = twins(Outside), plain_batches(3)
    fit(Whitened(model, torch.optim.Muon, lr=0.02, ns_steps=4), model, batches)
    fit(Whitened(twin, partial(torch.optim.Muon, ns_steps=4), lr=0.02), twin, batches)
    assert_same(model, twin)


# state


@pytest.mark.parametrize("name", TORCHS)
def test_the_rules_state_is_in_state_dict_and_resumes_bit_exactly(name):
    (cls, keywords), model, other, batches = RULES[name], network(), network(), drifting(6)
    optimizer = Whitened(model, cls, **keywords)
    fit(optimizer, model, batches[:3])
    p = nn.Parameter(torch.zeros(2, 2))
    descend(bare := cls([p], **keywords), p.sum())
    assert {k for k, v in bare.state[p].items() if v is not None} <= set(optimizer.state_dict()["state"][0])
    saved_model, saved_optimizer = through_a_file([model.state_dict(), optimizer.state_dict()])
    fit(optimizer, model, batches[3:])
    other.load_state_dict(saved_model)
    resumed = Whitened(other, cls, **keywords)
    resumed.load_state_dict(saved_optimizer)
    fit(resumed, other, batches[3:])
    assert_same(model, other)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["AdamW", "RAdam", "RMSprop"])
def test_loading_leaves_the_rules_step_count_where_the_rule_keeps_it(name):
    """On the host, unless capturable: on the device every parameter's step would wait for it."""
    (cls, keywords), models = RULES[name], twins(lambda: nn.Linear(4, 3).cuda())
    optimizers = [Whitened(model, cls, **keywords) for model in models]
    descend(optimizers[0], models[0](torch.randn(5, 4, device="cuda")).sum())
    optimizers[1].load_state_dict(optimizers[0].state_dict())
    for p, q in zip(*(model.parameters() for model in models), strict=True):
        assert optimizers[0].state[p]["step"].device == optimizers[1].state[q]["step"].device


# what is refused

NO_CLASS = r"Whitened: base must be a torch\.optim\.Optimizer class; got "
ON_PARAMETERS = "cannot run in whitened coordinates: its step depends on the parameter"


@pytest.mark.parametrize(
    ("base", "keywords", "message"),
    [
        (torch.optim.LBFGS, {}, "Whitened: LBFGS cannot run in whitened coordinates: it evaluates the loss several"),
        (torch.optim.SparseAdam, {}, "Whitened: SparseAdam cannot run in whitened coordinates: it takes sparse grad"),
        (torch.optim.ASGD, {}, "Whitened: ASGD cannot run in whitened coordinates: it averages and decays the param"),
        (torch.optim.Adafactor, {}, "Whitened: Adafactor cannot run in whitened coordinates: its relative step"),
        (partial(torch.optim.LBFGS, lr=0.1), {}, "Whitened: LBFGS cannot run in whitened coordinates"),
        (torch.optim.AdamW, {"plain": torch.optim.LBFGS}, "Whitened: LBFGS cannot run in whitened coordinates"),
        (nn.Linear, {}, f"{NO_CLASS}<class"),
        ("AdamW", {}, rf"{NO_CLASS}'AdamW'\."),
        (None, {}, rf"{NO_CLASS}None\."),
        (torch.optim.SGD([torch.zeros(1)]), {}, f"{NO_CLASS}SGD"),
        (torch.optim.SGD, {"betas": (0.9, 0.99)}, "Whitened: SGD does not take these keywords: .*'betas'"),
        (torch.optim.AdamW, {"beta": 0.9, "lr": 0.1}, "Whitened: AdamW does not take these keywords: .*'beta'"),
        (torch.optim.AdamW, {"betas": (1.5, 0.9)}, r"Invalid beta parameter at index 0: 1\.5"),
        (torch.optim.AdamW, {"lr": -1.0}, r"Invalid learning rate: -1\.0"),
        (torch.optim.AdamW, {"trust": 0}, "Whitened: trust must be a finite number > 0, or None to turn it off; got 0"),
        (Lars, {}, f"Whitened: Lars {ON_PARAMETERS}"),
        (Lars, {"lr": 1e-8}, f"Whitened: Lars {ON_PARAMETERS}"),
        (Shrinking, {}, f"Whitened: Shrinking {ON_PARAMETERS}"),
        (Shrinking, {"lr": 1e-3, "shrink": 1e-4}, f"Whitened: Shrinking {ON_PARAMETERS}"),
        (WithoutRate, {}, "Whitened: WithoutRate .*lr"),
    ],
)
def test_bases_and_keywords_that_cannot_serve_are_refused_and_leave_the_model_alone(base, keywords, message):
    model = nn.Linear(3, 2)
    before = weights(model)
    with pytest.raises(ValueError, match=f"^{message}"):
        Whitened(model, base, **keywords)
    assert not model._forward_hooks and not model._forward_pre_hooks
    assert all(still(model, before))


# layers whose parts come and go


def small_network():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def small_step(optimizer, model, count=1):
    for _ in range(count):
        descend(optimizer, model(randn(16, 6)).square().mean())


def freeze_a_bias(model, optimizer):
    model[0].bias.requires_grad_(False)


def freeze_the_weights(model, optimizer):
    for layer in (model[0], model[2]):
        layer.weight.requires_grad_(False)


def prune(model, optimizer):
    l1_unstructured(model[0], "weight", 0.3)
    optimizer.refresh()


def unprune(model, optimizer):
    remove(model[0], "weight")
    optimizer.refresh()


def thaw(model, optimizer):
    model.requires_grad_(True)


@pytest.mark.parametrize(
    ("change", "back"), [(freeze_a_bias, thaw), (freeze_the_weights, thaw), (prune, unprune)], ids=lambda f: f.__name__
)
@pytest.mark.parametrize(
    ("base", "keywords"),
    [
        (torch.optim.Muon, {}),
        (torch.optim.Muon, {"plain": partial(torch.optim.SGD, lr=0.01, momentum=0.9)}),
        (torch.optim.AdamW, {"joint": True}),
        (torch.optim.AdamW, {"plain": torch.optim.Adamax}),
        (torch.optim.SGD, {"joint": True, "lr": 0.01, "momentum": 0.9}),
        (Lion, {"joint": True}),
    ],
)
def test_a_rule_goes_on_where_parts_of_a_layer_come_and_go(base, keywords, change, back):
    """And loads its own checkpoints in between."""
    model = small_network()
    optimizer = Whitened(model, base, **keywords)
    for alter in (change, back, change):
        small_step(optimizer, model, 2)
        optimizer.zero_grad()
        alter(model, optimizer)
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        small_step(optimizer, model, 2)
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        assert is_finite(model)


def test_a_joint_matrix_keeps_the_memory_of_its_weight_when_a_bias_leaves_or_joins():
    model = small_network()
    optimizer = Whitened(model, torch.optim.Muon)
    small_step(optimizer, model, 2)
    kept = optimizer.state[model[0].weight]["momentum_buffer"][:, :6].clone()
    for bias_trains, columns in ((False, 6), (True, 7)):
        model[0].bias.requires_grad_(bias_trains)
        descend(optimizer, model(torch.zeros(4, 6, dtype=torch.float64)).mul(0).sum())
        kept = 0.95 * kept
        buffer = optimizer.state[model[0].weight]["momentum_buffer"]
        assert buffer.shape == (8, columns)
        assert_close(buffer[:, :6], kept)


def test_a_batchnorm_is_folded_under_muon():
    model = nn.Sequential(nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)).double()
    optimizer = Whitened(model, torch.optim.Muon)
    small_step(optimizer, model)
    evenstep.fold_batchnorm(model)
    optimizer.refresh()
    small_step(optimizer, model)
    assert optimizer.state[model[0].weight]["momentum_buffer"].shape == (8, 7)


def test_a_copy_under_muon_steps_before_it_knows_its_model_and_loads_before():
    model = small_network()
    optimizer = Whitened(model, torch.optim.Muon)
    small_step(optimizer, model)
    other, twin = copy.deepcopy((model, optimizer))
    twin.load_state_dict(optimizer.state_dict())
    with pytest.warns(UserWarning, match="no model is attached"):
        small_step(twin, other)
    twin.attach(other)
    small_step(twin, other)
    assert twin.state[other[0].weight].keys() == optimizer.state[model[0].weight].keys()


# memory


class Memory(TorchDispatchMode):
    """Bytes of tensors made under this mode: those that live, and the most that lived at once."""

    def __init__(self):
        super().__init__()
        self.seen, self.now, self.peak = weakref.WeakKeyDictionary(), 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **kwargs or {})
        given = {t.untyped_storage() for t in torch.utils._pytree.tree_leaves((args, kwargs)) if torch.is_tensor(t)}
        for t in torch.utils._pytree.tree_leaves(result):
            if torch.is_tensor(t) and t.untyped_storage() not in given and t.untyped_storage() not in self.seen:
                storage, size = t.untyped_storage(), t.untyped_storage().nbytes()
                self.seen[storage] = size
                self.now += size
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self.gone, size)
        return result

    def gone(self, size):
        self.now -= size


def size_of(tensors):
    return sum(t.numel() * t.element_size() for t in tensors)


@pytest.mark.parametrize("foreach", [None, False])
@pytest.mark.parametrize("name", ["SGD", "nesterov", "AdamW", "Muon", "Adagrad"])
def test_a_step_needs_room_for_three_copies_of_the_model_and_leaves_the_rules_state_alone(name, foreach):
    """Gradients on v, the rule's steps, and what the rule itself takes (`foreach` rules: one more)."""
    (cls, keywords), layers, width = RULES[name], 6, 128
    model = nn.Sequential(*[m for _ in range(layers) for m in (nn.Linear(width, width), nn.ReLU())])
    with Memory() as kept:
        optimizer = Whitened(model, cls, foreach=foreach, **keywords | {"lr": 1e-6})
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.randn(8, width)).square().mean().backward()
            with Memory() as peak:
                optimizer.step()
        optimizer.zero_grad()
    gc.collect()
    assert peak.peak <= 3.5 * size_of(model.parameters())
    state = [t for p in model.parameters() for t in optimizer.state[p].values() if torch.is_tensor(t)]
    assert kept.now - size_of(state) < size_of([model[0].weight]), "more than statistics outlasts a step"
    p = nn.Parameter(torch.zeros(width, width + 1))
    descend(bare := cls([p], **keywords), p.sum())
    rule = size_of(t for t in bare.state[p].values() if torch.is_tensor(t))
    assert size_of(state) <= layers * (rule + 4 * (2 * width + 8))


# UnitStep


class EvenOnV(RuleOnV):
    """UnitStep as its documentation has it, unit by unit on explicit v."""

    def __init__(self, model, *, lr, momentum, eps, decay, **keywords):
        super().__init__(model, None, decay=decay, **keywords)
        self.settings, self.memory = (lr, momentum, eps, decay, keywords["damping"]), {}

    def frame(self, k, x, y, g2):
        c, spread, fresh = oracle.OnV.frame(self, k, x, y, g2)
        return c._replace(beta=torch.ones_like(c.beta)), spread, fresh

    def steps(self, k, grads, v):
        lr, m, eps, decay, damping = self.settings
        layer = self.layers[k]
        _, unit = oracle.places(layer)
        total, weight, buffers = self.memory.get(
            k, (torch.zeros(oracle.units(layer)).double(), 0.0, [0.0] * len(grads))
        )
        buffers = [m * old + g for old, g in zip(buffers, grads, strict=True)]
        square = oracle.sum_per_unit(unit, grads[0] ** 2, len(total)) + (grads[1] ** 2 if len(grads) > 1 else 0)
        total, weight = decay * total + (1 - decay) * square, decay * weight + (1 - decay)
        self.memory[k] = total, weight, buffers
        average = total / weight
        root = (eps + torch.maximum(average, square) + damping * average.mean()).sqrt()
        ahead = [(1 - m) * (g + m * b) for g, b in zip(grads, buffers, strict=True)]
        length = (oracle.sum_per_unit(unit, v[0] ** 2, len(total)) + (v[1] ** 2 if len(v) > 1 else 0)).sqrt()
        scale = (length / stepsize.LONG).clamp(min=1) / root
        return [-lr * scale[unit] * ahead[0], *(-lr * scale * one for one in ahead[1:])]


@pytest.mark.parametrize("eps", [1e-12, 1e-2])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("guards", [UNGUARDED, GUARDS], ids=["bare", "guarded"])
def test_even_step_is_its_documentation(guards, momentum, eps):
    model, batches = network(), drifting(shock=1.0 if guards is UNGUARDED else 30.0)
    with torch.no_grad():
        model[2].weight[:3] *= 20  # units that are longer than usual
    settings = SETTINGS | {"lr": 0.1, "momentum": momentum, "eps": eps, **guards}
    smallest = assert_follows(EvenOnV(model, **settings), evenstep.UnitStep(model, **settings), model, batches)
    assert smallest == 1 if guards is UNGUARDED else smallest < 0.9


def test_every_unit_takes_a_step_of_at_most_lr_on_v():
    """A single step without damping: √(g²/max(R, ‖g‖²)) = 1 for each unit, whatever its gradient's size."""
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    x, t = 1 + randn(8, 4), 100 * randn(8, 3)
    seen = [x, torch.tanh(model[0](x)).detach()]
    before = copy.deepcopy(model)
    fit(evenstep.UnitStep(model, lr=0.01, momentum=0.0, damping=0.0, **UNGUARDED), model, [(x, t)])
    for layer, old, met in zip((model[0], model[2]), (before[0], before[2]), seen, strict=True):
        mean, var = oracle.mean_var(met)
        dw, db = (layer.weight - old.weight).detach(), (layer.bias - old.bias).detach()
        length2 = (db + dw @ mean) ** 2 + dw**2 @ var
        assert_close(length2.sqrt(), torch.full((len(db),), 0.01).double())


def test_even_step_on_weights_tied_under_two_biases():
    """One weight under two biases: both biases are part of the unit."""

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(4, 3), nn.Linear(4, 3)
            self.two.weight = self.one.weight

        def forward(self, x):
            return self.one(x) + torch.tanh(self.two(x))

    model = Tied()
    optimizer = evenstep.UnitStep(model, lr=0.01)
    x, t = 1 + torch.randn(16, 4), torch.randn(16, 3)
    before = functional.mse_loss(model(x), t).item()
    fit(optimizer, model, [(x, t)] * 30, functional.mse_loss)
    assert functional.mse_loss(model(x), t) < 0.9 * before
    assert optimizer.state[model.one.weight]["square"].numel() == 3


def test_even_step_keeps_one_momentum_one_float_per_unit_and_two_per_input():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32, 5))
    optimizer = evenstep.UnitStep(model)
    descend(optimizer, functional.cross_entropy(model(torch.randn(4, 3, 4, 4)), torch.randint(0, 5, (4,))))
    for layer, inputs, units in ((model[0], 3, 8), (model[3], 32, 5)):
        weight, bias = optimizer.state[layer.weight], optimizer.state[layer.bias]
        sizes = {k: v.numel() for k, v in weight.items()}
        assert weight["momentum_buffer"].shape == layer.weight.shape
        assert bias["momentum_buffer"].shape == layer.bias.shape
        arrays = sorted(size for k, size in sizes.items() if k != "momentum_buffer" and size > 1)
        assert arrays == sorted([inputs, inputs, units])
        assert sum(size == 1 for size in sizes.values()) <= 5
        assert all(v.numel() == 1 for k, v in bias.items() if k != "momentum_buffer")
