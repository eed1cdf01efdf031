"""Each kind of layer: its row in coverage(), and its update against explicit coordinates or a formula."""

import copy
import math
from collections import OrderedDict

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import evenstep
import oracle
from cases import LAYERS
from helpers import CPU_AND_GPU, PAPER, Forward, assert_same, coverage_of, every_optimizer, moved_by, randn, weights


@pytest.mark.parametrize("name", LAYERS)
def test_every_kind_is_whitened_and_says_so(name):
    layer = LAYERS[name].layer()
    kind, biased = type(layer).__name__, layer.bias is not None
    weight = ("weight", kind, "whitened", "" if biased else "no bias trains with it: implied bias")
    assert evenstep.WhitenedSGD(layer).coverage() == [weight, *[("bias", kind, "whitened", "")] * biased]


def test_coverage_prints_as_a_table():
    model = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3), nn.Linear(3, 2, bias=False))
    optimizer = evenstep.WhitenedSGD(model)
    lines = str(optimizer.coverage()).splitlines()
    assert [line.split()[0] for line in lines] == ["parameter", "0.weight", "0.bias", "1.weight", "1.bias", "2.weight"]
    assert lines[3].split()[1:3] == ["LayerNorm", "plain"]
    assert len({line.index(word) for line, word in zip(lines[1:3], ["whitened"] * 2, strict=True)}) == 1


def nested(layout):
    """Call a layer with sequences of one length in a nested tensor."""
    return lambda f, x: torch.stack(f(torch.nested.nested_tensor([*x], layout=layout)).unbind())


