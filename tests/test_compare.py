"""The race: its protocol, scores, page and command."""

import itertools
import json
import math
import random
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from evenstep.lab import cli
from evenstep.lab.compare import job_tables, page, protocol, scores
from evenstep.lab.compare.jobs import GRID, JUDGED, TIMED, Job
from evenstep.lab.compare.methods import METHODS
from evenstep.lab.compare.running import Runner
from evenstep.lab.compare.tasks import RACE, TASKS

OURS = METHODS["evenstep"].lr
PAIRS = [(task, method) for task in ("vgg", "gpt-384", "lstm") for method in ("evenstep", "adamw", "sgd", "muon")]


def metrics(task, value, first=5.0, last=1.0, **more):
    """What a training says of itself."""
    curve = {"steps": [1, 2, 3], "training_loss": [3.0, 2.0, 1.0], "validation": [0.1, value, value]}
    return {TASKS[task].metric: value, "training_loss": last, "first_loss": first, "curve": curve, **more}


def record(job, found):
    """The record of a job of the race."""
    config = {"compare": 1, "phase": job.phase, "task": job.task, "method": job.method, "lr": job.lr}
    config["steps"] = TASKS[job.task].steps
    machine = {"device": "a device"}
    return {"config": config, "seed": job.seed, "metrics": found, "environment": machine, "commit": "c0ffee"}


def raced(answer, pairs=PAIRS, rng=None):
    """All records of a race whose jobs are answered by a function, in random parts if there is a generator."""
    found = []
    while True:
        results = protocol.results(found, pairs).values()
        jobs = [job for own in results for job in (*own.missing(), *own.untimed())]
        if not jobs:
            return found
        if rng:
            jobs = rng.sample(jobs, rng.randint(1, len(jobs)))
        found += [record(job, answer(job)) for job in jobs]


def valley(job, best=None, depth=2.0):
    """A loss, or an accuracy, with its best at twice the usual lr."""
    if job.phase == TIMED:
        return {"seconds_per_step": 0.01, "state_bytes": 4}
    best = best or 2 * METHODS[job.method.partition(",")[0]].lr
    loss = 1 + 0.1 * depth * math.log2(job.lr / best) ** 2 + 0.01 * job.seed
    return metrics(job.task, 1 / loss if TASKS[job.task].higher else loss)


# protocol


@pytest.mark.parametrize("rng", [None, random.Random(1), random.Random(2)])
def test_a_race_ends_with_the_same_jobs_in_whatever_parts_it_is_run(rng):
    def key(r):
        return json.dumps([r["config"], r["seed"]], sort_keys=True)

    first = raced(valley)
    assert sorted(map(key, raced(valley, rng=rng))) == sorted(map(key, first))
    assert len({key(r) for r in first}) == len(first)


@pytest.mark.parametrize("shift", [-5, -3, -1, 0, 1, 2, 3, 5])
def test_a_grid_is_widened_until_both_ends_are_worse(shift):
    best = METHODS["adamw"].lr * 2.0**shift
    own = protocol.results(raced(lambda job: valley(job, best), [("vgg", "adamw")]), [("vgg", "adamw")])["vgg", "adamw"]
    rates = sorted(own.grid)
    assert own.best() == pytest.approx(best) and rates[0] < own.best() < rates[-1]
    assert all(b == 2 * a for a, b in itertools.pairwise(rates)) and set(own.five) <= set(rates)
    assert len(rates) == max(5, 4 + abs(shift))
    assert [seed for (m, lr), seeds in own.judged.items() if m == "adamw" for seed in seeds] == [1, 2, 3]


def test_a_grid_that_changes_nothing_is_not_widened():
    own = protocol.results(raced(lambda job: metrics(job.task, 1.5), PAIRS), PAIRS)
    assert all(len(results.grid) == 5 and results.best() == results.usual for results in own.values())


