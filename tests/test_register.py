"""Layers of other packages: registered, known by name, built from known layers, or plain with a reason."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.testing import assert_close

import evenstep
import oracle
from evenstep.model import known_layers
from helpers import PAPER, Forward, coverage_of, every_optimizer, fit, is_finite, moved_by, randn, still, weights


@pytest.fixture(autouse=True)
def forgetful(monkeypatch):
    """Undo after each test the registrations it made."""
    monkeypatch.setattr(known_layers, "KINDS", dict(known_layers.KINDS))


def some_batches(*shape):
    return [(1 + randn(*shape), 0.0) for _ in range(3)]


class OwnForward(nn.Linear):
    """A Linear with a forward of its own, which may compute anything."""

    def forward(self, x):
        return functional.linear(x, self.weight) + self.bias


class Conv1D(nn.Module):
    """As Transformers has it: a Linear with its weight transposed."""

    def __init__(self, inputs, units):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(inputs, units) / 4), nn.Parameter(torch.zeros(units))

    def forward(self, x):
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(*x.shape[:-1], -1)


Conv1D.__module__ = "transformers.pytorch_utils"


GraphLinear = type("Linear", (OwnForward,), {"__module__": "torch_geometric.nn.dense.linear"})


@every_optimizer
@pytest.mark.parametrize(
    "layer",
    [
        pytest.param(OwnForward, marks=pytest.mark.feature("register_layer"), id="registered"),
        pytest.param(Conv1D, marks=pytest.mark.feature("Transformers' Conv1D"), id="Conv1D"),
        pytest.param(GraphLinear, marks=pytest.mark.feature("torch_geometric's Linear"), id="torch_geometric"),
    ],
)
def test_a_layer_like_a_linear_steps_like_one(case, layer):
    if layer is OwnForward:
        evenstep.register_layer(OwnForward, nn.Linear)
    model, twin = (nn.Sequential(make(4, 6), nn.Tanh(), make(6, 2)).double() for make in (layer, nn.Linear))

    def like_linears():
        return [p.detach().T if layer is Conv1D and p.dim() > 1 else p.detach() for p in model.parameters()]

    for p, q in zip(like_linears(), twin.parameters(), strict=True):
        q.detach().copy_(p)
    optimizer, other = case.build(model), case.build(twin)
    assert coverage_of(optimizer) == coverage_of(other)
    batches = some_batches(5, 3, 4)
    fit(optimizer, model, batches)
    fit(other, twin, batches)
    assert_close(like_linears(), weights(twin))


class PerHead(nn.Module):
    """Each of 4 heads maps its own 3 features to 2."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(4, 3, 2)), nn.Parameter(torch.randn(4, 2))

    def forward(self, x):
        return torch.einsum("bhi,hio->bho", x, self.weight) + self.bias


class PerHeadKind(evenstep.LayerKind):
    def groups(self, module):
        return 4

    def matrix(self, module, weight):
        return weight.mT.unsqueeze(-1)

    def unmatrix(self, module, matrix, weight):
        return matrix.squeeze(-1).mT

    def look(self, module, args, kwargs, output, batch_dim):
        x = args[0].flatten(1)
        return [evenstep.Look(x, dim=1, examples=len(x), applied=len(x))]


def test_a_users_kind_steps_exactly_like_the_layers_it_stands_for():
    """Undamped, since damping is relative to the mean variance of a layer: here of all heads."""
    model, x = PerHead().double(), 1 + randn(9, 4, 3)
    evenstep.register_layer(PerHead, PerHeadKind())
    moved = moved_by(evenstep.WhitenedSGD(model, lr=0.05, **PAPER), model(x).square().sum())
    for k in range(4):
        dw, (db,) = oracle.natural_gradient(model.weight.grad[k].T, [model.bias.grad[k]], x[:, k])
        assert_close(moved[model.weight][k].T, -0.05 * dw)
        assert_close(moved[model.bias][k], -0.05 * db)
    moved = moved_by(evenstep.FanInSGD(model, lr=0.05), model(x).square().sum())
    for p in model.parameters():
        assert_close(moved[p], -0.05 * p.grad / math.sqrt(3))


def test_a_class_may_be_named_before_it_is_there():
    evenstep.register_layer(f"{__name__}.Later", nn.Linear)
    later = type("Later", (nn.Linear,), {"forward": OwnForward.forward, "__module__": __name__})
    assert set(coverage_of(evenstep.UnitStep(later(2, 2))).values()) == {("whitened", "")}


def test_a_subclass_of_a_registered_class_with_a_forward_of_its_own_is_plain():
    evenstep.register_layer(OwnForward, nn.Linear)
    tripled = type("Tripled", (OwnForward,), {"forward": lambda self, x: 3 * nn.Linear.forward(self, x)})
    model = nn.Sequential(tripled(2, 2), OwnForward(2, 2))
    treatments = [how for how, _ in coverage_of(evenstep.UnitStep(model)).values()]
    assert treatments == ["plain", "plain", "whitened", "whitened"]


@pytest.mark.parametrize(
    ("layer", "kind", "message"),
    [
        (3, nn.Linear, "layer must be a class of nn.Module or its dotted name; got 3"),
        (nn.Linear(2, 2), nn.Linear, "layer must be a class of nn.Module or its dotted name; got Linear"),
        (OwnForward, nn.LayerNorm, "kind must be a LayerKind or a class of layers it knows; got <class .*LayerNorm"),
        (OwnForward, OwnForward, "kind must be a LayerKind or a class of layers it knows; got <class .*OwnForward"),
        (OwnForward, "Linear", "kind must be a LayerKind or a class of layers it knows; got 'Linear'"),
        (OwnForward, evenstep.LayerKind, "kind must be a LayerKind or a class of layers it knows; got <class"),
    ],
)
def test_bad_registrations_are_named(layer, kind, message):
    with pytest.raises(ValueError, match=f"register_layer: {message}"):
        evenstep.register_layer(layer, kind)


