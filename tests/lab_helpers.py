"""What several tests of the lab share: a few images, records that nobody ran, commands and programs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from evenstep.lab import cli, data, sweep

TESTS, SOURCE = Path(__file__).parent, Path(cli.__file__).parents[2]


def small_arrays(count=10, channels=3, seed=0):
    """A few random images."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 256, (2, count, channels, 32, 32), generator=generator).byte()
    labels = torch.arange(count) % 10
    return data.Arrays(images[0], labels, images[1], labels, "random", data.CIFAR_CLASSES)


def record(method, lr, losses, seed=0, accuracy=0.5, **config):
    """A run with these losses, None where it diverged."""
    rows = [
        {"epoch": k, "train_loss": loss, "diverged": loss is None, "test_accuracy": accuracy, "dead_share": 0.0,
         "seconds": 0.5, "steps": 10}
        for k, loss in enumerate(losses, start=1)
    ]  # fmt: skip
    setting = {"model": "paper_cnn", "data": "CIFAR-10", "batch_size": 64, "epochs": len(losses), "options": {}}
    return {
        "config": {"method": method, "lr": lr, "seed": seed, **setting, **config},
        "seed": seed,
        "metrics": rows,
        "environment": {"torch": "2.9.0", "python": "3.12", "device": "a CPU", "threads": 1},
        "commit": "abc123",
        "time": "2026-01-01T00:00:00+00:00",
    }


def alone(trial, data, device="cpu"):
    """The record of a trial that runs by itself."""
    return next(sweep.side_by_side([trial], data, device, 1))


def without_seconds(rows):
    """The rows of a run but for their times, which no two runs share."""
    return [{k: v for k, v in row.items() if k != "seconds"} for row in rows]


def call(*arguments):
    """The exit code of a command."""
    with pytest.raises(SystemExit) as caught:
        cli.main([str(word) for word in arguments])
    return caught.value.code


def printed(capsys, *arguments, code=0):
    """What a command prints, none of it as an error."""
    assert call(*arguments) == code
    shown, errors = capsys.readouterr()
    assert errors == ""
    return shown


def refused(capsys, *arguments):
    """The one line with which a command is refused."""
    assert call(*arguments) == 2
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 1 and told[0].startswith("evenstep: "), told
    return told[0]


def start(*words, **settings):
    """A Python process that can import the package and the tests, on one thread."""
    environment = {**os.environ, "PYTHONPATH": f"{SOURCE}{os.pathsep}{TESTS}", "OMP_NUM_THREADS": "1"}
    environment |= settings.pop("env", {})
    settings = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True} | settings
    return subprocess.Popen([sys.executable, *map(str, words)], env=environment, **settings)


def finished(*words, **settings):
    """The exit code of such a process, and what it printed."""
    process = start(*words, **settings)
    shown, errors = process.communicate(timeout=120)
    return process.returncode, shown, errors
