"""One training over processes that torchrun started equals one process on the joined batch."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from evenstep.lab import distributed
from evenstep.lab.trial import Trial, start
from small_images import small_arrays

TRIAL = Trial("sg", 0.1, seed=3, epochs=2, batch_size=5, augment=True, decay_lr=True, options={"momentum": 0.9})
CODE = """
import sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from test_lab_distributed import train
train(Path(sys.argv[1]))
"""
ARRAYS = small_arrays(11)  # the last batch has one image, and one of two processes none


def train(folder):
    """Train in all joined processes; each writes the rows it computed."""
    with distributed.joined("cpu") as device:
        rows = start(TRIAL, ARRAYS, device).finish()
        (folder / f"{distributed.size()}-{distributed.rank()}.json").write_text(json.dumps(rows))


def test_two_processes_equal_one(tmp_path):
    paths = [str(Path(__file__).parent), str(Path(distributed.__file__).parents[2])]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = []
    for rank in range(2):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        environment = {**os.environ, **{k: str(v) for k, v in place.items()}}
        environment["PYTHONPATH"] = os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")])
        command = [sys.executable, "-c", CODE, str(tmp_path)]
        processes.append(subprocess.Popen(command, env=environment))
    assert [process.wait(timeout=120) for process in processes] == [0, 0]
    train(tmp_path)
    one, first, second = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("1-0", "2-0", "2-1"))
    for rows in zip(one, first, second, strict=True):
        row, other, another = ({k: v for k, v in r.items() if k != "seconds"} for r in rows)
        assert row == pytest.approx(other, rel=1e-5) and other == another


def test_one_process_alone_needs_no_group():
    with distributed.joined("cpu") as device:
        assert device.type == "cpu" and distributed.size() == 1 and distributed.rank() == 0
