"""The benchmark times every contender, also of another version, records ratios, and refuses unknown names."""

import sys
from pathlib import Path

import pytest

import evenstep
from evenstep.lab import bench, bench_goals, records, usage
from evenstep.lab.bench_contenders import load
from evenstep.lab.bench_models import SUBJECTS
from evenstep.lab.commands import run_bench as command
from lab_helpers import call, printed, refused

SRC = Path(evenstep.__file__).parents[1]
MLP = {"model": "mlp", "batch": 2, "rounds": 2, "width": 64}


def test_a_comparison_has_a_row_per_contender():
    setting = bench.Setting("gpt-tiny", ("sgd", "muon", "whitened-sgd", "unitstep", "batch-norm"), rounds=2)
    seen = []
    record = bench.run(setting, seen.append, warm_up=1)
    rows = {row["contender"]: row for row in record["metrics"]}
    assert seen == [0, 1]
    assert list(rows) == ["sgd", "muon", "whitened-sgd", "unitstep"], "there is no batch norm in a transformer"
    assert rows["sgd"]["ratio"] == 1 and all(row["seconds"] > 0 for row in rows.values())
    assert rows["sgd"]["state_per_parameter"] == 0 < rows["unitstep"]["state_per_parameter"] < 0.05
    assert {"torch", "device", "threads"} <= record["environment"].keys() and record["config"]["rounds"] == 2


def test_ratios_are_taken_round_by_round_to_the_contenders_own_base():
    times = {"sgd": [1.0, 2.0, 4.0], "adamw-fused": [2.0, 2.0, 2.0], "whitened-adamw": [2.0, 4.0, 6.0]}
    assert bench.row("adamw-fused", times)["ratio"] == 1.0 and bench.row("adamw-fused", times)["base"] == "sgd"
    row = bench.row("whitened-adamw", times)
    assert (row["base"], row["ratio_low"], row["ratio"], row["ratio_high"]) == ("adamw-fused", 1.0, 2.0, 3.0)
    row = bench.row("whitened-adamw", times | {"whitened-adamw@before": [1.0, 1.0, 1.0]})
    assert row["new_over_old"] == [2.0, 4.0, 6.0]


def test_another_version_is_timed_in_the_same_rounds_and_shares_no_module():
    record = bench.run(bench.Setting(contenders=("sgd", "unitstep", "whitened-adamw"), against=SRC, **MLP), warm_up=1)
    rows = {row["contender"]: row for row in record["metrics"]}
    assert list(rows)[-2:] == ["unitstep@before", "whitened-adamw@before"]
    assert len(rows["unitstep"]["new_over_old"]) == 3 and "new_over_old" not in rows["sgd"]
    assert record["config"]["against"] and str(SRC) not in str(record)
    assert "new / old" in bench_goals.text(record)
    before = load(SRC)
    assert before is not evenstep and before.UnitStep is not evenstep.UnitStep
    assert before.UnitStep.__mro__[1].__module__.startswith("evenstep_before.")
    copies = [name for name in sys.modules if name.startswith("evenstep_before.")]
    assert len(copies) > 20 and not any(".lab" in name for name in copies)
    assert all("evenstep-before-" in sys.modules[name].__file__ for name in copies)


def test_records_make_a_table_for_the_docs_if_they_share_the_first_contender(tmp_path, capsys):
    path = tmp_path / "bench.jsonl"
    records.append(path, bench.run(bench.Setting(contenders=("sgd", "unitstep"), **MLP), warm_up=1))
    head, line, row = printed(capsys, "bench", "--table", path).splitlines()
    assert head == "| | sgd, ms | unitstep |" and line == "| --- | --- | --- |"
    assert row.startswith("| mlp, width 64, batch 2, eager | ") and row.count("|") == 4
    records.append(path, bench.run(bench.Setting(contenders=("unitstep",), **MLP), warm_up=1))
    assert "differ (sgd, unitstep)" in refused(capsys, "bench", "--table", path)
    assert "none of these records is of what has a goal" in refused(capsys, "bench", "--table", path, "--goals")


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("name", ["paper-cnn", "mlp", "gpt-tiny"])
def test_small_networks_train(name, half):
    record = bench.run(bench.Setting(name, ("sgd",), batch=2, rounds=2, half=half), warm_up=1)
    assert record["metrics"][0]["seconds"] > 0 and ("bf16 weights" in bench_goals.text(record)) == half


def test_large_networks_have_the_sizes_of_their_papers():
    import torch

    with torch.device("meta"):
        counts = {name: sum(p.numel() for p in SUBJECTS[name].build().parameters()) for name in SUBJECTS}
    assert counts["resnet50"] == 25_557_032 and counts["alexnet"] == 61_100_840
    assert counts["gpt2-small"] == 124_439_808
    assert 85e6 < counts["vit-b16"] < 87e6


@pytest.mark.parametrize(("device", "usual"), [("cpu", (None, None, None)), ("cuda", (4096, 4096, None))])
def test_sweeps_vary_one_thing_at_a_time(device, usual):
    found = [(s.width, s.batch, s.depth) for s in command.growth(bench.Setting("", ("sgd",), device=device))]
    assert len(set(found)) > 8 and all(sum(a != b for a, b in zip(size, usual, strict=True)) <= 1 for size in found)