@pytest.mark.parametrize(
    ("method", "function", "got"),
    [
        ("matrix", lambda self, module, weight: weight.flatten(1), r"\[4, 6\]"),
        ("unmatrix", lambda self, module, matrix, weight: matrix.reshape(weight.shape), r"\[4, 2, 3, 1\]"),
    ],
)
def test_a_kind_whose_layout_does_not_come_back_is_refused(method, function, got):
    evenstep.register_layer(PerHead, type("Odd", (PerHeadKind,), {method: function})())
    message = rf"layer '0' \(PerHead\): Odd\.matrix must give .*got {got} for a weight of shape \[4, 3, 2\]"
    with pytest.raises(ValueError, match=message):
        evenstep.UnitStep(nn.Sequential(PerHead()))


def test_a_lazy_layer_is_covered_once_it_has_its_shape():
    """Before, it is refused: test_contract.py."""
    model = nn.Sequential(nn.LazyLinear(3)).double()
    model(randn(5, 4))
    assert set(coverage_of(evenstep.UnitStep(model)).values()) == {("whitened", "")}


def lora(inputs, units):
    """An adapter beside a frozen layer, as peft makes them."""
    base = nn.Linear(inputs, units).requires_grad_(False)
    adapter = {"down": nn.Linear(inputs, 2, bias=False), "up": nn.Linear(2, units, bias=False)}
    return Forward(lambda self, x: self.base(x) + self.up(self.down(x)), base=base, **adapter)


@pytest.mark.feature("LoRA adapters")
@every_optimizer
def test_adapters_train_and_what_they_adapt_stays(case):
    model = nn.Sequential(lora(4, 6), nn.Tanh(), lora(6, 2)).double()
    optimizer = case.build(model)
    rows = coverage_of(optimizer)
    assert {how for name, (how, _) in rows.items() if "base" in name} == {"frozen"}
    expected = {"plain"} if case.cls is evenstep.BlockNaturalSGD else {"whitened", "canonical", "fan-in"}
    assert {how for name, (how, _) in rows.items() if "base" not in name} <= expected
    before = weights(model)
    fit(optimizer, model, some_batches(5, 4))
    assert still(model, before) == ["base" in name for name, _ in model.named_parameters()]


NORMED = [
    (parametrizations.weight_norm, ["parametrizations.weight.original0", "parametrizations.weight.original1"]),
    (nn.utils.weight_norm, ["weight_g", "weight_v"]),
]


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated")
@pytest.mark.feature("parametrized weights (weight_norm)")
@pytest.mark.parametrize(("norm", "parts"), NORMED, ids=["new", "old"])
@every_optimizer
def test_a_weight_that_is_computed_is_plain_with_its_bias(case, norm, parts):
    model = nn.Sequential(norm(nn.Linear(4, 3)), nn.Linear(3, 2)).double()
    optimizer, before = case.build(model), weights(model)
    rows = coverage_of(optimizer)
    assert {rows[f"0.{name}"][0] for name in ("bias", *parts)} == {"plain"}
    assert rows["0.bias"][1].endswith("its layer's weight is computed from other parameters")
    fit(optimizer, model, some_batches(5, 4))
    assert not any(still(model, before))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:Please use quant_min")
@pytest.mark.feature("quantization-aware modules")
@every_optimizer
def test_quantization_aware_layers_are_plain_until_registered(case):
    quantized = torch.ao.nn.qat.Linear(4, 3, qconfig=torch.ao.quantization.get_default_qat_qconfig())
    model = nn.Sequential(quantized, nn.Linear(3, 3), nn.Linear(3, 2))
    treatment, reason = coverage_of(case.build(model))["0.weight"]
    assert treatment == "plain" and reason.endswith("torch.ao.nn.qat.modules.linear.Linear has a forward of its own")
    evenstep.register_layer(type(model[0]), nn.Linear)
    twin = copy.deepcopy(model)
    optimizer, before = case.build(twin), weights(twin)
    assert coverage_of(optimizer)["0.weight"] == coverage_of(optimizer)["1.weight"]
    fit(optimizer, twin, [(x.float(), t) for x, t in some_batches(5, 4)])
    assert is_finite(twin) and not any(still(twin, before))


class Tower(nn.Module):
    """Two weights in one module; the input of the second is the tanh of the first's output."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(5, 4)), nn.Parameter(torch.randn(2, 5))

    def forward(self, x):
        return (x @ self.up.T).tanh() @ self.down.T


class TowerKind(evenstep.LayerKind):
    def slots(self, module):
        return [evenstep.Slot("up", None, output_visible=False), evenstep.Slot("down", None)]

    def look(self, module, args, kwargs, output, batch_dim):
        seen = evenstep.Look(args[0], dim=1, examples=len(args[0]), applied=len(args[0]))
        return [seen, seen._replace(x=(args[0] @ module.up.T).tanh())]


def test_a_kind_with_several_weights_is_written_with_public_names():
    evenstep.register_layer(Tower, TowerKind())
    model = Tower().double()
    optimizer = evenstep.WhitenedSGD(model)
    monitor = evenstep.CurvatureMonitor(optimizer)
    assert [how for how, _ in coverage_of(optimizer).values()] == ["whitened", "whitened"]
    fit(optimizer, model, some_batches(9, 4))
    assert optimizer.state[model.up]["mass"] > 0 and optimizer.state[model.down]["mass"] > 0
    assert {name.split("/")[0] for name in monitor.scalars()} == {"up", "down", "all"} == {*optimizer.fired(), "all"}
