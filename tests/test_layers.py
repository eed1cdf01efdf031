"""Each kind of layer: its row in coverage(), and its update against explicit coordinates or a formula."""

import copy
import math
import pickle
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import evenstep
import oracle
from cases import LAYERS
from helpers import PAPER, Forward, assert_all_moved, assert_same, every_optimizer, fit, moved_by, randn, weights


def treatments(optimizer):
    """Parameter name to treatment, from coverage()."""
    return {row.parameter: row.treatment for row in optimizer.coverage()}


def reasons(optimizer):
    return {row.parameter: row.reason for row in optimizer.coverage()}


def assert_descends_on_v(optimizer, loss, model, names, rows, shared=1):
    """A step on `loss(model)` is autograd's on the explicit v of the parameters `names`, a weight and its biases.

    Constants are those of eq. 12 for the rows that the weight has met.
    """
    twin, lr = copy.deepcopy(model), optimizer.param_groups[0]["lr"]
    weight, *biases = (twin.get_parameter(name).detach() for name in names)
    layer = twin.get_submodule(names[0].rpartition(".")[0])
    mean, var = oracle.mean_var(rows)
    beta = torch.ones(oracle.units(layer)).double() * (oracle.fan_in(layer) * shared) ** -0.25

    def on_w(w, b):
        return loss(lambda x: functional_call(twin, dict(zip(names, [w, *b], strict=True)), x))

    new, moved = oracle.descend_on_v(on_w, layer, weight, biases, oracle.Constants(mean, var.rsqrt(), beta), lr)
    moved_by(optimizer, loss(model))
    for name, expected in zip(names, [new, *moved], strict=True):
        assert_close(model.get_parameter(name).detach(), expected)


def biasless(grad, rows):
    """The gradient of a weight without bias under the inverse of its surrogate curvature."""
    return grad @ torch.linalg.inv(oracle.surrogate(*oracle.mean_var(rows), bias=False))


# One layer of each kind


@pytest.mark.parametrize("name", LAYERS)
def test_every_kind_is_whitened_and_says_so(name):
    """Coverage names the layer's class; the first step is autograd's on explicit coordinates, guards on."""
    case = LAYERS[name]
    model, x = nn.Sequential(case.layer()), case.inputs()
    t = randn(*model(x).shape)
    keywords = {"lr": 0.2, "damping": 0.1, "fresh_max": 4.0, "trust": 0.1}
    reference, optimizer = oracle.OnV(model, **keywords), evenstep.WhitenedSGD(model, **keywords)
    kind = type(model[0]).__name__
    bias = [] if model[0].bias is None else [("0.bias", kind, "whitened", "")]
    reason = "" if bias else "no bias trains with it: implied bias"
    assert optimizer.coverage() == [("0.weight", kind, "whitened", reason), *bias]
    fit(optimizer, model, [(x, t)])
    reference.step(x, t)
    oracle.assert_same_parameters(reference, model)


def test_coverage_prints_as_a_table_and_repr_summarizes_it():
    model = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3), nn.Linear(3, 2, bias=False))
    optimizer = evenstep.WhitenedSGD(model)
    lines = str(optimizer.coverage()).splitlines()
    assert [line.split()[0] for line in lines] == [
        "parameter", "0.weight", "0.bias", "1.weight", "1.bias", "2.weight",
    ]  # fmt: skip
    assert lines[3].split()[1:3] == ["LayerNorm", "plain"]
    assert len({line.index(word) for line, word in zip(lines[1:3], ["whitened"] * 2, strict=True)}) == 1
    assert repr(optimizer).endswith("coverage: 3 whitened, 2 plain")


@pytest.mark.filterwarnings("ignore:.*saw no input")
@pytest.mark.parametrize("cls", [evenstep.WhitenedSGD, evenstep.CanonicalSGD, evenstep.UnitStep])
def test_coverage_of_a_weight_that_is_used_without_calling_its_layer(cls):
    """Its coordinates are fan-in's until the layer is called; before the first step nobody can know."""
    layer = nn.Linear(3, 2)
    optimizer = cls(layer)
    planned = optimizer.coverage()
    assert all(row.treatment in ("whitened", "canonical") and not row.reason for row in planned)
    moved_by(optimizer, F.linear(torch.randn(4, 3), layer.weight, layer.bias).square().sum())
    for row in optimizer.coverage():
        assert row.treatment == "fan-in"
        assert row.reason.startswith("no input seen so far (functional calls, ")
    moved_by(optimizer, layer(torch.randn(4, 3)).square().sum())
    assert optimizer.coverage() == planned


def functionally(layer, x):
    return F.linear(x, layer.weight, layer.bias)


def in_eval_mode(layer, x):
    return layer.eval()(x)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("call", [functionally, in_eval_mode])
@pytest.mark.parametrize("cls", [evenstep.WhitenedSGD, evenstep.CanonicalSGD])
def test_gradient_without_any_statistics_takes_fan_in_coordinates(cls, call, bias):
    layer = nn.Linear(4, 2, bias=bias).double()
    optimizer = cls(layer, lr=0.1, **PAPER)
    assert ("implied bias" in reasons(optimizer)["weight"]) == (not bias)
    with pytest.warns(UserWarning, match="saw no input .* or fan-in coordinates if it has none"):
        moved = moved_by(optimizer, call(layer, randn(6, 4)).square().mean())
    for p in layer.parameters():
        assert_close(moved[p], -0.1 * p.grad / math.sqrt(4))
    assert "implied bias" not in reasons(optimizer)["weight"]


