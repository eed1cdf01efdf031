"""The monitor's numbers agree with slow truth and stay readable; its events are few, and come when they should."""

import math
import re
from pathlib import Path

import numpy
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import evenstep
from evenstep import monitor as monitors
from evenstep.monitor import COLUMNS, CurvatureMonitor
from helpers import assert_same, descend, module_at, twins

BOUNDS = {"log2_variance_q90": (0, 20), "mean_shift_q90": (0, 100), "log10_largest_step": (-6, 6)}
BOUNDS |= dict.fromkeys(("changed_inputs", "dead_inputs", "guarded_units"), (0, 1))


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 40), nn.ReLU(), nn.Linear(40, 3))


def step(model, optimizer, x=None, times=1):
    """Steps on these inputs, by default 100 new rows of normal ones each."""
    for _ in range(times):
        descend(optimizer, model(torch.randn(100, 6) if x is None else x).square().mean())


def watched(model=None, lr=0.01, steps=0, **keywords):
    """A network, its optimizer and its monitor, after some steps."""
    model = model or network()
    optimizer = evenstep.WhitenedSGD(model, lr=lr, **keywords)
    monitor = CurvatureMonitor(optimizer)
    step(model, optimizer, times=steps)
    return model, optimizer, monitor


def kill(model, units=10):
    """Hidden units that are zero from now on."""
    with torch.no_grad():
        model[0].weight[:units], model[0].bias[:units] = 0.0, -1.0


def rescale(model, kappa, units=8):
    """Rescale hidden units, the function unchanged."""
    with torch.no_grad():
        model[0].weight[:units] *= kappa
        model[0].bias[:units] *= kappa
        model[2].weight[:, :units] /= kappa


# scalars


def test_scalars_are_quantiles_of_changes_between_running_and_fresh_moments():
    model, optimizer, monitor = watched(nn.Linear(9, 2).double(), lr=0.0)
    scales = torch.logspace(-1, 1, 9).double()
    first, second = torch.randn(50, 9).double() * scales, 2 + torch.randn(30, 9).double() * scales.flip(0)
    step(model, optimizer, first)
    step(model, optimizer, second)
    mean, var = first.numpy().mean(0), first.numpy().var(0)
    base = var + 0.03 * var.mean() + 1e-12 * mean**2
    share = 30 / 34
    log2 = numpy.log2((base - share * var + share * second.numpy().var(0)) / base)
    shift = share * abs(second.numpy().mean(0) - mean) / numpy.sqrt(base)
    for column, values in {"/log2_variance_q90": abs(log2), "/mean_shift_q90": shift}.items():
        assert monitor.scalars()[column] == pytest.approx(numpy.quantile(values, 0.9, method="lower"), rel=1e-5)


def test_every_layer_and_the_whole_network_have_every_column():
    """The share of units held back is one of all units; of the others the network has the largest value of a layer."""
    model, optimizer, monitor = watched()
    assert monitor.scalars() == {}
    kill(model)
    step(model, optimizer, times=3)
    scalars = monitor.scalars()
    assert set(scalars) == {f"{layer}/{column}" for layer in ("0", "2", "all") for column in COLUMNS}
    assert all(isinstance(value, float) for value in scalars.values())
    assert scalars["all/dead_inputs"] == 0.25
    units = (40 * scalars["0/guarded_units"] + 3 * scalars["2/guarded_units"]) / 43
    assert scalars["all/guarded_units"] == pytest.approx(units)
    assert scalars["all/mean_shift_q90"] == max(scalars["0/mean_shift_q90"], scalars["2/mean_shift_q90"])


def test_an_input_is_dead_after_256_rows_of_zeros_even_if_its_running_mean_was_not_zero():
    model, optimizer, monitor = watched(steps=20, lr=0.0)
    kill(model)
    found = []
    for _ in range(4):
        step(model, optimizer)
        found.append(monitor.scalars()["2/dead_inputs"])
    assert found == pytest.approx([0, 0, 0.25, 0.25])
    assert monitor.scalars()["0/dead_inputs"] == 0


def hardly_varying(*size):
    return 1e4 + 1e-3 * torch.randn(*size)


def jumping(*size):
    return torch.randn(*size) * 10.0 ** torch.randint(-15, 15, ())


@pytest.mark.parametrize("rows", [1, 3, 64])
@pytest.mark.parametrize(
    "make", [torch.randn, torch.zeros, torch.ones, hardly_varying, jumping], ids=lambda f: f.__name__
)
def test_scalars_stay_within_their_bounds(make, rows):
    model, optimizer, monitor = watched(nn.Sequential(nn.Linear(6, 1), nn.ReLU(), nn.Linear(1, 2)))
    for _ in range(10):
        step(model, optimizer, make(rows, 6))
        for name, value in monitor.scalars().items():
            low, high = BOUNDS[name.rpartition("/")[2]]
            assert low <= value <= high, name