def test_where_every_run_diverges_smaller_steps_are_tried_but_not_for_ever():
    pair = "gpt-384", "sgd"
    own = protocol.results(raced(lambda job: metrics(job.task, None, last=None), [pair]), [pair])[pair]
    assert min(own.grid) == own.usual / 2**6 and max(own.grid) == own.usual * 4


def test_a_run_that_diverged_is_never_chosen():
    def answer(job):
        found = valley(job)
        return {**found, "training_loss": 9.0} if job.lr > METHODS["adamw"].lr else found

    own = protocol.results(raced(answer, [("vgg", "adamw")]), [("vgg", "adamw")])["vgg", "adamw"]
    assert own.best() == METHODS["adamw"].lr


def test_judged_are_the_chosen_stepsize_our_default_and_what_authors_recommend():
    own = protocol.results(raced(valley), PAIRS)
    assert set(own["vgg", "evenstep"].judged) == {("evenstep", OURS), ("evenstep", 2 * OURS)}
    adamw = METHODS["adamw"]
    assert set(own["vgg", "adamw"].judged) == {("adamw", 2 * adamw.lr), ("adamw," + adamw.authors[0], adamw.authors[1])}
    assert all(set(seeds) == {1, 2, 3} for results in own.values() for seeds in results.judged.values())


def test_a_method_that_cannot_run_a_task_is_left_there():
    def answer(job):
        return {"error": "ValueError: no"} if (job.task, job.method) == ("lstm", "muon") else valley(job)

    found = raced(answer)
    own = protocol.results(found, PAIRS)["lstm", "muon"]
    assert own.error == "ValueError: no" and not own.missing()
    tried = [r for r in found if (r["config"]["task"], r["config"]["method"]) == ("lstm", "muon")]
    assert len(tried) == 6  # the first five, and the timing that was asked for with them


def test_options_make_another_method():
    pair, other = ("vgg", "adamw"), ("vgg", "adamw,beta2=0.999")
    found = raced(valley, [other])
    results = protocol.results(found, [pair, other])
    assert not results[pair].grid and not results[pair].judged and len(results[other].grid) == 5


def test_records_of_a_task_that_has_changed_do_not_count():
    found = raced(valley, [("vgg", "adamw")])
    for r in found:
        r["config"]["steps"] += 1
    assert len(protocol.results(found, [("vgg", "adamw")])["vgg", "adamw"].missing()) == 5 + 3


@pytest.mark.parametrize("count", [1, 7, 40])
def test_a_page_can_be_made_before_the_race_is_over(tmp_path, count):
    found = raced(valley)[:count]
    assert "## Held out" in page.write(tmp_path / "c.md", found, []).read_text()


def test_methods_run_on_their_tasks_unless_both_are_named():
    everywhere = {task for task, method in protocol.pairs([], []) if method == "soap"}
    assert everywhere == set(RACE) and len(protocol.pairs([], ["lion"])) == 3
    assert protocol.pairs(["vit"], ["lion", "sgd"]) == [("vit", "lion"), ("vit", "sgd")]


# scores


def test_the_range_of_stepsizes_is_that_of_the_interpolated_metric():
    grid = [0.01 * 2.0**k for k in range(7)]
    rng = random.Random(0)
    for higher, tolerance in itertools.product((True, False), (0.01, 0.05, 0.3)):
        values = dict(zip(grid, [rng.uniform(0.3, 0.5) for _ in grid], strict=True))
        best = (max if higher else min)(values, key=values.get)
        limit = values[best] * (1 - tolerance if higher else 1 + tolerance)

        def inside(x, values=values, limit=limit, higher=higher):
            k = min(int(x), len(grid) - 2)
            a, b = values[grid[k]], values[grid[k + 1]]
            value = a + (b - a) * (x - k)
            return value >= limit if higher else value <= limit

        fine, middle = 4000, grid.index(best)
        left = next((k for k in range(1, middle * fine + 1) if not inside(middle - k / fine)), middle * fine)
        most = (len(grid) - 1 - middle) * fine
        right = next((k for k in range(1, most + 1) if not inside(middle + k / fine)), most)
        found = scores.width(values, tolerance, higher)
        assert found.decades == pytest.approx((left + right) / fine * math.log10(2), abs=1e-3)
        assert found.open == (left == middle * fine or right == most)