SAME = {  # a layer, its input, and two ways to call it
    "by keyword": (nn.Linear(4, 2), (5, 4), lambda f, x: f(input=x), lambda f, x: f(x)),
    "by keyword in any order": (
        nn.ConvTranspose2d(2, 3, 2, stride=2),
        (2, 2, 4, 4),
        lambda f, x: f(output_size=[9, 9], input=x),
        lambda f, x: f(x, output_size=[9, 9]),
    ),
    "self-attention by keyword": (
        nn.MultiheadAttention(4, 2, batch_first=True),
        (5, 3, 4),
        lambda f, x: f(query=x, key=x, value=x)[0],
        lambda f, x: f(x, x, x)[0],
    ),
    "one example": (nn.Linear(4, 2), (1, 4), lambda f, x: f(x[0]), lambda f, x: f(x)),
    "one image": (nn.Conv1d(3, 2, 3), (1, 3, 7), lambda f, x: f(x[0]), lambda f, x: f(x)),
    "nested, jagged": (nn.Linear(3, 4), (2, 5, 3), nested(torch.jagged), lambda f, x: f(x)),
    "nested, strided": (nn.Linear(3, 4), (2, 5, 3), nested(torch.strided), lambda f, x: f(x)),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
@pytest.mark.parametrize("cls", [evenstep.WhitenedSGD, evenstep.CanonicalSGD, evenstep.FanInSGD])
@pytest.mark.parametrize("name", SAME)
def test_two_ways_to_call_a_layer_make_the_same_steps(name, cls):
    layer, shape, *calls = SAME[name]
    model, twin = (copy.deepcopy(layer).double() for _ in calls)
    optimizers, x = [cls(net, lr=0.1) for net in (model, twin)], randn(*shape)
    for k in range(2):
        for optimizer, net, call in zip(optimizers, (model, twin), calls, strict=True):
            moved_by(optimizer, call(net, x + k).square().mean())
    assert_same(model, twin, rtol=1e-10, atol=1e-12)


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors is a no-op")
@pytest.mark.parametrize("lone", [True, False])
@every_optimizer
def test_a_layer_without_inputs_trains_its_bias(case, lone):
    model = nn.Sequential(*([] if lone else [nn.Linear(3, 0)]), nn.Linear(0, 2))
    optimizer, x = case.build(model), torch.randn(5, 0 if lone else 3)
    nn.init.ones_(model[-1].bias)
    for _ in range(3):
        before = model[-1].bias.detach().clone()
        moved_by(optimizer, (model(x) - 3).square().mean())
        assert (model[-1].bias > before).all() and model[-1].bias.isfinite().all()
    assert optimizer.state[model[-1].weight].get("sharing", 1) == 1


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
@every_optimizer
def test_a_sparse_input_is_counted_but_has_no_moments(case, layout):
    """Without moments the layer moves in fan-in coordinates, and coverage() says so."""
    model, x = nn.Sequential(nn.Linear(3, 2)).double(), randn(6, 3).relu()
    optimizer = case.build(model)
    moved = moved_by(optimizer, model(x.to_sparse(layout=layout)).square().mean())
    assert all(step.isfinite().all() and step.any() for step in moved.values())
    state = optimizer.state[model[0].weight]
    assert state.get("sharing", 1) == 1
    assert ("sparse tensors" in coverage_of(optimizer)["0.weight"][1]) == ("mass" in state)


@pytest.mark.parametrize("batch_first", [True, False])
def test_self_attention_whitens_in_proj_like_a_linear(batch_first):
    """in_proj sees the module's own input with S the time, in either layout; out_proj takes fan-in coordinates."""
    attention, x = nn.MultiheadAttention(4, 1, batch_first=batch_first).double(), 1 + randn(5, 3, 4)
    nn.init.normal_(attention.in_proj_bias)
    optimizer = evenstep.WhitenedSGD(attention, lr=0.3, **PAPER)
    rows = coverage_of(optimizer)
    treatments = {"in_proj_": "whitened", "out_proj": "fan-in"}
    assert all(treatment == treatments[name[:8]] for name, (treatment, _) in rows.items())
    assert "its input is not seen" in rows["out_proj.weight"][1]
    seen = x if batch_first else x.transpose(0, 1).contiguous()
    moved = moved_by(optimizer, attention(seen, seen, seen, need_weights=False)[0].pow(3).mean())
    weight, bias = attention.in_proj_weight, attention.in_proj_bias
    dw, (db,) = oracle.natural_gradient(weight.grad, [bias.grad], x.flatten(0, 1), shared=3)
    assert_close(moved[weight], -0.3 * dw)
    assert_close(moved[bias], -0.3 * db)
    for p in attention.out_proj.parameters():
        assert_close(moved[p], -0.3 / math.sqrt(4 * 3) * p.grad)


def test_cross_attention_takes_fan_in_coordinates_and_says_so_after_the_first_step():
    """in_proj then has three inputs, so it has no moments; S is the length of the query."""
    attention = nn.MultiheadAttention(4, 2, batch_first=True).double()
    optimizer = evenstep.WhitenedSGD(attention, lr=0.3, **PAPER)
    before, (query, memory) = coverage_of(optimizer), (randn(5, 3, 4), randn(5, 7, 4))
    moved = moved_by(optimizer, attention(query, memory, memory)[0].square().mean())
    for p in attention.parameters():
        assert_close(moved[p], -0.3 * p.grad / math.sqrt(4 * 3))
    changed = {name: reason for name, (_, reason) in coverage_of(optimizer).items() if reason != before[name][1]}
    assert [*changed] == ["in_proj_weight", "in_proj_bias"]
    assert "no input seen so far" in changed["in_proj_weight"]


def test_attention_with_other_key_sizes_takes_fan_in_for_each_projection():
    attention = nn.MultiheadAttention(4, 2, kdim=3, vdim=5, batch_first=True).double()
    optimizer = evenstep.WhitenedSGD(attention, lr=0.3, **PAPER)
    for name, (treatment, _) in coverage_of(optimizer).items():
        assert treatment == ("plain" if name == "in_proj_bias" else "fan-in")
    moved = moved_by(optimizer, attention(randn(2, 3, 4), randn(2, 6, 3), randn(2, 6, 5))[0].square().mean())
    assert_close(moved[attention.v_proj_weight], -0.3 * attention.v_proj_weight.grad / math.sqrt(5 * 3))
    assert_close(moved[attention.in_proj_bias], -0.3 * attention.in_proj_bias.grad)


def test_linear_layers_beside_batch_second_attention_count_time_as_sharing():
    """In a TransformerEncoderLayer on [time, batch, feature] every Linear has S = time, as with batch first."""
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0).double()
    twin = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True).double()
    twin.load_state_dict(layer.state_dict())
    x = randn(6, 3, 4)
    optimizer = evenstep.WhitenedSGD(layer, lr=0.1, **PAPER)
    moved_by(optimizer, layer(x.transpose(0, 1)).pow(3).mean())
    moved_by(evenstep.WhitenedSGD(twin, lr=0.1, **PAPER), twin(x).pow(3).mean())
    assert_same(twin, layer, rtol=1e-7, atol=1e-7)
    assert "sequences taken as [time, batch, feature]" in coverage_of(optimizer)["linear1.weight"][1]