@pytest.mark.parametrize("shape", [(4,), (3, 7)])
def test_input_without_batch_dimension_is_one_example(shape):
    """torch's layers take one example as it is: the step is that of a batch of one."""
    layer = (nn.Linear(4, 2) if len(shape) == 1 else nn.Conv1d(3, 2, 3)).double()
    twin, x = copy.deepcopy(layer), randn(*shape)
    for model, batch in ((layer, x), (twin, x.unsqueeze(0))):
        moved_by(evenstep.FanInSGD(model, lr=0.1), model(batch).square().sum())
    assert_close(layer.weight, twin.weight)


CALLS = {  # a layer, its input, and two ways to call it
    "linear": (nn.Linear(4, 2), (5, 4), lambda f, x: f(input=x), lambda f, x: f(x)),
    "in any order": (
        nn.ConvTranspose2d(2, 3, 2, stride=2),
        (2, 2, 4, 4),
        lambda f, x: f(output_size=[9, 9], input=x),
        lambda f, x: f(x, output_size=[9, 9]),
    ),
    "self-attention": (
        nn.MultiheadAttention(4, 2, batch_first=True),
        (5, 3, 4),
        lambda f, x: f(query=x, key=x, value=x)[0],
        lambda f, x: f(x, x, x)[0],
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_called_by_keyword(name):
    layer, shape, *calls = CALLS[name]
    twins, x = [copy.deepcopy(layer).double() for _ in calls], randn(*shape)
    for twin, call in zip(twins, calls, strict=True):
        moved_by(evenstep.WhitenedSGD(twin, **PAPER), call(twin, x).square().mean())
    assert_same(*twins)


# Inputs that are no plain tensors, or have no width


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


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
@every_optimizer
def test_a_nested_tensor_is_its_rows(case, layout):
    """Sequences of one length in a nested tensor are a batch like any other."""
    model, x = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).double(), randn(2, 5, 3)
    twin = copy.deepcopy(model)
    one, two = case.build(model), case.build(twin)
    for k in range(2):
        nested = torch.nested.nested_tensor([*(x + k)], layout=layout)
        moved_by(one, torch.stack(model(nested).unbind()).square().mean())
        moved_by(two, twin(x + k).square().mean())
    assert_same(twin, model, rtol=1e-10, atol=1e-12)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
@every_optimizer
def test_a_sparse_input_is_counted_but_has_no_moments(case, layout):
    """Without moments the layer moves in fan-in coordinates, and coverage() says so."""
    model, x = nn.Sequential(nn.Linear(3, 2)).double(), randn(6, 3).relu()
    optimizer = case.build(model)
    before = [p.detach().clone() for p in model.parameters()]
    moved_by(optimizer, model(x.to_sparse(layout=layout)).square().mean())
    assert_all_moved(model, before)
    state = optimizer.state[model[0].weight]
    assert state.get("sharing", 1) == 1
    assert ("sparse tensors show none" in reasons(optimizer)["0.weight"]) == ("mass" in state)


# Called several times, or not at all


def twice():
    """A layer that a forward uses twice, and one it does not use."""
    layers = {"layer": nn.Linear(3, 3), "spare": nn.Linear(3, 3)}
    return Forward(lambda self, x: self.layer(torch.tanh(self.layer(x)) + 1), **layers).double()


def test_layer_called_several_times_has_one_update_from_pooled_moments():
    """Rows of both calls are pooled, S is summed over calls, the gradient is the sum: one step on v."""
    model, x = twice(), randn(5, 3)
    met = torch.cat([x, torch.tanh(model.layer(x)) + 1]).detach()
    optimizer = evenstep.WhitenedSGD(model, lr=0.2, **PAPER)
    names = ["layer.weight", "layer.bias"]
    assert_descends_on_v(optimizer, lambda f: oracle.log_cosh(f(x), x).mean(), model, names, met, shared=2)
    assert optimizer.state[model.layer.weight]["sharing"] == 2


@pytest.mark.parametrize("sizes", [[6], [2, 4]])
def test_canonical_g2_of_a_layer_called_several_times(sizes):
    """Both calls of each example add to its Σ g², and an example counts once: one backward per example."""
    model, x = twice(), randn(6, 3)
    total = torch.zeros(3).double()
    for e in range(6):
        first = F.linear(x[e], model.layer.weight, model.layer.bias).detach().requires_grad_()
        second = F.linear(torch.tanh(first) + 1, model.layer.weight, model.layer.bias)
        g = torch.autograd.grad(oracle.log_cosh(second.unsqueeze(0), x[e : e + 1]).sum(), [first, second])
        total += g[0] ** 2 + g[1] ** 2
    optimizer = evenstep.CanonicalSGD(model, lr=0.1)
    for part in x.split(sizes):
        (oracle.log_cosh(model(part), part).sum() / 6).backward()
    optimizer.step()
    assert_close(optimizer.state[model.layer.weight]["mg2"], total / 6)


@every_optimizer
def test_unused_layer_is_left_alone_and_keeps_its_moments(case):
    model = twice()
    optimizer = case.build(model)
    moved_by(optimizer, model.spare(model(randn(5, 3))).square().mean())
    kept = {k: v.clone() for k, v in optimizer.state[model.spare.weight].items()}
    moved = moved_by(optimizer, model(randn(5, 3)).square().mean())
    assert not moved[model.spare.weight].any() and not moved[model.spare.bias].any()
    assert moved[model.layer.weight].any()
    assert all(torch.equal(v, kept[k]) for k, v in optimizer.state[model.spare.weight].items())


def unused(model, optimizer):
    moved_by(optimizer, model.spare(randn(6, 3)).square().mean())


def evaluated(model, optimizer):
    model.eval()


def detached(model, optimizer):
    optimizer.detach()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("pause", [unused, evaluated, detached])
def test_without_new_statistics_a_layer_moves_by_the_moments_it_had(pause):
    """After a pause, in eval mode (fine-tuning), without hooks; the last two with one warning."""
    model = Forward(lambda self, x: self.layer(x), layer=nn.Linear(3, 2), spare=nn.Linear(3, 2)).double()
    x, other, optimizer = 1 + randn(6, 3), randn(6, 3), evenstep.WhitenedSGD(model, lr=0.1, **PAPER)
    moved_by(optimizer, model(x).square().mean())
    pause(model, optimizer)
    told = pytest.warns(UserWarning, match=r"layer 'layer' \(Linear\) has a gradient but saw no input")
    with nullcontext() if pause is unused else told:
        names = ["layer.weight", "layer.bias"]
        assert_descends_on_v(optimizer, lambda f: f(other).square().mean(), model, names, x)
    moved_by(optimizer, model(other).square().mean())  # a second warning would be an error


# Tied weights


def tied(two, share_bias=False):
    """Two Linear layers that share their weight, and their bias or not."""
    one = nn.Linear(3, 3)
    two.weight = one.weight
    if share_bias:
        two.bias = one.bias
    return Forward(lambda self, x: self.two(torch.tanh(self.one(x)) + 1), one=one, two=two).double()


def rows_met(model, x):
    """What their weight meets for an input."""
    return torch.cat([x, torch.tanh(model.one(x)) + 1]).detach()


@pytest.mark.parametrize("share_bias", [True, False])
def test_tied_weights_have_one_update_with_the_sum_of_their_biases(share_bias):
    """Autograd on the explicit coordinates of one weight and both biases, moments pooled over both places."""
    model, x = tied(nn.Linear(3, 3), share_bias), randn(6, 3)
    met, optimizer = rows_met(model, x), evenstep.WhitenedSGD(model, lr=0.2, **PAPER)
    assert treatments(optimizer)["one.weight"] == "whitened"
    assert reasons(optimizer)["one.weight"] == "tied: one, two"
    names = ["one.weight", "one.bias", *([] if share_bias else ["two.bias"])]
    assert_descends_on_v(optimizer, lambda f: oracle.log_cosh(f(x), x).mean(), model, names, met, shared=2)


def held_and_free(model, loss, lr):
    """What a step on `loss(model)` moves each parameter by, by name: with a trust radius of 0.1, and without."""
    twin = copy.deepcopy(model)
    held = moved_by(evenstep.WhitenedSGD(model, lr=lr, **PAPER | {"trust": 0.1}), loss(model))
    free = moved_by(evenstep.WhitenedSGD(twin, lr=lr, **PAPER), loss(twin))
    return ({name: m[p] for name, p in net.named_parameters()} for net, m in ((model, held), (twin, free)))


def test_trust_radius_of_tied_weights_holds_for_every_bias():
    """One factor for the weight and all its biases: the tightest of them."""
    model, x = tied(nn.Linear(3, 3)), randn(6, 3)
    w, *biases = weights(model)
    mean, var = oracle.mean_var(rows_met(model, x))
    held, free = held_and_free(model, lambda f: f(x).square().sum(), lr=5.0)
    dw, *dbiases = free.values()
    factor = oracle.trust_factors(model.one, w, biases, dw, dbiases, mean, var, var, 0.1)
    assert (factor < 1).all()
    assert_close(held["one.weight"], factor.view(-1, 1) * dw)
    assert_close(held["two.bias"], factor * dbiases[1])


def test_tied_weight_with_a_bias_at_one_place_only_takes_the_biasless_form():
    """No bias goes with every use of the weight, so none can be its x_0 = 1; the one there is moves alone."""
    model, x = tied(nn.Linear(3, 3, bias=False)), randn(6, 3)
    met, optimizer = rows_met(model, x), evenstep.WhitenedSGD(model, lr=0.2, **PAPER)
    assert treatments(optimizer) == {"one.weight": "whitened", "one.bias": "fan-in"}
    moved = moved_by(optimizer, model(x).square().mean())
    assert_close(moved[model.one.weight], -0.2 / math.sqrt(3 * 2) * biasless(model.one.weight.grad, met))
    assert_close(moved[model.one.bias], -0.2 / math.sqrt(3 * 2) * model.one.bias.grad)


@pytest.mark.parametrize("block", ["network", "unit"])
def test_blocks_of_tied_weights_have_length_eta(block):
    """A unit's block is its weights and all its biases, each counted once (eqs. 9 and 10)."""
    model = tied(nn.Linear(3, 3))
    optimizer = evenstep.BlockNaturalSGD(model, lr=0.1, block=block, bounded=False)
    moved = moved_by(optimizer, model(randn(5, 3)).square().mean())
    units = torch.cat([moved[model.one.weight], *(moved[m.bias].unsqueeze(1) for m in (model.one, model.two))], 1)
    lengths = units.norm().view(1) if block == "network" else units.norm(dim=1)
    assert_close(lengths, 0.1 * torch.ones_like(lengths))


def sharing_weight(*layers):
    """Layers in a row, the first two of which share their weight."""
    layers[1].weight = layers[0].weight
    return nn.Sequential(*layers).double()


def test_tied_convolutions_may_differ_in_stride():
    """S is the sum of the output positions of both places."""
    model = sharing_weight(nn.Conv1d(2, 2, 3), nn.Conv1d(2, 2, 3, stride=2))
    moved = moved_by(evenstep.FanInSGD(model, lr=1.0), model(randn(4, 2, 9)).square().mean())
    assert_close(moved[model[0].weight], -model[0].weight.grad / math.sqrt(2 * 3 * (7 + 3)))


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ("embedding, one", "shared with Linear 'one'"),
        ("one, embedding", "shared with Embedding 'embedding'"),
        ("one, embedding, two", "shared with Embedding 'embedding', Linear 'two'"),
    ],
)
def test_a_shared_weight_names_its_other_owners(order, expected):
    """coverage() lists it under its first owner, whichever that is."""
    model, weight = nn.Module(), nn.Parameter(torch.randn(5, 3))
    for name in order.split(", "):
        model.add_module(name, nn.Embedding(5, 3) if name == "embedding" else nn.Linear(3, 5, bias=False))
        model.get_submodule(name).weight = weight
    model.other = nn.Linear(3, 3)
    row = evenstep.WhitenedSGD(model).coverage()[0]
    assert row == (f"{order.split(', ')[0]}.weight", type(next(model.children())).__name__, "plain", expected)