def test_no_range_reaches_into_a_run_that_diverged():
    assert scores.width({1.0: 1.2, 10.0: 1.0, 100.0: math.inf}, 0.05, higher=False).decades == pytest.approx(0.25)
    assert scores.width({1.0: math.inf}, 0.05, higher=False) == (0.0, False)


def test_a_target_is_reached_between_the_points_of_a_curve():
    assert scores.first_reached([10, 20, 30], [0.1, 0.3, 0.5], 0.4, higher=True) == pytest.approx(25)
    assert scores.first_reached([10, 20], [0.5, 0.6], 0.4, higher=True) == 10
    assert scores.first_reached([10, 20], [None, 0.6], 0.4, higher=True) == 20
    assert scores.first_reached([10, 20], [2.0, 1.5], 1.0, higher=False) == math.inf


def test_a_difference_is_paired_by_seed():
    ours, theirs = {0: 1.0, 1: 1.2, 2: 1.7, 5: 99.0}, {0: 1.1, 1: 1.5, 2: 1.6, 7: -99.0}
    apart = [-0.1, -0.3, 0.1]
    assert scores.paired(ours, theirs) == pytest.approx((sum(apart) / 3, statistics.stdev(apart) / 3**0.5, 3))
    difference, error, seeds = scores.paired({0: 1.0}, {0: 3.0})
    assert (difference, seeds) == (-2.0, 1) and math.isnan(error) and scores.verdict(difference, error) == "one seed"
    assert [scores.verdict(d, 1.0) for d in (1.5, 0.5, -0.5, -1.5)] == ["ahead", "level", "level", "behind"]


# tables


def row(text, first, after="\n\n\n"):
    """The cells of the row that begins with this cell, in the text after a heading."""
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.split(after)[-1].splitlines()]
    return next(line for line in lines if line[0] == first)


def test_the_page_shows_what_the_records_say(tmp_path):
    def answer(job):
        found = valley(job)
        if job.phase == JUDGED and job.method == "evenstep" and job.lr == OURS:
            found[TASKS[job.task].metric] = {1: 0.8, 2: 0.9, 3: 0.7}[job.seed]
        return found

    path = page.write(tmp_path / "comparison.md", raced(answer), [Path("race.jsonl")])
    text = path.read_text()
    held = row(text, "lstm ↓", "## Held out")
    assert held[1] == "**0.8000 ± 0.0577**" and held[2] == held[4] == "1.0200 ± 0.0058"
    assert row(text, "vgg °", "## Held out")[1] == "80.00 ± 5.77"
    apart = [1.01 - 0.8, 1.02 - 0.9, 1.03 - 0.7]
    error = statistics.stdev(apart) / 3**0.5
    assert row(text, "lstm ↓", "Ahead by")[1] == f"**{statistics.mean(apart):+.4f} ± {error:.4f}**"
    assert row(text, "at its default ahead of tuned AdamW")[1:] == ["2 of 3", "10 of 12"]
    assert "- vgg °: AdamW, by" in text and "(figures/comparison.svg)" in text
    assert row(text, "AdamW", "Over its tasks")[1:3] == ["0 of 3", "0 of 15"]
    assert "a device" in text and "c0ffee" in text and "race.jsonl" in text
    assert (tmp_path / "figures" / "comparison.svg").read_text().startswith("<?xml")


