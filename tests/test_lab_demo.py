"""The demo, at tiny settings, and the paper's figure 2."""

import re
import sys
from xml.etree import ElementTree

import pytest
import torch
from PIL import Image

from data_files import write_images
from evenstep.lab import display, drawing, plots, records
from evenstep.lab.commands import run_demo as command
from lab_helpers import call, finished, record, small_arrays

STEPSIZES = {"sg": (0.01, 0.1), "fan-in": (1.0,), "batch-norm": (0.1,), "whitening": (0.3,), "adam": (1e-3,)}


def run_demo(out, **options):
    return command.main(command.Options(out=out, epochs=2, **options), STEPSIZES, small_arrays(count=20, channels=1))


def test_demo_writes_records_table_figure_and_report(tmp_path, capsys):
    folder, threads = tmp_path / "new" / "folder", torch.get_num_threads()
    assert run_demo(folder) == 0
    found = records.read(folder / "records.jsonl")
    assert [(r["config"]["method"], r["config"]["lr"]) for r in found] == [
        (method, lr) for method, grid in STEPSIZES.items() for lr in grid
    ]
    assert all(len(r["metrics"]) == 2 and r["environment"]["threads"] == 1 for r in found)
    assert torch.get_num_threads() == threads
    with Image.open(folder / "figure2.png") as image:
        assert image.width > 1000
    assert ElementTree.parse(folder / "figure2.svg").getroot().tag.endswith("svg")
    shown = capsys.readouterr().out
    assert shown.splitlines()[-1] == f"Report: {folder / 'report.html'}" and (folder / "report.html").is_file()
    packed = re.sub(r"\s+", "", shown)
    for text in ("FanInSGD", "WhitenedSGD", "6of6runs", "12/12", "records.jsonl", "figure2.png", "figure2.svg"):
        assert text in packed


def test_figure_2_shows_each_method_in_its_panel_at_its_best_stepsize(tmp_path):
    runs = {("sg", 0.1): [2.0, 1.0], ("sg", 0.3): [2.0, 0.5], ("sg", 9.0): [2.0, None], ("whitening", 0.3): [1.0, 0.2]}
    found = [record(method, lr, losses) for (method, lr), losses in runs.items()]
    left, right = plots.figure2(found).axes
    assert [list(line.get_ydata()) for line in (*left.lines, *right.lines)] == [[2.0, 0.5], [1.0, 0.2]]
    assert left.get_ylim()[0] < 0.2 < right.get_ylim()[1] and left.get_ylim() == right.get_ylim()
    assert [text.get_text() for text in left.get_legend().get_texts()] == ["SGD, 0.3"]
    first, second = (drawing.save(plots.figure2(found), tmp_path / f"{name}.svg") for name in "ab")
    assert first.read_bytes() == second.read_bytes()


def test_on_a_terminal_the_status_is_redrawn_below_the_lines(monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    with display.Bar(4) as bar:
        bar.say("work")
        bar.advance("one is done")
    shown = capsys.readouterr().out
    assert "\r\x1b[Kone is done\n\r\x1b[Kwork  1/4  0:00:00, 0:00:00 left" in shown and shown.endswith("left\n")


def test_without_arguments_the_demo_runs(monkeypatch):
    seen = []
    monkeypatch.setattr(command, "main", lambda options: seen.append(options) or 0)
    assert call() == 0 and seen == [command.Options()]


WITHOUT = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"matplotlib", "jinja2", "optuna"}:
            raise ModuleNotFoundError(name, name=name)
sys.meta_path.insert(0, Blocked())
from evenstep.lab import cli
cli.main()
"""


@pytest.mark.parametrize(
    "words", [("train",), ("sweep", "--methods", "sg", "--stepsizes", "0.1"), ("reproduce", "fig1", "--quick")]
)
def test_commands_run_with_torch_numpy_and_pillow_alone(words, tmp_path):
    if words[0] != "reproduce":
        write_images(tmp_path / "images")
        words = (*words, "--epochs", "1", "--data", tmp_path / "images")
    code, shown, errors = finished("-c", WITHOUT, *words, "--out", tmp_path)
    assert (code, errors) == (0, "") and list(tmp_path.glob("*.jsonl"))
    assert 'install what the experiments need: pip install "evenstep[lab]"' in shown