def test_a_suite_names_every_row_of_its_device(monkeypatch):
    monkeypatch.setattr(usage, "usable_device", lambda name: None)
    rows = command.settings(command.Options(suite="gpu", against=SRC))
    assert {s.model for s in rows} == {"resnet50", "alexnet", "gpt2-small", "vit-b16"}
    assert all(s.device == "cuda" and s.autocast and s.rounds == 12 and s.against == SRC for s in rows)
    [one] = command.settings(command.Options(goals=True, model=("paper-cnn-4",), rounds=3, contenders=("sgd",)))
    assert (one.model, one.threads, one.rounds, one.contenders) == ("paper-cnn-4", 1, 3, ("sgd",))


def test_a_failed_comparison_does_not_end_the_others(tmp_path, capsys):
    out = tmp_path / "new" / "bench.jsonl"
    words = ["--model", "paper-cnn", "--contenders", "sgd", "batch-norm", "sgd", "--rounds", "2", "--batch", "1", "2"]
    shown = printed(capsys, "bench", *words, "--records", out, code=1)
    assert "paper-cnn, batch 1, eager: failed: Expected more than 1 value" in shown and shown.count("  sgd ") == 1
    assert [record["config"]["batch"] for record in records.read(out)] == [2]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--model", "gpt-tiny", "--contenders", "batch-norm"], "cannot have batch-norm; add a contender"),
        (["--model", "mlp", "--channels-last"], "mlp, eager, channels_last: failed: required rank 4 tensor"),
    ],
)
def test_settings_that_contradict_each_other_fail_in_a_line(words, told, tmp_path, capsys):
    assert told in printed(capsys, "bench", *words, "--rounds", "2", "--records", tmp_path / "bench.jsonl", code=1)


def measured(model, device="cuda", state=0.002, versions=None, **ratios):
    """A record as the bench makes it."""
    config = bench.Setting(model, (), device, autocast=device == "cuda", compiled=device == "cuda").config()
    rows = [{"contender": name.replace("_", "-"), "ratio": ratio, "state_per_parameter": state}
            | ({"new_over_old": versions} if versions else {}) for name, ratio in ratios.items()]  # fmt: skip
    return {"config": config, "metrics": rows}


def missed(found):
    """The goals that these records miss."""
    return [(row.what, row.contender, row.goal.column) for row in bench_goals.verdicts(found) if row.missed]


def test_goals_are_judged_by_the_newest_measurement_of_each_contender():
    old = measured("gpt2-small", sgd=1.0, unitstep=1.0, whitened_adamw=1.041)
    new = measured("gpt2-small", sgd=1.0, unitstep=1.0281)
    eager, small = (measured("gpt2-small", state=0.5, sgd=1.0, unitstep=9.0) for _ in range(2))
    eager["config"]["compiled"], small["config"]["batch"] = False, 2
    assert missed([old, eager, new, small]) == [
        ("gpt2-small, eager, bf16", "unitstep", "ratio"),
        ("gpt2-small, eager, bf16", "unitstep", "state_per_parameter"),
        ("gpt2-small, compiled, bf16", "unitstep", "ratio"),
        ("gpt2-small, compiled, bf16", "whitened-adamw", "ratio"),
    ]
    lines = bench_goals.goals_table(bench_goals.verdicts([old, eager, new, small])).splitlines()
    assert "| gpt2-small, compiled, bf16 | unitstep | 1.018 | 1.028 | **1.028** |" in lines
    assert "| vit-b16, compiled, bf16 | unitstep | 1.015 | 1.025 | – |" in lines
    assert len({line.count("|") for line in lines}) == 1


def test_a_version_that_is_one_percent_slower_fails_and_one_that_batch_norm_undercuts():
    fast, slow = (measured("vit-b16", versions=[0.9, ratio, 1.1], unitstep=1.0) for ratio in (1.009, 1.011))
    assert missed([fast]) == [] and missed([slow]) == [("vit-b16, compiled, bf16", "unitstep", "new_over_old")]
    record = measured("paper-cnn", "cpu", sgd=1.0, unitstep=1.13, whitened_sgd=1.2, batch_norm=1.15)
    assert missed([record]) == [("paper-cnn, eager", "whitened-sgd", "ratio")]


def test_records_of_version_0_1_are_read(tmp_path, capsys):
    records.append(tmp_path / "old.jsonl", measured("paper-cnn", "cpu", sgd=1.0, evenstep=1.5, batch_norm=1.2))
    table = printed(capsys, "bench", "--table", tmp_path / "old.jsonl", "--goals", code=1)
    assert "| paper-cnn, eager | unitstep | 1.120 | 1.200 | **1.500** |" in table


@pytest.mark.parametrize(("limit", "code"), [(1e9, 0), (0.0, 1)])
def test_goals_are_timed_and_judged_by_the_exit_code(limit, code, monkeypatch, tmp_path, capsys):
    goal = bench_goals.Goal("unitstep", 1.0, limit)
    monkeypatch.setitem(bench_goals.SUITES, "cpu", ((bench_goals.ON_CPU("gpt-tiny"), (goal,)),))
    assert call("bench", "--goals", "--rounds", "2", "--records", tmp_path / "bench.jsonl") == code
    assert capsys.readouterr().out.count("**") == 2 * code
