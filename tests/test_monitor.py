"""The monitor says what happened to the statistics, and changes nothing by saying it."""

import pytest
import torch
from torch import nn

import evenstep
from evenstep.monitor import COLUMNS


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def step(model, optimizer, x):
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


def test_scalars_are_distances_between_batch_and_running_moments():
    model = nn.Linear(3, 2).double()
    optimizer = evenstep.WhitenedSGD(model, lr=0.0)
    monitor = evenstep.CurvatureMonitor(optimizer)
    first, second = torch.randn(50, 3).double(), 2 + 3 * torch.randn(50, 3).double()
    step(model, optimizer, first)
    step(model, optimizer, second)
    mean, var = first.mean(0), first.var(0, correction=0)
    growth = second.var(0, correction=0) / var
    scalars = monitor.scalars()
    assert scalars["/mean_distance"] == pytest.approx(((second.mean(0) - mean).abs() / var.sqrt()).max().item())
    assert scalars["/growth"] == pytest.approx(growth.max().item())
    assert scalars["/variance_ratio"] == pytest.approx(torch.maximum(growth, 1 / growth).max().item())
    assert all(isinstance(value, float) for value in scalars.values())


def test_every_layer_and_the_whole_network_have_every_column():
    model = network()
    optimizer = evenstep.UnitStep(model)
    monitor = evenstep.CurvatureMonitor(optimizer)
    assert monitor.scalars() == {}
    step(model, optimizer, torch.randn(20, 6))
    scalars = monitor.scalars()
    assert set(scalars) == {f"{layer}/{column}" for layer in ("0", "2", "all") for column in COLUMNS}
    assert scalars["all/dead_inputs"] == max(scalars["0/dead_inputs"], scalars["2/dead_inputs"])


def test_dead_units_show_as_dead_inputs_of_the_next_layer():
    model = network()
    with torch.no_grad():
        model[0].weight[:2], model[0].bias[:2] = 0.0, -1.0
    optimizer = evenstep.WhitenedSGD(model, lr=0.0)
    monitor = evenstep.CurvatureMonitor(optimizer)
    step(model, optimizer, torch.randn(200, 6))
    assert monitor.scalars()["2/dead_inputs"] == pytest.approx(0.25)
    assert monitor.scalars()["0/dead_inputs"] == 0


@pytest.mark.parametrize("guarded", [True, False])
def test_a_shock_is_an_event_with_its_step_layer_and_size(guarded):
    model = network()
    guards = {} if guarded else {"fresh_max": None, "trust": None}
    optimizer = evenstep.WhitenedSGD(model, lr=0.01, **guards)
    monitor = evenstep.CurvatureMonitor(optimizer)
    for _ in range(20):
        step(model, optimizer, torch.randn(100, 6))
    assert monitor.events() == []
    with torch.no_grad():
        model[0].weight[0] *= 10
        model[0].bias[0] *= 10
        model[2].weight[:, 0] /= 10
    step(model, optimizer, torch.randn(100, 6))
    [event, *_] = monitor.events()
    assert (event.step, event.layer) == (21, "2")
    assert event.what.startswith("variance of 1 inputs grew, up to ")
    size = float(event.what.removeprefix("variance of 1 inputs grew, up to ").partition("-fold")[0])
    assert 50 < size < 200
    assert event.what.endswith("-fold; guarded" if guarded else "-fold; not guarded")
    assert str(event).startswith("step 21, layer 2: variance of 1 inputs grew")
    assert monitor.events() == []


def test_watching_changes_no_weight():
    twins = network(), network()
    twins[1].load_state_dict(twins[0].state_dict())
    optimizers = [evenstep.UnitStep(m) for m in twins]
    evenstep.CurvatureMonitor(optimizers[1])
    for _ in range(5):
        x = torch.randn(30, 6)
        for model, optimizer in zip(twins, optimizers, strict=True):
            step(model, optimizer, x)
    for a, b in zip(twins[0].parameters(), twins[1].parameters(), strict=True):
        assert torch.equal(a, b)


def test_guards_counted_are_guards_that_fired():
    model = network()
    optimizer = evenstep.WhitenedSGD(model, lr=1000.0)
    for _ in range(3):
        step(model, optimizer, torch.randn(100, 6))
    shares = optimizer.fired()
    assert set(shares) == {"0", "2"}
    assert shares["2"][1] > 0.5
    assert all(0 <= share <= 1 for pair in shares.values() for share in pair)


def test_weights_of_one_layer_are_told_apart():
    model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
    optimizer = evenstep.UnitStep(model)
    step(model, optimizer, torch.randn(4, 5, 8))
    expected = {"self_attn.in_proj_weight", "self_attn.out_proj.weight", "linear1", "linear2"}
    assert set(optimizer.fired()) == expected
    model.self_attn.in_proj_weight.requires_grad_(False)
    assert set(optimizer.fired()) == expected - {"self_attn.in_proj_weight"}


def test_an_optimizer_without_moments_is_refused():
    with pytest.raises(ValueError, match="CurvatureMonitor: FanInSGD keeps no moments to watch"):
        evenstep.CurvatureMonitor(evenstep.FanInSGD(network()))
    with pytest.raises(ValueError, match="CurvatureMonitor: SGD keeps no moments to watch"):
        evenstep.CurvatureMonitor(torch.optim.SGD(network().parameters()))