# Attention


def by_hand(attention):
    """Self-attention with one head, its projections as plain Linear layers; [batch, time, feature]."""

    def forward(self, x):
        q, k, v = self.in_proj(x).chunk(3, -1)
        return self.out_proj(torch.softmax(q @ k.mT / math.sqrt(q.shape[-1]), -1) @ v)

    n = attention.embed_dim
    model = Forward(forward, in_proj=nn.Linear(n, 3 * n), out_proj=nn.Linear(n, n)).double()
    model.load_state_dict({k.replace("in_proj_", "in_proj."): v for k, v in attention.state_dict().items()})
    return model


@pytest.mark.parametrize("batch_first", [True, False])
def test_self_attention_whitens_in_proj_like_a_linear_by_hand(batch_first):
    """in_proj sees the module's own input with S the time, in either layout; out_proj takes fan-in coordinates."""
    attention = nn.MultiheadAttention(4, 1, batch_first=batch_first).double()
    nn.init.normal_(attention.in_proj_bias)
    hand, x, t = by_hand(attention), 1 + randn(5, 3, 4), randn(5, 3, 4)
    optimizer = evenstep.WhitenedSGD(attention, lr=0.3, **PAPER)
    assert treatments(optimizer) == {
        "in_proj_weight": "whitened", "in_proj_bias": "whitened", "out_proj.weight": "fan-in",
        "out_proj.bias": "fan-in",
    }  # fmt: skip
    assert "its input is not seen" in reasons(optimizer)["out_proj.weight"]
    seen = x if batch_first else x.transpose(0, 1).contiguous()
    y = attention(seen, seen, seen, need_weights=False)[0]
    moved = moved_by(optimizer, oracle.log_cosh(y if batch_first else y.transpose(0, 1), t).mean())
    truth = moved_by(evenstep.WhitenedSGD(hand, lr=0.3, **PAPER), oracle.log_cosh(hand(x), t).mean())
    assert_close(moved[attention.in_proj_weight], truth[hand.in_proj.weight])
    assert_close(moved[attention.in_proj_bias], truth[hand.in_proj.bias])
    rate = 0.3 / math.sqrt(4 * 3)
    assert_close(moved[attention.out_proj.weight], -rate * attention.out_proj.weight.grad)
    assert_close(moved[attention.out_proj.bias], -rate * attention.out_proj.bias.grad)


