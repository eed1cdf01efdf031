"""The report: reading what anyone may have written, and the page made from it."""

import json
import math
import re
import shlex
from html.parser import HTMLParser
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest

from evenstep.lab import cli, comparison, reading, records, report, rerun, summary, tables
from evenstep.lab.commands import run_sweep as sweep_command
from evenstep.lab.data.fashion import FASHION_NAME
from evenstep.lab.experiments import EXPERIMENTS, Claim, Verdict, fig1
from evenstep.lab.methods import METHODS
from lab_helpers import record

HOSTILE = '</script><script>alert("x")</script><img src=x onerror=alert(1)>&amp;{{ 7*7 }}$\\frac{"\'`\u2028\ud800\x00'


class Page(HTMLParser):
    """What a browser would find in the report of a folder."""

    def __init__(self, folder):
        super().__init__()
        self.tags, self.texts, self.path = [], [], report.write(folder)
        self.text = self.path.read_text(encoding="utf-8")
        self.feed(self.text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_data(self, text):
        self.texts.append(text.strip())


def write(folder, *found, extra=()):
    """The page of these records and lines."""
    lines = [json.dumps(r) for r in found] + list(extra)
    (folder / "records.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8", errors="surrogateescape")
    return Page(folder)


def sweep_of(*methods, seeds=(0, 1), **config):
    """Made-up runs at three stepsizes, the middle one the best, the largest diverging."""
    return [
        record(method, lr, [2.0, loss + 0.01 * k + 0.001 * seed if loss else None], seed, **config)
        for k, method in enumerate(methods)
        for lr, loss in ((0.1, 1.5), (0.2, 1.0), (0.4, None))
        for seed in seeds
    ]


def test_page_shows_every_method_with_its_numbers_and_needs_nothing_from_outside(tmp_path):
    page = write(tmp_path, *sweep_of("sg", "unitstep"))
    assert page.path == tmp_path / "report.html"
    for text in ("SGD", "UnitStep", "1.010 ± 0.001", "33.3%", "abc123", "a CPU", "0, 1", "2.9.0, 3.12"):
        assert any(text in shown for shown in page.texts), text
    figures = [a["src"] for tag, a in page.tags if tag == "img"]
    assert len(figures) == 3 and all(src.startswith("data:image/svg+xml;base64,") for src in figures)
    links = [a[key] for _, a in page.tags for key in ("src", "href") if key in a]
    assert all(link.startswith(("#", "data:", "figures/")) for link in links), links
    assert {tag for tag, _ in page.tags}.isdisjoint({"iframe", "script"}) and not re.findall(r"https?://", page.text)
    policy = next(a["content"] for tag, a in page.tags if a.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'") and "unsafe" not in policy
    assert Page(tmp_path).text == page.text, "the same records give the same page"


def test_hostile_texts_stay_texts(tmp_path):
    hostile = sweep_of(HOSTILE, data=HOSTILE, options={HOSTILE: HOSTILE}, model_options={"{0.__class__}": HOSTILE})
    for run in hostile:
        run |= {"commit": HOSTILE, "environment": {"device": HOSTILE, "torch": HOSTILE}, "time": HOSTILE}
    page = write(tmp_path, *hostile, extra=[HOSTILE.replace("\ud800", "")])
    assert "script" not in dict(page.tags) and [tag for tag, _ in page.tags].count("img") == 3
    assert not any(name.startswith("on") for _, attributes in page.tags for name in attributes)
    assert any('<script>alert("x")</script>' in text for text in page.texts)
    assert "{{ 7*7 }}" in " ".join(page.texts)
    for figure in (tmp_path / "figures").iterdir():
        assert ElementTree.parse(figure).getroot().tag.endswith("svg")


def test_lines_that_are_no_records_are_reported_and_the_rest_is_shown(tmp_path):
    lines = [
        "not json",
        '{"config": {"method": "sg", "lr": 0.1}, "metrics": [{"train_lo',
        "[1, 2]",
        '{"metrics": []}',
        "[" * 100_000,
        '{"config": 3}',
        '{"config": {"a": "\udcff"}}',
    ]
    page, found = write(tmp_path, record("sg", 0.1, [1.0]), extra=lines), reading.read(tmp_path)
    assert len(found.runs) == 1
    for number, (line, fault) in enumerate(zip(lines, found.faults, strict=True), start=2):
        assert fault.startswith(f"records.jsonl, line {number}: not a record")
        assert any(f"records.jsonl, line {number}: not a record" in text for text in page.texts)
        one = tmp_path / "one.jsonl"
        one.write_text(line, encoding="utf-8", errors="surrogateescape")
        with pytest.raises(ValueError, match=r"one\.jsonl, line 1: not a record"):
            records.read(one)


def test_evenstep_of_version_0_1_is_unitstep_and_todays_is_itself(tmp_path):
    old = record("evenstep", 0.1, [1.0])
    new, path = {**old, "format": reading.FORMAT}, tmp_path / "records.jsonl"
    page = write(tmp_path, old, new)
    assert {"UnitStep", "EvenStep"} <= set(page.texts)
    assert [r["config"]["method"] for r in reading.read(tmp_path).runs] == ["unitstep", "evenstep"]
    assert records.append(path, {**new, "seed": 1}, once=True)["seed"] == 0 and records.make({}, 0, [])["format"] == 2


def test_records_of_other_kinds_are_counted(tmp_path):
    run = record("sg", 0.1, [1.0])
    others = [
        {**run, "metrics": []},
        {**run, "metrics": [{"train_loss": 1.0, "seconds": [3]}]},
        {**run, "metrics": {"train_loss": 1.0}},
        *(record("sg", lr, [1.0]) for lr in (-0.1, True, "0.1", 10**400)),
        record(None, 0.1, [1.0]),
        record("sg", 0.1, [1.0], options=[1]),
        {**run, "seed": {"a": 1}},
        {"config": {"name": "an experiment of another kind"}, "metrics": [{"x": 1}]},
    ]
    assert not [other for other in others if reading.is_run(reading.clean(other))]
    page, found = write(tmp_path, run, *others), reading.read(tmp_path)
    assert len(found.runs) == 1 and found.others == {"records.jsonl": len(others)} and not found.faults
    assert f"records.jsonl: {len(others)}" in page.texts


ODD_ROW = {"test_accuracy": math.nan, "seconds": math.inf, "train_loss": 10**400, "other": "many"}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "odd",
    [
        [record("sg", 1e300, [1.0]), record("sg", 1, [1.2])],
        [record("sg", 5e-324, [1.0])],
        [record("sg", 0.1, [1e-320])],
        [record("sg", 0.1, [10**300], data="other"), record("sg", 0.2, [1.0], data="other")],
        [record("sg", 0.1, [-1.0])],
        [record("sg", 100.0, [None]), record("adam", 100.0, [None])],
        [record("sg", 0.1, [1.0], model_options="wide")],
        [record("sg", 0.1, [1.0]) | {"metrics": [ODD_ROW, *record("sg", 0.1, [1.0])["metrics"]]}],
    ],
)
def test_a_report_is_made_over_any_values(odd, tmp_path):
    assert write(tmp_path, *odd).tags and len(list((tmp_path / "figures").iterdir())) == 3


def test_an_empty_folder_gives_a_page_that_says_so(tmp_path):
    assert "No run of a method at a stepsize" in Page(tmp_path).text


def test_runs_are_compared_only_where_they_can_be():
    found = comparison.comparisons(
        [*sweep_of("sg"), *sweep_of("sg", data="other"), *sweep_of("sg", batch_size=128), *sweep_of("adam")]
    )
    assert [len(c.series) for c in found] == [2, 1, 1]
    assert found[1].title == "The paper's CNN on other" and found[1].l0 is None


def rerun_of(runs):
    """The one command that makes these runs again, and the trials it stands for."""
    [line] = rerun.commands(summary.series(runs))
    program, name, *arguments = shlex.split(line)
    assert (program, name) == ("evenstep", "sweep")
    return line, sweep_command.grid(cli.parse(name, sweep_command.Options, arguments))


@pytest.mark.parametrize("augment", [False, True, "flip+cutout"])
def test_the_command_shown_makes_the_runs_again(augment):
    runs = sweep_of("sg", seeds=(0, 2), options={"momentum": 0.9}, decay_lr=True, augment=augment, model_options={})
    assert [{**vars(t), "data": "CIFAR-10"} for t in rerun_of(runs)[1]] == [r["config"] for r in runs]


def test_the_command_shown_has_the_very_stepsizes_unless_they_are_the_methods_own():
    rates = [0.0123456789, 0.1 + 0.2, 1.0, 1e30]
    line, trials = rerun_of(record("sg", lr, [1.0]) for lr in rates)
    assert [t.lr for t in trials] == rates and "0.0123456789 0.30000000000000004 1 " in line
    line, _ = rerun_of(record(m, lr, [1.0], data=FASHION_NAME) for m in ("sg", "adam") for lr in METHODS[m].stepsizes)
    assert "--methods sg adam" in line and "--stepsizes" not in line and "--data fashion" in line


def test_verdicts_on_claims_are_shown_with_their_figure(tmp_path, monkeypatch):
    said = [(True, "So it did."), (False, HOSTILE), (None, "Nobody.")]
    claims = [Claim("§1", HOSTILE, lambda _, verdict=verdict: Verdict(*verdict)) for verdict in said]
    monkeypatch.setitem(EXPERIMENTS, "fig1", SimpleNamespace(CLAIMS=claims))
    records.append(tmp_path / "fig1.jsonl", records.make({"experiment": "fig1"}, 0, [{}]))
    assert "img" not in dict(Page(tmp_path).tags), "there is no figure yet"
    (tmp_path / "figures" / "fig1.svg").write_text("<svg/>")
    page = Page(tmp_path)
    words = ["held", "did not hold", "undecided"]
    assert [text for text in page.texts if text in words] == words
    assert [a["src"] for tag, a in page.tags if tag == "img"] == ["data:image/svg+xml;base64,PHN2Zy8+"]
    assert "script" not in dict(page.tags)


@pytest.mark.parametrize("rows", [[{"w1": "far", "w2": 1.0}], [3], [{"step": {}}] * 2])
def test_an_experiment_with_odd_numbers_is_left_out_with_a_line(rows, tmp_path):
    for method in fig1.METHODS:
        records.append(tmp_path / "fig1.jsonl", records.make({"experiment": "fig1", "name": method}, 0, rows))
    assert "fig1 cannot be judged: " in Page(tmp_path).text


def test_tables_tell_what_diverged_and_was_not_reached():
    found = comparison.compare([*sweep_of("sg"), record("adam", 0.1, [None, None])])
    assert tables.tuned(found).rows[1][1] == "diverged"
    assert tables.timing(found).columns == ["epochs", "steps", "seconds"]
    assert tables.timing(found).rows == [["2", "20", "1.0"], ["∞", "∞", "∞"]]
    found = comparison.compare([record("sg", 0.1, [1.0], 0), record("sg", 0.1, [None], 1)])
    assert tables.tuned(found).rows[0][1] == "1.000 where it did not diverge"
    found = comparison.compare([record("unitstep", 1e6, [3.4]), record("unitstep", 1e30, [2.307])])  # above the first
    assert tables.tuned(found).rows[0][1] == "diverged"
    assert tables.tuning(found).rows[0][0] == "–" and found.target is None
