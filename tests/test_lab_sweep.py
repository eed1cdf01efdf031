"""Sweeps that are stopped, killed or shared lose no record and double none."""

import json
import multiprocessing
import signal
import time
from dataclasses import replace

import pytest
import torch

from evenstep.lab import comparison, identity, records, sweep
from evenstep.lab.data import Text, fashion_mnist_subset
from evenstep.lab.trial import Trial
from evenstep.lab.usage import UsageError
from lab_helpers import small_arrays, start

ARRAYS = small_arrays()
TRIALS = [Trial("sg", 0.01 * (k + 1), seed=k % 2, epochs=1, batch_size=5) for k in range(4)]


def keys(found):
    return [records.dumps(record["config"]) for record in found]


def wanted(trials):
    return [records.dumps(sweep.config(trial, ARRAYS)) for trial in trials]


@pytest.fixture
def ran(monkeypatch):
    """The trials that began, in order."""
    begun, work = [], sweep.work
    monkeypatch.setattr(sweep, "work", lambda trial, *a: (begun.append(trial), work(trial, *a))[1])
    return begun


def test_a_sweep_runs_what_is_missing_and_keeps_the_order(tmp_path, ran):
    out, told = tmp_path / "records.jsonl", []
    first = sweep.sweep(TRIALS[1:3], ARRAYS, out, on_record=told.append)
    assert keys(told) == keys(first) == wanted(TRIALS[1:3])
    again = sweep.sweep([TRIALS[2], TRIALS[2], *TRIALS], ARRAYS, out)
    assert keys(again) == wanted([TRIALS[2], TRIALS[2], *TRIALS]) and again[0] == first[1]
    assert sorted(keys(records.read(out))) == sorted(wanted(TRIALS))
    assert ran == [*TRIALS[1:3], TRIALS[0], TRIALS[3]]


def test_a_failing_trial_stops_no_other(tmp_path):
    out, broken = tmp_path / "records.jsonl", Trial("sg", 0.1, epochs=1, batch_size=5, options={"momentum": -1.0})
    with pytest.raises(ValueError, match="momentum"):
        sweep.sweep([broken, *TRIALS], ARRAYS, out, at_once=2)
    assert sorted(keys(records.read(out))) == sorted(wanted(TRIALS))


def test_a_refusal_to_begin_lets_the_begun_trials_end(tmp_path):
    out, begun = tmp_path / "records.jsonl", []

    def begin(trial):
        if len(begun) == 2:
            raise TimeoutError
        begun.append(trial)

    with pytest.raises(TimeoutError):
        sweep.sweep(TRIALS, ARRAYS, out, at_once=3, on_begin=begin)
    assert begun == TRIALS[:2] and sorted(keys(records.read(out))) == sorted(wanted(TRIALS[:2]))


MANY = [Trial("sg", 0.01 * (k + 1), epochs=1, batch_size=5) for k in range(9)]
KILLED = """
import sys, time
from pathlib import Path
import torch
torch.set_num_threads(1)
from evenstep.lab import sweep
from test_lab_sweep import ARRAYS, MANY
sweep.sweep(MANY, ARRAYS, Path(sys.argv[1]), at_once=2, on_record=lambda record: time.sleep(0.3))
"""


def test_a_killed_sweep_goes_on_where_it_was(tmp_path, ran):
    out = tmp_path / "records.jsonl"
    process = start("-c", KILLED, out, stdout=None, stderr=None)
    deadline = time.monotonic() + 60
    while not (out.exists() and out.read_bytes().count(b"\n") >= 3):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    before = records.read(out)
    found = sweep.sweep(MANY, ARRAYS, out, at_once=2)
    assert 3 <= len(before) < 9 and records.read(out)[: len(before)] == before
    assert sorted(keys(records.read(out))) == sorted(wanted(MANY)) and keys(found) == wanted(MANY)
    assert len(ran) == 9 - len(before)


