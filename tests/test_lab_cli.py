"""The commands: what they do, how they stop and go on, and one line for whatever cannot be done."""

import json
import re
import signal
import sys
import time
from pathlib import Path

import pytest
import torch

from data_files import write_images
from evenstep.lab import checkpoint, data, experiments, records, reproduce, trial, usage
from evenstep.lab.commands import COMMANDS, run_sweep, shared
from evenstep.lab.trial import Trial
from helpers import same, still, stopped_after_a_checkpoint, weights
from lab_helpers import call, printed, refused, small_arrays, start, without_seconds


@pytest.fixture
def few_images(monkeypatch):
    """A handful of images wherever a command loads data."""
    monkeypatch.setattr(data, "load", lambda source: small_arrays(count=20, channels=1))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["demo", "--epochs", "0"], "--epochs must be between 1 and 10000; got 0"),
        (["demo", "--epochs", "many"], "--epochs must be a whole number; got 'many'"),
        (["demo", "--epochs"], "--epochs needs a value"),
        (["demo", "--device", "nonsense"], "--device nonsense cannot be used here"),
        (["demo", "--out", __file__], "cannot be written (File exists); choose another folder"),
        (["demo", "--bogus"], "demo does not know '--bogus'; see evenstep demo --help"),
        (["demo", "--epoch", "3"], "did you mean --epochs?"),
        (["swep"], "no command is called 'swep'; did you mean 'sweep'?"),
        (["frobnicate"], "there are: demo, reproduce, init, tune, sweep"),
        (["sweep", "--stepsizes"], "--stepsizes is empty, so there is nothing to run"),
        (["sweep", "--stepsizes", "nan"], "--stepsizes takes positive numbers; got 'nan'"),
        (["sweep", "--methods", "adm"], "no method is called 'adm'; did you mean 'adam'?"),
        (["sweep", "--model", "paper-cnn"], "no network is called 'paper-cnn'; did you mean 'paper_cnn'?"),
        (["sweep", "--model", "transformer"], "--model transformer cannot be trained on fashion"),
        (["sweep", "--options", "momentum"], "--options takes NAME=VALUE"),
        (["sweep", "--options", "momentun=0.9"], "method EvenStep with {'momentun': 0.9}"),
        (["sweep", "--model-options", "depth=3"], "--model paper_cnn with {'depth': 3}"),
        (["train", "--lr", "fast"], "--lr takes positive numbers; got 'fast'"),
        (["train", "--data", "/no/such/place"], "--data /no/such/place: no such file or folder"),
        (["report"], "report needs FOLDER"),
        (["report", "/no/such/place"], "/no/such/place is not a folder"),
        (["report", Path(__file__).parent], "has no *.jsonl records"),
        (["reproduce"], "name an experiment to reproduce: fig1, fig2"),
        (["reproduce", "fig9"], "no experiment is called 'fig9'; did you mean 'fig"),
        (["reproduce", "fig1", "--budget", "nan"], "--budget takes seconds, 0 or more; got nan"),
        (["doctor"], "doctor needs FILE.py[:FUNCTION]"),
        (["doctor", "model.py"], "model.py is not there; give FILE.py, or FILE.py:FUNCTION"),
        (["doctor", "no_such_file.py:build"], "no_such_file.py is not there"),
        (["bench", "--model", "resnet5"], "did you mean 'resnet50'?"),
        (["bench", "--batch", "8", "0"], "--batch must be between 1 and 1000000; got 0"),
        (["bench", "--seed", "99999999999999999999999"], "--seed must be between 0"),
        (["bench", "--goals", "--half", "--batch", "3"], "a suite has its own settings; leave out --batch, --half"),
        (["bench", "--suite", "cpu", "--model", "alexnet"], "suite cpu has no row with --model alexnet"),
        (["bench", "--against", "/nowhere"], "--against /nowhere holds no evenstep package; give the src folder"),
        (["bench", "--table", "/nowhere"], "--table /nowhere: no record of bench there"),
    ],
)
def test_what_cannot_be_done_is_one_line(arguments, message, capsys):
    assert message in refused(capsys, *arguments)