def test_cross_attention_takes_fan_in_coordinates_and_says_so_after_the_first_step():
    """in_proj then has three inputs, so it has no moments; S is the length of the query."""
    attention = nn.MultiheadAttention(4, 2, batch_first=True).double()
    optimizer = evenstep.WhitenedSGD(attention, lr=0.3, **PAPER)
    before, (query, memory) = reasons(optimizer), (randn(5, 3, 4), randn(5, 7, 4))
    moved = moved_by(optimizer, attention(query, memory, memory)[0].square().mean())
    for p in attention.parameters():
        assert_close(moved[p], -0.3 * p.grad / math.sqrt(4 * 3))
    changed = {name: reason for name, reason in reasons(optimizer).items() if reason != before[name]}
    assert [*changed] == ["in_proj_weight", "in_proj_bias"]
    assert "no input seen so far" in changed["in_proj_weight"]


def test_attention_with_other_key_sizes_takes_fan_in_for_each_projection():
    attention = nn.MultiheadAttention(4, 2, kdim=3, vdim=5, batch_first=True).double()
    optimizer = evenstep.WhitenedSGD(attention, lr=0.3, **PAPER)
    assert treatments(optimizer) == {
        "q_proj_weight": "fan-in", "k_proj_weight": "fan-in", "v_proj_weight": "fan-in", "in_proj_bias": "plain",
        "out_proj.weight": "fan-in", "out_proj.bias": "fan-in",
    }  # fmt: skip
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
    assert "sequences taken as [time, batch, feature]" in reasons(optimizer)["linear1.weight"]


# Plain


class Doubled(nn.Linear):
    """A Linear that computes something else."""

    def forward(self, x):
        return super().forward(2 * x)


class Renamed(nn.Linear):
    """A Linear by another name."""


