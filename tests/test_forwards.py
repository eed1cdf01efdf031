"""Which forward passes count, and how often."""

import copy
import math
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import evenstep
import oracle
from helpers import PAPER, Forward, assert_same, coverage_of, fit, layer_statistics, moved_by, randn, twice
from rules import deep_network, drifting

WATCHING = [evenstep.WhitenedSGD, evenstep.CanonicalSGD]


def trained(model, batches, between=lambda model, x: None, cls=evenstep.WhitenedSGD):
    """The model after a few steps, with something done to it before each."""
    optimizer = cls(model, lr=0.05)
    for x, t in batches:
        between(model, 100 * x)
        fit(optimizer, model, [(x, t)])
    return model


def in_a_transform(model, x):
    parameters = dict(model.named_parameters())
    torch.func.vmap(lambda one: torch.func.functional_call(model, parameters, (one.unsqueeze(0),)))(x)


UNCOUNTED = {
    "eval": lambda model, x: (model.eval()(x), model.train()),
    "no_grad": lambda model, x: torch.no_grad()(lambda: model(x))(),
    "inference mode": lambda model, x: torch.inference_mode()(lambda: model(x))(),
    "transform": in_a_transform,
}


@pytest.mark.parametrize("between", UNCOUNTED.values(), ids=UNCOUNTED)
@pytest.mark.parametrize("cls", WATCHING)
def test_forwards_that_do_not_train_never_count(between, cls):
    """Bit for bit the same steps with and without them."""
    model, batches = deep_network(), drifting(3)
    twin = copy.deepcopy(model)
    assert_same(trained(twin, batches, cls=cls), trained(model, batches, between, cls))


def traced(model, x):
    trace = torch.jit.trace(model, x)
    return trace, [node.kind() for node in trace.inlined_graph.nodes()]


def exported(model, x):
    program = torch.export.export(model, (x,))
    return program.module(), [str(node.target) for node in program.graph.nodes]


@pytest.mark.filterwarnings("ignore:`torch.jit", "ignore:.*LeafSpec:FutureWarning")
@pytest.mark.parametrize("way", [traced, exported])
@pytest.mark.parametrize("cls", WATCHING)
def test_a_model_in_training_can_be_traced_and_exported(cls, way):
    """The program has the layers' operations alone, and is not counted."""
    model, x = deep_network().float(), torch.randn(5, 2, 4, 4)
    (_, expected), twin, batches = way(copy.deepcopy(model), x), copy.deepcopy(model), [(x, torch.randn(5, 3))]

    def trace(model, x):
        program, found = way(model, x)
        assert found == expected
        assert_close(program(x), copy.deepcopy(model)(x))

    assert_same(trained(twin, batches, cls=cls), trained(model, batches, trace, cls))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("functionally", [True, False])
@pytest.mark.parametrize("cls", WATCHING)
def test_a_gradient_without_any_statistics_takes_fan_in_coordinates(cls, functionally, bias):
    """coverage() says so from then on, until the layer is called; before the first step nobody can know."""
    layer, x = nn.Linear(4, 2, bias=bias).double(), randn(6, 4)
    optimizer = cls(layer, lr=0.1, **PAPER)
    planned = coverage_of(optimizer)
    assert all(how in ("whitened", "canonical") for how, _ in planned.values())
    assert ("implied bias" in planned["weight"][1]) == (not bias)
    y = functional.linear(x, layer.weight, layer.bias) if functionally else layer.eval()(x)
    with pytest.warns(UserWarning, match="saw no input .* or fan-in coordinates if it has none"):
        moved = moved_by(optimizer, y.square().mean())
    for p in layer.parameters():
        assert_close(moved[p], -0.1 * p.grad / math.sqrt(4))
    for how, reason in coverage_of(optimizer).values():
        assert how == "fan-in" and reason.startswith("no input seen so far (functional calls, ")
    moved_by(optimizer, layer.train()(x).square().mean())
    assert coverage_of(optimizer) == planned


PAUSES = {
    "unused": lambda model, optimizer: moved_by(optimizer, model.spare(randn(6, 3)).square().mean()),
    "eval mode": lambda model, optimizer: model.eval(),
    "detached": lambda model, optimizer: optimizer.detach(),
}


