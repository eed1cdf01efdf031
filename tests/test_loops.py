"""Training loops as people write them, for every optimizer: each must step as the plain loop does."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from cases import OPTIMIZERS

every_optimizer = pytest.mark.parametrize("case", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())


class Network(nn.Module):
    """Two stages and a head, with what a forward may do to them."""

    def __init__(self, *, inplace=False, keyword=False, recompute=None):
        super().__init__()
        self.one = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(inplace), nn.Flatten())
        self.two = nn.Sequential(nn.Linear(64, 6), nn.LayerNorm(6), nn.ReLU(inplace))
        self.head = nn.Linear(6, 3)
        self.keyword, self.recompute = keyword, recompute

    def forward(self, x):
        for stage in (self.one, self.two):
            if self.recompute is None:
                x = stage(x)
            else:
                x = checkpoint(stage, x.requires_grad_() if x.is_leaf else x, use_reentrant=self.recompute)
        return self.head(input=x) if self.keyword else self.head(x)


@pytest.fixture
def batches():
    return [(torch.randn(8, 2, 4, 4).double() + 1, torch.randint(0, 3, (8,))) for _ in range(4)]


def plain_step(model, optimizer, x, y):
    optimizer.zero_grad()
    functional.cross_entropy(model(x), y).backward()
    optimizer.step()


def trained(case, model, batches, step=plain_step):
    optimizer = case.build(model)
    for x, y in batches:
        step(model, optimizer, x.clone(), y)
    return [p.detach().clone() for p in model.parameters()]


def pair(**how):
    """A plain network and its twin that does something more."""
    model = Network().double()
    twin = Network(**how).double()
    twin.load_state_dict(model.state_dict())
    return model, twin


def assert_equal(case, model, twin, batches, step=plain_step, rtol=1e-9):
    for p, q in zip(trained(case, model, batches), trained(case, twin, batches, step), strict=True):
        assert_close(p, q, rtol=rtol, atol=1e-12)


@pytest.mark.feature("gradient accumulation")
@every_optimizer
@pytest.mark.parametrize("sizes", [[4, 4], [3, 1, 4]])
def test_micro_batches_are_one_batch(case, sizes, batches):
    def accumulate(model, optimizer, x, y):
        optimizer.zero_grad()
        for part, target in zip(x.split(sizes), y.split(sizes), strict=True):
            (functional.cross_entropy(model(part), target) * len(part) / len(x)).backward()
        optimizer.step()

    assert_equal(case, *pair(), batches, accumulate, rtol=1e-6)


@pytest.mark.feature("gradient clipping")
@every_optimizer
@pytest.mark.parametrize("by", ["norm", "value"])
def test_clipped_gradients_are_the_gradients(case, by, batches):
    """Clipping acts on raw gradients before the step: as if they had come so."""

    def clip(model, optimizer, x, y):
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        if by == "norm":
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        else:
            nn.utils.clip_grad_value_(model.parameters(), 0.01)
        optimizer.step()

    def by_hand(model, optimizer, x, y):
        params = list(model.parameters())
        grads = torch.autograd.grad(functional.cross_entropy(model(x), y), params)
        norm = torch.linalg.vector_norm(torch.stack([g.norm() for g in grads]))
        factor = (0.1 / (norm + 1e-6)).clamp(max=1.0)
        assert factor < 1
        for p, g in zip(params, grads, strict=True):
            p.grad = factor * g if by == "norm" else g.clamp(-0.01, 0.01)
        optimizer.step()

    model, twin = pair()
    for p, q in zip(trained(case, model, batches, clip), trained(case, twin, batches, by_hand), strict=True):
        assert_close(p, q, rtol=1e-9, atol=1e-12)


@pytest.mark.feature("activation checkpointing")
@every_optimizer
@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputed_forwards_change_no_step(case, reentrant, batches):
    assert_equal(case, *pair(recompute=reentrant), batches)


@pytest.mark.feature("in-place activations")
@every_optimizer
def test_in_place_activations_change_no_step(case, batches):
    assert_equal(case, *pair(inplace=True), batches)


@pytest.mark.feature("modules called by keyword")
@every_optimizer
def test_calls_by_keyword_change_no_step(case, batches):
    assert_equal(case, *pair(keyword=True), batches)


@pytest.mark.feature("eval and no_grad forwards between steps")
@every_optimizer
def test_forwards_that_do_not_train_change_no_step(case, batches):
    def validate(model, optimizer, x, y):
        plain_step(model, optimizer, x, y)
        with torch.no_grad():
            model(100 * x)
        model.eval()
        model(100 * x)
        model.train()
        with torch.inference_mode():
            model(100 * x)

    assert_equal(case, *pair(), batches, validate)


@pytest.mark.feature("EMA copies")
@every_optimizer
def test_an_average_of_the_weights_may_be_kept_beside(case, batches):
    """A copy of the model, hooks and all, that is averaged and run in training mode."""
    kept = []

    def averaged(model, optimizer, x, y):
        if not kept:
            kept.append(AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5)))
        plain_step(model, optimizer, x, y)
        kept[0].update_parameters(model)
        kept[0](100 * x).sum().backward()

    model, twin = pair()
    assert_equal(case, model, twin, batches, averaged)
    for p, q in zip(kept[0].module.parameters(), twin.parameters(), strict=True):
        assert p.isfinite().all() and not torch.equal(p, q)


@pytest.mark.feature("channels_last")
@every_optimizer
def test_channels_last_changes_no_step(case, batches):
    model, twin = pair()
    twin = twin.to(memory_format=torch.channels_last)

    def step(model, optimizer, x, y):
        plain_step(model, optimizer, x.to(memory_format=torch.channels_last), y)

    assert_equal(case, model, twin, batches, step)


@pytest.mark.feature("freezing and thawing layers")
@every_optimizer
def test_a_layer_frozen_for_a_while_stands_still_and_goes_on(case, batches):
    model = Network().double()
    optimizer = case.build(model)
    layer = model.two[0]
    for k, (x, y) in enumerate(batches):
        layer.requires_grad_(k not in (1, 2))
        before = [p.detach().clone() for p in layer.parameters()]
        plain_step(model, optimizer, x, y)
        moved = [not torch.equal(p, q) for p, q in zip(layer.parameters(), before, strict=True)]
        assert moved == [k not in (1, 2)] * 2


@pytest.mark.feature("two backward passes, losses added")
@every_optimizer
def test_two_losses_from_one_forward_are_their_sum(case, batches):
    def both(model, optimizer, x, y):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        (0.25 * loss).backward(retain_graph=True)
        (0.75 * loss).backward()
        optimizer.step()

    if case.cls.__name__ == "CanonicalSGD":
        pytest.skip("g² is read at each backward: two of them are two gradients to it")
    assert_equal(case, *pair(), batches, both)


@pytest.mark.feature("deepcopy of a model in training")
@every_optimizer
def test_a_copy_trains_with_an_optimizer_of_its_own(case, batches):
    model, _ = pair()
    optimizer = case.build(model)
    plain_step(model, optimizer, *batches[0])
    twin = copy.deepcopy(model)
    other = case.build(twin)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for x, y in batches[1:]:
        plain_step(model, optimizer, x, y)
        plain_step(twin, other, x, y)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters(), strict=True))
