"""Accelerate steps as a plain loop does: prepared or not, accumulated, clipped, in bf16, saved and loaded."""

import copy

import pytest
from torch.nn import functional

from helpers import assert_all_moved, assert_same, plain_loop, regression

accelerate = pytest.importorskip("accelerate")
CLOSE = {"rtol": 1.3e-6, "atol": 1e-5}


@pytest.fixture(autouse=True)
def fresh():
    """Accelerate keeps its settings for the process."""
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


def train(accelerator, model, optimizer, batches, clip=None):
    for x, y in batches:
        with accelerator.accumulate(model):
            accelerator.backward(functional.mse_loss(model(x), y))
            if clip is not None and accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.feature("Accelerate: prepare")
@pytest.mark.parametrize("when", ["before", "after"])
def test_built_before_or_after_prepare_it_is_the_plain_loop(case, when):
    net, twin, batches = regression()
    accelerator = accelerate.Accelerator(cpu=True)
    if when == "before":
        model, optimizer = accelerator.prepare(net, case.build(net))
    else:
        model = accelerator.prepare(net)
        optimizer = accelerator.prepare(case.build(model))
    train(accelerator, model, optimizer, batches)
    assert_same(plain_loop(case.build(twin), twin, batches), model, **CLOSE)


@pytest.mark.feature("Accelerate: accumulation and clipping")
def test_accumulation_and_clipping_are_those_of_the_plain_loop(case):
    net, twin, batches = regression()
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, optimizer = accelerator.prepare(net, case.build(net))
    train(accelerator, model, optimizer, batches, clip=0.1)
    assert_same(plain_loop(case.build(twin), twin, batches, every=2, clip=0.1), model, **CLOSE)


@pytest.mark.feature("Accelerate: bf16")
def test_bf16_runs_and_stays_finite(case):
    net, before, batches = regression()
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    model, optimizer = accelerator.prepare(net, case.build(net))
    train(accelerator, model, optimizer, batches)
    assert_all_moved(net, before.parameters())


@pytest.mark.feature("Accelerate: save_state and load_state, bit for bit")
def test_a_loaded_run_ends_where_the_whole_one_does(case, tmp_path):
    net, _, batches = regression(8)
    accelerator = accelerate.Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(net, case.build(net))
    train(accelerator, model, optimizer, batches[:4])
    accelerator.save_state(tmp_path)
    train(accelerator, model, optimizer, batches[4:])
    end = copy.deepcopy(model)
    accelerator.load_state(tmp_path)
    train(accelerator, model, optimizer, batches[4:])
    assert_same(end, model)


@pytest.mark.feature("Accelerate: example")
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_the_example_learns(example, precision):
    assert example.main(mixed_precision=precision) > 0.9
