"""Training loops as people write them, for every optimizer: each must step as the plain loop does."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

from helpers import assert_same, descend, every_optimizer, still, weights


class Network(nn.Module):
    """Two parts and a head, and what a forward may do to them."""

    def __init__(self, *, inplace=False, keyword=False, recompute=None):
        super().__init__()
        up = nn.ConvTranspose2d(4, 4, 1, groups=2)
        self.one = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(inplace), up, nn.Flatten())
        self.two = nn.Sequential(nn.Linear(64, 6), nn.LayerNorm(6), nn.ReLU(inplace))
        self.head = nn.Linear(6, 3)
        self.keyword, self.recompute = keyword, recompute

    def forward(self, x):
        for part in (self.one, self.two):
            if self.recompute is None:
                x = part(x)
            else:
                x = checkpoint(part, x.requires_grad_() if x.is_leaf else x, use_reentrant=self.recompute)
        return self.head(input=x) if self.keyword else self.head(x)


def plain(model, optimizer, x, y):
    descend(optimizer, functional.cross_entropy(model(x), y))


def closure(model, optimizer, x, y):
    """The closure runs first, and its loss comes back."""

    def run():
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        return loss

    assert optimizer.step(run).requires_grad


def accumulate(model, optimizer, x, y, sizes):
    optimizer.zero_grad()
    for part, target in zip(x.split(sizes), y.split(sizes), strict=True):
        (functional.cross_entropy(model(part), target) * len(part) / len(x)).backward()
    optimizer.step()


def two_losses(model, optimizer, x, y):
    optimizer.zero_grad()
    loss = functional.cross_entropy(model(x), y)
    (0.25 * loss).backward(retain_graph=True)
    (0.75 * loss).backward()
    optimizer.step()


def negated(model, optimizer, x, y):
    descend(optimizer, -functional.cross_entropy(model(x), y))


def clip(model, optimizer, x, y, by):
    """Clipping acts on raw gradients before the step: as if they had come so."""
    clip_in_place = nn.utils.clip_grad_norm_ if by == "norm" else nn.utils.clip_grad_value_
    optimizer.zero_grad()
    functional.cross_entropy(model(x), y).backward()
    clip_in_place(model.parameters(), 0.01)
    optimizer.step()


def clip_by_hand(model, optimizer, x, y, by):
    params = list(model.parameters())
    grads = torch.autograd.grad(functional.cross_entropy(model(x), y), params)
    norm = torch.cat([g.flatten() for g in grads]).norm()
    for p, g in zip(params, grads, strict=True):
        p.grad = g * 0.01 / (norm + 1e-6) if by == "norm" else g.clamp(-0.01, 0.01)
    optimizer.step()


def channels_last(model, optimizer, x, y):
    model.to(memory_format=torch.channels_last)
    plain(model, optimizer, x.to(memory_format=torch.channels_last), y)
    assert model.one[0].weight.is_contiguous(memory_format=torch.channels_last)


def validate(model, optimizer, x, y):
    plain(model, optimizer, x, y)
    with torch.no_grad():
        model(100 * x)
    model.eval()
    model(100 * x)
    model.train()
    with torch.inference_mode():
        model(100 * x)


WAYS = [
    ("closures", {"step": closure}),
    ("gradient accumulation", {"step": partial(accumulate, sizes=[4, 4]), "rtol": 1e-6}),
    ("gradient accumulation", {"step": partial(accumulate, sizes=[3, 1, 4]), "rtol": 1e-6}),
    ("two backward passes, losses added", {"step": two_losses}),
    ("gradient clipping", {"step": partial(clip, by="norm"), "by": partial(clip_by_hand, by="norm")}),
    ("gradient clipping", {"step": partial(clip, by="value"), "by": partial(clip_by_hand, by="value")}),
    ("activation checkpointing", {"network": {"recompute": True}}),
    ("activation checkpointing", {"network": {"recompute": False}}),
    ("in-place activations", {"network": {"inplace": True}}),
    ("modules called by keyword", {"network": {"keyword": True}}),
    ("channels_last", {"step": channels_last}),
    ("eval and no_grad forwards between steps", {"step": validate}),
    ("maximize", {"step": negated, "maximize": True}),
    ("lr as a tensor", {"lr_shape": ()}),
    ("lr as a tensor", {"lr_shape": (1,)}),
]


@pytest.fixture
def batches():
    return [(torch.randn(8, 2, 4, 4).double() + 1, torch.randint(0, 3, (8,))) for _ in range(4)]


def assert_steps_alike(case, batches, step=plain, by=plain, network=None, rtol=1e-9, lr_shape=None, **keywords):
    """The network trained by `step`, whose weights are those that `by` leads a plain network to."""
    model, twin = Network().double(), Network(**(network or {})).double()
    twin.load_state_dict(model.state_dict())
    if lr_shape is not None:
        keywords["lr"] = torch.full(lr_shape, case.keywords["lr"], dtype=torch.float64)
    for m, optimizer, one_step in ((model, case.build(model), by), (twin, case.build(twin, **keywords), step)):
        for x, y in batches:
            one_step(m, optimizer, x.clone(), y)
    assert_same(model, twin, rtol=rtol, atol=1e-12)
    return twin


@pytest.mark.parametrize("way", [pytest.param(way, marks=pytest.mark.feature(name), id=name) for name, way in WAYS])
@every_optimizer
def test_this_loop_steps_as_the_plain_one(case, way, batches):
    if way.get("step") is two_losses and case.cls.__name__ == "CanonicalSGD":
        pytest.skip("g² is read at each backward: two of them are two gradients to it")
    assert_steps_alike(case, batches, **way)


@pytest.mark.feature("EMA copies")
@every_optimizer
def test_an_average_of_the_weights_may_be_kept_beside(case, batches):
    """A copy of the model, hooks and all, that is averaged and run in training mode."""
    kept = []

    def averaged(model, optimizer, x, y):
        if not kept:
            kept.append(AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5)))
        plain(model, optimizer, x, y)
        kept[0].update_parameters(model)
        kept[0](100 * x).sum().backward()

    trained = assert_steps_alike(case, batches, averaged)
    assert not any(still(trained, weights(kept[0].module)))
    assert all(p.isfinite().all() for p in kept[0].parameters())


@pytest.mark.feature("freezing and thawing layers")
@every_optimizer
def test_a_layer_frozen_for_a_while_stands_still_and_goes_on(case, batches):
    model = Network().double()
    optimizer, layer = case.build(model), model.two[0]
    for k, (x, y) in enumerate(batches):
        layer.requires_grad_(k not in (1, 2))
        before = weights(layer)
        plain(model, optimizer, x, y)
        assert still(layer, before) == [k in (1, 2)] * 2
