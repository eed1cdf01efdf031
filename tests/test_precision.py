"""Mixed precision: bf16 autocast, fp16 with a GradScaler, bf16 parameters, for every optimizer."""

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parameters_to_vector

import evenstep
from helpers import assert_same, every_optimizer, is_finite, small_network, still, twins, weights


def batches(count):
    """Images whose class is written into one row, so that there is something to learn."""
    drawn = []
    for _ in range(count):
        x, y = torch.randn(16, 2, 4, 4) + 1, torch.randint(0, 3, (16,))
        x[torch.arange(16), 0, 0, y] += 3
        drawn.append((x, y))
    return drawn


def train(model, optimizer, batches, dtype=None, scaler=None, clip=None):
    """A step on each batch, with forwards under autocast to `dtype` and a scaler if there is one; the losses' sum."""
    total = 0.0
    scaler = scaler or torch.amp.GradScaler(enabled=False)
    for x, y in batches:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            loss = functional.cross_entropy(model(x.to(model[0].weight.dtype)).float(), y)
        scaler.scale(loss).backward()
        if clip is not None:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        scaler.step(optimizer)
        scaler.update()
        total += loss.item()
    return total


def with_scaler(case, model, scaler):
    """Only canonical constants read gradients before they are unscaled."""
    return case.build(model, **({"scaler": scaler} if case.cls is evenstep.CanonicalSGD else {}))


@pytest.mark.parametrize(
    ("dtype", "autocast"),
    [
        pytest.param(torch.float32, torch.bfloat16, marks=pytest.mark.feature("bf16 autocast"), id="autocast"),
        pytest.param(torch.bfloat16, None, marks=pytest.mark.feature("bf16 parameters"), id="parameters"),
    ],
)
@every_optimizer
def test_bf16_goes_where_float32_goes(case, dtype, autocast):
    """Moments stay float32; momentum and a rule's own memory have the parameters' dtype, as torch keeps them."""
    model, twin = twins(lambda: small_network().to(dtype))
    twin.float()
    start, data = parameters_to_vector(twin.parameters()).detach(), batches(16)
    optimizer = case.build(model)
    train(model, optimizer, data[:1], autocast)
    train(twin, case.build(twin), data[:1])
    moved = [parameters_to_vector(m.parameters()).float() - start for m in (model, twin)]
    assert functional.cosine_similarity(*moved, dim=0) > 0.9
    assert train(model, optimizer, data, autocast) > train(model, optimizer, data, autocast)
    assert all(p.dtype == dtype for p in model.parameters())
    moments = {"mx", "vx", "mass", "sharing", "mg2", "square", "square_mass", "step"}
    for state in optimizer.state.values():
        wide = {name for name, value in state.items() if value.dtype == torch.float32}
        assert wide >= (state.keys() if dtype == torch.float32 else state.keys() & moments)


@pytest.mark.feature("fp16 with GradScaler")
@every_optimizer
def test_a_scaler_changes_no_step(case):
    """Scaled by a power of two and unscaled again, gradients are the same, and so are the weights."""
    model, twin = twins()
    data, scaler = batches(6), torch.amp.GradScaler("cpu", init_scale=256.0)
    train(model, with_scaler(case, model, scaler), data, torch.float16, scaler)
    train(twin, case.build(twin), data, torch.float16)
    assert_same(model, twin, rtol=2e-2, atol=2e-3)


@pytest.mark.feature("fp16 with GradScaler")
@every_optimizer
def test_steps_that_a_scaler_skips_leave_no_harm(case):
    """A scale that overflows at first: weights wait until it has come down, and what was seen meanwhile is finite."""
    model, data = small_network(), batches(16)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40, backoff_factor=2.0**-4)
    optimizer, start = with_scaler(case, model, scaler), weights(model)
    train(model, optimizer, batches(3), torch.float16, scaler)
    assert scaler.get_scale() == 2.0**28
    assert all(still(model, start))
    train(model, optimizer, batches(8), torch.float16, scaler)
    assert not all(still(model, start))
    losses = [train(model, optimizer, data, torch.float16, scaler, clip=1.0) for _ in range(2)]
    assert losses[1] < losses[0]
    assert optimizer.nonfinite_steps == 0 and is_finite(model)
    for state in optimizer.state.values():
        assert all(value.isfinite().all() for value in state.values())