@pytest.mark.parametrize("make", [torch.zeros, torch.ones, hardly_varying])
def test_inputs_that_hardly_vary_do_not_change(make):
    model, optimizer, monitor = watched(nn.Linear(6, 2))
    for _ in range(20):
        step(model, optimizer, make(64, 6))
        assert monitor.scalars()["/log2_variance_q90"] < 2


@pytest.mark.parametrize("rows", [3, 100])
def test_a_long_calm_run_has_no_event_and_three_rows_a_batch_are_noise(rows):
    model, optimizer, monitor = watched()
    found = []
    for _ in range(150):
        step(model, optimizer, torch.randn(rows, 6))
        found.append(monitor.scalars()["0/log2_variance_q90"])
    assert sum(found) / len(found) < 1.2 and max(found) < 4
    assert monitor.events() == []


# events


@pytest.mark.parametrize("kappa", [30, 0.03])
@pytest.mark.parametrize("guarded", [True, False])
def test_a_lasting_change_of_scale_is_one_event_at_its_third_step(kappa, guarded):
    model, optimizer, monitor = watched(steps=60, **({} if guarded else {"fresh_max": None, "trust": None}))
    assert monitor.events() == []
    rescale(model, kappa)
    step(model, optimizer, times=40)
    [event] = [e for e in monitor.events() if e.kind == "scale"]
    assert (event.step, event.layer) == (63, "2")
    share = re.fullmatch(r"the running variances no longer fit (\d+)% of its inputs", event.what)[1]
    assert 15 <= int(share) <= 20
    assert str(event) == f"step 63, layer 2: {event.what}"
    assert monitor.events() == []


def many_large_batches(model, optimizer):
    for _ in range(5):
        step(model, optimizer, 100 * torch.randn(100, 6))


def dead_units(model, optimizer):
    kill(model)
    step(model, optimizer, times=10)


FAULTS = {  # the kind of the event: what is done after how many steps, the event's step and the end of its text
    "scale": (many_large_batches, 60, 63, "of its inputs (and 1 more layers)"),
    "dead": (dead_units, 20, 25, "layer 2: dead inputs rose by 25% to 25%"),
}


@pytest.mark.parametrize("kind", FAULTS)
def test_a_fault_is_one_event_of_all_its_layers(kind):
    fault, calm, at, text = FAULTS[kind]
    model, optimizer, monitor = watched(steps=calm, lr=1e-4)
    fault(model, optimizer)
    [event] = [e for e in monitor.events() if e.kind == kind]
    assert event.step == at and str(event).endswith(text)


def test_a_nan_batch_is_one_event():
    model, optimizer, monitor = watched(steps=5)
    with pytest.warns(UserWarning, match="not finite"):
        step(model, optimizer, torch.full((100, 6), torch.nan))
    late = CurvatureMonitor(optimizer)
    step(model, optimizer, times=12)
    [event] = monitor.events()
    assert (event.step, event.layer, event.kind) == (6, "all", "nonfinite")
    assert late.events() == [], "the batch came before this monitor"


@pytest.mark.filterwarnings("ignore:.*not finite")
@pytest.mark.parametrize("capturable", [False, True])
def test_events_do_not_depend_on_when_they_are_read(capturable):
    model, optimizer, monitor = watched(capturable=capturable)
    late, found = CurvatureMonitor(optimizer), []
    for k in range(50):
        step(model, optimizer, torch.full((100, 6), torch.nan) if k in {5, 30} else None)
        found += monitor.events()
    assert found == late.events()
    assert [(e.step, e.kind) for e in found if e.kind != "guards"] == [(6, "nonfinite"), (31, "nonfinite")]


def test_a_stepsize_far_too_large_is_an_event():
    _, _, monitor = watched(steps=10, lr=100.0)
    event = monitor.events()[0]
    assert (event.step, event.layer, event.kind) == (3, "all", "guards")
    assert "acts as the stepsize" in event.what


def test_a_few_units_held_back_far_are_an_event():
    monitor = watched(steps=1)[2]
    row = {"guarded_units": 0.1, "log10_largest_step": 1.0, "newly_dead": 0.0}
    *none, [event] = [monitor._tell(t, monitors.ALARMS[-1], {"all": row}) for t in (1, 2, 3)]
    assert none == [[], []] and event.what.startswith("a unit asks for steps of 10^1.0 times its own length")