def test_times_are_steps_to_adamws_result_times_the_seconds_of_a_step(tmp_path):
    text = page.text(page.Verdicts(protocol.results(found := raced(valley), PAIRS)), found, [])
    # the curve goes from 0.1 up to what it ends with, at step 2; the worst of three seeds is the target
    value = {seed: 1 / (1 + 0.01 * seed) for seed in (1, 2, 3)}
    steps = [1 + (value[3] - 0.1) / (value[seed] - 0.1) for seed in (1, 2, 3)]
    assert row(text, "vgg °", "## Seconds")[1] == f"{100 * value[3]:.2f}"
    assert row(text, "vgg °", "## Seconds")[5].strip("*") == f"{0.01 * sum(steps) / 3:.4f} (2)"


def test_a_failed_method_is_named_with_its_error(tmp_path):
    def answer(job):
        return {"error": "ValueError: no"} if (job.task, job.method) == ("lstm", "muon") else valley(job)

    text = page.write(tmp_path / "c.md", raced(answer), []).read_text()
    assert "- lstm, muon: ValueError: no" in text and row(text, "lstm ↓", "## Held out")[-1] == "failed"


def single(method, lr, seed, value, task="gpt", first=5.0, last=1.0, **more):
    """A record of a single job."""
    config = {"study": "rules", "task": task, "method": method, "lr": lr, "steps": TASKS[task].steps}
    found = {TASKS[task].metric: value, "training_loss": last, "first_loss": first, **more}
    return {"config": config, "seed": seed, "metrics": found}


def test_single_jobs_compare_our_default_with_the_best_setting_of_each_rival():
    def runs(method, lr, values):
        return [single(method, lr, seed, value) for seed, value in enumerate(values)]

    found = [
        *runs("evenstep", OURS, [1.0, 1.1, 1.2]),
        *runs("evenstep", 0.04, [0.9, 1.0, 1.1]),
        *runs("normuon,momentum=0.9", 0.02, [1.1, 1.3, 1.5]),
        *runs("normuon,momentum=0.95", 0.01, [1.4, 1.4, 1.4]),
        single("evenstep", 0.6, 0, 7.0, last=7.0),
        single("soap", 0.003, 0, 1.0) | {"metrics": {"error": "ValueError: no"}},
    ]
    text = job_tables.markdown(found)
    assert row(text, "evenstep")[1:5] == ["1.0000 ± 0.1000", "evenstep, 0.04", "3", "-0.1000 ± 0.0000 (3)"]
    assert row(text, "evenstep")[-1] == "1 of 7"
    assert row(text, "normuon")[2:6] == [
        "normuon,momentum=0.9, 0.02 (end of grid)",
        "3",
        "+0.2000 ± 0.0577 (3)",
        "ahead",
    ]
    assert "soap, 0.003, 0: ValueError: no" in text


def test_the_studys_records_are_tabulated():
    path = Path(__file__).parents[1] / "results" / "rules.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    chosen = {"study": "rules", "task": "gpt", "method": "normuon,momentum=0.9", "lr": 0.02, "steps": 800}
    losses = [r["metrics"]["held_out_loss"] for r in records if r["config"] == chosen]
    shown = f"{statistics.mean(losses):.4f} ± {statistics.stdev(losses):.4f}"
    assert row(job_tables.markdown(records), "normuon", "### gpt\n")[1] == shown and len(losses) == 3


# the command


def fails(capsys, *arguments):
    """The message of a request that cannot be carried out."""
    with pytest.raises(SystemExit) as end:
        cli.main(["compare", *map(str, arguments)])
    message = capsys.readouterr().err
    assert end.value.code == 2 and message.count("\n") == 1
    return message


