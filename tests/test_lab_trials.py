"""Trials side by side train as each by itself; on a GPU as CUDA graphs, which equal eager steps and are faster."""

import time

import pytest
import torch
from torch import nn

from evenstep.lab import parallel_trials, sweep, trial
from evenstep.lab.methods import METHODS
from evenstep.lab.parallel_trials import CapturedStep, round_robin, side_stream
from evenstep.lab.train import Training, linear_decay
from evenstep.lab.trial import Trial
from lab_helpers import alone, small_arrays, without_seconds

ARRAYS = small_arrays(count=20, channels=1)


def counting(name, steps, log):
    for k in range(steps):
        log.append((name, k))
        yield
    return name


def test_works_advance_in_turn_and_end_in_their_own_time():
    log = []
    works = [counting("a", 3, log), counting("b", 1, log), counting("c", 1, log)]
    assert list(round_robin(works, "cpu", at_once=2)) == ["b", "a", "c"]
    assert log == [("a", 0), ("b", 0), ("a", 1), ("a", 2), ("c", 0)]


@pytest.mark.parametrize("at_once", [1, 3])
def test_interleaved_trials_equal_trials_by_themselves_bit_for_bit(at_once):
    trials = [
        Trial("unitstep", 0.05, seed=1, epochs=2, batch_size=6, augment=True),
        Trial("sg", 0.1, seed=0, epochs=1, batch_size=8),
        Trial("whitened-adam", 1e-3, seed=2, epochs=2, batch_size=6, decay_lr=True),
    ]
    found = {r["config"]["method"]: r for r in sweep.side_by_side(trials, ARRAYS, "cpu", at_once)}
    for one in trials:
        assert without_seconds(found[one.method]["metrics"]) == without_seconds(alone(one, ARRAYS)["metrics"])


def test_seconds_leave_out_the_time_of_other_trials(monkeypatch):
    def training(pause):
        model = nn.Sequential(nn.Flatten(), nn.Linear(1024, 10))
        model.register_forward_hook(lambda *_: time.sleep(pause))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return Training(model, optimizer, ARRAYS, epochs=1, batch_size=5, seed=0)

    fast, other = training(0.0), training(0.2)
    list(round_robin([fast.run(), other.run()], "cpu", at_once=2))
    assert other.rows[0]["seconds"] > 0.8 > 4 * fast.rows[0]["seconds"]


def test_no_trial_is_captured_on_a_cpu():
    assert not isinstance(trial.start(Trial("sg", 0.1), ARRAYS, "cpu", capture=True).step, CapturedStep)


SETTINGS = {
    **{name: {} for name in METHODS},
    **{f"{name}, decayed": {"decay_lr": True} for name in ("sg", "unitstep", "whitened-adam", "whitened-muon")},
    "adam, augmented": {"augment": "crop+flip+cutout"},
    "batch-norm, large": {"model": "deep_net", "augment": True},
}


def fashion(count=300):
    """A last batch of another size: a second graph."""
    from evenstep.lab.data import fashion_mnist_subset

    return fashion_mnist_subset().subset(count)


def eager(monkeypatch):
    monkeypatch.setattr(trial, "Training", lambda *a, capture, **k: Training(*a, capture=False, **k))


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:.*constructed with capturable=True")
@pytest.mark.parametrize("name", SETTINGS)
def test_graphs_train_as_eager_steps_do(name, monkeypatch):
    method, settings = name.partition(",")[0], SETTINGS[name]
    one = Trial(method, METHODS[method].stepsizes[0], epochs=6, batch_size=64, **settings)
    data = fashion().to("cuda")
    captured = [r for r in sweep.side_by_side([one, one, one], data, "cuda", 3)]
    eager(monkeypatch)
    reference = alone(one, data, "cuda")
    for record in captured:
        losses = [[row["train_loss"] for row in r["metrics"]] for r in (record, reference)]
        assert losses[0] == pytest.approx(losses[1], rel=0.03), name
    monkeypatch.undo()
    with side_stream("cuda"):
        training = trial.start(one, data, "cuda", capture=True)
        training.finish()
    graphs = training.step.graphs.values()
    assert len(graphs) == 2 and all(graph.calls > parallel_trials.WARM_UP for graph in graphs)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:.*constructed with capturable=True")
def test_a_schedule_reaches_captured_steps():
    data, rates = fashion(256).to("cuda"), []
    one = Trial("unitstep", 0.1, epochs=4, batch_size=64, decay_lr=True)
    with side_stream("cuda"):
        training = trial.start(one, data, "cuda", capture=True)
        rates += [float(training.optimizer.param_groups[0]["lr"]) for _ in training.run()]
    assert rates == pytest.approx([0.1 * linear_decay(k / 16) for k in range(16)])


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:.*constructed with capturable=True")
def test_a_diverging_trial_touches_no_other():
    data = fashion().to("cuda")
    calm, wild = Trial("sg", 0.05, epochs=6), Trial("sg", 1e30, epochs=6)
    found = {r["config"]["lr"]: r for r in sweep.side_by_side([wild, calm], data, "cuda", 2)}
    assert found[1e30]["metrics"][-1]["diverged"] and len(found[1e30]["metrics"]) < 6
    losses = [[row["train_loss"] for row in r["metrics"]] for r in (found[0.05], alone(calm, data, "cuda"))]
    assert losses[0] == pytest.approx(losses[1], rel=0.03)
