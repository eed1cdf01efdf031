"""One training over processes that torchrun started equals one process on the joined batch."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from evenstep.lab import distributed, records
from evenstep.lab.trial import Trial, run_recorded
from small_images import small_arrays

TRIAL = Trial("sg", 0.1, seed=3, epochs=2, batch_size=5, augment=True, decay_lr=True, options={"momentum": 0.9})
CODE = """
import sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from evenstep.lab import trial
from test_lab_distributed import ARRAYS, TRIAL
trial.run_recorded(TRIAL, ARRAYS, Path(sys.argv[1]), on_epoch=lambda row: print("epoch", row["epoch"], flush=True))
"""
ARRAYS = small_arrays(11)  # the last batch has one image, and one of two processes none


def test_two_processes_equal_one(tmp_path):
    paths = [str(Path(__file__).parent), str(Path(records.__file__).parents[2])]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = []
    for rank in range(2):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        environment = {**os.environ, **{k: str(v) for k, v in place.items()}}
        environment["PYTHONPATH"] = os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")])
        command = [sys.executable, "-c", CODE, str(tmp_path / "two.jsonl")]
        processes.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    said = [process.communicate(timeout=120)[0].split("\n") for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert [line for line in said[0] if line.startswith("epoch")] == ["epoch 1", "epoch 2"]
    assert not [line for line in said[1] if line.startswith("epoch")]
    run_recorded(TRIAL, ARRAYS, tmp_path / "one.jsonl")
    (two,), (one,) = records.read(tmp_path / "two.jsonl"), records.read(tmp_path / "one.jsonl")
    assert two["config"] == one["config"]
    assert (two["environment"]["processes"], one["environment"]["processes"]) == (2, 1)
    for row, other in zip(two["metrics"], one["metrics"], strict=True):
        row, other = ({k: v for k, v in r.items() if k != "seconds"} for r in (row, other))
        assert row == pytest.approx(other, rel=1e-5)


def test_one_process_alone_needs_no_group():
    with distributed.joined("cpu") as device:
        assert device.type == "cpu" and distributed.size() == 1 and distributed.rank() == 0
