"""The study of optimizers: scripts/study."""

import doctest
import json
import math
import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.testing import assert_close

SCRIPTS = Path(__file__).parents[1] / "scripts"
sys.path.append(str(SCRIPTS))

from study import methods, table, tasks, training  # noqa: E402

OURS = methods.METHODS["evenstep"].lr

installed = pytest.mark.skipif(
    not (methods.RIVALS / "pytorch_optimizer").is_dir(), reason="needs rivals' packages: make rivals"
)


def record(method, lr, seed, value, task="gpt", first=5.0, last=1.0, **more):
    """A record of a training."""
    metric = tasks.TASKS[task].metric
    config = {"study": "rules", "task": task, "method": method, "lr": lr, "steps": tasks.TASKS[task].steps}
    metrics = {metric: value, "training_loss": last, "first_loss": first, **more}
    return {"config": config, "seed": seed, "metrics": metrics}


def runs(method, lr, values, **more):
    """Records of several seeds."""
    return [record(method, lr, seed, value, **more) for seed, value in enumerate(values)]


def row(text, first):
    """The cells of the row that begins with this cell."""
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    return next(line for line in lines if line[0] == first)


@pytest.mark.parametrize("module", [methods, table, training])
def test_examples_of_docstrings_hold(module):
    assert doctest.testmod(module).failed == 0


# tables


def test_a_difference_is_paired_by_seed():
    ours, theirs = {0: 1.0, 1: 1.2, 2: 1.7, 5: 99.0}, {0: 1.1, 1: 1.5, 2: 1.6, 7: -99.0}
    apart = [-0.1, -0.3, 0.1]
    found = table.paired(ours, theirs)
    assert found == pytest.approx((sum(apart) / 3, statistics.stdev(apart) / 3**0.5, 3))
    assert found[1] == pytest.approx(math.sqrt((0.0 + 0.04 + 0.04) / 2 / 3))


def test_one_seed_has_no_standard_error():
    difference, error, seeds = table.paired({0: 1.0}, {0: 3.0})
    assert (difference, seeds) == (-2.0, 1) and math.isnan(error) and table.verdict(difference, error) == "one seed"


def test_a_verdict_takes_more_than_a_standard_error():
    assert [table.verdict(d, 1.0) for d in (1.5, 0.5, -0.5, -1.5)] == ["ahead", "level", "level", "behind"]


def test_the_summary_compares_our_default_with_the_best_setting_of_the_best_rival():
    found = [
        *runs("evenstep", OURS, [1.0, 1.1, 1.2]),
        *runs("evenstep", 0.04, [0.9, 1.0, 1.1]),
        *runs("muon", 0.02, [1.3, 1.4, 1.5]),
        *runs("normuon,momentum=0.9", 0.02, [1.1, 1.3, 1.5]),
        *runs("normuon,momentum=0.95", 0.01, [1.4, 1.4, 1.4]),
    ]
    text = table.markdown(found)
    cells = row(text, "gpt")
    assert cells[1] == "1.1000 ± 0.1000" and cells[2] == "1.0000 ± 0.1000 at 0.04"
    assert cells[3].startswith("1.3000") and cells[4].startswith("normuon,momentum=0.9, 0.02")
    assert cells[5] == "+0.2000 ± 0.0577 (3)" and cells[6] == "ahead"  # apart by 0.1, 0.2, 0.3
    assert cells[7] == "10.0%"  # 1.1 where the best lr has 1.0
    assert row(text, "normuon")[3:6] == ["3", "+0.2000 ± 0.0577 (3)", "0.02: 1.3000"]
    assert row(text, "evenstep")[4:7] == ["-0.1000 ± 0.0000 (3)", f"{OURS:g}: 1.1000, 0.04: 1.0000", "10.0%"]


def test_accuracies_are_better_when_higher_and_shown_in_per_cent():
    found = [
        *runs("evenstep", OURS, [0.50, 0.52], task="deep"),
        *runs("muon-conv", 0.02, [0.55, 0.59], task="deep"),
        *runs("muon-conv", 0.04, [0.10, 0.10], task="deep"),
    ]
    cells = row(table.markdown(found), "deep")
    assert cells[3] == "57.00 ± 2.83" and cells[5:7] == ["-6.00 ± 1.00 (2)", "behind"]


def test_the_seeds_that_all_settings_have_choose_among_them():
    task = table.Task([*runs("muon", 0.02, [1.0, 9.0, 9.0]), *runs("muon", 0.04, [1.1]), *runs("muon", 0.08, [1.2])])
    assert task.best("muon").lr == 0.02 and not task.at_end(table.Setting("muon", 0.04))
    assert task.at_end(task.best("muon"))


def test_divergence_is_a_lost_number_or_a_loss_above_the_first():
    found = [
        *runs("evenstep", OURS, [1.0]),
        record("evenstep", 0.2, 0, None, last=None),
        record("evenstep", 0.6, 0, 7.0, last=7.0),
        record("evenstep", 6.0, 0, None, last=None),  # beyond a factor of 30
    ]
    text = table.markdown(found)
    assert row(text, "gpt")[8] == "1 of 2, 2 of 3" and row(text, "evenstep")[7] == "3 of 4"


def test_failed_jobs_and_shorter_trainings_stand_apart():
    short = record("muon", 0.02, 0, 3.0)
    short["config"]["steps"] = 3
    failed = record("soap", 0.003, 0, 1.0)
    failed["metrics"] = {"error": "ValueError: no"}
    text = table.markdown([record("evenstep", OURS, 0, 1.0), short, failed])
    assert "### gpt\n" in text and "### gpt, 3 steps\n" in text and "soap, 0.003, 0: ValueError: no" in text