def test_requests_that_cannot_be_carried_out_are_one_line(capsys, tmp_path):
    assert "did you mean 'gpt-384'" in fails(capsys, "--smoke", "--tasks", "gpt-38")
    assert "did you mean 'adamw'" in fails(capsys, "--smoke", "--methods", "adamww")
    assert "should be TASK:METHOD:LR:SEED" in fails(capsys, "gpt:muon", "--smoke")
    assert "--data" in fails(capsys) and "not a folder" in fails(capsys, "--data", tmp_path / "none")
    assert "cifar-10-batches-py" in fails(
        capsys, "--data", tmp_path, "--tasks", "vgg", "--methods", "sgd", "--out", tmp_path / "x.jsonl"
    )
    assert "no such file" in fails(capsys, "--table", tmp_path / "none.jsonl")
    (tmp_path / "empty.jsonl").touch()
    assert "run the race first" in fails(capsys, "--table", tmp_path / "empty.jsonl")


def test_missing_packages_are_named_before_anything_runs(capsys, tmp_path, monkeypatch):
    from evenstep.lab.compare.methods import packages

    monkeypatch.setattr(packages, "RIVALS", tmp_path / ".rivals")
    monkeypatch.setattr(sys, "path", [p for p in sys.path if not p.endswith(".rivals")])
    monkeypatch.delitem(sys.modules, "pytorch_optimizer", raising=False)
    assert "make rivals" in fails(capsys, "--smoke", "--methods", "soap", "--out", tmp_path / "x.jsonl")


def run(*arguments):
    """Run the command in this process."""
    with pytest.raises(SystemExit) as end:
        cli.main(["compare", *map(str, arguments)])
    return end.value.code


def test_a_race_goes_on_where_its_budget_ended(capsys, tmp_path):
    out = tmp_path / "race.jsonl"
    options = ["--smoke", "--tasks", "autoencoder", "--methods", "adamw", "--out", out]
    assert run(*options, "--budget", 0) == 3 and not out.exists()
    assert "jobs are left" in capsys.readouterr().out
    assert run(*options) == 0 and "nothing is left" in capsys.readouterr().out
    lines = out.read_text().splitlines()
    assert {json.loads(line)["config"]["phase"] for line in lines} == {GRID, JUDGED, TIMED}
    out.write_text("\n".join(lines[:4]) + "\n" + lines[4][:40])  # the run was killed while it wrote
    assert run(*options) == 0 and len(out.read_text().splitlines()) == len(lines)
    assert run(*options) == 0 and len(out.read_text().splitlines()) == len(lines)
    assert "measure nothing" in fails(capsys, "--table", out)


def test_jobs_that_the_budget_cuts_off_are_left(tmp_path):
    said = []
    runner = Runner(tmp_path / "x.jsonl", None, torch.device("cpu"), math.inf, smoke=True, say=said.append)
    jobs = [Job("autoencoder", "adamw", 0.001, seed) for seed in range(4)]
    clock = itertools.count()

    def elapsed(self):
        return float(next(clock))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Runner, "elapsed", property(elapsed))
        runner.budget = 18.0
        ended = runner.done(jobs, at_once=1)
    assert 0 < ended < 4 and len((tmp_path / "x.jsonl").read_text().splitlines()) == ended
    assert any("not done within the budget" in text for text in said)


def test_single_jobs_are_not_run_twice(capsys, tmp_path):
    out = tmp_path / "jobs.jsonl"
    jobs = [f"{task}:{method}:default:0" for task in ("gpt", "deep") for method in ("evenstep", "adamw")]
    assert run(*jobs, "--smoke", "--out", out) == 0 and "4 jobs on" in capsys.readouterr().out
    assert run(*jobs, "--smoke", "--out", out, "--retry") == 0 and "0 jobs on" in capsys.readouterr().out
    assert run("--table", out) == 0 and "### deep, 4 steps" in capsys.readouterr().out


def test_the_race_can_be_listed_without_the_extras():
    code = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"matplotlib", "PIL", "numpy", "jinja2", "optuna"}:
            raise ModuleNotFoundError(name, name=name)
sys.meta_path.insert(0, Blocked())
import evenstep.lab.commands.run_compare
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)


@pytest.mark.slow
def test_all_phases_of_the_race_run_in_small(tmp_path):
    assert run("--smoke", "--out", tmp_path / "race.jsonl") == 0