class Doubled(nn.Linear):
    """A Linear that computes something else."""

    def forward(self, x):
        return super().forward(2 * x)


def bare():
    """Parameters that belong to no known layer, before one that does."""

    def forward(self, x):
        return self.last(self.norm(self.rnn(self.embedding(x))[0]) * self.scale)

    parts = {"embedding": nn.Embedding(6, 4), "rnn": nn.GRU(4, 4, batch_first=True), "norm": nn.LayerNorm(4)}
    model = Forward(forward, **parts, last=nn.Linear(4, 2))
    model.scale = nn.Parameter(torch.randn(4))
    return model


def language_model():
    parts = {"embedding": nn.Embedding(6, 3), "head": nn.Linear(3, 6), "last": nn.Linear(3, 3)}
    parts["head"].weight = parts["embedding"].weight
    return Forward(lambda self, x: self.head(self.last(self.embedding(x))), **parts)


def two_layers(first=None):
    return nn.Sequential(OrderedDict(first=first or nn.Linear(3, 3), last=nn.Linear(3, 2)))


def of_other_groups():
    """Its weight, [2, 2, 1], joins two inputs to two units, or four to two in two groups: not one set of inputs."""
    model = two_layers(nn.Sequential(nn.Conv1d(4, 2, 1, groups=2), nn.Conv1d(2, 2, 1), nn.Flatten(), nn.Linear(2, 3)))
    model.first[1].weight = model.first[0].weight
    return model


PLAIN = {  # a model whose layer `last` is whitened; what coverage() says of other parameters; what to exclude
    "without whitened form": (bare, {"norm.weight": "no whitened form for LayerNorm"}, []),
    "shared by other groups": (of_other_groups, {"first.0.weight": ""}, []),
    "shared with an embedding": (
        language_model,
        {
            "embedding.weight": "shared by Embedding 'embedding', Linear 'head'",
            "head.bias": "its weight is shared by Embedding 'embedding', Linear 'head'",
        },
        [],
    ),
    "forward of its own": (
        lambda: nn.Sequential(OrderedDict(first=Doubled(3, 3), last=type("Renamed", (nn.Linear,), {})(3, 2))),
        {"first.weight": f"{Doubled.__module__}.Doubled has a forward of its own", "first.bias": ""},
        [],
    ),
    "excluded": (two_layers, {f"first.{part}": "excluded by 'f*'" for part in ("weight", "bias")}, ["f*"]),
    "excluded weight": (
        two_layers,
        {"first.weight": "excluded by 'first*.weight'", "first.bias": "its weight is excluded by 'first*.weight'"},
        ["first*.weight"],
    ),
}


@pytest.mark.parametrize("name", PLAIN)
def test_what_is_plain_says_why_and_moves_by_its_gradient(name):
    """By −plain_lr times the gradient; what is whitened is named, and moves by something else."""
    build, expected, exclude = PLAIN[name]
    model = build().double()
    optimizer = evenstep.WhitenedSGD(model, lr=0.1, plain_lr=0.02, exclude=exclude, **PAPER)
    rows = coverage_of(optimizer)
    assert all(rows[parameter][1].startswith(reason) for parameter, reason in expected.items()), rows
    assert all(rows[parameter][0] == "plain" for parameter in expected)
    assert rows["last.weight"] == rows["last.bias"] == ("whitened", "")
    x = torch.randint(6, (5, 3)) if isinstance(model, Forward) else randn(5, 3)
    x = randn(5, 4, 1) if name == "shared by other groups" else x
    moved = moved_by(optimizer, model(x).square().sum())
    for parameter, (treatment, _) in rows.items():
        p = model.get_parameter(parameter)
        assert torch.allclose(moved[p], -0.02 * p.grad) == (treatment == "plain")