def smoke(text):
    """The result of a job on the small network of its task."""
    job, cpu = training.parse_job(text), torch.device("cpu")
    task = tasks.tiny(job.task)
    *_, (_, found) = finished(training.guarded(job, task, task.load(None, cpu), cpu))
    return found


def finished(work):
    """What a work yields, and its result."""
    while True:
        try:
            yield next(work)
        except StopIteration as end:
            yield end.value
            return


# methods


def test_a_method_carries_options():
    job = training.parse_job("gpt:normuon,plain_lr=0.001,momentum=0.9:default:2")
    assert job == ("gpt", "normuon,momentum=0.9,plain_lr=0.001", 0.02, 2)
    assert methods.parse("evenstep,head=None,trust=0.2")[1] == {"head": None, "trust": 0.2}


@pytest.mark.parametrize("text", ["gpt:muon:1", "bach:muon:1:0", "gpt:moon:1:0", "gpt:muon,momentum:1:0"])
def test_a_job_that_cannot_be_is_refused(text):
    with pytest.raises(ValueError, match="should be"):
        training.parse_job(text)


def test_without_packages_a_rival_says_what_to_run(monkeypatch, tmp_path):
    monkeypatch.setattr(methods, "RIVALS", tmp_path / ".rivals")
    monkeypatch.setattr(sys, "path", [p for p in sys.path if not p.endswith(".rivals")])
    monkeypatch.delitem(sys.modules, "pytorch_optimizer", raising=False)
    assert "make rivals" in smoke("gpt:normuon:default:0")["skipped"]


def test_a_method_that_cannot_run_a_task_is_an_error_of_that_job():
    assert smoke("resnet:muon:default:0")["error"].startswith("ValueError: no hidden weights")


def network():
    """A convolution, a dense layer, a head, and a norm."""
    layers = [nn.Conv2d(3, 8, 3), nn.Flatten(), nn.LayerNorm(32), nn.Linear(32, 6), nn.ReLU(), nn.Linear(6, 2)]
    return nn.Sequential(*layers)


def test_hidden_weights_are_all_but_the_head():
    model = network()
    assert methods.hidden(model, convolutions=True) == [model[0].weight, model[3].weight]
    assert methods.hidden(model, convolutions=False) == [model[3].weight]


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
    descend(own, methods.Scaled(cls, own, lr, **options), rates, lr.fill_)
    descend(others, plain, rates, lambda rate: plain.param_groups[0].update(lr=rate))
    assert_close([p.detach() for p in own], [p.detach() for p in others])


def test_a_step_that_depends_on_the_weights_is_refused():
    with pytest.raises(ValueError, match="weight decay"):
        methods.Scaled(torch.optim.SGD, [nn.Parameter(torch.ones(2))], 0.1, weight_decay=0.1)


@installed
@pytest.mark.parametrize("name", ["muon-conv", "normuon"])
def test_packages_take_an_lr_in_a_tensor_as_a_number(name):
    """So a graph that was captured once follows the schedule."""
    torch.manual_seed(0)
    models = [network(), network()]
    models[1].load_state_dict(models[0].state_dict())
    for model, tensor in zip(models, (True, False), strict=True):
        method, options = methods.parse(f"{name},momentum=0.9")
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
    package = methods.muon_kin("Muon")([ours], 0.02, **options)
    own = torch.optim.Muon([theirs], lr=0.02, weight_decay=0.0, **options)
    for some, optimizer in ((ours, package), (theirs, own)):
        descend([some], optimizer, [0.02] * 3, lambda _: None)
    assert_close(ours.detach(), theirs.detach(), rtol=0, atol=3e-3)  # both multiply in bfloat16


# trainings


@pytest.mark.parametrize("name", tasks.TASKS)
def test_lr_ends_near_zero_unless_it_is_constant(name):
    task = tasks.TASKS[name]
    rates = [task.rate(k, task.steps) for k in range(task.steps)]
    assert max(rates) == pytest.approx(1, abs=0.01)
    assert rates[-1] == (1 if task.constant else pytest.approx(0, abs=0.01))
    assert rates[0] == pytest.approx(1 / task.warm_up if task.warm_up else 1)


@pytest.mark.parametrize("name", ["deep", "gpt"])
def test_methods_share_weights_and_batches_of_a_seed(name):
    first = [smoke(f"{name}:{method}:default:3")["first_loss"] for method in ("evenstep", "adamw", "sgd")]
    assert first[0] == first[1] == first[2] != smoke(f"{name}:adamw:default:4")["first_loss"]


@installed
@pytest.mark.parametrize("name", ["muon-conv", "normuon", "adamuon", "soap", "ademamix", "lion"])
@pytest.mark.parametrize("task", ["gpt", "resnet-bn"])
def test_packages_take_steps(task, name):
    found = smoke(f"{task}:{name}:default:0")
    assert math.isfinite(found["training_loss"]), found


def test_a_study_runs_to_a_table_and_is_not_run_twice(tmp_path):
    out = tmp_path / "study.jsonl"
    jobs = [f"{task}:{method}:default:0" for task in ("gpt", "deep") for method in ("evenstep", "muon")]
    command = [sys.executable, str(SCRIPTS / "study"), *jobs, "--smoke", "--out", str(out), "--table", str(out)]
    env = {**os.environ, "PYTHONPATH": str(SCRIPTS.parent / "src"), "OMP_NUM_THREADS": "1"}
    texts = [
        subprocess.run(command, capture_output=True, text=True, check=True, env=env, cwd=tmp_path).stdout
        for _ in range(2)
    ]
    assert "4 jobs on" in texts[0] and "### deep, 3 steps" in texts[0]
    assert "0 jobs on" in texts[1] and len(out.read_text().splitlines()) == 4
    assert {json.loads(line)["config"]["steps"] for line in out.read_text().splitlines()} == {3}
