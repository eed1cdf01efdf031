"""Processes that share a study share its members, and take over those of the dead."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from evenstep.lab import processes, records, running, study, sweep
from evenstep.lab.trial import Trial
from evenstep.lab.usage import UsageError
from small_images import small_arrays

pytest.importorskip("optuna")

ARRAYS = small_arrays()
TRIALS = [Trial("sg", 0.01 * (k + 1), epochs=1, batch_size=5) for k in range(8)]
CODE = """
import sys, time
from pathlib import Path
import torch
torch.set_num_threads(1)
from evenstep.lab import study
from test_lab_study import ARRAYS, TRIALS
url, out, stale, pause, members = sys.argv[1:]

def told(record):
    print("ran", record["config"]["lr"], flush=True)
    time.sleep(float(pause))

found = study.run(url, TRIALS, ARRAYS, Path(out), at_once=int(members), stale=float(stale),
                  device="cpu", on_record=told)
print("found", len(found), flush=True)
"""


def start(url, out, stale=60.0, pause=0.0, members=1):
    paths = [str(Path(__file__).parent), str(Path(study.__file__).parents[2])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-c", CODE, url, str(out), str(stale), str(pause), str(members)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def ran(text):
    return [float(line.split()[1]) for line in text.splitlines() if line.startswith("ran ")]


def rates(found):
    return sorted(record["config"]["lr"] for record in found)


EVERY = sorted(trial.lr for trial in TRIALS)


def run(*arguments, **settings):
    return study.run(*arguments, device="cpu", **settings)


def board(url, trials, stale=60.0, warn=print):
    return study.Board(str(url), [sweep.key(sweep.config(trial, ARRAYS)) for trial in trials], stale, warn)


def take(board, count):
    return [board.take() for _ in range(count)]


@pytest.mark.parametrize(
    "url", ["journal://{}/study.log", pytest.param("sqlite:///{}/study.db", marks=pytest.mark.slow)]
)
def test_two_processes_do_no_member_twice(url, tmp_path):
    url = url.format(tmp_path)
    processes = [start(url, tmp_path / f"{name}.jsonl", pause=0.1) for name in "ab"]
    said = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert sorted(ran(said[0]) + ran(said[1])) == EVERY and ran(said[0]) and ran(said[1])
    found = run(url, TRIALS, ARRAYS, tmp_path / "c.jsonl")  # nothing is left to do; all is gathered
    assert [r["config"]["lr"] for r in found] == [t.lr for t in TRIALS]
    assert rates(records.read(tmp_path / "c.jsonl")) == EVERY


def test_members_that_another_machine_holds_are_waited_for_until_it_is_silent_for_too_long(tmp_path, monkeypatch):
    url, out, told, words = str(tmp_path / "study.log"), tmp_path / "records.jsonl", [], []
    take(board(url, TRIALS[:2]), 2)
    monkeypatch.setattr(processes, "host", lambda: "another machine")
    found = run(url, TRIALS[:2], ARRAYS, out, stale=3.0, on_record=told.append, on_wait=words.append)
    assert rates(found) == rates(told) == EVERY[:2] and words[-1] == ""
    assert words[0] == "2 runs of other processes"


def test_a_process_that_was_killed_on_this_machine_is_known_to_be_dead(tmp_path):
    url, out = str(tmp_path / "study.journal"), tmp_path / "records.jsonl"
    process = start(url, out, stale=3600.0, pause=60.0, members=8)
    assert process.stdout.readline().startswith("ran ")
    process.send_signal(signal.SIGKILL)
    process.communicate()
    words = []
    assert rates(run(url, TRIALS, ARRAYS, out, stale=3600.0, on_wait=words.append)) == EVERY and not words


@pytest.mark.skipif(os.name != "posix", reason="Windows ends processes without asking them")
def test_a_terminated_process_gives_back_what_it_had_taken(tmp_path):
    url, out = str(tmp_path / "study.journal"), tmp_path / "records.jsonl"
    process = start(url, out, stale=3600.0, pause=60.0, members=8)
    assert process.stdout.readline().startswith("ran ")
    process.terminate()
    process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    states = sorted(attempt.state.name for attempt in board(url, TRIALS)._attempts())
    assert states == ["COMPLETE"] + ["FAIL"] * 7


def test_who_is_done_first_waits_for_the_others_and_counts_their_runs(tmp_path):
    url, out = str(tmp_path / "study.log"), tmp_path / "records.jsonl"
    slow = start(url, tmp_path / "slow.jsonl", pause=1.0, members=4)
    first = slow.stdout.readline()
    own, others = [], []
    found = run(url, TRIALS, ARRAYS, out, on_record=own.append, on_other=others.append)
    assert ran(first + slow.communicate(timeout=60)[0]) == rates(others) == EVERY[:4] and rates(own) == EVERY[4:]
    assert rates(found) == rates(records.read(out)) == EVERY


def test_ctrl_c_ends_the_waiting(tmp_path):
    url, out = str(tmp_path / "study.log"), tmp_path / "records.jsonl"
    take(board(url, TRIALS), 2)  # and this process lives

    def stop(words):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(url, TRIALS, ARRAYS, out, on_wait=stop)
    assert rates(records.read(out)) == EVERY[2:]


def test_a_sweep_says_what_it_waits_for_and_counts_the_runs_of_others(tmp_path, capsys):
    url, out = str(tmp_path / "study.log"), tmp_path / "records.jsonl"
    other = board(url, TRIALS[:3])
    finished = sweep.sweep(TRIALS[:2], ARRAYS, tmp_path / "other.jsonl")
    take(other, 2)

    def runner(*arguments, on_wait, **settings):
        def waiting(words):
            on_wait(words)
            for name, record in zip(list(other.mine) if words else [], finished, strict=False):
                other.finish(name, record)

        return study.run(url, *arguments, on_wait=waiting, **settings)

    assert not running.run_trials(TRIALS[:3], ARRAYS, out, torch.device("cpu"), runner)
    shown = capsys.readouterr().out
    assert "Waiting: 2 runs of other processes" in shown and "3/3" in shown and len(records.read(out)) == 3


def test_no_record_is_not_taken_for_a_stop_by_the_user(tmp_path, capsys):
    for stopped, code, words in ((False, 1, "No run is finished"), (True, 130, "Stopped before the first run")):
        assert running.conclude(tmp_path / "records.jsonl", stopped) == code
        assert words in capsys.readouterr().out


def test_the_first_to_ask_for_a_dead_member_gets_it(tmp_path):
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
    assert [attempt.state.name for attempt in mine._attempts()] == ["FAIL", "RUNNING", "FAIL"]


def test_a_process_taken_for_dead_changes_nothing_when_it_comes_back(tmp_path):
    slow, other = (board(tmp_path / "study.log", TRIALS[:1], stale=0.5) for _ in range(2))
    (record,) = sweep.sweep(TRIALS[:1], ARRAYS, tmp_path / "records.jsonl")
    name = slow.take()
    time.sleep(0.6)
    assert other.take() == name
    other.finish(name, record)
    slow.finish(name, {**record, "seed": 99})
    assert other.complete() == {name: record}


def test_a_stopped_process_gives_back_what_it_had_taken(tmp_path):
    url, out = str(tmp_path / "study.log"), tmp_path / "records.jsonl"

    def stop(record):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(url, TRIALS, ARRAYS, out, at_once=3, on_record=stop)
    told = []
    found = run(url, TRIALS, ARRAYS, tmp_path / "other.jsonl", on_record=told.append)
    assert len(told) == 7 and rates(found) == EVERY


def test_records_that_are_there_already_are_not_run_again(tmp_path):
    out, told = tmp_path / "records.jsonl", []
    sweep.sweep(TRIALS[:5], ARRAYS, out)
    found = run(f"sqlite:///{tmp_path}/study.db", TRIALS, ARRAYS, out, on_record=told.append)
    assert rates(told) == EVERY[5:] and rates(found) == EVERY


def test_a_diverged_run_is_a_record_like_any_other(tmp_path):
    trials = [Trial("sg", lr, epochs=2, batch_size=2) for lr in (1e30, 0.1)]
    for url in (f"sqlite:///{tmp_path}/study.db", str(tmp_path / "study.log")):
        found = run(url, trials, ARRAYS, tmp_path / "records.jsonl")
        assert [record["metrics"][-1]["diverged"] for record in found] == [True, False]


def test_a_study_of_another_sweep_is_refused(tmp_path):
    url, out = str(tmp_path / "study.log"), tmp_path / "records.jsonl"
    run(url, TRIALS[:2], ARRAYS, out)
    with pytest.raises(UsageError, match="holds another sweep; give the same data and options") as e:
        run(url, [Trial("adam", 0.1)], ARRAYS, out)
    assert "\n" not in str(e.value)


def test_a_study_of_other_data_of_the_same_name_is_refused(tmp_path):
    url = str(tmp_path / "study.log")
    run(url, TRIALS[:2], ARRAYS, tmp_path / "records.jsonl")
    with pytest.raises(UsageError, match="holds another sweep"):
        run(url, TRIALS[:2], small_arrays(seed=1), tmp_path / "other.jsonl")


@pytest.mark.parametrize("cut", [1, 20])
def test_an_unfinished_line_of_a_journal_is_cut_off(cut, tmp_path):
    path, said = tmp_path / "study.log", []
    run(str(path), TRIALS[:2], ARRAYS, tmp_path / "records.jsonl")
    path.write_bytes(path.read_bytes()[:-cut])
    for name in ("a", "b"):
        found = run(str(path), TRIALS[:2], ARRAYS, tmp_path / f"{name}.jsonl", stale=0.5, warn=said.append)
        assert rates(found) == EVERY[:2]
    assert len(said) == 1 and "was not written whole; it was moved to study.log.damaged" in said[0]
    assert len((tmp_path / "study.log.damaged").read_bytes().splitlines()) == 1


def test_a_line_that_is_left_unfinished_while_others_run_harms_none(tmp_path):
    path, said = tmp_path / "study.log", []
    mine = board(path, TRIALS[:2], warn=said.append)
    with path.open("ab") as file:
        file.write(b'{"op_code":')
    assert None not in take(mine, 2) and len(said) == 1


@pytest.mark.parametrize("content", [b"12:00 began\n12:01 ended", b"{}\n", b"[1]", b'{"op_code":0}\n\n{"op_'])
@pytest.mark.parametrize("url", ["{}", "journal://{}", "sqlite:///{}"])
def test_a_file_that_is_no_study_is_refused_and_left_alone(url, content, tmp_path, monkeypatch):
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    path = tmp_path / "notes.log"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=r"is not a journal|cannot be opened") as e:
        run(url.format(path), TRIALS, ARRAYS, tmp_path / "records.jsonl", warn=lambda said: None)
    assert str(path) in str(e.value) and "\n" not in str(e.value)
    assert path.read_bytes() == content or b"op_code" in content


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("somewhere", "is no study; give a journal file"),
        ("sqlite:////nowhere/at/all.db", "cannot be opened"),
        ("nosuch://host/study", "cannot be opened"),
        ("journal:///nowhere/at/all.log", "cannot be opened"),
    ],
)
def test_a_url_that_leads_nowhere_is_named(url, reason, tmp_path, monkeypatch):
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    with pytest.raises(UsageError, match=reason) as e:
        run(url, TRIALS, ARRAYS, tmp_path / "records.jsonl")
    assert url in str(e.value) and "\n" not in str(e.value)


def test_optuna_is_asked_for_when_it_is_missing(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(UsageError, match=r'--study needs optuna .*pip install "evenstep\[lab\]"'):
        run("sqlite:///x.db", TRIALS, ARRAYS, tmp_path / "records.jsonl")
