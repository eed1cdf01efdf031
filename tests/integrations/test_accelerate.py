"""Accelerate steps as a plain loop does: prepared or not, accumulated, clipped, in bf16, saved and loaded."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

accelerate = pytest.importorskip("accelerate")


@pytest.fixture(autouse=True)
def fresh():
    """Accelerate keeps its settings for the process."""
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


def network():
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 2))


def some_batches(count=6):
    return [(torch.randn(8, 4) + 1, torch.randn(8, 2)) for _ in range(count)]


def train(accelerator, model, optimizer, batches, clip=None):
    for x, y in batches:
        with accelerator.accumulate(model):
            accelerator.backward(functional.mse_loss(model(x), y))
            if clip is not None and accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()


def plain(case, net, batches, every=1, clip=None):
    optimizer = case.build(net)
    for k, (x, y) in enumerate(batches):
        (functional.mse_loss(net(x), y) / every).backward()
        if (k + 1) % every == 0:
            if clip is not None:
                nn.utils.clip_grad_norm_(net.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
    return net


def assert_same(net, other):
    for p, q in zip(net.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q)


@pytest.mark.feature("Accelerate: prepare")
@pytest.mark.parametrize("when", ["before", "after"])
def test_built_before_or_after_prepare_it_is_the_plain_loop(case, when):
    net, batches = network(), some_batches()
    twin = copy.deepcopy(net)
    accelerator = accelerate.Accelerator(cpu=True)
    if when == "before":
        model, optimizer = accelerator.prepare(net, case.build(net))
    else:
        model = accelerator.prepare(net)
        optimizer = accelerator.prepare(case.build(model))
    train(accelerator, model, optimizer, batches)
    assert_same(model, plain(case, twin, batches))


@pytest.mark.feature("Accelerate: accumulation and clipping")
def test_accumulation_and_clipping_are_those_of_the_plain_loop(case):
    net, batches = network(), some_batches()
    twin = copy.deepcopy(net)
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, optimizer = accelerator.prepare(net, case.build(net))
    train(accelerator, model, optimizer, batches, clip=0.1)
    assert_same(model, plain(case, twin, batches, every=2, clip=0.1))


@pytest.mark.feature("Accelerate: bf16")
def test_bf16_runs_and_stays_finite(case):
    net = network()
    before = copy.deepcopy(net)
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    model, optimizer = accelerator.prepare(net, case.build(net))
    train(accelerator, model, optimizer, some_batches())
    for p, q in zip(net.parameters(), before.parameters(), strict=True):
        assert p.isfinite().all() and not torch.equal(p, q)


@pytest.mark.feature("Accelerate: save_state and load_state, bit for bit")
def test_a_loaded_run_ends_where_the_whole_one_does(case, tmp_path):
    net, batches = network(), some_batches(8)
    accelerator = accelerate.Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(net, case.build(net))
    train(accelerator, model, optimizer, batches[:4])
    accelerator.save_state(tmp_path)
    train(accelerator, model, optimizer, batches[4:])
    end = [p.detach().clone() for p in model.parameters()]
    accelerator.load_state(tmp_path)
    train(accelerator, model, optimizer, batches[4:])
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), end, strict=True))


@pytest.mark.feature("Accelerate: example")
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_the_example_learns(example, precision):
    assert example.main(mixed_precision=precision) > 0.9