def bare():
    """Parameters that belong to no known layer, before one that does."""

    def forward(self, x):
        return self.last(self.norm(self.rnn(self.embedding(x))[0]) * self.scale)

    parts = {"embedding": nn.Embedding(6, 4), "rnn": nn.GRU(4, 4, batch_first=True), "norm": nn.LayerNorm(4)}
    model = Forward(forward, **parts, last=nn.Linear(4, 2))
    model.scale = nn.Parameter(torch.randn(4))
    return model.double()


def language_model():
    parts = {"embedding": nn.Embedding(6, 3), "head": nn.Linear(3, 6), "other": nn.Linear(3, 3)}
    parts["head"].weight = parts["embedding"].weight
    return Forward(lambda self, x: self.head(self.other(self.embedding(x))), **parts).double()


def two_linears(first=None):
    return nn.Sequential(first or nn.Linear(3, 3), nn.Linear(3, 2)).double()


WHITENED = {"1.weight": "whitened ()", "1.bias": "whitened ()"}
PLAIN = {  # a model; what coverage() says of its parameters; what to exclude
    "without whitened form": (
        bare,
        {
            "last.weight": "whitened ()",
            "last.bias": "whitened ()",
            "norm.weight": "plain (no whitened form for LayerNorm)",
        },
        [],
    ),
    # [2, 2, 1] joins two inputs to two units, or four inputs to two units in two groups: not one set of inputs
    "shared by other groups": (
        lambda: sharing_weight(nn.Conv1d(4, 2, 1, groups=2), nn.Conv1d(2, 2, 1), nn.Conv1d(2, 3, 1)),
        {"0.weight": "plain ("},
        [],
    ),
    "shared with an embedding": (
        language_model,
        {
            "embedding.weight": "plain (shared with Linear 'head')",
            "head.bias": "plain (its weight is shared with Embedding 'embedding')",
            "other.weight": "whitened ()",
            "other.bias": "whitened ()",
        },
        [],
    ),
    "forward of its own": (
        lambda: nn.Sequential(Doubled(3, 3), Renamed(3, 2)).double(),
        {"0.weight": "plain (Doubled has a forward of its own)", "0.bias": "plain (", **WHITENED},
        [],
    ),
    # weight norm's g and v are no layer's weight; its bias has none to move with
    "parametrized": (lambda: two_linears(parametrizations.weight_norm(nn.Linear(3, 3))), WHITENED, []),
    "excluded": (
        two_linears,
        {"0.weight": "plain (excluded by '0.*')", "0.bias": "plain (excluded by '0.*')", **WHITENED},
        ["0.*"],
    ),
    "excluded weight": (
        two_linears,
        {
            "0.weight": "plain (excluded by '0.weight')",
            "0.bias": "plain (its weight is excluded by '0.weight')",
            **WHITENED,
        },
        ["0.weight"],
    ),
}


@pytest.mark.parametrize("name", PLAIN)
def test_what_is_plain_says_why_and_moves_by_its_gradient(name):
    """By −plain_lr times the gradient; what is whitened is named, and moves by something else."""
    build, expected, exclude = PLAIN[name]
    model = build()
    optimizer = evenstep.WhitenedSGD(model, lr=0.1, plain_lr=0.02, exclude=exclude, **PAPER)
    rows = {row.parameter: f"{row.treatment} ({row.reason})" for row in optimizer.coverage()}
    assert all(rows[parameter].startswith(how) for parameter, how in expected.items()), rows
    whitened = {parameter for parameter, how in expected.items() if how.startswith("whitened")}
    if name != "shared by other groups":
        assert whitened == {parameter for parameter, how in rows.items() if not how.startswith("plain (")}
    x = torch.randint(6, (5, 3)) if isinstance(model, Forward) else randn(5, *((4, 3) if "groups" in name else (3,)))
    moved = moved_by(optimizer, model(x).square().sum())
    for parameter, how in rows.items():
        p = model.get_parameter(parameter)
        if how.startswith("plain ("):
            assert_close(moved[p], -0.02 * p.grad)
        else:
            assert not torch.allclose(moved[p], -0.02 * p.grad)


def test_no_covered_layer_warns():
    with pytest.warns(UserWarning, match="no layer of this LayerNorm is covered"):
        evenstep.WhitenedSGD(nn.LayerNorm(3))


# A bias, or a weight, alone


def bias_excluded(model):
    return evenstep.WhitenedSGD(model, lr=0.1, exclude=["*bias"], **PAPER)


def bias_frozen(model):
    model[0].bias.requires_grad_(False)
    return evenstep.WhitenedSGD(model, lr=0.1, **PAPER)


def bias_outside_the_optimizer(model):
    return evenstep.WhitenedSGD([("0.weight", model[0].weight)], lr=0.1, model=model, **PAPER)


def bias_shared(model):
    model.append(nn.Linear(4, 4)).double()
    model[1].bias = model[0].bias
    return evenstep.WhitenedSGD(model, lr=0.1, **PAPER)


@pytest.mark.parametrize(
    ("without", "expected"),
    [(bias_excluded, "plain"), (bias_frozen, "frozen"), (bias_outside_the_optimizer, None), (bias_shared, "plain")],
)
def test_a_weight_whose_bias_does_not_train_with_it_takes_the_biasless_form(without, expected):
    model, x = nn.Sequential(nn.Linear(4, 4)).double(), 2 + randn(6, 4)
    optimizer = without(model)
    found, (weight, bias) = treatments(optimizer), (model[0].weight, model[0].bias)
    assert found["0.weight"] == "whitened" and found.get("0.bias") == expected
    assert reasons(optimizer)["0.weight"] == "no bias trains with it: implied bias"
    before = bias.detach().clone()
    moved = moved_by(optimizer, model(x).square().mean())
    assert_close(moved[weight], -0.1 / math.sqrt(4) * biasless(weight.grad, x))
    assert_close(bias.detach() - before, -0.1 * bias.grad if expected == "plain" else torch.zeros(4).double())