def test_a_text_is_refused_where_images_are_needed(capsys, tmp_path):
    (tmp_path / "text.txt").write_text("abcdefghij" * 1000)
    told = refused(capsys, "sweep", "--data", tmp_path / "text.txt", "--out", tmp_path / "out")
    assert "a text; try --model transformer" in told
    told = refused(capsys, "demo", "--data", tmp_path / "text.txt", "--out", tmp_path / "out")
    assert told.endswith("text.txt is a text; images are needed here")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model-options", "classes=3"], "paper_cnn with {'classes': 3}: it has 3 outputs, and random has 10"),
        (["--model-options", "width=0"], "--model paper_cnn with {'width': 0}: "),
        (["--model-options", "width=100000"], "--model paper_cnn with {'width': 100000}: "),
        (["--options", "betas=[0.9]"], "method Adam with {'betas': [0.9]}: "),
        (["--options", "fused=true", "foreach=true"], "method Adam with {'fused': True, 'foreach': True}: "),
        (["--options", "capturable=true"], "method Adam with {'capturable': True}: "),  # which its step refuses
    ],
)
@pytest.mark.parametrize("command", [("train", "--method"), ("sweep", "--methods")])
def test_options_that_cannot_run_are_told_before_anything_runs(
    command, options, message, capsys, tmp_path, few_images, recwarn
):
    before = torch.get_rng_state()
    assert message in refused(capsys, *command, "adam", *options, "--epochs", "1", "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists() and torch.equal(torch.get_rng_state(), before) and not recwarn.list


def test_a_fault_of_ours_is_not_taken_for_the_users(monkeypatch):
    def wrong(*arguments, **options):
        raise RuntimeError("a fault of ours")

    arrays = small_arrays(count=10, channels=1)
    monkeypatch.setitem(shared.MODELS, "paper_cnn", wrong)
    with pytest.raises(RuntimeError, match="a fault of ours"):
        shared.try_out(Trial("sg", 0.1), arrays)
    with pytest.raises(usage.UsageError, match="a fault of ours"):
        shared.try_out(Trial("sg", 0.1, model_options={"width": 2}), arrays)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_each_command_names_its_flags(command, capsys):
    shown = printed(capsys, command, "--help")
    assert shown.startswith(f"usage: evenstep {command}") and "--help" in shown


SWEEP = ("sweep", "--methods", "sg", "adam", "--stepsizes", "0.01", "0.1", "--epochs", "1", "--batch-size", "10")


def test_sweep_runs_the_grid_with_its_options_and_ends_with_the_report(tmp_path, few_images, capsys):
    assert call(*SWEEP, "--seeds", "0", "1", "--out", tmp_path) == 0
    found = [r["config"] for r in records.read(tmp_path / "records.jsonl")]
    assert {(c["method"], c["lr"], c["seed"]) for c in found} == {
        (method, lr, seed) for method in ("sg", "adam") for lr in (0.01, 0.1) for seed in (0, 1)
    }
    shown = capsys.readouterr().out
    assert shown.splitlines()[-1] == f"Report: {tmp_path / 'report.html'}" and "8/8" in shown
    assert "8 of 12 runs are in" in printed(capsys, *SWEEP, "--seeds", "0", "1", "2", "--out", tmp_path)
    assert call(*SWEEP, "--study", tmp_path / "study.log", "--out", tmp_path / "shared") == 0
    assert len(records.read(tmp_path / "shared" / "records.jsonl")) == 4
    more = ("--options", "weight_decay=0.5", "--model-options", "width=2", "--decay-lr")
    assert call(*SWEEP, *more, "--out", tmp_path) == 0
    last = records.read(tmp_path / "records.jsonl")[-1]["config"]
    assert (last["options"], last["model_options"], last["decay_lr"]) == ({"weight_decay": 0.5}, {"width": 2}, True)


def test_sweep_without_stepsizes_takes_each_methods_own():
    trials = run_sweep.grid(run_sweep.Options(methods=("sg", "adam", "sg")))
    assert [t.lr for t in trials] == [0.03, 0.1, 0.3, 1.0, 3e-4, 1e-3, 3e-3, 1e-2]


def test_ctrl_c_keeps_what_is_finished_and_the_same_command_goes_on(tmp_path):
    write_images(tmp_path / "images")
    words = ["sweep", "--out", tmp_path / "out", "--data", tmp_path / "images", "--epochs", "9", "--methods", "sg"]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background would ignore it
    process = start("-m", "evenstep", *words, "--seeds", *range(100))
    signal.signal(signal.SIGINT, before)
    file, until = tmp_path / "out" / "records.jsonl", time.monotonic() + 60
    while not (file.exists() and file.read_text().count("\n")) and time.monotonic() < until:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    shown = process.communicate(timeout=60)[0]
    kept = file.read_text()
    assert process.returncode == 130 and "Stopped" in shown and (tmp_path / "out" / "report.html").exists()
    assert 1 <= len([json.loads(line) for line in kept.splitlines()]) < 400
    assert call(*words, "--seeds", "0") == 0 and file.read_text().startswith(kept)
    first = [r["config"] for r in records.read(file) if r["seed"] == 0]
    assert len(first) == 4 and all(config["model_options"] == {"classes": 2} for config in first)


def begun(one, arrays):
    return trial.start(one, arrays), trial.config(one, arrays)


@pytest.mark.parametrize("method", ["unitstep", "sg", "batch-norm", "whitened-adam"])
def test_training_that_is_interrupted_goes_on_bit_for_bit(method, tmp_path):
    one = Trial(method, 0.05, epochs=4, batch_size=6, augment=True, decay_lr=True)
    arrays, path = small_arrays(count=20, channels=1), tmp_path / "parts.pt"
    whole, _ = begun(one, arrays)
    whole.finish()

    for _ in range(4):
        torch.manual_seed(99)
        part, what = begun(one, arrays)
        checkpoint.restore(part, what, path)

        def keep_and_stop(row, part=part, what=what):
            checkpoint.save(part, what, path)
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            part.finish(keep_and_stop)
    assert part.done and without_seconds(part.rows) == without_seconds(whole.rows)
    assert same(dict(part.model.state_dict()), dict(whole.model.state_dict()))


def test_train_checkpoints_reports_and_is_not_repeated(tmp_path, few_images, capsys):
    command = ("train", "--epochs", "2", "--batch-size", "10", "--out", tmp_path)
    assert call(*command) == 0 and call(*command) == 0
    [record] = records.read(tmp_path / "records.jsonl")
    assert record["config"]["method"] == "evenstep" and [row["steps"] for row in record["metrics"]] == [2, 2]
    saved = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    assert len(saved["rows"]) == 2 and "Going on after epoch 2" in capsys.readouterr().out
    assert "| EvenStep | 0.025 |" in printed(capsys, "report", tmp_path, "--markdown")
    (tmp_path / "records.jsonl").unlink()
    told = refused(capsys, *command, "--lr", "0.1")
    assert "is of another configuration (lr: 0.025 there, 0.1 here); choose another --out" in told


def test_train_stopped_by_ctrl_c_says_how_to_go_on(tmp_path, few_images, capsys, monkeypatch):
    with stopped_after_a_checkpoint(monkeypatch):
        assert "1 of 3 epochs are kept" in printed(capsys, "train", "--epochs", "3", "--out", tmp_path, code=130)
    assert call("train", "--epochs", "3", "--out", tmp_path) == 0
    assert len(records.read(tmp_path / "records.jsonl")[0]["metrics"]) == 3


CHANGES = {
    "model": lambda saved: saved.pop("model"),
    "shape": lambda saved: saved["model"].update({"0.weight": torch.zeros(3, 3)}),
    "optimizer": lambda saved: saved["optimizer"]["param_groups"].clear(),
    "lr": lambda saved: saved["optimizer"]["param_groups"][0].pop("lr"),
    "momentum": lambda saved: saved["optimizer"]["state"][0].update(momentum_buffer=torch.zeros(7)),
    "order": lambda saved: saved.update(order=torch.zeros(3)),
    "rows": lambda saved: saved.update(rows=3),
    "many rows": lambda saved: saved.update(rows=9 * saved["rows"]),
    "text": lambda saved: saved.update(config="{half"),
}


@pytest.mark.parametrize(
    ("method", "change"),
    [*(("sg", change) for change in CHANGES), *(("unitstep", c) for c in CHANGES if c not in ("lr", "momentum"))],
)
def test_a_checkpoint_with_something_else_inside_is_refused_and_changes_nothing(method, change, tmp_path):
    options = {"momentum": 0.9} if method == "sg" else {}
    one = Trial(method, 0.05, epochs=2, batch_size=10, options=options)
    arrays, path = small_arrays(count=10, channels=1), tmp_path / "checkpoint.pt"
    training, what = begun(one, arrays)
    for _ in training.epoch():
        pass
    checkpoint.save(training, what, path)
    saved = torch.load(path, weights_only=True)
    CHANGES[change](saved)
    torch.save(saved, path)
    content = path.read_bytes()
    fresh, what = begun(one, arrays)
    before = weights(fresh.model)
    with pytest.raises(usage.UsageError, match=r"is not a checkpoint of this version \(.+\); remove it, or") as told:
        checkpoint.restore(fresh, what, path)
    assert "\n" not in str(told.value) and path.read_bytes() == content and fresh.rows == []
    assert all(still(fresh.model, before))
    assert not fresh.optimizer.state_dict()["state"] or method == "unitstep"
    fresh.finish()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no full disk to write to")
def test_a_full_disk_is_one_line_and_leaves_no_part_of_a_checkpoint(tmp_path, few_images, capsys):
    (tmp_path / "checkpoint.partial").symlink_to("/dev/full")
    assert "checkpoint.pt cannot be written (" in refused(capsys, "train", "--epochs", "1", "--out", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == []


@pytest.mark.parametrize("name", ["records.jsonl", "report.html", "figures"])
@pytest.mark.parametrize("command", [("train", "--epochs", "1"), SWEEP])
def test_what_stands_in_the_way_of_a_file_is_one_line(command, name, tmp_path, few_images, capsys):
    if name == "figures":
        (tmp_path / name).touch()
    else:
        (tmp_path / name).mkdir()
    told = refused(capsys, *command, "--out", tmp_path)
    assert told in [f"evenstep: {tmp_path / name}: {why}" for why in ("Is a directory", "File exists")]


@pytest.mark.parametrize("line", [b"nonsense", b"7", b'{"config": {"name": "\xff"}}'])
@pytest.mark.parametrize("command", [("train",), SWEEP])
def test_a_damaged_line_is_refused_before_anything_runs(command, line, tmp_path, few_images, capsys):
    path = tmp_path / "records.jsonl"
    path.write_bytes(line + b"\n")
    told = refused(capsys, *command, "--epochs", "1", "--out", tmp_path)
    assert f"{path}, line 1: not a record" in told and told.endswith("; remove that line, or choose another --out")
    assert path.read_bytes() == line + b"\n" and not (tmp_path / "checkpoint.pt").exists()


def test_report_tells_of_files_that_cannot_be_read(tmp_path, capsys):
    (tmp_path / "a.jsonl").mkdir()
    (tmp_path / "b.jsonl").symlink_to(tmp_path / "nowhere")
    assert call("report", tmp_path) == 0
    (tmp_path / "c.jsonl").write_text("nonsense\n")
    assert call("report", tmp_path) == 0
    told = capsys.readouterr().err
    assert "c.jsonl, line 1: not a record" in told
    assert "a.jsonl: cannot be read (Is a directory)" in told and "b.jsonl: cannot be read (No such file" in told


def test_reproduce_prints_verdicts_and_ends_with_the_report(tmp_path, capsys):
    shown = printed(capsys, "reproduce", "fig1", "--quick", "--out", tmp_path)
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    for claim in experiments.EXPERIMENTS["fig1"].CLAIMS:
        assert f"fig1: {claim.text} ({claim.section})\n  held. " in shown and claim.section in page
    assert shown.splitlines()[-1] == f"Report: {tmp_path / 'report.html'}" and re.search(r" (\d+)/\1 ", shown)


OTHER = records.make({"method": "sg", "lr": 0.1, "data": "x"}, 0, [{"train_loss": 1.0}])
FOREIGN = {
    "half": ('{"config": {"half a rec', ", line 1: not a record"),
    "no options": (json.dumps(OTHER), " holds records that are not of fig2; move it away, or choose another --out"),
    "folder": (None, ": Is a directory"),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_another_experiments_damaged_file_stops_no_verdict(kind, tmp_path, capsys):
    content, why = FOREIGN[kind]
    path = tmp_path / "fig2.jsonl"
    if content is None:
        path.mkdir()
    else:
        path.write_text(content)
    shown = " ".join(printed(capsys, "reproduce", "fig1", "--quick", "--out", tmp_path).split())
    assert f"fig2 is left out: {path}{why}" in shown and "fig1: " in shown and "Report: " in shown
    assert (tmp_path / "figures" / "fig1.svg").exists() and (content is None or path.read_text() == content)
    if kind != "half":  # which would be repaired
        (tmp_path / "fig1.jsonl").unlink()
        assert f"{path}{why}" in refused(capsys, "reproduce", "fig1", "fig2", "--quick", "--out", tmp_path)
        assert not (tmp_path / "fig1.jsonl").exists()


@pytest.mark.parametrize(("left", "code"), [(["fig1"], 3), (None, 130)])
def test_reproduce_that_ends_early_says_how_to_go_on(left, code, tmp_path, monkeypatch, capsys):
    def reproduce_all(names, options, out, device, budget, progress, warn):
        progress("fig1", 15, 16)
        if left is None:
            raise KeyboardInterrupt
        return left

    monkeypatch.setattr(reproduce, "reproduce", reproduce_all)
    shown = printed(capsys, "reproduce", "fig1", "--out", tmp_path, code=code)
    assert "the same command goes on with the rest" in shown and "15/16" in shown


CONV = "lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 10))"
NET = "lambda: Net(nn.Linear(4, 4))\nclass Net(nn.Sequential):\n    def forward(self, x):\n        "
DATACLASS = """lambda: nn.Linear(Config().width, 4)
from dataclasses import dataclass
@dataclass
class Config:
    width: 'int' = 4
"""
WORDS = "lambda: nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 4))"
SHAPE, TOO_LARGE = "--input must be a shape such as 8x3x32x32; got ", "--input must have at most 64 sizes and"


@pytest.fixture
def diagnose(tmp_path):
    """The arguments of `doctor` for a file where this builds the model."""

    def words(build, *more, name="model.py"):
        (tmp_path / name).write_text(f"import torch\nfrom torch import nn\nbuild = {build}\n", encoding="utf-8")
        return "doctor", f"{tmp_path / name}:build", *more

    return words


def test_doctor_shows_coverage_memory_and_time(diagnose, capsys):
    shown = printed(capsys, *diagnose(CONV, "--input", "4x3x8x8"))
    for text in ("0.weight   Conv2d       whitened", "no whitened form for BatchNorm2d", "3,130 parameters train"):
        assert text in shown
    floats = {m[0].strip(): float(m[1]) for m in re.findall(r"^  ([A-Za-z ]+?) +([\d.]+) +[\d.e-]+$", shown, re.M)}
    assert 1.0 < floats["EvenStep"] < 2.5
    assert floats["SGD with momentum"] == 1.0 and floats["AdamW"] == 2.0 and 1.0 < floats["UnitStep"] < 2.0
    assert re.search(r"Time of a step.*\n  SGD with momentum +[\d.]+ ms +1.00 .*\n.*\n  EvenStep +[\d.]+ ms", shown)


@pytest.mark.parametrize(
    ("build", "shown"),
    [
        (CONV + "\ninputs = lambda: {'input': torch.zeros(2, 3, 8, 8)}", "Time of a step"),
        (NET + "return super().forward(x[0])\ninputs = lambda: [torch.zeros(2, 4)]", "Time of a step"),  # one argument
        (DATACLASS, "20 parameters train"),
    ],
)
@pytest.mark.parametrize("name", ["a_model.py", "random.py"])
def test_a_users_file_is_a_module_like_any_other_and_may_have_inputs(build, shown, name, diagnose, capsys):
    import random

    assert shown in printed(capsys, *diagnose(build, name=name)) and sys.modules["random"] is random


@pytest.mark.parametrize(
    ("build", "more", "message"),
    [
        ("lambda: nn.Linear('three', 4)", [], "model.py:3: TypeError: "),
        ("lambda: 3", [], "returned int; it should return a torch.nn.Module"),
        ("nn.ReLU", [], "returned a model without parameters to train"),
        ("3\nother = another = lambda: 3", [], "model.py has no function 'build'; it has: other, another"),
        (CONV, ["--input", "3xtwo"], SHAPE + "'3xtwo'"),
        (CONV, ["--input", "4x3x9x9"], "model.py: RuntimeError: "),
        (NET + "raise RuntimeError('not today')", ["--input", "2x4"], "model.py:6: RuntimeError: not today"),
        (NET + "return x", ["--input", "2x4"], "the model's output has no tensor that depends on its parameters"),
        ("lambda: nn.Sequential(nn.LazyLinear(4))", [], "model.py:build: 0.weight has no shape yet; call the model"),
        ("lambda: nn.Linear(4, 4, dtype=torch.complex64)", [], "complex parameters are not supported; train torch."),
        (WORDS, ["--input", "2x4"], "gives random float32 numbers; for other inputs define inputs() in "),
        (CONV, ["--input", "9" * 5000], TOO_LARGE),
        ("lambda: nn.Linear(4, 4)\ninputs = lambda: [torch.zeros(2, 4)]", [],
         "must be Tensor, not list; inputs() returned a list, which is one argument"),
        ("0\n\ndef build(:\n    pass", [], "model.py:5: SyntaxError: "),
    ],
)  # fmt: skip
def test_faults_of_the_users_file_are_one_line_with_their_place(build, more, message, diagnose, capsys):
    assert message in refused(capsys, *diagnose(build, *more))