def test_a_line_cut_short_is_mended_reported_and_kept(tmp_path, ran):
    out, said = tmp_path / "records.jsonl", []
    sweep.sweep(TRIALS[:2], ARRAYS, out)
    whole = out.read_bytes()
    out.write_bytes(whole[:-20])
    found = sweep.sweep(TRIALS[:2], ARRAYS, out, warn=said.append)
    assert said == [f"{out}, line 2 was not written whole; it was moved to records.jsonl.damaged and counts as not run"]
    half = whole.splitlines()[1][:-19]
    assert (tmp_path / "records.jsonl.damaged").read_bytes() == half + b"\n"
    assert keys(found) == keys(records.read(out)) == wanted(TRIALS[:2]) and ran[-1] == TRIALS[1]
    out.write_bytes(out.read_bytes()[:-1])
    with pytest.warns(UserWarning, match=r"line 2 had no line end; it was added"):
        sweep.sweep(TRIALS[:2], ARRAYS, out)
    assert keys(records.read(out)) == wanted(TRIALS[:2]) and len(ran) == 3
    assert records.mend(out) is None and records.mend(tmp_path / "none.jsonl") is None


def write_many(out, name):
    for k in range(30):
        records.append(out, {"config": {"who": name, "k": k}, "text": name * 50_000})


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")  # pytest-xdist is
def test_processes_that_share_a_file_tear_no_line(tmp_path):
    out, context = tmp_path / "records.jsonl", multiprocessing.get_context("fork")
    processes = [context.Process(target=write_many, args=(out, name)) for name in "abc"]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    found = [json.loads(line)["config"] for line in out.read_text().splitlines()]
    assert sorted((c["who"], c["k"]) for c in found) == [(name, k) for name in "abc" for k in range(30)]


OTHERS = small_arrays(seed=1)  # of the same name


def test_other_data_of_the_same_name_are_told_apart(tmp_path):
    out = tmp_path / "records.jsonl"
    sweep.sweep(TRIALS[:1], ARRAYS, out)
    before = out.read_bytes()
    with pytest.raises(UsageError, match=r"records\.jsonl holds runs on other data called random .*another --out") as e:
        sweep.sweep(TRIALS[:1], OTHERS, out)
    assert "\n" not in str(e.value) and out.read_bytes() == before
    assert len(sweep.sweep(TRIALS[:2], small_arrays(), out)) == 2  # the same again, read anew
    found = records.read(out)[:1] + sweep.sweep(TRIALS[:1], OTHERS, tmp_path / "others.jsonl")
    titles = [c.title for c in comparison.comparisons(found)]
    assert [t.rpartition(" on ")[2] for t in titles] == [f"random ({identity.digest(d)})" for d in (ARRAYS, OTHERS)]


def test_records_without_a_digest_count_as_finished(tmp_path, ran):
    out = tmp_path / "records.jsonl"
    for record in sweep.sweep(TRIALS[:2], ARRAYS, tmp_path / "new.jsonl"):
        records.append(out, {**record, "config": identity.without_digest(record["config"])})
    ran.clear()
    found = sweep.sweep(TRIALS[:3], ARRAYS, out)
    assert ran == [TRIALS[2]] and [identity.DIGEST in r["config"] for r in found] == [False, False, True]
    (together,) = comparison.comparisons(records.read(out))
    assert len(together.runs) == 3 and together.title.endswith("on random")


def test_a_digest_is_of_all_that_the_data_hold():
    same, digest = small_arrays(), identity.digest(ARRAYS)
    assert identity.digest(same) == digest and identity.described(ARRAYS) == {"data": "random", "data_digest": digest}
    for name in ("train_x", "train_y", "test_x", "test_y"):
        changed = getattr(ARRAYS, name).clone()
        changed[len(changed) // 2] += 1
        assert identity.digest(replace(ARRAYS, **{name: changed})) != digest
    tokens = torch.arange(20) % 2
    texts = [Text(tokens, tokens[:split], "t", letters) for split in (2, 4) for letters in ("ab", "ac")]
    assert len(set(map(identity.digest, texts))) == 4
    shipped = fashion_mnist_subset()  # whose records are as they were before there were digests
    assert identity.described(shipped) == {"data": shipped.name}
    assert identity.DIGEST not in sweep.config(TRIALS[0], shipped.subset(20))