def test_bias_alone_moves_in_fan_in_coordinates():
    """A bias that trains while its weight is frozen: δb = −lr ⟨g⟩/√(n·S), and the weight stays."""
    layer, x = nn.Conv1d(2, 3, 2).double(), randn(5, 2, 6)
    layer.weight.requires_grad_(False)
    optimizer = evenstep.WhitenedSGD(layer, lr=0.1, **PAPER)
    assert treatments(optimizer) == {"weight": "frozen", "bias": "fan-in"}
    moved = moved_by(optimizer, layer(x).square().mean())
    assert_close(moved[layer.bias], -0.1 * layer.bias.grad / math.sqrt(2 * 2 * 5))
    assert not moved[layer.weight].any()


@pytest.mark.parametrize("frozen", ["weight", "bias"])
def test_trust_radius_measures_the_whole_unit_whatever_is_frozen(frozen):
    """‖u_j‖ is a property of the unit: a part of it that does not train still has its length."""
    layer, x = nn.Linear(4, 3).double(), 2 + randn(6, 4)
    nn.init.normal_(layer.bias, std=3.0)
    getattr(layer, frozen).requires_grad_(False)
    w, b = weights(layer)
    held, free = held_and_free(layer, lambda f: f(x).square().mean(), lr=30.0)
    # fan-in coordinates, which a bias alone has, are μ = 0 and α = 1
    mean, var = oracle.mean_var(x) if frozen == "bias" else (torch.zeros(4).double(), torch.ones(4).double())
    factor = oracle.trust_factors(layer, w, [b], free["weight"], [free["bias"]], mean, var, var, 0.1)
    assert (factor < 1).all()
    assert_close(held["weight"], factor.view(-1, 1) * free["weight"])
    assert_close(held["bias"], factor * free["bias"])


# Which forwards count


def network():
    return nn.Sequential(
        nn.Conv2d(2, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(12, 4), nn.Tanh(), nn.Linear(4, 2)
    ).double()


def some_batches():
    return [(k + randn(5, 2, 3, 3), randn(5, 2)) for k in range(3)]


def trained(model, batches, between=lambda model, x: None, cls=evenstep.WhitenedSGD):
    """The model after a few steps, with something done to it before each."""
    optimizer = cls(model, lr=0.05)
    for x, t in batches:
        between(model, x)
        fit(optimizer, model, [(x, t)])
    return model


def in_eval(model, x):
    model.eval()
    model(100 * x)
    model.train()


def without_grad(model, x):
    with torch.no_grad():
        model(100 * x)


def in_inference_mode(model, x):
    with torch.inference_mode():
        model(100 * x)


def in_a_transform(model, x):
    torch.func.vmap(lambda one: torch.func.functional_call(model, dict(model.named_parameters()), (one.unsqueeze(0),)))(
        100 * x
    )


def in_a_deepcopy(model, x):
    copy.deepcopy(model)(100 * x).sum().backward()


def in_a_pickle(model, x):
    pickle.loads(pickle.dumps(model))(100 * x).sum().backward()


@pytest.mark.parametrize(
    "between", [in_eval, without_grad, in_inference_mode, in_a_transform, in_a_deepcopy, in_a_pickle]
)
@pytest.mark.parametrize("cls", [evenstep.WhitenedSGD, evenstep.CanonicalSGD])
def test_forwards_that_do_not_train_never_count(between, cls):
    """Bit for bit the same steps with and without them."""
    model, batches = network(), some_batches()
    twin = copy.deepcopy(model)
    assert_same(trained(twin, batches, cls=cls), trained(model, batches, between, cls=cls))


def test_a_copy_of_a_watched_model_trains_with_an_optimizer_of_its_own():
    model, batches = network(), some_batches()
    optimizer = evenstep.WhitenedSGD(model, lr=0.05)
    one, other = (trained(twin, batches) for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))))
    assert_same(one, other)
    assert all(not state for state in optimizer.state.values())
    optimizer.detach()
    assert_same(one, trained(model, batches))


RECOMPUTED = {  # modules, the shape of an input, and a forward that calls a part of the model by `call`
    "two parts": (
        lambda: {"inner": network()},
        (2, 3, 3),
        lambda self, call, x: call(self.inner[3:], call(self.inner[:3], x)),
    ),
    "a layer called twice": (lambda: {"inner": twice()}, (3,), lambda self, call, x: call(self.inner, x)),
    "one of two calls": (
        lambda: {"layer": nn.Linear(3, 3)},
        (3,),
        lambda self, call, x: call(self.layer, self.layer(x)),
    ),
}


@pytest.mark.parametrize("name", RECOMPUTED)
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("cls", [evenstep.WhitenedSGD, evenstep.CanonicalSGD, evenstep.FanInSGD])
def test_activation_checkpointing_changes_no_update(cls, reentrant, name):
    """What is run again in the backward counts once, whether its first run had gradients or not; in micro-batches."""
    parts, shape, forward = RECOMPUTED[name]

    def again(module, x):
        return checkpoint(module, x if x.requires_grad else x.clone().requires_grad_(), use_reentrant=reentrant)

    model = Forward(lambda self, x: forward(self, again, x), **parts()).double()
    twin = copy.deepcopy(model)
    twin.function = lambda self, x: forward(self, lambda module, x: module(x), x)
    optimizers = cls(model, lr=0.05), cls(twin, lr=0.05)
    for k in range(3):
        x = k + randn(5, *shape)
        for net, optimizer in zip((model, twin), optimizers, strict=True):
            optimizer.zero_grad()
            for part in x.split([2, 3]):
                (net(part).cosh().log().sum() / 5).backward()
            optimizer.step()
    assert_same(twin, model, rtol=1e-10, atol=1e-12)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        one, other = (o.state[t].get("sharing") for o, t in zip(optimizers, (p, q), strict=True))
        assert one == other


