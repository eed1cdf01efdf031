"""Canonical coordinates (eq. 5): what they make of the curvature, and the squared gradients that their hooks read."""

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import evenstep
import oracle
from cases import LAYERS
from helpers import PAPER, randn, twice


def test_canonical_constants_make_the_curvature_the_identity():
    """The empirical Fisher matrix on v is I where inputs are independent of each other and of g (§2.3, App. A).

    The examples are all combinations of three values of each, so that this holds exactly.
    """
    grid = torch.cartesian_prod(*randn(5, 3))
    x, g = grid[:, :3], grid[:, 3:]
    layer = nn.Linear(3, 2).double()
    optimizer = evenstep.CanonicalSGD(layer, lr=0.0, damping=0.0, rows=None)
    (layer(x) * g).sum(1).mean().backward()
    optimizer.step()
    state = optimizer.state[layer.weight]
    z = torch.cat([torch.ones(len(x), 1).double(), (x - state["mx"]) / state["vx"].sqrt()], 1)
    for j in range(2):
        on_v = g[:, j : j + 1] / state["mg2"][j].sqrt() * z
        assert_close(on_v.T @ on_v / len(x), torch.eye(4).double())


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("sizes", [[6], [1, 3, 2]])
@pytest.mark.parametrize("name", ["linear", "linear-sequence", "grouped", "transposed2d"])
def test_canonical_g2_is_that_of_single_examples(name, sizes, reduction):
    """S·E[g²] from hooks on batches equals one backward per example, for both reductions and in micro-batches."""
    case = LAYERS[name]
    model, x = nn.Sequential(case.layer()), case.inputs(6)
    t = randn(6, *model(x).shape[1:])
    reference = oracle.OnV(model, lr=0.1, coordinates="canonical")
    truth = reference.squared(0, x, t, oracle.log_cosh)
    reference.step(x, t)
    optimizer = evenstep.CanonicalSGD(model, lr=0.1, reduction=reduction, **PAPER)
    for part, target in zip(x.split(sizes), t.split(sizes), strict=True):
        total = oracle.log_cosh(model(part), target).sum()
        (total / 6 if reduction == "mean" else total).backward()
    optimizer.step()
    assert_close(optimizer.state[model[0].weight]["mg2"], truth)
    oracle.assert_same_parameters(reference, model)


def test_canonical_constants_know_of_a_gradient_scaler():
    """Told of it, they have the squares of unscaled gradients; untold, those of scaled ones."""
    told, x = nn.Linear(4, 3), torch.randn(6, 4)
    untold, found = copy.deepcopy(told), []
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    for layer, tells in ((told, True), (untold, False)):
        optimizer = evenstep.CanonicalSGD(layer, lr=0.01, scaler=scaler if tells else None)
        scaler.scale(layer(x).square().mean()).backward()
        scaler.step(optimizer)
        found.append(optimizer.state[layer.weight]["mg2"])
    assert_close(found[0], found[1] / 256**2)


def gathered(layer, forward, model=None, examples=6, passes=1):
    """Σ ĝ² over the output of `layer`, as the optimizer keeps it after backward passes through what `forward` gives."""
    optimizer = evenstep.CanonicalSGD(model or layer, lr=0.0, reduction="sum")
    loss = forward()
    for left in reversed(range(passes)):
        loss.backward(retain_graph=left > 0)
    optimizer.step()
    return examples * optimizer.state[layer.weight]["mg2"]


def expected(loss, y, units=-1):
    """Σ ĝ² by autograd."""
    (g,) = torch.autograd.grad(loss, y)
    return g.square().movedim(units, -1).reshape(-1, y.shape[units]).sum(0)


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
    "conv, channels last": (lambda: nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last), (6, 3, 4, 5)),
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
    (build, shape), (in_place, apart) = OUTPUTS[output], IN_PLACE[change]
    layer, x = build().double(), randn(*shape)
    y = layer(x)
    slopes = torch.linspace(-1, 2, apart(y).numel()).double()
    truth = expected(apart(y).flatten() @ slopes, y, units=shape.index(3))
    found = gathered(layer, lambda: in_place(layer(x)).flatten() @ slopes, examples=6 if 6 in shape else 1)
    assert_close(found, truth)


def test_g2_of_a_layer_called_several_times_is_that_of_all_calls():
    """While an example counts once."""
    model, x = twice().double(), randn(6, 3)
    first = model.layer(x)
    second = model.layer(torch.tanh(first) + 1)
    slopes = torch.autograd.grad(oracle.log_cosh(second, x).sum(), [first, second])
    found = gathered(model.layer, lambda: oracle.log_cosh(model(x), x).sum(), model)
    assert_close(found, sum(g.square().sum(0) for g in slopes))


AGAIN = [*((partial(checkpoint, use_reentrant=reentrant), 1) for reentrant in (True, False)), (nn.Module.__call__, 2)]


@pytest.mark.parametrize(("call", "passes"), AGAIN, ids=["reentrant", "not reentrant", "two passes"])
def test_g2_of_views_survives_checkpointing_and_adds_up_over_passes_through_a_retained_graph(call, passes):
    layer, x = nn.Linear(3, 4).double(), randn(6, 5, 3).requires_grad_()
    model = nn.Sequential(layer, nn.ReLU(inplace=True))
    y = layer(x)
    found = gathered(layer, lambda: call(model, x).square().sum(), model, passes=passes)
    assert_close(found, passes * expected(y.relu().square().sum(), y))


def test_g2_of_a_gradient_penalty_adds_both_passes():
    """The gradient that reaches the output in the first pass, and the one in the pass through the penalty."""
    layer, x = nn.Linear(3, 4).double(), randn(6, 5, 3).requires_grad_()

    def penalty():
        (slope,) = torch.autograd.grad(layer(x).tanh_().sum(), x, create_graph=True)
        return slope.square().sum()

    y = layer(x)
    (first,) = torch.autograd.grad(y.tanh().sum(), y, create_graph=True)
    second = expected((first @ layer.weight).square().sum(), y)
    assert_close(gathered(layer, penalty), first.square().sum((0, 1)) + second)


def test_an_attention_has_no_g2_and_the_layers_around_it_do():
    block = nn.TransformerEncoderLayer(4, 2, 8, 0.0, nn.ReLU(inplace=True), batch_first=True).double()
    x, kept = randn(6, 5, 4), []
    handle = block.linear1.register_forward_hook(lambda module, args, y: kept.append(y))
    plain = copy.deepcopy(block)
    plain.activation = nn.ReLU()
    truth = expected(plain(x).sin().sum(), kept[0])
    handle.remove()
    optimizer = evenstep.CanonicalSGD(block, lr=0.1, reduction="sum")
    block(x).sin().sum().backward()
    optimizer.step()
    assert_close(6 * optimizer.state[block.linear1.weight]["mg2"], truth)
    names = {name for name, p in block.named_parameters() if "mg2" in optimizer.state[p]}
    assert names == {"linear1.weight", "linear2.weight"}