@pytest.mark.parametrize("pause", PAUSES)
def test_without_new_statistics_a_layer_moves_by_the_moments_it_had(pause):
    """After a pause, in eval mode (fine-tuning), without hooks; the last two with one warning."""
    model = Forward(lambda self, x: self.layer(x), layer=nn.Linear(3, 2), spare=nn.Linear(3, 2)).double()
    x, other, optimizer = 1 + randn(6, 3), randn(6, 3), evenstep.WhitenedSGD(model, lr=0.1, **PAPER)
    moved_by(optimizer, model(x).square().mean())
    PAUSES[pause](model, optimizer)
    told = pytest.warns(UserWarning, match=r"layer 'layer' \(Linear\) has a gradient but saw no input")
    weight, bias = model.layer.parameters()
    with nullcontext() if pause == "unused" else told:
        moved = moved_by(optimizer, model(other).square().mean())
    dw, (db,) = oracle.natural_gradient(weight.grad, [bias.grad], x)
    assert_close(moved[weight], -0.1 * dw)
    assert_close(moved[bias], -0.1 * db)
    moved_by(optimizer, model(other).square().mean())  # a second warning would be an error


RECOMPUTED = {  # modules, the shape of an input, and a forward that calls a part of the model by `call`
    "two parts": (
        lambda: {"inner": deep_network()},
        (2, 4, 4),
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
@pytest.mark.parametrize("cls", [*WATCHING, evenstep.FanInSGD])
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


def whole_and_parts():
    """A body that may be called by itself, with a layer that it uses twice; and its optimizer."""
    model = Forward(lambda self, x: self.head(self.body(x)), body=twice(), head=nn.Linear(3, 2)).double()
    return model, evenstep.WhitenedSGD(model, lr=0.1)


def sharing(optimizer, model):
    """S of the head, and of the layer that the body uses twice."""
    return [optimizer.state[layer.weight]["sharing"].item() for layer in (model.head, model.body.layer)]


def by_parts(model, x):
    return model.head(model.body(x))


def with_the_body_in_eval(model, x):
    model.eval()
    model.head.train()
    return model(x)


PARTLY = {
    "by parts": by_parts,
    "by its method": lambda model, x: model.forward(x),
    "recomputed": lambda model, x: checkpoint(by_parts, model, x.clone().requires_grad_(), use_reentrant=True),
    "body in eval mode": with_the_body_in_eval,
}


@pytest.mark.filterwarnings("ignore:.*saw no input")  # of the part in eval mode
@pytest.mark.parametrize("call", PARTLY)
def test_calls_outside_of_a_forward_of_the_whole_model_count_their_examples(call):
    """Whether or not the whole model was called before: in an earlier step, or in this one."""
    (model, optimizer), x = whole_and_parts(), randn(16, 3)
    moved_by(optimizer, model(x).square().mean())
    assert sharing(optimizer, model) == [1, 2]
    for _ in range(2):
        moved_by(optimizer, PARTLY[call](model, x).square().mean())
        assert sharing(optimizer, model) == [1, 1 if model.body.training else 2]
    model.train()
    loss = model(x).square().mean()
    moved_by(optimizer, loss + by_parts(model, x).square().mean())
    assert sharing(optimizer, model) == pytest.approx([1, 4 / 3])  # the whole model counts once, its part twice


def test_a_forward_that_fails_is_over():
    (model, optimizer), x = whole_and_parts(), randn(16, 3)
    with pytest.raises(TypeError):
        model(None)
    moved_by(optimizer, by_parts(model, x).square().mean())
    assert sharing(optimizer, model) == [1, 1]


def test_reading_the_tally_between_calls_changes_no_count():
    """A CPU counts in plain numbers until the tensor is read; both ways of counting add up."""
    model, x = nn.Sequential(twice(), nn.Linear(3, 3)), torch.randn(16, 3)
    for read in (False, True, False):
        optimizer = evenstep.WhitenedSGD(model)
        layers = layer_statistics(optimizer).values()
        for _ in range(2):
            model(x)
            _ = [layer.tally for layer in layers if read]
        assert [layer.tally.tolist() for layer in layers] == [[64, 0, 64, 32], [0] * 4, [32, 0, 32, 32]]
        optimizer.detach()
