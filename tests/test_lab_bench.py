"""The benchmark: it runs every contender, records ratios, and refuses what it does not know."""

import sys
import types

import pytest

from evenstep.lab import bench, bench_goals, cli, records
from evenstep.lab.bench_models import SUBJECTS
from evenstep.lab.bench_tables import table


def test_a_comparison_has_a_row_per_contender(tmp_path):
    setting = bench.Setting("gpt-tiny", ("sgd", "muon", "whitened-sgd", "evenstep", "batch-norm"), rounds=2)
    seen = []
    record = bench.run(setting, seen.append, warm_up=1)
    assert seen == [0, 1]
    rows = {row["contender"]: row for row in record["metrics"]}
    assert list(rows) == ["sgd", "muon", "whitened-sgd", "evenstep"], "there is no batch norm in a transformer"
    assert rows["sgd"]["ratio"] == 1 and all(row["seconds"] > 0 for row in rows.values())
    assert rows["sgd"]["state_per_parameter"] == 0 < rows["evenstep"]["state_per_parameter"] < 0.05
    assert "evenstep" in table(record)


def test_records_make_a_table_for_the_docs(tmp_path, capsys):
    setting = bench.Setting("mlp", ("sgd", "evenstep"), batch=2, rounds=2, width=64)
    records.append(tmp_path / "bench.jsonl", bench.run(setting, warm_up=1))
    bench.main(["--table", str(tmp_path / "bench.jsonl")])
    head, line, row = capsys.readouterr().out.splitlines()
    assert head == "| | sgd, ms | evenstep |" and line == "| --- | --- | --- |"
    assert row.startswith("| mlp, width 64, batch 2, eager | ") and row.count("|") == 4


def test_rivals_are_timed_where_they_can_be_imported(monkeypatch, capsys):
    calls = []

    class KFACPreconditioner:
        def __init__(self, model):
            calls.append(type(model).__name__)

        def step(self):
            calls.append("step")

    with pytest.raises(SystemExit, match="2"):
        bench.main(["--model", "mlp", "--contenders", "kfac", "--rounds", "2"])
    assert "needs kfac-pytorch" in capsys.readouterr().err
    found = types.SimpleNamespace(KFACPreconditioner=KFACPreconditioner)
    monkeypatch.setitem(sys.modules, "kfac", types.SimpleNamespace(preconditioner=found))
    monkeypatch.setitem(sys.modules, "kfac.preconditioner", found)
    record = bench.run(bench.Setting("mlp", ("sgd", "kfac"), batch=2, rounds=2, width=64), warm_up=1)
    assert calls == ["Sequential", "step", "step", "step"] and "kfac" in table(record)
    assert record["metrics"][1]["state_per_parameter"] is None


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("name", ["paper-cnn", "mlp", "gpt-tiny"])
def test_small_networks_train(name, half):
    setting = bench.Setting(name, ("sgd",), batch=2, rounds=2, half=half)
    record = bench.run(setting, warm_up=1)
    assert record["metrics"][0]["seconds"] > 0 and ("bf16 weights" in table(record)) == half


def test_large_networks_have_the_sizes_of_their_papers():
    import torch

    with torch.device("meta"):
        counts = {name: sum(p.numel() for p in SUBJECTS[name].build().parameters()) for name in SUBJECTS}
    assert counts["resnet50"] == 25_557_032 and counts["alexnet"] == 61_100_840
    assert counts["gpt2-small"] == 124_439_808
    assert 85e6 < counts["vit-b16"] < 87e6


def test_sweeps_vary_one_thing_at_a_time():
    found = bench.settings(bench.Setting("", ("sgd",)), ["mlp"], [], sweep=True)
    varied = [{k: getattr(s, k) for k in ("width", "batch", "depth") if getattr(s, k) is not None} for s in found[1:]]
    assert all(len(v) == 1 for v in varied) and {k for v in varied for k in v} == {"width", "batch", "depth"}
    large = bench.settings(bench.Setting("", ("sgd",), device="cuda"), [], [], sweep=True)
    sizes = [(s.width, s.batch, s.depth) for s in large]
    usual = (4096, 4096, None)
    assert usual in sizes and all(sum(a != b for a, b in zip(size, usual, strict=True)) <= 1 for size in sizes)


