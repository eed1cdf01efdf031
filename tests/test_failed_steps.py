"""A step that raises in the middle leaves the device usable, and the optimizer able to step again.

An exception handler may print local variables (pytest --showlocals, debuggers, error trackers): none of them may be a
tensor whose memory is gone. On a GPU, reading one is an illegal memory access, which no process survives.
"""

import traceback
from contextlib import contextmanager
from functools import partial
from itertools import count

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cases import OPTIMIZERS
from evenstep.kernels.launch import Launcher
from helpers import CPU_AND_GPU, GPU, assert_all_moved, descend, weights
from rules import deep_network


class Interrupted(Exception):
    """Raised in the middle of a step."""


class FailingOperation(TorchDispatchMode):
    """Raise instead of torch's operation with this number."""

    def __init__(self, number):
        super().__init__()
        self.number, self.numbers = number, count(1)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if next(self.numbers) == self.number:
            raise Interrupted
        return function(*args, **(kwargs or {}))


NAMES = ["unitstep", "whitened-paper", "canonical", "network", "whitened-sgd", "whitened-adamw", "whitened-muon"]
SERVED = [name for name in NAMES if name not in ("canonical", "network")]  # by kernels


def loss_of(model):
    x = torch.randn(16, 2, 4, 4) + 0.5
    return model(x.to(model[0].weight)).square().mean()


def trained(build, device, steps):
    """A network and its optimizer after some steps."""
    model = deep_network().float().to(device)
    optimizer = build(model)
    for group in optimizer.param_groups:
        group["lr"] /= 10  # an unguarded rule diverges in as many steps as there are failures
    for _ in range(steps):
        descend(optimizer, loss_of(model))
    return model, optimizer


def assert_usable_after(error, model, optimizer, device):
    """Print all that an exception handler may print, use the device, then train on."""
    assert traceback.TracebackException.from_exception(error, capture_locals=True).format()
    assert repr(optimizer) and repr(dict(optimizer.state)) and repr([p.grad for p in model.parameters()])
    assert torch.ones(10**6, device=device).sum().item() == 10**6
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()
    before = weights(model)
    for _ in range(2):
        descend(optimizer, loss_of(model))
    assert_all_moved(model, before)
    for state in optimizer.state.values():
        assert all(value.isfinite().all() for value in state.values())


def failures(model, optimizer, device, fail_at, numbers):
    """How many of these points a step reaches; at each of them it is made to raise, which must do no lasting harm."""
    for reached, number in enumerate(numbers):
        optimizer.zero_grad()
        loss_of(model).backward()
        try:
            with fail_at(number):
                optimizer.step()
        except Interrupted as error:
            assert_usable_after(error, model, optimizer, device)
        else:
            return reached
    raise AssertionError("too few numbers")


@pytest.mark.parametrize("device", CPU_AND_GPU)
@pytest.mark.parametrize("name", NAMES)
def test_an_operation_that_raises_does_no_lasting_harm(name, device):
    model, optimizer = trained(OPTIMIZERS[name].build, device, 2)
    assert failures(model, optimizer, device, FailingOperation, (4**k for k in range(20))) > 1


@pytest.mark.parametrize("steps", [0, 2], ids=["first step", "later step"])
@pytest.mark.parametrize("device", CPU_AND_GPU)
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_base_rule_that_raises_does_no_lasting_harm(when, device, steps, monkeypatch):
    model, optimizer = trained(OPTIMIZERS["whitened-adamw"].build, device, steps)
    step = torch.optim.AdamW.step

    def failing(self, closure=None):
        if when == "after":
            step(self, closure)
        raise Interrupted

    with monkeypatch.context() as patch, pytest.raises(Interrupted) as error:
        patch.setattr(torch.optim.AdamW, "step", failing)
        descend(optimizer, loss_of(model))
    assert_usable_after(error.value, model, optimizer, device)


@pytest.mark.gpu
@pytest.mark.skipif(GPU.type == "cpu", reason="the CPU has no kernels")
@pytest.mark.parametrize("capturable", [False, True], ids=["", "capturable"])
@pytest.mark.parametrize("name", SERVED)
def test_a_kernel_that_cannot_be_launched_does_no_lasting_harm(name, capturable, monkeypatch):
    """As where Triton cannot compile it."""
    model, optimizer = trained(partial(OPTIMIZERS[name].build, capturable=capturable), GPU, 0)
    assert failures(model, optimizer, GPU, partial(failing_launch, monkeypatch), range(1, 100)) > 2


@contextmanager
def failing_launch(monkeypatch, number):
    """Raise instead of the launch with this number."""
    launch, numbers = Launcher.__call__, count(1)

    def failing(self, *arguments, **constants):
        if next(numbers) == number:
            raise Interrupted
        launch(self, *arguments, **constants)

    with monkeypatch.context() as patch:
        patch.setattr(Launcher, "__call__", failing)
        yield