def test_events_are_those_of_the_last_history_steps():
    model = network()
    optimizer = evenstep.WhitenedSGD(model, lr=100.0)
    monitor = CurvatureMonitor(optimizer, history=5)
    step(model, optimizer, times=20)
    assert [e.step for e in monitor.events()] == [18]


# what it must not do


class NoReads(TorchDispatchMode):
    """No operation may read a value, which waits for a GPU."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        assert "_local_scalar_dense" not in str(function), "a value was read"
        return function(*args, **(kwargs or {}))


def test_no_look_at_a_step_reads_the_device(monkeypatch):
    model, optimizer, monitor = watched(steps=3)

    def unread(method):
        def inner(*args):
            with NoReads(), monkeypatch.context() as patch:
                patch.setattr(torch.Tensor, "tolist", None)
                patch.setattr(torch.Tensor, "numpy", None)
                return method(*args)

        return inner

    seen = len(monitor._records)
    monkeypatch.setattr(monitor, "note", unread(monitor.note))
    monkeypatch.setattr(monitor, "end_step", unread(monitor.end_step))
    step(model, optimizer)
    assert len(monitor._records) == seen + 1
    with pytest.raises(AssertionError, match="a value was read"), NoReads():
        torch.ones(()).item()


@pytest.mark.gpu
def test_a_watched_step_does_not_wait_for_a_gpu():
    model = network().cuda()
    optimizer = evenstep.UnitStep(model)
    monitor = CurvatureMonitor(optimizer)
    x = torch.randn(100, 6, device="cuda")
    step(model, optimizer, x)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            step(model, optimizer, x)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(monitor._records) == 4 and monitor.events() == []


def test_watching_changes_no_weight():
    model, twin = twins(network)
    optimizers = evenstep.UnitStep(model), evenstep.UnitStep(twin)
    CurvatureMonitor(optimizers[1])
    for _ in range(5):
        x = torch.randn(30, 6)
        step(model, optimizers[0], x)
        step(twin, optimizers[1], x)
    assert_same(model, twin)


@pytest.mark.parametrize("optimizer", [evenstep.FanInSGD, lambda model: torch.optim.SGD(model.parameters())])
def test_an_optimizer_without_moments_is_refused(optimizer):
    with pytest.raises(ValueError, match=r"CurvatureMonitor: .*SGD keeps no moments to watch"):
        CurvatureMonitor(optimizer(network()))


@pytest.mark.parametrize("threshold", [1.0, -3.0, math.nan])
def test_a_threshold_that_everything_exceeds_is_refused(threshold):
    with pytest.raises(ValueError, match="threshold must be above 1"):
        CurvatureMonitor(evenstep.UnitStep(network()), threshold=threshold)


# the guards' own counts


def test_weights_of_one_layer_are_told_apart():
    model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
    optimizer = evenstep.UnitStep(model)
    step(model, optimizer, torch.randn(4, 5, 8))
    expected = {"self_attn.in_proj_weight", "self_attn.out_proj.weight", "linear1", "linear2"}
    assert set(optimizer.fired()) == expected
    model.self_attn.in_proj_weight.requires_grad_(False)
    assert set(optimizer.fired()) == expected - {"self_attn.in_proj_weight"}


# whole trainings: the grid behind the thresholds, on seeds that they were not set on


thresholds = module_at(Path(__file__).parents[1] / "scripts" / "monitor_thresholds.py")


@pytest.mark.slow
@pytest.mark.parametrize("name", thresholds.OPTIMIZERS)
@pytest.mark.parametrize("network", thresholds.NETWORKS)
def test_a_healthy_training_has_few_events(network, name):
    _, events = thresholds.train(network, name, "none", seed=7)
    assert len(events) <= 3, [str(event) for event in events]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*not finite")
@pytest.mark.parametrize("fault", thresholds.FAULTS)
@pytest.mark.parametrize("name", thresholds.OPTIMIZERS)
@pytest.mark.parametrize("network", thresholds.NETWORKS)
def test_a_fault_has_an_event_within_ten_steps(network, name, fault):
    if "units" in fault and network not in thresholds.DENSE:
        pytest.skip("has no two dense layers in a row")
    rows, events = thresholds.train(network, name, fault, seed=7, until=thresholds.AT + 30)
    start = 1 if fault == "lr x 30" else thresholds.AT
    if not any(event.kind == thresholds.FAULTS[fault] and start <= event.step < start + 10 for event in events):
        calm, _ = thresholds.train(network, name, "none", seed=7, until=thresholds.AT + 30)
        loss, calm_loss = (sum(row["loss"] for row in each[-50:]) / 50 for each in (rows, calm))
        assert fault == "lr x 30" and loss < calm_loss, "a fault that did harm had no event"
