"""Mixed precision: bf16 autocast, fp16 with a GradScaler, bf16 parameters, for every optimizer."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

import evenstep
from cases import OPTIMIZERS

every_optimizer = pytest.mark.parametrize("case", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(64, 8), nn.LayerNorm(8), nn.Linear(8, 3)
    )


def batch():
    """Images whose class is written into one row, so that there is something to learn."""
    y = torch.randint(0, 3, (16,))
    x = torch.randn(16, 2, 4, 4) + 1
    x[torch.arange(16), 0, 0, y] += 3
    return x, y


def flat(model):
    return torch.cat([p.detach().float().flatten() for p in model.parameters()])


def train(model, optimizer, batches, dtype=None, scaler=None, clip=None):
    """A step on each batch, with forwards under autocast to `dtype` and a scaler if there is one."""
    for x, y in batches:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            loss = functional.cross_entropy(model(x.to(model[0].weight.dtype)).float(), y)
        if scaler is None:
            loss.backward()
            optimizer.step()
            continue
        scaler.scale(loss).backward()
        if clip is not None:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        scaler.step(optimizer)
        scaler.update()


def alike(left, right):
    """The cosine between two displacements."""
    return functional.cosine_similarity(left, right, dim=0)


def with_scaler(case, model, scaler):
    """Only canonical constants read gradients before they are unscaled."""
    return case.build(model, **({"scaler": scaler} if case.cls is evenstep.CanonicalSGD else {}))


def assert_learns(model, optimizer, batches, *how, **more):
    """Training on these batches lowers the loss on them."""
    before = loss_on(model, batches)
    train(model, optimizer, batches, *how, **more)
    assert loss_on(model, batches) < before


@torch.no_grad()
def loss_on(model, batches):
    x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
    return functional.cross_entropy(model(x.to(model[0].weight.dtype)).float(), y)


@pytest.mark.feature("bf16 autocast")
@every_optimizer
def test_bf16_autocast_goes_where_float32_goes(case):
    model, twin = network(), network()
    twin.load_state_dict(model.state_dict())
    start, batches = flat(model), [batch() for _ in range(16)]
    optimizer, reference = case.build(model), case.build(twin)
    train(model, optimizer, batches[:1], torch.bfloat16)
    train(twin, reference, batches[:1])
    assert alike(flat(model) - start, flat(twin) - start) > 0.9
    assert_learns(model, optimizer, batches[1:], torch.bfloat16)
    assert all(p.dtype == torch.float32 for p in model.parameters())
    for state in optimizer.state.values():
        assert all(value.dtype == torch.float32 for value in state.values())


@pytest.mark.feature("bf16 parameters")
@every_optimizer
def test_bf16_parameters_go_where_float32_ones_go(case):
    """Moments stay float32; momentum and a rule's own memory have the parameters' dtype, as torch keeps them."""
    model = network().bfloat16()
    twin = copy.deepcopy(model).float()
    start, batches = flat(model), [batch() for _ in range(16)]
    optimizer, reference = case.build(model), case.build(twin)
    train(model, optimizer, batches[:1])
    train(twin, reference, batches[:1])
    assert alike(flat(model) - start, flat(twin) - start) > 0.9
    assert_learns(model, optimizer, batches[1:])
    for state in optimizer.state.values():
        wide = {name for name, value in state.items() if value.dtype == torch.float32}
        assert wide >= state.keys() & {"mx", "vx", "mass", "sharing", "mg2", "square", "square_mass", "step"}


@pytest.mark.feature("fp16 with GradScaler")
@every_optimizer
def test_a_scaler_changes_no_step(case):
    """Scaled by a power of two and unscaled again, gradients are the same, and so are the weights."""
    model, twin = network(), network()
    twin.load_state_dict(model.state_dict())
    batches, scaler = [batch() for _ in range(6)], torch.amp.GradScaler("cpu", init_scale=256.0)
    train(model, with_scaler(case, model, scaler), batches, torch.float16, scaler)
    train(twin, case.build(twin), batches, torch.float16)
    torch.testing.assert_close(flat(model), flat(twin), rtol=2e-2, atol=2e-3)


@pytest.mark.feature("fp16 with GradScaler")
@every_optimizer
def test_steps_that_a_scaler_skips_leave_no_harm(case):
    """A scale that overflows at first: weights wait until it has come down, and what was seen meanwhile is finite."""
    model = network()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40, backoff_factor=2.0**-4)
    optimizer = with_scaler(case, model, scaler)
    start = flat(model)
    train(model, optimizer, [batch() for _ in range(3)], torch.float16, scaler)
    assert scaler.get_scale() == 2.0**28
    assert torch.equal(flat(model), start)
    train(model, optimizer, [batch() for _ in range(8)], torch.float16, scaler)
    assert not torch.equal(flat(model), start)
    assert_learns(model, optimizer, [batch() for _ in range(16)], torch.float16, scaler, clip=1.0)
    assert optimizer.nonfinite_steps == 0
    for state in optimizer.state.values():
        assert all(value.isfinite().all() for value in state.values())


def test_canonical_constants_without_their_scaler_would_be_wrong():
    """Why it must be told of the scaler: the squares it reads are those of scaled gradients."""
    results = []
    for told in (True, False):
        torch.manual_seed(0)
        model, scaler = network(), torch.amp.GradScaler("cpu", init_scale=256.0)
        optimizer = evenstep.CanonicalSGD(model, lr=0.01, scaler=scaler if told else None)
        train(model, optimizer, [batch()], torch.float16, scaler)
        results.append(optimizer.state[model[0].weight]["mg2"])
    assert results[0].mean().item() == pytest.approx(results[1].mean().item() / 256**2, rel=0.1)