def parts():
    """A body that may be called by itself, with a layer that it uses twice."""
    return Forward(lambda self, x: self.head(self.body(x)), body=twice(), head=nn.Linear(3, 2)).double()


def by_parts(model, x):
    return model.head(model.body(x))


def by_method(model, x):
    return model.forward(x)


def recomputed(model, x):
    return checkpoint(lambda x: by_parts(model, x), x.clone().requires_grad_(), use_reentrant=True)


def with_a_part_in_eval(model, x):
    model.eval()
    model.head.train()
    return model(x)


@pytest.mark.filterwarnings("ignore:.*saw no input")  # of the part in eval mode
@pytest.mark.parametrize("call", [by_parts, by_method, recomputed, with_a_part_in_eval])
def test_calls_outside_of_an_announced_forward_count_their_examples(call):
    """Whether or not the whole model was called before: in an earlier step, or in this one."""
    model, x = parts(), randn(16, 3)
    optimizer = evenstep.WhitenedSGD(model, lr=0.1)
    moved_by(optimizer, model(x).square().mean())
    assert optimizer.state[model.body.layer.weight]["sharing"] == 2
    for _ in range(2):
        moved_by(optimizer, call(model, x).square().mean())
        assert optimizer.state[model.head.weight]["sharing"] == 1
        if model.body.training:
            assert optimizer.state[model.body.layer.weight]["sharing"] == 1
    model.train()
    loss = model(x).square().mean()
    moved_by(optimizer, loss + by_parts(model, x).square().mean())
    assert optimizer.state[model.head.weight]["sharing"] == 1
    assert optimizer.state[model.body.layer.weight]["sharing"] == 4 / 3  # the whole model counts once, its part twice


def test_a_forward_that_fails_is_over():
    model, x = parts(), randn(16, 3)
    optimizer = evenstep.WhitenedSGD(model, lr=0.1)
    with pytest.raises(TypeError):
        model(None)
    moved_by(optimizer, by_parts(model, x).square().mean())
    assert optimizer.state[model.head.weight]["sharing"] == 1
    assert optimizer.state[model.body.layer.weight]["sharing"] == 1


def traced(model, x):
    trace = torch.jit.trace(model, x)
    return trace, [node.kind() for node in trace.inlined_graph.nodes()]


def exported(model, x):
    program = torch.export.export(model, (x,))
    return program.module(), [str(node.target) for node in program.graph.nodes]


@pytest.mark.filterwarnings("ignore:`torch.jit", "ignore:.*LeafSpec:FutureWarning")
@pytest.mark.parametrize("way", [traced, exported])
@pytest.mark.parametrize("cls", [evenstep.UnitStep, evenstep.CanonicalSGD])
def test_a_model_in_training_can_be_traced_and_exported(cls, way):
    """The program has the layers' operations alone, and is not counted."""
    model, x = network().float(), torch.randn(5, 2, 3, 3)
    _, expected = way(copy.deepcopy(model), x)
    optimizer = cls(model)
    program, found = way(model, x)
    assert found == expected
    assert not any(stage.applied for stage in optimizer._statistics.layers.values())
    assert_close(program(x), model(x))


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("cls", [evenstep.WhitenedSGD, evenstep.CanonicalSGD])
def test_batch_that_is_not_finite_leaves_no_trace(cls, first, value):
    """Weights, and all steps after it, are as if it had not come."""
    model, batches = network(), some_batches()
    twin, bad = copy.deepcopy(model), 1 + randn(5, 2, 3, 3)
    bad[0, 0, 0, 0] = value
    optimizer, other = cls(model, lr=0.05), cls(twin, lr=0.05)
    for k, batch in enumerate(batches):
        if k == (0 if first else 1):
            before = copy.deepcopy(model)
            with pytest.warns(UserWarning, match="a gradient is not finite"):
                fit(optimizer, model, [(bad, batch[1])])
            assert_same(before, model)
        fit(optimizer, model, [batch])
        fit(other, twin, [batch])
    assert_same(twin, model, rtol=1e-10, atol=1e-12)


class Turned(nn.Linear):
    """A Linear that computes and stores its output the other way round: a view with strides of its own."""

    def forward(self, x):
        return (self.weight @ x.mT + self.bias.unsqueeze(-1)).mT


evenstep.register_layer(Turned, nn.Linear)


OUTPUTS = {
    "linear [n]": (lambda: nn.Linear(3, 4), (3,)),
    "linear [B, n]": (lambda: nn.Linear(3, 4), (6, 3)),
    "linear [B, T, n]": (lambda: nn.Linear(3, 4), (6, 5, 3)),
    "linear [B, T, U, n]": (lambda: nn.Linear(3, 4), (6, 5, 2, 3)),
    "linear without bias": (lambda: nn.Linear(3, 4, bias=False), (6, 5, 3)),
    "conv": (lambda: nn.Conv2d(3, 4, 2), (6, 3, 4, 5)),
    "conv without batch": (lambda: nn.Conv2d(3, 4, 2), (3, 4, 5)),
    "conv, channels last": (lambda: nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last), (3, 4, 5)),
    "transposed conv": (lambda: nn.ConvTranspose1d(3, 4, 2), (6, 3, 5)),
    "turned": (lambda: Turned(3, 4), (6, 5, 3)),
}


