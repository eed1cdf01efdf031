"""Each kind of layer: its row in coverage(), and its update against explicit coordinates or a formula."""

import copy
import math
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import evenstep
import oracle
from cases import LAYERS, OPTIMIZERS

PAPER = {"damping": 0.0, "fresh_max": None, "trust": None}


def randn(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def treatments(optimizer):
    """Parameter name to treatment, from coverage()."""
    return {row.parameter: row.treatment for row in optimizer.coverage()}


def reasons(optimizer):
    return {row.parameter: row.reason for row in optimizer.coverage()}


def step(optimizer, loss):
    """Take one step on `loss`; returns how far each parameter moved."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    before = [p.detach().clone() for p in params]
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return {p: p.detach() - old for p, old in zip(params, before, strict=True)}


def whitening(rows, layer, shared):
    """Eq. 12's constants from a layer's input rows."""
    mean, var = oracle.mean_var(rows)
    return oracle.Constants(
        mean, var.rsqrt(), torch.ones(oracle.units(layer)).double() * (oracle.fan_in(layer) * shared) ** -0.25
    )


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
    step(optimizer, oracle.log_cosh(model(x), t).mean())
    reference.step(x, t)
    assert_close(model[0].weight.detach(), reference.w[0])
    if bias:
        assert_close(model[0].bias.detach(), reference.b[0])


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


def test_coverage_names_cross_attention_after_the_first_step():
    model = nn.TransformerDecoderLayer(8, 2, 16, dropout=0.0, batch_first=True).double()
    optimizer = evenstep.WhitenedSGD(model)
    before = {row.parameter: row.reason for row in optimizer.coverage()}
    step(optimizer, model(randn(3, 4, 8), randn(3, 5, 8)).square().mean())
    after = {row.parameter: row.reason for row in optimizer.coverage()}
    changed = [name for name in before if before[name] != after[name]]
    assert changed == ["multihead_attn.in_proj_weight", "multihead_attn.in_proj_bias"]
    assert "no input seen so far" in after[changed[0]]


@pytest.mark.filterwarnings("ignore:.*saw no input")
@pytest.mark.parametrize("cls", [evenstep.WhitenedSGD, evenstep.CanonicalSGD, evenstep.UnitStep])
def test_coverage_of_a_weight_that_is_used_without_calling_its_layer(cls):
    """Its coordinates are fan-in's until the layer is called; before the first step nobody can know."""
    layer = nn.Linear(3, 2)
    optimizer = cls(layer)
    planned = optimizer.coverage()
    assert all(row.treatment in ("whitened", "canonical") and not row.reason for row in planned)
    step(optimizer, F.linear(torch.randn(4, 3), layer.weight, layer.bias).square().sum())
    for row in optimizer.coverage():
        assert row.treatment == "fan-in"
        assert row.reason.startswith("no input seen so far (functional calls, ")
    step(optimizer, layer(torch.randn(4, 3)).square().sum())
    assert optimizer.coverage() == planned


def test_a_weight_without_bias_that_is_used_functionally_has_no_implied_bias():
    layer = nn.Linear(3, 2, bias=False)
    optimizer = evenstep.WhitenedSGD(layer, lr=0.1, **PAPER)
    assert reasons(optimizer)["weight"] == "no bias trains with it: implied bias"
    with pytest.warns(UserWarning, match="saw no input .* or fan-in coordinates if it has none"):
        moved = step(optimizer, F.linear(torch.randn(4, 3), layer.weight).square().sum())
    assert_close(moved[layer.weight], -0.1 * layer.weight.grad / math.sqrt(3))
    assert "implied bias" not in reasons(optimizer)["weight"]


@pytest.mark.parametrize("shape", [(4,), (3, 7)])
def test_input_without_batch_dimension_is_one_example(shape):
    """torch's layers take one example as it is: the step is that of a batch of one."""
    layer = (nn.Linear(4, 2) if len(shape) == 1 else nn.Conv1d(3, 2, 3)).double()
    twin, x = copy.deepcopy(layer), randn(*shape)
    for model, batch in ((layer, x), (twin, x.unsqueeze(0))):
        step(evenstep.FanInSGD(model, lr=0.1), model(batch).square().sum())
    assert_close(layer.weight, twin.weight)


def test_called_by_keyword():
    layer = nn.Linear(4, 2).double()
    twin, x = copy.deepcopy(layer), randn(5, 4)
    step(evenstep.WhitenedSGD(layer, lr=0.1), layer(input=x).square().sum())
    step(evenstep.WhitenedSGD(twin, lr=0.1), twin(x).square().sum())
    assert torch.equal(layer.weight, twin.weight)


def test_keywords_come_in_any_order():
    model = nn.ConvTranspose2d(2, 3, 2, stride=2)
    twin, x = copy.deepcopy(model), torch.randn(2, 2, 4, 4)
    step(evenstep.UnitStep(model), model(output_size=[9, 9], input=x).square().mean())
    step(evenstep.UnitStep(twin), twin(x, output_size=[9, 9]).square().mean())
    assert torch.equal(model.weight, twin.weight)


# Inputs that are no plain tensors, or have no width


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors is a no-op")
@pytest.mark.parametrize("lone", [True, False])
@pytest.mark.parametrize("case", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_a_layer_without_inputs_trains_its_bias(case, lone):
    model = nn.Sequential(*([] if lone else [nn.Linear(3, 0)]), nn.Linear(0, 2))
    optimizer, x = case.build(model), torch.randn(5, 0 if lone else 3)
    nn.init.ones_(model[-1].bias)
    for _ in range(3):
        before = model[-1].bias.detach().clone()
        step(optimizer, (model(x) - 3).square().mean())
        assert (model[-1].bias > before).all() and model[-1].bias.isfinite().all()
    assert optimizer.state[model[-1].weight].get("sharing", 1) == 1


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
@pytest.mark.parametrize("case", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_a_nested_tensor_is_its_rows(case, layout):
    """Sequences of one length in a nested tensor are a batch like any other."""
    model, x = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).double(), randn(2, 5, 3)
    twin = copy.deepcopy(model)
    one, two = case.build(model), case.build(twin)
    for k in range(2):
        nested = torch.nested.nested_tensor([*(x + k)], layout=layout)
        step(one, torch.stack(model(nested).unbind()).square().mean())
        step(two, twin(x + k).square().mean())
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert_close(p, q, rtol=1e-10, atol=1e-12)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
@pytest.mark.parametrize("case", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_a_sparse_input_is_counted_but_has_no_moments(case, layout):
    """Without moments the layer moves in fan-in coordinates, and coverage() says so."""
    model, x = nn.Sequential(nn.Linear(3, 2)).double(), randn(6, 3).relu()
    optimizer = case.build(model)
    before = [p.detach().clone() for p in model.parameters()]
    step(optimizer, model(x.to_sparse(layout=layout)).square().mean())
    assert all(p.isfinite().all() and not torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    state = optimizer.state[model[0].weight]
    assert state.get("sharing", 1) == 1
    assert ("sparse tensors show none" in reasons(optimizer)["0.weight"]) == ("mass" in state)


# Called several times, or not at all


class Twice(nn.Module):
    """A layer that a forward uses twice, and one it uses if asked."""

    def __init__(self):
        super().__init__()
        self.layer, self.spare = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x, spare=False):
        x = self.layer(torch.tanh(self.layer(x)) + 1)
        return self.spare(x) if spare else x


def test_layer_called_several_times_has_one_update_from_pooled_moments():
    """Rows of both calls are pooled, S is summed over calls, the gradient is the sum: one step on v."""
    model = Twice().double()
    layer, x = copy.deepcopy(model.layer), randn(5, 3)
    w, b = layer.weight.detach(), layer.bias.detach()
    optimizer = evenstep.WhitenedSGD(model, lr=0.2, **PAPER)
    step(optimizer, oracle.log_cosh(model(x), x).mean())
    met = torch.cat([x, torch.tanh(F.linear(x, w, b)) + 1])
    c = whitening(met, layer, shared=2)

    def loss(w, biases):
        y = F.linear(torch.tanh(F.linear(x, w, biases[0])) + 1, w, biases[0])
        return oracle.log_cosh(y, x).mean()

    new, (bias,) = oracle.descend_on_v(loss, layer, w, [b], c, lr=0.2)
    assert_close(model.layer.weight.detach(), new)
    assert_close(model.layer.bias.detach(), bias)
    assert optimizer.state[model.layer.weight]["sharing"] == 2


@pytest.mark.parametrize("sizes", [[6], [2, 4]])
def test_canonical_g2_of_a_layer_called_several_times(sizes):
    """Both calls of each example add to its Σ g², and an example counts once: one backward per example."""
    model, x = Twice().double(), randn(6, 3)
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


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_unused_layer_is_left_alone_and_keeps_its_moments(name):
    model = Twice().double()
    optimizer = OPTIMIZERS[name].build(model)
    step(optimizer, model(randn(5, 3), spare=True).square().mean())
    kept = {k: v.clone() for k, v in optimizer.state[model.spare.weight].items()}
    moved = step(optimizer, model(randn(5, 3)).square().mean())
    assert not moved[model.spare.weight].any() and not moved[model.spare.bias].any()
    assert moved[model.layer.weight].any()
    assert all(torch.equal(v, kept[k]) for k, v in optimizer.state[model.spare.weight].items())


def test_moments_after_a_pause_are_those_before_it():
    """A layer that returns after a pause moves by the constants it had."""
    model, x = Twice().double(), randn(5, 3)
    optimizer = evenstep.WhitenedSGD(model, lr=0.1, **PAPER)
    with torch.no_grad():
        seen = model(x)
    step(optimizer, model(x, spare=True).square().mean())
    step(optimizer, model(randn(5, 3)).square().mean())
    w, b = model.spare.weight.detach().clone(), model.spare.bias.detach().clone()
    with torch.no_grad():
        later = model(2 * x)
    step(optimizer, model(2 * x, spare=True).square().mean())
    c = whitening(seen, model.spare, shared=1)

    def loss(w, biases):
        return F.linear(later, w, biases[0]).square().mean()

    new, (bias,) = oracle.descend_on_v(loss, model.spare, w, [b], c, lr=0.1)
    assert_close(model.spare.weight.detach(), new)
    assert_close(model.spare.bias.detach(), bias)


def test_gradient_without_statistics_uses_the_last_moments_and_warns_once():
    """Eval-mode fine-tuning: constants are those of the last training forward."""
    layer, x = nn.Linear(3, 2).double(), 1 + randn(6, 3)
    optimizer = evenstep.WhitenedSGD(layer, lr=0.1, **PAPER)
    step(optimizer, layer(x).square().mean())
    layer.eval()
    w, b, other = layer.weight.detach().clone(), layer.bias.detach().clone(), randn(6, 3)
    with pytest.warns(UserWarning, match=r"layer '' \(Linear\) has a gradient but saw no input"):
        step(optimizer, layer(other).square().mean())
    new, (bias,) = oracle.descend_on_v(
        lambda w, biases: F.linear(other, w, biases[0]).square().mean(), layer, w, [b], whitening(x, layer, 1), lr=0.1
    )
    assert_close(layer.weight.detach(), new)
    assert_close(layer.bias.detach(), bias)
    step(optimizer, layer(other).square().mean())  # a second warning would be an error


@pytest.mark.parametrize("cls", [evenstep.WhitenedSGD, evenstep.CanonicalSGD])
def test_gradient_without_any_statistics_takes_fan_in_coordinates(cls):
    layer, x = nn.Linear(4, 2).double().eval(), randn(6, 4)
    optimizer = cls(layer, lr=0.1, **PAPER)
    with pytest.warns(UserWarning, match="saw no input"):
        moved = step(optimizer, layer(x).square().mean())
    assert_close(moved[layer.weight], -0.1 * layer.weight.grad / math.sqrt(4))
    assert_close(moved[layer.bias], -0.1 * layer.bias.grad / math.sqrt(4))


# Tied weights


class Tied(nn.Module):
    """Two layers that share their weight, and their bias or not."""

    def __init__(self, share_bias):
        super().__init__()
        self.one, self.two = nn.Linear(3, 3), nn.Linear(3, 3)
        self.two.weight = self.one.weight
        if share_bias:
            self.two.bias = self.one.bias

    def forward(self, x):
        return self.two(torch.tanh(self.one(x)) + 1)


@pytest.mark.parametrize("share_bias", [True, False])
def test_tied_weights_have_one_update_with_the_sum_of_their_biases(share_bias):
    """Autograd on the explicit coordinates of one weight and both biases, moments pooled over both places."""
    model = Tied(share_bias).double()
    x, w = randn(6, 3), model.one.weight.detach().clone()
    biases = [model.one.bias.detach().clone()] + ([] if share_bias else [model.two.bias.detach().clone()])
    optimizer = evenstep.WhitenedSGD(model, lr=0.2, **PAPER)
    assert treatments(optimizer)["one.weight"] == "whitened"
    assert reasons(optimizer)["one.weight"] == "tied: one, two"
    step(optimizer, oracle.log_cosh(model(x), x).mean())
    met = torch.cat([x, torch.tanh(F.linear(x, w, biases[0])) + 1])

    def loss(w, b):
        return oracle.log_cosh(F.linear(torch.tanh(F.linear(x, w, b[0])) + 1, w, b[-1]), x).mean()

    new, moved = oracle.descend_on_v(loss, model.one, w, biases, whitening(met, model.one, shared=2), lr=0.2)
    assert_close(model.one.weight.detach(), new)
    assert_close(model.one.bias.detach(), moved[0])
    assert_close(model.two.bias.detach(), moved[-1])


def test_trust_radius_of_tied_weights_holds_for_every_bias():
    """One factor for the weight and all its biases: the tightest of them."""
    model = Tied(share_bias=False).double()
    x, w = randn(6, 3), model.one.weight.detach().clone()
    biases = [model.one.bias.detach().clone(), model.two.bias.detach().clone()]
    free = copy.deepcopy(model)
    held = step(evenstep.WhitenedSGD(model, lr=5.0, damping=0.0, fresh_max=None, trust=0.1), model(x).square().sum())
    full = step(evenstep.WhitenedSGD(free, lr=5.0, **PAPER), free(x).square().sum())
    met = torch.cat([x, torch.tanh(F.linear(x, w, biases[0])) + 1])
    mean, var = oracle.mean_var(met)
    dw, dbiases = full[free.one.weight], [full[free.one.bias], full[free.two.bias]]
    factor = oracle.trust_factors(model.one, w, biases, dw, dbiases, mean, var, var, 0.1)
    assert (factor < 1).all()
    assert_close(held[model.one.weight], factor.view(-1, 1) * dw)
    assert_close(held[model.two.bias], factor * dbiases[1])


def test_tied_weight_with_a_bias_at_one_place_only_takes_the_biasless_form():
    """No bias goes with every use of the weight, so none can be its x_0 = 1; the one there is moves alone."""

    class OneBias(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(3, 3), nn.Linear(3, 3, bias=False)
            self.two.weight = self.one.weight

        def forward(self, x):
            return self.two(torch.tanh(self.one(x)) + 1)

    model = OneBias().double()
    w, b, x = model.one.weight.detach().clone(), model.one.bias.detach().clone(), randn(6, 3)
    optimizer = evenstep.WhitenedSGD(model, lr=0.2, **PAPER)
    assert treatments(optimizer) == {"one.weight": "whitened", "one.bias": "fan-in"}
    moved = step(optimizer, model(x).square().mean())
    met = torch.cat([x, torch.tanh(F.linear(x, w, b)) + 1])
    inverse = torch.linalg.inv(oracle.surrogate(*oracle.mean_var(met), bias=False))
    assert_close(moved[model.one.weight], -0.2 / math.sqrt(3 * 2) * model.one.weight.grad @ inverse)
    assert_close(moved[model.one.bias], -0.2 / math.sqrt(3 * 2) * model.one.bias.grad)


@pytest.mark.parametrize("block", ["network", "unit"])
def test_blocks_of_tied_weights_have_length_eta(block):
    """A unit's block is its weights and all its biases, each counted once (eqs. 9 and 10)."""
    model = Tied(share_bias=False).double()
    optimizer = evenstep.BlockNaturalSGD(model, lr=0.1, block=block, bounded=False)
    moved = step(optimizer, model(randn(5, 3)).square().mean())
    units = torch.cat([moved[model.one.weight], *(moved[m.bias].unsqueeze(1) for m in (model.one, model.two))], 1)
    lengths = units.norm().view(1) if block == "network" else units.norm(dim=1)
    assert_close(lengths, 0.1 * torch.ones_like(lengths))


def test_tied_convolutions_may_differ_in_stride():
    """S is the sum of the output positions of both places."""

    class Strides(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Conv1d(2, 2, 3), nn.Conv1d(2, 2, 3, stride=2)
            self.two.weight = self.one.weight

        def forward(self, x):
            return self.two(self.one(x))

    model = Strides().double()
    moved = step(evenstep.FanInSGD(model, lr=1.0), model(randn(4, 2, 9)).square().mean())
    assert_close(moved[model.one.weight], -model.one.weight.grad / math.sqrt(2 * 3 * (7 + 3)))


def test_weight_shared_across_different_groups_is_plain():
    """[2, 2, 1] joins two inputs to two units, or four inputs to two units in two groups: not one set of inputs."""
    model = nn.Sequential(nn.Conv1d(4, 2, 1, groups=2), nn.Conv1d(2, 2, 1), nn.Conv1d(2, 3, 1)).double()
    model[1].weight = model[0].weight
    optimizer = evenstep.WhitenedSGD(model, lr=0.1, **PAPER)
    assert treatments(optimizer)["0.weight"] == "plain"
    moved = step(optimizer, model(randn(5, 4, 3)).square().mean())
    assert_close(moved[model[0].weight], -0.1 * model[0].weight.grad)


def test_bias_shared_by_two_layers_is_plain_and_their_weights_take_the_biasless_form():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).double()
    model[1].bias = model[0].bias
    optimizer, x = evenstep.WhitenedSGD(model, lr=0.1, **PAPER), 2 + randn(6, 3)
    assert treatments(optimizer) == {"0.weight": "whitened", "0.bias": "plain", "1.weight": "whitened"}
    moved = step(optimizer, model(x).square().mean())
    inverse = torch.linalg.inv(oracle.surrogate(*oracle.mean_var(x), bias=False))
    assert_close(moved[model[0].weight], -0.1 / math.sqrt(3) * model[0].weight.grad @ inverse)
    assert_close(moved[model[0].bias], -0.1 * model[0].bias.grad)


def test_weight_shared_with_an_embedding_is_plain():
    class LanguageModel(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.head, self.other = nn.Embedding(5, 3), nn.Linear(3, 5), nn.Linear(3, 3)
            self.head.weight = self.embedding.weight

        def forward(self, x):
            return self.head(self.other(self.embedding(x)))

    model = LanguageModel().double()
    optimizer = evenstep.WhitenedSGD(model, lr=0.1, plain_lr=0.3, **PAPER)
    assert treatments(optimizer) == {
        "embedding.weight": "plain", "head.bias": "plain", "other.weight": "whitened", "other.bias": "whitened",
    }  # fmt: skip
    assert reasons(optimizer)["embedding.weight"] == "shared with Linear 'head'"
    assert reasons(optimizer)["head.bias"] == "its weight is shared with Embedding 'embedding'"
    moved = step(optimizer, model(torch.tensor([[0, 2], [3, 3]])).square().sum())
    assert_close(moved[model.head.weight], -0.3 * model.head.weight.grad)
    assert_close(moved[model.head.bias], -0.3 * model.head.bias.grad)


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


class ByHand(nn.Module):
    """Self-attention with one head, its projections as plain Linear layers; [batch, time, feature]."""

    def __init__(self, attention):
        super().__init__()
        n = attention.embed_dim
        self.in_proj, self.out_proj = nn.Linear(n, 3 * n).double(), nn.Linear(n, n).double()
        with torch.no_grad():
            self.in_proj.weight.copy_(attention.in_proj_weight)
            self.in_proj.bias.copy_(attention.in_proj_bias)
            self.out_proj.weight.copy_(attention.out_proj.weight)
            self.out_proj.bias.copy_(attention.out_proj.bias)

    def forward(self, x):
        q, k, v = self.in_proj(x).chunk(3, -1)
        return self.out_proj(torch.softmax(q @ k.mT / math.sqrt(q.shape[-1]), -1) @ v)


@pytest.mark.parametrize("batch_first", [True, False])
def test_self_attention_whitens_in_proj_like_a_linear_by_hand(batch_first):
    """in_proj sees the module's own input with S the time, in either layout; out_proj takes fan-in coordinates."""
    attention = nn.MultiheadAttention(4, 1, batch_first=batch_first).double()
    hand, x, t = ByHand(attention), 1 + randn(5, 3, 4), randn(5, 3, 4)
    nn.init.normal_(attention.in_proj_bias)
    hand.in_proj.bias.data.copy_(attention.in_proj_bias)
    optimizer = evenstep.WhitenedSGD(attention, lr=0.3, **PAPER)
    assert treatments(optimizer) == {
        "in_proj_weight": "whitened", "in_proj_bias": "whitened", "out_proj.weight": "fan-in",
        "out_proj.bias": "fan-in",
    }  # fmt: skip
    assert "its input is not seen" in reasons(optimizer)["out_proj.weight"]
    seen = x if batch_first else x.transpose(0, 1).contiguous()
    y = attention(seen, seen, seen, need_weights=False)[0]
    moved = step(optimizer, oracle.log_cosh(y if batch_first else y.transpose(0, 1), t).mean())
    truth = step(evenstep.WhitenedSGD(hand, lr=0.3, **PAPER), oracle.log_cosh(hand(x), t).mean())
    assert_close(moved[attention.in_proj_weight], truth[hand.in_proj.weight])
    assert_close(moved[attention.in_proj_bias], truth[hand.in_proj.bias])
    rate = 0.3 / math.sqrt(4 * 3)
    assert_close(moved[attention.out_proj.weight], -rate * attention.out_proj.weight.grad)
    assert_close(moved[attention.out_proj.bias], -rate * attention.out_proj.bias.grad)


def test_cross_attention_takes_fan_in_coordinates():
    """in_proj then has three inputs, so it has no moments; S is the length of the query."""
    attention = nn.MultiheadAttention(4, 2, batch_first=True).double()
    optimizer = evenstep.WhitenedSGD(attention, lr=0.3, **PAPER)
    query, memory = randn(5, 3, 4), randn(5, 7, 4)
    moved = step(optimizer, attention(query, memory, memory)[0].square().mean())
    for p in attention.parameters():
        assert_close(moved[p], -0.3 * p.grad / math.sqrt(4 * 3))


def test_attention_called_by_keyword_is_self_attention():
    attention = nn.MultiheadAttention(4, 2, batch_first=True).double()
    twin, x = copy.deepcopy(attention), randn(5, 3, 4)
    step(evenstep.WhitenedSGD(attention, **PAPER), attention(query=x, key=x, value=x)[0].square().sum())
    step(evenstep.WhitenedSGD(twin, **PAPER), twin(x, x, x)[0].square().sum())
    assert torch.equal(attention.in_proj_weight, twin.in_proj_weight)


def test_attention_with_other_key_sizes_takes_fan_in_for_each_projection():
    attention = nn.MultiheadAttention(4, 2, kdim=3, vdim=5, batch_first=True).double()
    optimizer = evenstep.WhitenedSGD(attention, lr=0.3, **PAPER)
    assert treatments(optimizer) == {
        "q_proj_weight": "fan-in", "k_proj_weight": "fan-in", "v_proj_weight": "fan-in", "in_proj_bias": "plain",
        "out_proj.weight": "fan-in", "out_proj.bias": "fan-in",
    }  # fmt: skip
    moved = step(optimizer, attention(randn(2, 3, 4), randn(2, 6, 3), randn(2, 6, 5))[0].square().mean())
    assert_close(moved[attention.v_proj_weight], -0.3 * attention.v_proj_weight.grad / math.sqrt(5 * 3))
    assert_close(moved[attention.in_proj_bias], -0.3 * attention.in_proj_bias.grad)


def test_linear_layers_beside_batch_second_attention_count_time_as_sharing():
    """In a TransformerEncoderLayer on [time, batch, feature] every Linear has S = time, as with batch first."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0).double()
    twin = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True).double()
    twin.load_state_dict(layer.state_dict())
    x = randn(6, 3, 4)
    optimizer = evenstep.WhitenedSGD(layer, lr=0.1, **PAPER)
    step(optimizer, layer(x.transpose(0, 1)).pow(3).mean())
    step(evenstep.WhitenedSGD(twin, lr=0.1, **PAPER), twin(x).pow(3).mean())
    for (name, p), q in zip(layer.named_parameters(), twin.parameters(), strict=True):
        assert_close(p, q, msg=name)
    assert "sequences taken as [time, batch, feature]" in reasons(optimizer)["linear1.weight"]


# Plain


class Bare(nn.Module):
    """Parameters that belong to no known layer, before one that does."""

    def __init__(self):
        super().__init__()
        self.embedding, self.rnn = nn.Embedding(6, 4), nn.GRU(4, 4, batch_first=True)
        self.norm, self.scale = nn.LayerNorm(4), nn.Parameter(torch.randn(4))
        self.last = nn.Linear(4, 2)

    def forward(self, x):
        return self.last(self.norm(self.rnn(self.embedding(x))[0]) * self.scale)


def test_norms_embeddings_rnns_and_bare_parameters_are_plain():
    """They move by −plain_lr times their gradient; the layers around them change nothing."""
    model = Bare().double()
    optimizer = evenstep.WhitenedSGD(model, lr=0.1, plain_lr=0.02, **PAPER)
    table = treatments(optimizer)
    assert {name for name, how in table.items() if how == "whitened"} == {"last.weight", "last.bias"}
    assert {how for name, how in table.items() if not name.startswith("last")} == {"plain"}
    assert reasons(optimizer)["norm.weight"] == "no whitened form for LayerNorm"
    moved = step(optimizer, model(torch.tensor([[0, 1, 5], [2, 2, 3]])).square().sum())
    for name, p in model.named_parameters():
        if not name.startswith("last"):
            assert_close(moved[p], -0.02 * p.grad)
    assert not torch.allclose(moved[model.last.weight], -0.02 * model.last.weight.grad)


class Doubled(nn.Linear):
    """A Linear that computes something else."""

    def forward(self, x):
        return super().forward(2 * x)


class Renamed(nn.Linear):
    """A Linear by another name."""


def test_subclass_with_a_forward_of_its_own_is_plain_and_one_without_is_not():
    model = nn.Sequential(Doubled(3, 3), Renamed(3, 2)).double()
    optimizer = evenstep.WhitenedSGD(model, lr=0.1, **PAPER)
    assert list(treatments(optimizer).values()) == ["plain", "plain", "whitened", "whitened"]
    assert reasons(optimizer)["0.weight"] == "Doubled has a forward of its own"
    moved = step(optimizer, model(randn(5, 3)).square().mean())
    assert_close(moved[model[0].weight], -0.1 * model[0].weight.grad)


def test_parametrized_weight_is_plain():
    """Weight norm's g and v are no layer's weight; its bias has none to move with."""
    model = nn.Sequential(parametrizations.weight_norm(nn.Linear(3, 3)), nn.Linear(3, 2)).double()
    optimizer = evenstep.WhitenedSGD(model, lr=0.1, **PAPER)
    assert [row.treatment for row in optimizer.coverage()] == ["plain"] * 3 + ["whitened"] * 2
    moved = step(optimizer, model(randn(5, 3)).square().mean())
    for p in model[0].parameters():
        assert_close(moved[p], -0.1 * p.grad)


def test_no_covered_layer_warns():
    with pytest.warns(UserWarning, match="no layer of this LayerNorm is covered"):
        evenstep.WhitenedSGD(nn.LayerNorm(3))


def test_excluded_names_are_plain():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)).double()
    optimizer = evenstep.WhitenedSGD(model, lr=0.1, exclude=["1.*"], **PAPER)
    assert treatments(optimizer) == {
        "0.weight": "whitened", "0.bias": "whitened", "1.weight": "plain", "1.bias": "plain",
    }  # fmt: skip
    assert reasons(optimizer)["1.weight"] == "excluded by '1.*'"
    moved = step(optimizer, model(randn(5, 3)).square().mean())
    assert_close(moved[model[1].weight], -0.1 * model[1].weight.grad)
    assert_close(moved[model[1].bias], -0.1 * model[1].bias.grad)


def test_excluded_bias_is_plain_and_its_weight_takes_the_biasless_form():
    """A pattern keeps every parameter it names in plain coordinates, biases too."""
    layer, x = nn.Linear(4, 3).double(), 2 + randn(6, 4)
    optimizer = evenstep.WhitenedSGD(layer, lr=0.1, exclude=["bias"], **PAPER)
    assert treatments(optimizer) == {"weight": "whitened", "bias": "plain"}
    assert reasons(optimizer)["bias"] == "excluded by 'bias'"
    moved = step(optimizer, layer(x).square().mean())
    inverse = torch.linalg.inv(oracle.surrogate(*oracle.mean_var(x), bias=False))
    assert_close(moved[layer.weight], -0.1 / math.sqrt(4) * layer.weight.grad @ inverse)
    assert_close(moved[layer.bias], -0.1 * layer.bias.grad)


# Frozen halves


def test_bias_alone_moves_in_fan_in_coordinates():
    """A bias that trains while its weight is frozen: δb = −lr ⟨g⟩/√(n·S), and the weight stays."""
    layer, x = nn.Conv1d(2, 3, 2).double(), randn(5, 2, 6)
    layer.weight.requires_grad_(False)
    optimizer = evenstep.WhitenedSGD(layer, lr=0.1, **PAPER)
    assert treatments(optimizer) == {"weight": "frozen", "bias": "fan-in"}
    moved = step(optimizer, layer(x).square().mean())
    assert_close(moved[layer.bias], -0.1 * layer.bias.grad / math.sqrt(2 * 2 * 5))
    assert not moved[layer.weight].any()


def test_excluded_weight_is_named_as_the_reason_of_its_bias():
    optimizer = evenstep.WhitenedSGD(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)), exclude=["0.weight"])
    assert reasons(optimizer)["0.weight"] == "excluded by '0.weight'"
    assert reasons(optimizer)["0.bias"] == "its weight is excluded by '0.weight'"


def test_weight_with_a_frozen_bias_takes_the_biasless_form():
    layer, x = nn.Linear(4, 3).double(), 2 + randn(6, 4)
    layer.bias.requires_grad_(False)
    optimizer = evenstep.WhitenedSGD(layer, lr=0.1, **PAPER)
    assert treatments(optimizer) == {"weight": "whitened", "bias": "frozen"}
    assert reasons(optimizer)["weight"] == "no bias trains with it: implied bias"
    moved = step(optimizer, layer(x).square().mean())
    mean, var = oracle.mean_var(x)
    inverse = torch.linalg.inv(oracle.surrogate(mean, var, bias=False))
    assert_close(moved[layer.weight], -0.1 / math.sqrt(4) * layer.weight.grad @ inverse)


def test_bias_outside_the_optimizer_counts_as_frozen():
    layer, x = nn.Linear(4, 3).double(), 2 + randn(6, 4)
    twin = copy.deepcopy(layer)
    twin.bias.requires_grad_(False)
    step(evenstep.WhitenedSGD([layer.weight], model=layer, **PAPER), layer(x).square().mean())
    step(evenstep.WhitenedSGD(twin, **PAPER), twin(x).square().mean())
    assert torch.equal(layer.weight, twin.weight)


@pytest.mark.parametrize("frozen", ["weight", "bias"])
def test_trust_radius_measures_the_whole_unit_whatever_is_frozen(frozen):
    """‖u_j‖ is a property of the unit: a part of it that does not train still has its length."""
    layer, x = nn.Linear(4, 3).double(), 2 + randn(6, 4)
    nn.init.normal_(layer.bias, std=3.0)
    getattr(layer, frozen).requires_grad_(False)
    w, b = layer.weight.detach().clone(), layer.bias.detach().clone()
    free = copy.deepcopy(layer)
    held = step(evenstep.WhitenedSGD(layer, lr=30.0, **PAPER | {"trust": 0.1}), layer(x).square().mean())
    full = step(evenstep.WhitenedSGD(free, lr=30.0, **PAPER), free(x).square().mean())
    # fan-in coordinates, which a bias alone has, are μ = 0 and α = 1
    mean, var = oracle.mean_var(x) if frozen == "bias" else (torch.zeros(4).double(), torch.ones(4).double())
    dw, db = full[free.weight], full[free.bias]
    factor = oracle.trust_factors(layer, w, [b], dw, [db], mean, var, var, 0.1)
    assert (factor < 1).all()
    assert_close(held[layer.weight], factor.view(-1, 1) * dw)
    assert_close(held[layer.bias], factor * db)


# Which forwards count


def trained(model, batches, between=lambda model, x: None, call=None, cls=evenstep.WhitenedSGD):
    """The parameters after a few steps, with something done to the model before each."""
    optimizer = cls(model, lr=0.05)
    for x, t in batches:
        optimizer.zero_grad()
        between(model, x)
        oracle.log_cosh((call or model)(x), t).mean().backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def network():
    return nn.Sequential(
        nn.Conv2d(2, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(12, 4), nn.Tanh(), nn.Linear(4, 2)
    ).double()


def some_batches():
    return [(k + randn(5, 2, 3, 3), randn(5, 2)) for k in range(3)]


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
    with_them = trained(model, batches, between, cls=cls)
    without = trained(twin, batches, cls=cls)
    assert all(torch.equal(p, q) for p, q in zip(with_them, without, strict=True))


def test_a_copy_of_a_watched_model_trains_with_an_optimizer_of_its_own():
    model, batches = network(), some_batches()
    optimizer = evenstep.WhitenedSGD(model, lr=0.05)
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    one, other = (trained(twin, batches) for twin in copies)
    assert all(torch.equal(p, q) for p, q in zip(one, other, strict=True))
    assert all(not state for state in optimizer.state.values())
    optimizer.detach()
    assert all(torch.equal(p, q) for p, q in zip(trained(model, batches), one, strict=True))


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("cls", [evenstep.WhitenedSGD, evenstep.CanonicalSGD, evenstep.FanInSGD])
def test_activation_checkpointing_changes_no_update(cls, reentrant):
    """A forward recomputed in the backward counts once, whether its first run had gradients or not."""

    class Checkpointed(nn.Module):
        def __init__(self, inner, on):
            super().__init__()
            self.inner, self.on = inner, on

        def forward(self, x):
            if not self.on:
                return self.inner(x)
            x = checkpoint(self.inner[:3], x.requires_grad_(), use_reentrant=reentrant)
            return checkpoint(self.inner[3:], x, use_reentrant=reentrant)

    inner, batches = network(), some_batches()
    twin = copy.deepcopy(inner)
    recomputed = trained(Checkpointed(inner, True), batches, cls=cls)
    plain = trained(Checkpointed(twin, False), batches, cls=cls)
    for p, q in zip(recomputed, plain, strict=True):
        assert_close(p, q, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("cls", [evenstep.WhitenedSGD, evenstep.CanonicalSGD])
def test_checkpointing_a_layer_called_twice_changes_no_update(cls, reentrant):
    """Repeated calls and micro-batches inside a checkpoint: rows, uses and examples as without it."""
    model, batches = Twice().double(), [(randn(5, 3), randn(5, 3)) for _ in range(2)]
    twin = copy.deepcopy(model)

    class Checkpointed(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return checkpoint(self.inner, x.requires_grad_(), use_reentrant=reentrant)

    for outer, inner in ((Checkpointed(model), model), (twin, twin)):
        optimizer = cls(outer, lr=0.05)
        for x, t in batches:
            optimizer.zero_grad()
            for part, target in zip(x.split([2, 3]), t.split([2, 3]), strict=True):
                (oracle.log_cosh(outer(part.clone()), target).sum() / 5).backward()
            optimizer.step()
        assert optimizer.state[inner.layer.weight]["sharing"] == 2
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert_close(p, q, rtol=1e-10, atol=1e-12)


class Parts(nn.Module):
    """A body that may be called by itself, with a layer that it uses twice."""

    def __init__(self):
        super().__init__()
        self.body, self.head = Twice(), nn.Linear(3, 2)

    def forward(self, x):
        return self.head(self.body(x))


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
    model, x = Parts(), torch.randn(16, 3)
    optimizer = evenstep.WhitenedSGD(model, lr=0.1)
    step(optimizer, model(x).square().mean())
    assert optimizer.state[model.body.layer.weight]["sharing"] == 2
    for _ in range(2):
        step(optimizer, call(model, x).square().mean())
        assert optimizer.state[model.head.weight]["sharing"] == 1
        if model.body.training:
            assert optimizer.state[model.body.layer.weight]["sharing"] == 1
    model.train()
    loss = model(x).square().mean()
    step(optimizer, loss + by_parts(model, x).square().mean())
    assert optimizer.state[model.head.weight]["sharing"] == 1
    assert optimizer.state[model.body.layer.weight]["sharing"] == 4 / 3  # the whole model counts once, its part twice


def test_a_forward_that_fails_is_over():
    model, x = Parts(), torch.randn(16, 3)
    optimizer = evenstep.WhitenedSGD(model, lr=0.1)
    with pytest.raises(TypeError):
        model(None)
    step(optimizer, by_parts(model, x).square().mean())
    assert optimizer.state[model.head.weight]["sharing"] == 1
    assert optimizer.state[model.body.layer.weight]["sharing"] == 1


@pytest.mark.filterwarnings("ignore:`torch.jit")
@pytest.mark.parametrize("cls", [evenstep.UnitStep, evenstep.CanonicalSGD])
def test_a_model_in_training_can_be_traced(cls):
    """The trace has the layers' operations alone, and is not counted."""
    model, x = network().float(), torch.randn(5, *some_batches()[0][0].shape[1:])
    plain = torch.jit.trace(copy.deepcopy(model), x)
    optimizer = cls(model)
    traced = torch.jit.trace(model, x)
    found, expected = ([node.kind() for node in trace.inlined_graph.nodes()] for trace in (traced, plain))
    assert found == expected
    assert not any(stage.applied for stage in optimizer._statistics.layers.values())
    assert_close(traced(x), model(x))


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
@pytest.mark.parametrize("cls", [evenstep.UnitStep, evenstep.CanonicalSGD])
def test_a_model_in_training_can_be_exported(cls):
    """The program has the layers' operations alone, and is not counted."""
    model, x = network().float(), torch.randn(5, *some_batches()[0][0].shape[1:])
    plain = torch.export.export(copy.deepcopy(model), (x,))
    optimizer = cls(model)
    exported = torch.export.export(model, (x,))
    found, expected = ([str(node.target) for node in program.graph.nodes] for program in (exported, plain))
    assert found == expected
    assert not any(stage.applied for stage in optimizer._statistics.layers.values())
    assert_close(exported.module()(x), model(x))


def test_checkpointing_one_of_two_calls_changes_no_update():
    """A layer used outside and inside a reentrant checkpoint: both calls count."""

    class Half(nn.Module):
        def __init__(self, on):
            super().__init__()
            self.layer, self.on = nn.Linear(3, 3), on

        def forward(self, x):
            x = self.layer(x)
            return checkpoint(self.layer, x, use_reentrant=True) if self.on else self.layer(x)

    model, twin, x = Half(True).double(), Half(False).double(), randn(5, 3)
    twin.load_state_dict(model.state_dict())
    step(evenstep.WhitenedSGD(model, lr=0.1, **PAPER), model(x).square().mean())
    step(evenstep.WhitenedSGD(twin, lr=0.1, **PAPER), twin(x).square().mean())
    assert_close(model.layer.weight, twin.layer.weight)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("cls", [evenstep.WhitenedSGD, evenstep.CanonicalSGD])
def test_batch_that_is_not_finite_leaves_no_trace(cls, first, value):
    """Weights, and all steps after it, are as if it had not come."""
    model, batches = network(), some_batches()
    twin, bad = copy.deepcopy(model), 1 + randn(5, 2, 3, 3)
    bad[0, 0, 0, 0] = value
    optimizer, other = cls(model, lr=0.05), cls(twin, lr=0.05)
    sequence = [(bad, batches[0][1]), *batches] if first else [batches[0], (bad, batches[0][1]), *batches[1:]]
    for x, t in sequence:
        if x is bad:
            before = [p.detach().clone() for p in model.parameters()]
            with pytest.warns(UserWarning, match="a gradient is not finite"):
                step(optimizer, oracle.log_cosh(model(x), t).mean())
            assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
        else:
            step(optimizer, oracle.log_cosh(model(x), t).mean())
            step(other, oracle.log_cosh(twin(x), t).mean())
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert_close(p, q, rtol=1e-10, atol=1e-12)


class Turned(nn.Linear):
    """A Linear that computes and stores its output the other way round: a view with strides of its own."""

    def forward(self, x):
        return (self.weight @ x.mT + self.bias.unsqueeze(-1)).mT


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
def test_g2_is_that_of_the_output_before_operations_in_place(output, change, monkeypatch):
    monkeypatch.setitem(evenstep.model.known_layers.KINDS, Turned, evenstep.LayerKind())
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


def test_g2_of_a_view_made_inside_an_autograd_function(monkeypatch):
    monkeypatch.setitem(evenstep.model.known_layers.KINDS, Extension, evenstep.LayerKind())
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


def test_detached_hooks_are_gone_and_steps_go_on_with_the_last_moments():
    layer, x = nn.Linear(3, 2).double(), randn(6, 3)
    optimizer = evenstep.WhitenedSGD(layer, lr=0.1, **PAPER)
    step(optimizer, layer(x).square().mean())
    optimizer.detach()
    assert not layer._forward_hooks and not layer._forward_pre_hooks
    w, b, other = layer.weight.detach().clone(), layer.bias.detach().clone(), randn(6, 3)
    with pytest.warns(UserWarning, match="saw no input"):
        step(optimizer, layer(other).square().mean())
    new, _ = oracle.descend_on_v(
        lambda w, biases: F.linear(other, w, biases[0]).square().mean(), layer, w, [b], whitening(x, layer, 1), lr=0.1
    )
    assert_close(layer.weight.detach(), new)
