"""Tasks, methods and trainings of the race: evenstep.lab.compare."""

import math
import sys
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from evenstep.lab.compare import training
from evenstep.lab.compare.jobs import GRID, JUDGED, TIMED, Job, config, parse_job
from evenstep.lab.compare.methods import METHODS, VARIANTS, packages, parse
from evenstep.lab.compare.methods.method import Capture
from evenstep.lab.compare.tasks import RACE, TASKS
from evenstep.lab.compare.tasks.tabular import columns
from evenstep.lab.compare.tasks.task import carved
from evenstep.lab.compare.tasks.text import TextTask
from evenstep.lab.parallel_trials import round_robin

CPU = torch.device("cpu")
installed = pytest.mark.skipif(not (packages.RIVALS / "singd").is_dir(), reason="needs rivals' packages: make rivals")


def finished(work):
    """The result of a work."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            return end.value


def smoke(text, phase="single"):
    """The result of a job on the small network of its task."""
    job = parse_job(text)._replace(phase=phase)
    task = TASKS[job.task].tiny()
    return finished(training.guarded(job, task, task.load(None, CPU), CPU))[1]


# tasks


def test_the_race_has_twelve_tasks():
    assert len(RACE) == 12 and all(task.validated for task in RACE.values())


@pytest.mark.parametrize("name", TASKS)
def test_lr_ends_near_zero_unless_it_is_constant(name):
    task = TASKS[name]
    rates = [task.rate(k, task.steps) for k in range(task.steps)]
    assert max(rates) == pytest.approx(1, abs=0.01)
    assert rates[-1] == (1 if task.constant else pytest.approx(0, abs=0.01))
    assert rates[0] == pytest.approx(1 / task.warm_up if task.warm_up else 1)


def test_a_method_without_decay_keeps_the_warm_up():
    rates = [RACE["gpt-384"].rate(k, 800, decay=False) for k in range(800)]
    assert rates[0] == pytest.approx(1 / 80) and set(rates[80:]) == {1.0}


@pytest.mark.parametrize("name", RACE)
def test_every_task_trains_a_tiny_network(name):
    found = smoke(f"{name}:evenstep:default:0")
    assert math.isfinite(found["training_loss"]) and RACE[name].metric in found, found


@pytest.mark.parametrize("name", [name for name, task in RACE.items() if task.normalized])
def test_the_version_with_batch_norm_has_it_in_front_of_every_relu(name):
    model = RACE[name].network(batch_norm=True)
    kinds = [type(m) for m in model.modules() if isinstance(m, nn.ReLU | nn.modules.batchnorm._BatchNorm)]
    assert len(kinds) > 4 and all(kind is nn.ReLU for kind in kinds[1::2]) and nn.ReLU not in kinds[::2]


def test_residual_nets_without_norm_keep_the_size_of_activations():
    torch.manual_seed(0)
    model, sizes = RACE["resnet20"].network(), []
    for block in list(model.children())[2:11]:
        block.register_forward_hook(lambda m, x, y: sizes.append(y.square().mean().sqrt().item()))
    model(torch.randn(4, 3, 32, 32))
    assert len(sizes) == 9 and max(sizes) < 4 * min(sizes)


def test_validation_examples_are_none_of_those_trained_on():
    x = torch.arange(50)
    (rest, _), (held, y) = carved(x, x)
    assert sorted([*rest.tolist(), *held.tolist()]) == x.tolist() and len(held) == 5 and torch.equal(held, y)
    assert torch.equal(carved(x, x)[1][0], held)


def test_text_is_split_end_to_end(tmp_path):
    text = bytes(range(250)) * 40
    (tmp_path / "python-source.txt").write_bytes(text)
    splits = RACE["gpt-384"].load(tmp_path, CPU)
    assert b"".join(bytes(splits[name][0].tolist()) for name in ("train", "validation", "test")) == text
    assert [len(splits[name][0]) for name in splits] == [9600, 200, 200]
    single = TASKS["gpt"].load(tmp_path, CPU)
    assert len(single["train"][0]) == 9800 and "validation" not in single


def test_held_out_windows_predict_the_byte_after_each():
    task = TextTask(nn.Identity, 1, 1, nn.Identity, context=4, windows=3)
    pieces = list(task.pieces((torch.arange(20, dtype=torch.uint8),)))
    assert torch.cat([x for x, _ in pieces]).flatten().tolist() == list(range(12))
    assert all(torch.equal(y, x + 1) for x, y in pieces)


def test_held_out_metrics_weigh_every_example_alike():
    task = RACE["cnn"]
    x, y = torch.randn(2500, 10), torch.randint(10, (2500,))
    right = sum(int(a.argmax()) == int(b) for a, b in zip(x, y, strict=True)) / 2500
    assert float(task.held_out(lambda a: a, (x, y))) == pytest.approx(right)


def test_columns_of_the_table_are_what_they_are_called():
    x = torch.randint(256, (3, 3, 32, 32), dtype=torch.uint8)
    found, one = columns(x).double(), x[1].double()
    red = one[0].flatten()
    spread = ((red - red.mean()) ** 2).mean()
    assert_close(found[1, [0, 3]], torch.stack([red.mean(), spread]), rtol=1e-4, atol=0)
    skewness = ((red - red.mean()) ** 3).mean() / (spread + 1) ** 1.5
    assert_close(found[1, 6], skewness, rtol=1e-3, atol=1e-5)
    down = sum((one[0, i + 1, j] - one[0, i, j]) ** 2 for i in range(31) for j in range(32)) / (31 * 32)
    assert_close(found[1, 15], down, rtol=1e-4, atol=0)
    grey = one.mean(0)
    assert_close(found[1, 24], grey[:8, :8].mean(), rtol=1e-4, atol=0)
    assert_close(found[1, 40], (grey < 16).sum().double(), rtol=0, atol=2)
    across, below = grey[:-1, 1:] - grey[:-1, :-1], grey[1:, :-1] - grey[:-1, :-1]
    assert_close(found[1, 57:].sum(), (across**2 + below**2).sqrt().sum(), rtol=1e-4, atol=0)
    assert found.std(0).max() > 100 * found.std(0).min()


# methods


def test_research_stays_out_of_the_race():
    assert not set(METHODS) & set(VARIANTS) and parse("half")[0] is VARIANTS["half"]
    assert all(set(method.tasks) <= set(RACE) and method.label for method in METHODS.values())


def test_a_method_carries_options():
    job = parse_job("gpt:normuon,plain_lr=0.001,momentum=0.9:default:2")
    assert job[:4] == ("gpt", "normuon,momentum=0.9,plain_lr=0.001", 0.02, 2)
    assert parse("evenstep,head=None,trust=0.2")[1] == {"head": None, "trust": 0.2}


@pytest.mark.parametrize(
    "text", ["gpt:muon:1", "bach:muon:1:0", "gpt:moon:1:0", "gpt:muon,momentum:1:0", "gpt:sgd:x:0"]
)
def test_a_job_that_cannot_be_is_refused(text):
    with pytest.raises(ValueError, match="should be"):
        parse_job(text)


def test_single_jobs_are_recorded_as_those_of_the_study():
    job = parse_job("gpt:muon:0.02:0")
    assert config(job, TASKS["gpt"], None, False) == {
        "study": "rules", "task": "gpt", "method": "muon", "lr": 0.02, "steps": 800,
    }  # fmt: skip


def test_without_packages_a_rival_says_what_to_run(monkeypatch, tmp_path):
    monkeypatch.setattr(packages, "RIVALS", tmp_path / ".rivals")
    monkeypatch.setattr(sys, "path", [p for p in sys.path if not p.endswith(".rivals")])
    monkeypatch.delitem(sys.modules, "pytorch_optimizer", raising=False)
    assert "make rivals" in smoke("gpt:normuon:default:0")["skipped"]


def test_a_method_that_cannot_run_a_task_is_an_error_of_that_job():
    assert smoke("resnet20:muon:default:0")["error"].startswith("ValueError: no hidden weights")
    assert "batch norm" in smoke("gpt-384:sgd-bn:default:0")["error"]


def network():
    """A convolution, a dense layer, a head, and a norm."""
    layers = [nn.Conv2d(3, 8, 3), nn.Flatten(), nn.LayerNorm(32), nn.Linear(32, 6), nn.ReLU(), nn.Linear(6, 2)]
    return nn.Sequential(*layers)


def test_hidden_weights_are_all_but_the_head():
    model = network()
    assert packages.hidden(model, convolutions=True) == [model[0].weight, model[3].weight]
    assert packages.hidden(model, convolutions=False) == [model[3].weight]
    text = RACE["lstm"].tiny().network()
    assert [tuple(p.shape) for p in packages.hidden(text, convolutions=True)] == [(64, 16)] * 4


def descend(params, optimizer, rates, set_rate):
    """Steps on random gradients that are the same in each call."""
    generator = torch.Generator().manual_seed(0)
    for rate in rates:
        set_rate(rate)
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator)
        optimizer.step()


@pytest.mark.parametrize(
    ("cls", "options"),
    [(torch.optim.Muon, {"momentum": 0.9, "weight_decay": 0.0}), (torch.optim.SGD, {"momentum": 0.9})],
)
def test_an_lr_in_a_tensor_gives_the_steps_of_the_class_itself(cls, options):
    first = [torch.randn(6, 4), torch.randn(4, 6)]
    own, others = ([nn.Parameter(p.clone()) for p in first] for _ in range(2))
    rates = [0.02, 0.01, 0.03]
    plain, lr = cls(others, lr=0.02, **options), torch.tensor(0.02)
    descend(own, packages.scaled(cls, own, lr, **options), rates, lr.fill_)
    descend(others, plain, rates, lambda rate: plain.param_groups[0].update(lr=rate))
    assert_close([p.detach() for p in own], [p.detach() for p in others])


def test_steps_that_depend_on_the_weights_are_left_to_the_class_itself():
    with pytest.raises(ValueError, match="weight decay"):
        packages.Scaled(torch.optim.SGD, [nn.Parameter(torch.ones(2))], 0.1, weight_decay=0.1)
    found = smoke("vgg:sgd,weight_decay=0.1:0.01:0")
    assert "weight decay" in found["capture_error"] and math.isfinite(found["training_loss"])


@installed
@pytest.mark.parametrize("name", ["muon-conv", "normuon"])
def test_packages_take_an_lr_in_a_tensor_as_a_number(name):
    """So a graph that was captured once follows the schedule."""
    torch.manual_seed(0)
    models = [network(), network()]
    models[1].load_state_dict(models[0].state_dict())
    for model, tensor in zip(models, (True, False), strict=True):
        method, options = parse(f"{name},momentum=0.9")
        optimizers = method.build(model, torch.tensor(0.02) if tensor else 0.02, options)
        schedule = training.Schedule(optimizers)
        for optimizer in optimizers:
            params = [p for group in optimizer.param_groups for p in group["params"]]
            descend(params, optimizer, [1.0, 0.5, 0.1], schedule.set)
    assert_close(models[0].state_dict(), models[1].state_dict())


@installed
def test_muon_of_the_package_is_torchs_on_matrices():
    p = torch.randn(8, 6)
    ours, theirs = nn.Parameter(p.clone()), nn.Parameter(p.clone())
    options = {"momentum": 0.9}
    package = packages.muon_kin("Muon")([ours], 0.02, **options)
    own = torch.optim.Muon([theirs], lr=0.02, weight_decay=0.0, **options)
    for some, optimizer in ((ours, package), (theirs, own)):
        descend([some], optimizer, [0.02] * 3, lambda _: None)
    assert_close(ours.detach(), theirs.detach(), rtol=0, atol=3e-3)  # both multiply in bfloat16


# trainings


@pytest.mark.parametrize("name", ["vgg", "gpt-384"])
def test_methods_share_weights_and_batches_of_a_seed(name):
    first = [smoke(f"{name}:{method}:default:3")["first_loss"] for method in ("evenstep", "adamw", "sgd")]
    assert first[0] == first[1] == first[2] != smoke(f"{name}:adamw:default:4")["first_loss"]


@installed
@pytest.mark.parametrize("task", ["gpt-384", "resnet20-bn"])
@pytest.mark.parametrize("name", [name for name in METHODS if name != "sgd-bn"])
def test_methods_take_steps(task, name):
    found = smoke(f"{task}:{name}:default:0")
    assert (name, task) == ("muon", "resnet20-bn") or math.isfinite(found["training_loss"]), found


def test_a_grid_is_measured_on_the_validation_split_and_a_verdict_on_the_test_split():
    task = RACE["cnn"].tiny()
    data = task.load(None, CPU)
    data["validation"] = data["validation"][0], torch.full_like(data["validation"][1], 11)  # no answer is right
    for phase, right in ((GRID, False), (JUDGED, True)):
        job, same = Job("cnn", "sgd", 0.0, 1, phase), {**data, "test": data["train"]}
        found = finished(training.guarded(job, task, same, CPU))[1]
        assert (found["held_out_accuracy"] > 0) == right
    assert set(found["curve"]["validation"]) == {0.0} and len(found["curve"]["steps"]) == task.steps


def test_the_curve_is_the_mean_loss_between_its_points():
    job, task = parse_job("autoencoder:adamw:0.001:0"), RACE["autoencoder"].tiny()
    data = task.load(None, CPU)
    alone = training.Training(job, task, data, CPU, 4, parse("adamw")[0].capture)
    losses = []
    for _ in range(4):
        alone.step()
        losses.append(float(alone.loss_now))
    found = finished(training.guarded(job._replace(phase=GRID), task, data, CPU))[1]
    assert found["curve"] == {"steps": [1, 2, 3, 4], "training_loss": pytest.approx(losses, rel=1e-3)}
    assert found["training_loss"] == pytest.approx(losses[-1]) and found["first_loss"] == pytest.approx(losses[0])


def test_a_timed_job_measures_a_step_and_the_state():
    found = smoke("autoencoder:adamw:0.001:0", TIMED)
    count = sum(p.numel() for p in RACE["autoencoder"].tiny().network().parameters())
    assert found["seconds_per_step"] > 0 and 8 * count <= found["state_bytes"] <= 8 * count + 4 * 100


@installed
def test_averaged_weights_are_what_is_measured():
    job, task = parse_job("autoencoder:schedule-free:0.01:0"), RACE["autoencoder"].tiny()
    trained = training.Training(job, task, task.load(None, CPU), CPU, 4, parse("schedule-free")[0].capture)
    for _ in range(4):
        trained.step()
    weights = [p.detach().clone() for p in trained.model.parameters()]
    held = float(trained.held_out("test"))
    moving = task.held_out(trained.predict, trained.data["test"]).item()
    assert held != moving
    assert_close([p.detach() for p in trained.model.parameters()], weights)


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["evenstep", "unitstep", "adamw", "sgd", "muon", "normuon", "whitened-adamw"])
@pytest.mark.parametrize("name", RACE)
def test_steps_are_captured_and_learn_what_eager_ones_do(name, method):
    if method == "normuon" and not (packages.RIVALS / "pytorch_optimizer").is_dir():
        pytest.skip("needs rivals' packages: make rivals")
    if method == "muon" and name.startswith("resnet20"):
        pytest.skip("no hidden matrix but the head")
    device, job = torch.device("cuda"), parse_job(f"{name}:{method}:default:0")
    task = replace(RACE[name].tiny(), steps=8)
    data = task.load(None, device)
    ((_, found),) = round_robin([training.guarded(job, task, data, device)], device)
    assert found["run"] == "captured", found
    (eager,) = round_robin([training.train(job, task, data, device, None, Capture.NOTHING)], device)
    assert found["training_loss"] == pytest.approx(eager["training_loss"], rel=0.02)