def zero_first(y):
    y[..., :1] = 0
    return y


IN_PLACE = {  # an operation in place, and the same in a new tensor
    "none": (lambda y: y.tanh(), lambda y: y.tanh()),
    "relu": (nn.ReLU(inplace=True), lambda y: y.relu()),
    "add": (lambda y: y.add_(1).square(), lambda y: (y + 1).square()),
    "several": (lambda y: zero_first(y.mul_(2).add_(1)).square(), lambda y: zero_first(2 * y + 1).square()),
    "slice": (lambda y: zero_first(y).square(), lambda y: zero_first(y.clone()).square()),
    "of a view": (lambda y: y.flatten().sin_().square(), lambda y: y.flatten().sin().square()),
}


@pytest.mark.parametrize("change", IN_PLACE)
@pytest.mark.parametrize("output", OUTPUTS)
def test_g2_is_that_of_the_output_before_operations_in_place(output, change):
    build, shape = OUTPUTS[output]
    layer, x = build().double(), randn(*shape)
    in_place, apart = IN_PLACE[change]
    weights = torch.linspace(-1, 2, apart(layer(x)).numel()).double()

    y = layer(x)
    (g,) = torch.autograd.grad(apart(y).flatten() @ weights, y)
    units = y.dim() - 1 if isinstance(layer, nn.Linear) else y.dim() - x.dim() + shape.index(3)
    wanted = g.square().movedim(units, -1).reshape(-1, 4).sum(0)

    optimizer = evenstep.CanonicalSGD(nn.Sequential(layer), lr=0.1)
    (in_place(optimizer._statistics.model(x)).flatten() @ weights).backward()
    (stage,) = optimizer._statistics.layers.values()
    assert_close(stage.g2, wanted)


class LinearFunction(torch.autograd.Function):
    """A Linear without bias as extensions write it: the output is a view made inside the function."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return (x.flatten(0, -2) @ weight.T).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.flatten(0, -2).T @ x.flatten(0, -2)


class Extension(nn.Linear):
    def forward(self, x):
        return LinearFunction.apply(x, self.weight)


evenstep.register_layer(Extension, nn.Linear)


def test_g2_of_a_view_made_inside_an_autograd_function():
    layer, x = Extension(3, 4, bias=False).double(), randn(6, 5, 3)
    y = F.linear(x, layer.weight)
    (g,) = torch.autograd.grad(y.tanh().sum(), y)
    optimizer = evenstep.CanonicalSGD(layer, lr=0.1)
    layer(x).tanh().sum().backward()
    (statistics,) = optimizer._statistics.layers.values()
    assert_close(statistics.g2, g.square().sum((0, 1)))


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_g2_of_views_survives_checkpointing_and_retained_graphs(reentrant):
    layer, x = nn.Linear(3, 4).double(), randn(6, 5, 3)
    y = layer(x)
    (g,) = torch.autograd.grad(y.relu().square().sum(), y)
    model = nn.Sequential(layer, nn.ReLU(inplace=True))
    optimizer = evenstep.CanonicalSGD(model, lr=0.1)
    (stage,) = optimizer._statistics.layers.values()
    y = model(x) if reentrant is None else checkpoint(model, x.requires_grad_(), use_reentrant=reentrant)
    loss = y.square().sum()
    loss.backward(retain_graph=reentrant is None)
    assert_close(stage.g2, g.square().sum((0, 1)))
    if reentrant is None:  # a second pass adds its gradients, as autograd does
        loss.backward()
        assert_close(stage.g2, 2 * g.square().sum((0, 1)))


def test_g2_of_a_gradient_penalty_adds_both_passes():
    """The gradient that reaches the output in the first pass, and the one in the pass through the penalty."""
    layer, x = nn.Linear(3, 4).double(), randn(6, 5, 3).requires_grad_()
    y = layer(x)
    (first,) = torch.autograd.grad(y.tanh().sum(), y, create_graph=True)
    (second,) = torch.autograd.grad((first @ layer.weight).square().sum(), y)
    optimizer = evenstep.CanonicalSGD(layer, lr=0.1)
    (stage,) = optimizer._statistics.layers.values()
    (slope,) = torch.autograd.grad(layer(x).tanh_().sum(), x, create_graph=True)
    slope.square().sum().backward()
    assert_close(stage.g2, first.square().sum((0, 1)) + second.square().sum((0, 1)))


def test_an_attention_has_no_g2_and_the_layers_around_it_do():
    block = nn.TransformerEncoderLayer(4, 2, 8, 0.0, nn.ReLU(inplace=True), batch_first=True).double()
    x, kept = randn(6, 5, 4), []
    handle = block.linear1.register_forward_hook(lambda module, args, y: kept.append(y))
    plain = copy.deepcopy(block)
    plain.activation = nn.ReLU()
    (g,) = torch.autograd.grad(plain(x).sin().sum(), kept)
    handle.remove()
    optimizer = evenstep.CanonicalSGD(block, lr=0.1)
    block(x).sin().sum().backward()
    stages = optimizer._statistics.items()
    assert_close(next(stage.g2 for entry, stage in stages if entry.path == "linear1"), g.square().sum((0, 1)))
    assert {entry.path for entry, stage in stages if not stage.units} == {"self_attn"}
