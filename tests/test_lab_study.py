"""Processes that share a study share its runs, and take over those of the dead."""

import signal
import time

import pytest

from evenstep.lab import records, study, sweep, trial
from evenstep.lab.trial import Trial
from evenstep.lab.usage import UsageError
from lab_helpers import small_arrays, start

pytest.importorskip("optuna")

ARRAYS = small_arrays()
TRIALS = [Trial("sg", 0.01 * (k + 1), epochs=1, batch_size=5) for k in range(8)]
EVERY = sorted(trial.lr for trial in TRIALS)
CODE = """
import sys, time
from pathlib import Path
import torch
torch.set_num_threads(1)
from evenstep.lab import study
from test_lab_study import ARRAYS, TRIALS
url, out, pause, at_once = sys.argv[1:]

def told(record):
    print("ran", record["config"]["lr"], flush=True)
    time.sleep(float(pause))

study.run(url, TRIALS, ARRAYS, Path(out), at_once=int(at_once), on_record=told)
"""


def begin(url, out, pause=0.0, at_once=1):
    return start("-c", CODE, url, out, pause, at_once, stderr=None)


def rates(found):
    return sorted(record["config"]["lr"] for record in found)


def run(url, trials, out, **settings):
    """The stepsizes that this process was told of."""
    told = []
    study.run(str(url), trials, ARRAYS, out, on_record=told.append, **settings)
    assert {t.lr for t in trials} <= set(rates(records.read(out)))
    return rates(told)


def board(url, trials, stale=60.0):
    return study.Board(str(url), [records.dumps(trial.config(one, ARRAYS)) for one in trials], stale)


@pytest.fixture
def began(monkeypatch):
    """The stepsizes of the trials that this process began."""
    begun, work = [], sweep.work
    monkeypatch.setattr(sweep, "work", lambda one, *a: (begun.append(one.lr), work(one, *a))[1])
    return begun


@pytest.mark.parametrize(
    "url", ["journal://{}/study.log", pytest.param("sqlite:///{}/study.db", marks=pytest.mark.slow)]
)
def test_two_processes_do_no_run_twice_and_both_get_all_records(url, tmp_path, began):
    url = url.format(tmp_path)
    other = begin(url, tmp_path / "a.jsonl", pause=0.1)
    assert other.stdout.readline().startswith("ran ")
    quiet = [].append  # whether there is something to wait for depends on who is faster
    assert run(url, TRIALS, tmp_path / "b.jsonl", warn=quiet) == EVERY and 0 < len(began) < len(TRIALS)
    assert other.communicate(timeout=120)[0].count("ran ") == len(TRIALS) - 1
    found = [records.read(tmp_path / f"{name}.jsonl") for name in "ab"]
    assert rates(found[0]) == rates(found[1]) == EVERY
    assert sorted(map(records.dumps, found[0])) == sorted(map(records.dumps, found[1]))
    began.clear()
    assert run(url, TRIALS, tmp_path / "c.jsonl") == EVERY and began == []  # nothing is left to do; all is gathered


def test_a_process_that_was_killed_is_silent_and_its_runs_are_taken_over(tmp_path, began):
    url, said = str(tmp_path / "study.log"), []
    process = begin(url, tmp_path / "a.jsonl", pause=60.0, at_once=8)
    assert process.stdout.readline().startswith("ran ")
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert run(url, TRIALS, tmp_path / "b.jsonl", stale=2.0, warn=said.append) == EVERY
    assert len(began) == 7 and all("runs of other processes" in line for line in said)


def test_a_stopped_process_gives_back_what_it_had_taken(tmp_path, began):
    def stop(record):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        study.run(str(tmp_path / "study.log"), TRIALS, ARRAYS, tmp_path / "a.jsonl", at_once=3, on_record=stop)
    began.clear()
    assert run(tmp_path / "study.log", TRIALS, tmp_path / "b.jsonl") == EVERY and len(began) == 7


def test_a_run_of_a_living_process_is_waited_for_and_ctrl_c_ends_the_waiting(tmp_path):
    board(tmp_path / "study.log", TRIALS).take()

    def stop(line):
        assert line == "Waiting: 1 runs of other processes."
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        study.run(str(tmp_path / "study.log"), TRIALS, ARRAYS, tmp_path / "a.jsonl", warn=stop)
    assert rates(records.read(tmp_path / "a.jsonl")) == EVERY[1:]


def test_the_first_to_ask_for_a_dead_run_gets_it(tmp_path):
    """The other asks between the first one's look at the study and its claim."""
    mine, other = (board(tmp_path / "study.log", TRIALS[:1], stale=0.5) for _ in range(2))
    name = mine.take()
    time.sleep(0.6)
    create, rivals = other.storage.create_new_trial, []

    def create_second(*arguments, **settings):
        if not rivals:
            rivals.append(mine.take())
        return create(*arguments, **settings)

    other.storage.create_new_trial = create_second
    assert other.take() is None and rivals == [name]
    assert [attempt.state.name for attempt in mine.study.get_trials()] == ["FAIL", "RUNNING", "FAIL"]


def test_a_process_taken_for_dead_changes_nothing_when_it_comes_back(tmp_path):
    slow, other = (board(tmp_path / "study.log", TRIALS[:1], stale=0.5) for _ in range(2))
    (record,) = sweep.sweep(TRIALS[:1], ARRAYS, tmp_path / "records.jsonl")
    name = slow.take()
    time.sleep(0.6)
    assert other.take() == name
    other.finish(name, record)
    slow.finish(name, {**record, "seed": 99})
    assert other.complete() == {name: record}


@pytest.mark.parametrize("url", ["sqlite:///{}/study.db", "{}/study.log"])
def test_what_is_recorded_is_not_run_again_and_a_diverged_run_is_a_record(url, tmp_path, began):
    trials = [Trial("sg", lr, epochs=2, batch_size=2) for lr in (0.1, 1e30)]
    sweep.sweep(trials[:1], ARRAYS, tmp_path / "records.jsonl")
    began.clear()
    assert run(url.format(tmp_path), trials, tmp_path / "records.jsonl") == began == [1e30]
    assert [r["metrics"][-1]["diverged"] for r in records.read(tmp_path / "records.jsonl")] == [False, True]


@pytest.mark.parametrize("content", [b"12:00 began\n12:01 ended", b"{}\n", b"[1]", None])
@pytest.mark.parametrize("url", ["{}", "journal://{}", "sqlite:///{}", "nosuch://{}"])
def test_what_is_no_study_is_refused_and_left_alone(url, content, tmp_path, monkeypatch):
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    path = tmp_path / "notes.log"
    if content is None:
        path = tmp_path / "nowhere" / "at" / "all.log"
    else:
        path.write_bytes(content)
    with pytest.raises(UsageError, match=r"is not a journal|cannot be opened") as e:
        run(url.format(path), TRIALS, tmp_path / "records.jsonl")
    assert str(path) in str(e.value) and "\n" not in str(e.value)
    assert not path.exists() if content is None else path.read_bytes() == content