def bias_frozen(model):
    model[0].bias.requires_grad_(False)
    return model


def bias_shared(model):
    model.append(nn.Linear(4, 4)).double()
    model[1].bias = model[0].bias
    return model


ALONE = {  # the first argument of the optimizer, more keywords, and how the bias is treated
    "excluded": (lambda model: model, {"exclude": ["*bias"]}, "plain"),
    "frozen": (bias_frozen, {}, "frozen"),
    "outside the optimizer": (lambda model: [("0.weight", model[0].weight)], {}, None),
    "shared": (bias_shared, {}, "plain"),
}


@pytest.mark.parametrize("name", ALONE)
def test_a_weight_whose_bias_does_not_train_with_it_takes_the_biasless_form(name):
    model, x = nn.Sequential(nn.Linear(4, 4)).double(), 2 + randn(6, 4)
    params, keywords, treatment = ALONE[name]
    optimizer = evenstep.WhitenedSGD(params(model), lr=0.1, model=model, **keywords, **PAPER)
    (weight, bias), rows = model[0].parameters(), coverage_of(optimizer)
    assert rows["0.weight"] == ("whitened", "no bias trains with it: implied bias")
    assert rows.get("0.bias", [None])[0] == treatment
    before = bias.detach().clone()
    moved = moved_by(optimizer, model(x).square().mean())
    assert_close(moved[weight], -0.1 * oracle.natural_gradient(weight.grad, [], x)[0])
    assert_close(bias.detach() - before, -0.1 * bias.grad if treatment == "plain" else torch.zeros(4).double())


@pytest.mark.parametrize("trust", [None, 0.1])
def test_a_bias_alone_moves_in_fan_in_coordinates(trust):
    """While its weight is frozen: δb = −lr ⟨g⟩/√(n·S). A guard still measures the whole unit, weight included."""
    layer, x, lr = nn.Conv1d(2, 3, 2).double(), randn(5, 2, 6), 30.0 if trust else 0.1
    layer.weight.requires_grad_(False)
    (w, b), one = weights(layer), torch.ones(2).double()
    optimizer = evenstep.WhitenedSGD(layer, lr=lr, **PAPER | {"trust": trust})
    assert [how for how, _ in coverage_of(optimizer).values()] == ["frozen", "fan-in"]
    moved = moved_by(optimizer, layer(x).square().mean())
    step = -lr * layer.bias.grad / math.sqrt(2 * 2 * 5)
    factor = oracle.trust_factors(layer, w, [b], 0 * w, [step], 0 * one, one, one, trust or math.inf)
    assert (factor < 1).all() if trust else (factor == 1).all()
    assert_close(moved[layer.bias], factor * step)
    assert not moved[layer.weight].any()


@pytest.mark.parametrize("device", CPU_AND_GPU)
@pytest.mark.parametrize("foreach", [None, False])
@pytest.mark.parametrize("cls", [evenstep.WhitenedSGD, evenstep.UnitStep])
def test_without_bias_the_step_on_a_constant_input_is_the_limit_of_small_variances(cls, foreach, device):
    """A variance of 0 would give its weights no coordinate. An input that is 0 moves nothing."""
    start, noise, slopes = nn.Linear(4, 3, bias=False), randn(64, 4), randn(3).to(device)
    mean, responses = torch.tensor([1.0, -2.0, 0.0, 3.0]).double(), []  # how far the step moves the outputs
    for spread in (0.0, 1e-4, 1e-2):
        model = copy.deepcopy(start).double().to(device)
        optimizer = cls(model, lr=0.01, foreach=foreach, **PAPER)
        x = (mean + spread * noise * (mean != 0)).to(device)
        moved = moved_by(optimizer, (model(x) * slopes).sum(1).mean())[model.weight]
        assert not moved[:, 2].any()
        responses.append(moved.cpu() @ mean)
    if cls is evenstep.WhitenedSGD:
        assert_close(responses[0], -0.01 / math.sqrt(4) * slopes.cpu(), rtol=1e-4, atol=0)
    assert_close(responses[0], responses[1], rtol=1e-3, atol=0)
    assert_close(responses[0], responses[2], rtol=0.02, atol=0)