def test_the_command_writes_records(tmp_path, capsys):
    out = tmp_path / "bench"
    with pytest.raises(SystemExit) as done:
        cli.main(["bench", "--model", "mlp", "--contenders", "sgd", "evenstep", "--rounds", "2", "--out", str(out)])
    assert done.value.code == 0 and len(records.read(out / "bench.jsonl")) == 1
    assert "ratio" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--model", "resnet5"], "did you mean 'resnet50'?"),
        (["--contenders", "evnstep"], "did you mean 'evenstep'?"),
        (["--rounds", "0"], "--rounds must be between"),
        (["--device", "nowhere"], "--device nowhere cannot be used here"),
        (["--batch", "-3"], "--batch must be between 1 and 1000000; got -3"),
        (["--batch", "8", "0"], "--batch must be between 1 and 1000000; got 0"),
        (["--batch", "1", "--contenders", "batch-norm"], "--batch 1 is too small for batch-norm"),
        (["--threads", "-1"], "--threads must be between 0 and 1024; got -1"),
        (["--seed", "99999999999999999999999"], "--seed must be between 0"),
        (["--contenders"], "--contenders is empty, so there is nothing to run"),
        (["--model"], "--model is empty, so there is nothing to run; name a network, or add --sweep"),
        (["--model", "gpt-tiny", "--contenders", "batch-norm"], "--model gpt-tiny cannot have batch-norm; add"),
        (["--model", "mlp", "--channels-last"], "--channels-last is for images, and mlp takes none"),
        (["--model", "mlp", "--contenders", "sgd", "kfac"], "needs kfac-pytorch"),
        (["--model", "mlp", "--half", "--autocast"], "--half leaves nothing to --autocast"),
        (["--goals", "--half", "--batch", "3"], "--goals says itself what is timed and how; leave out --batch, --half"),
    ],
)
@pytest.mark.parametrize("main", [lambda words: cli.main(["bench", *words]), bench.main])
def test_bad_input_is_one_line(main, arguments, said, capsys):
    with pytest.raises(SystemExit) as done:
        main(arguments)
    error = capsys.readouterr().err
    assert done.value.code == 2 and said in error and error.count("\n") == 1


@pytest.mark.parametrize("of_command", [True, False])
def test_contenders_that_a_network_cannot_have_are_named(of_command, tmp_path, capsys):
    words = ["--model", "gpt-tiny", "--contenders", "batch-norm", "sgd", "sgd", "--rounds", "2"]
    if of_command:
        with pytest.raises(SystemExit):
            cli.main(["bench", *words, "--out", str(tmp_path)])
    else:
        bench.main(words)
    shown = capsys.readouterr().out
    assert "gpt-tiny cannot have batch-norm, which is left out; its times are measured by sgd\n" in shown
    assert shown.count("  sgd ") == 1


def test_a_table_takes_records_measured_by_one_contender(tmp_path, capsys):
    for name in ("sgd", "evenstep"):
        setting = bench.Setting("mlp", (name,), batch=2, rounds=2, width=64)
        records.append(tmp_path / "bench.jsonl", bench.run(setting, warm_up=1))
    path = str(tmp_path / "bench.jsonl")
    for words, said in (
        ([path], "measured by sgd and evenstep"),
        ([path, "--goals"], "none of these records is of what has a goal"),
        ([str(tmp_path)], "no record of bench"),
    ):
        with pytest.raises(SystemExit, match="2"):
            bench.main(["--table", *words])
        assert said in capsys.readouterr().err


def measured(model, device="cuda", state=0.002, **ratios):
    """A record as the bench makes it."""
    config = {"bench": True, **bench.asdict(bench.Setting(model, (), device, autocast=True, compiled=True))}
    rows = [("sgd", 1.0), *((name.replace("_", "-"), ratio) for name, ratio in ratios.items())]
    rows = [{"contender": name, "ratio": ratio, "state_per_parameter": state} for name, ratio in rows]
    return {"config": config, "metrics": rows}


def test_goals_are_judged_by_the_newest_records_of_them():
    old, new = (measured("gpt2-small", whitened_sgd=ratio, evenstep=1.02) for ratio in (1.0, 1.0201))
    eager, small = (measured("gpt2-small", whitened_sgd=9.0, evenstep=9.0) for _ in range(2))
    eager["config"]["compiled"], small["config"]["batch"] = False, 2
    rows = {row.what: row for row in bench_goals.verdicts([old, eager, new, small])}
    assert rows["gpt2-small, compiled, bf16"].missed == ["whitened-sgd"]
    assert rows["gpt2-small, eager, bf16"].missed == ["whitened-sgd", "evenstep"]
    assert rows["vit-b16, compiled, bf16"].found == {} and len(rows) == 6
    assert rows["gpt2-small, state beyond momentum, floats per parameter"].missed == []
    lines = bench_goals.table(list(rows.values())).splitlines()
    assert "| gpt2-small, compiled, bf16 | 1.01 | 1.02 | **1.020** | 1.020 |" in lines
    assert "| vit-b16, compiled, bf16 | 1.01 | 1.02 | – | – |" in lines
    assert len({line.count("|") for line in lines}) == 1


def test_a_goal_is_missed_that_batch_norm_meets_more_cheaply():
    record = measured("paper-cnn", "cpu", whitened_sgd=1.03, evenstep=1.01, batch_norm=1.02)
    record["config"] |= {"autocast": False, "compiled": False}
    assert [row.missed for row in bench_goals.verdicts([record])] == [["whitened-sgd"], []]


@pytest.mark.parametrize("of_command", [True, False])
def test_goals_are_timed_and_judged_by_the_exit_code(of_command, monkeypatch, tmp_path, capsys):
    for best, code in ((1e9, 0), (0.0, 1)):
        monkeypatch.setitem(bench_goals.GOALS, "cpu", [bench_goals.Goal(best, best, {"model": "gpt-tiny"})])
        words = ["--goals", "--rounds", "2", "--threads", "1"]
        with pytest.raises(SystemExit) as done:
            cli.main(["bench", *words, "--out", str(tmp_path)]) if of_command else sys.exit(bench.main(words))
        shown = capsys.readouterr().out
        assert done.value.code == code and "| gpt-tiny, eager |" in shown and shown.count("**") == 4 * code
