"""The demo and the command line, at tiny settings."""

import os
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from PIL import Image

from evenstep.lab import cli, demo, plots, records, usage
from small_images import small_arrays

STEPSIZES = {"sg": (0.01, 0.1), "fan-in": (1.0,), "batch-norm": (0.1,), "whitening": (0.3,)}


def run_demo(out, **keywords):
    return demo.main(demo.Demo(out=out, epochs=2), STEPSIZES, small_arrays(count=20, channels=1), **keywords)


def test_demo_writes_records_table_and_figure(tmp_path, capsys):
    assert run_demo(tmp_path / "new" / "folder") == 0
    folder = tmp_path / "new" / "folder"
    found = records.read(folder / "records.jsonl")
    assert [(r["config"]["method"], r["config"]["lr"]) for r in found] == [
        (method, lr) for method, grid in STEPSIZES.items() for lr in grid
    ]
    assert all(len(r["metrics"]) == 2 for r in found)
    with Image.open(folder / "figure2.png") as image:
        assert image.width > 1000
    assert ElementTree.parse(folder / "figure2.svg").getroot().tag.endswith("svg")
    shown = re.sub(r"\s+", "", capsys.readouterr().out)
    for text in ("SG÷√(n·S)", "whitening", "records.jsonl", "figure2.png", "figure2.svg"):
        assert text in shown


def test_demo_trains_in_one_thread_and_gives_the_others_back(tmp_path):
    before = torch.get_num_threads()
    run_demo(tmp_path)
    assert {r["environment"]["threads"] for r in records.read(tmp_path / "records.jsonl")} == {1}
    assert torch.get_num_threads() == before


def test_demo_replaces_earlier_records(tmp_path):
    run_demo(tmp_path)
    run_demo(tmp_path)
    assert len(records.read(tmp_path / "records.jsonl")) == 5


def test_interrupted_demo_reports_what_is_finished(tmp_path, monkeypatch, capsys):
    real, calls = demo.run, []

    def run_twice(*arguments):
        calls.append(arguments)
        if len(calls) > 2:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(demo, "run", run_twice)
    assert run_demo(tmp_path) == 130
    assert len(records.read(tmp_path / "records.jsonl")) == 2
    assert (tmp_path / "figure2.png").is_file() and "Stopped" in capsys.readouterr().out


def test_demo_interrupted_at_once_says_so(tmp_path, monkeypatch, capsys):
    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "run", stop)
    assert run_demo(tmp_path) == 130
    assert "nothing to report" in capsys.readouterr().out and not (tmp_path / "figure2.png").exists()


def made_up_record(method, lr, losses):
    rows = [
        {"epoch": i + 1, "train_loss": loss, "diverged": loss is None, "test_accuracy": 0.5, "dead_share": 0.0}
        for i, loss in enumerate(losses)
    ]
    config = {"method": method, "lr": lr, "model": "paper_cnn", "data": "random", "batch_size": 64, "seed": 0}
    return {"config": config, "metrics": [{**row, "seconds": 0.1} for row in rows]}


def test_figure_shows_each_method_in_its_panel_and_the_best_thick():
    found = [
        made_up_record("sg", 0.1, [2.0, 1.0]),
        made_up_record("sg", 0.3, [2.0, 0.5]),
        made_up_record("sg", 9.0, [2.0, None]),
        made_up_record("whitening", 0.3, [1.0, 0.2]),
    ]
    left, right = plots.plot(found).axes
    assert [len(line.get_ydata()) for line in left.lines] == [2, 2, 1] and len(right.lines) == 1
    thick = max(left.lines, key=lambda line: line.get_linewidth())
    assert list(thick.get_ydata()) == [2.0, 0.5]
    assert {text.get_text() for text in left.texts} == {"0.1", "SG, 0.3"}


def test_figure_and_table_of_only_diverged_runs():
    found = [made_up_record("sg", 9.0, [None])]
    assert len(plots.plot(found).axes) == 2
    assert demo.table(found).row_count == 1


def test_same_records_same_svg(tmp_path):
    found = [made_up_record("sg", 0.1, [2.0, 1.0])]
    first, second = (plots.save(plots.plot(found), tmp_path, name)[1] for name in ("a", "b"))
    assert first.read_bytes() == second.read_bytes()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--epochs", "0"], "--epochs must be between 1 and 10000; got 0"),
        (["--seed", "-1"], "--seed must be between 0"),
        (["--device", "nonsense"], "--device nonsense cannot be used here"),
        (["--device", "meta"], "--device meta cannot be used here"),
        (["--out", __file__], "cannot be written (File exists); choose another folder"),
        (["--out", f"{__file__}/below"], "cannot be written (Not a directory); choose another folder"),
    ],
)
def test_bad_arguments_are_one_line_and_exit_code_2(arguments, message, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(["demo", *arguments])
    assert caught.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("evenstep: ") and message in lines[0]


@pytest.mark.parametrize("arguments", [["demo", "--bogus"], ["no-such-command"], ["demo", "--epochs", "many"]])
def test_what_cannot_be_parsed_is_exit_code_2(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2 and "Traceback" not in capsys.readouterr().err


def test_cuda_without_a_gpu_is_refused():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(usage.UsageError, match="try --device cpu"):
        usage.usable_device("cuda")


def test_without_arguments_the_demo_runs(monkeypatch):
    seen = []
    monkeypatch.setattr(demo, "main", lambda options: seen.append(options) or 0)
    with pytest.raises(SystemExit) as caught:
        cli.main([])
    assert caught.value.code == 0 and seen == [demo.Demo()]


@pytest.mark.parametrize("missing", ["tyro", "rich", "matplotlib"])
def test_missing_extra_is_one_line(missing, tmp_path):
    (tmp_path / f"{missing}.py").write_text(f"raise ModuleNotFoundError('gone', name='{missing}')")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{Path(cli.__file__).parents[2]}"}
    done = subprocess.run(
        [sys.executable, "-m", "evenstep"], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1
    assert missing in done.stderr and 'pip install "evenstep[lab]"' in done.stderr


def test_training_code_needs_neither_rich_nor_tyro_nor_matplotlib():
    program = (
        "import sys, evenstep.lab.trial, evenstep.lab.summary\n"
        "print(sorted({'rich', 'tyro', 'matplotlib', 'jinja2'} & set(sys.modules)))"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(cli.__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
