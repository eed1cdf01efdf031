"""Kernels against float64, and fused steps against steps block by block."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import evenstep
from cases import BY_HAND, TORCH_RULES
from evenstep.coordinates.whitening import Whitening
from evenstep.kernels import input_sums as kernel
from evenstep.kernels import launch
from evenstep.statistics.layer_statistics import LayerStatistics
from evenstep.step.triton import tables, triton_step
from helpers import (
    CPU_AND_GPU,
    GPU,
    LAYOUTS,
    SHAPES,
    Net,
    assert_matrix_kernels_agree,
    assert_moments_agree,
    assert_steps_agree,
    inputs_like,
    still,
    weights,
)

BACKEND = "torch" if GPU.type == "cpu" else "triton"
SERVED = BY_HAND if GPU.type == "cpu" else BY_HAND | TORCH_RULES
EXACT = [name for name in SERVED if name not in ("muon", "orthogonal")]  # which orthogonalize in bfloat16
SOME = [name for name in ("momentum", "unitstep", "unitstep-plain", "adamw", "nesterov-joint") if name in SERVED]
FUSED = [(name, "cpu") for name in BY_HAND]
FUSED += [pytest.param(name, "gpu", marks=pytest.mark.gpu) for name in EXACT]


@pytest.mark.filterwarnings("ignore:.*not finite")
@pytest.mark.parametrize("poison", [(), (2,)], ids=["", "a NaN"])
@pytest.mark.parametrize(("name", "place"), FUSED)
def test_a_fused_step_is_the_step_block_by_block(name, place, poison):
    torch.manual_seed(3)
    if place == "cpu":
        assert_steps_agree(name, Net().double(), "cpu", 1e-9, poison=poison, by="torch")
    else:
        assert_steps_agree(name, Net().to(GPU), GPU, 2e-4, poison=poison, by=BACKEND)


@pytest.mark.gpu
@pytest.mark.parametrize("memory", ["aligned", "channels-last", "misaligned"])
@pytest.mark.parametrize("name", SOME)
def test_a_fused_step_serves_many_rows_in_any_memory_layout(memory, name):
    torch.manual_seed(3)
    layout = torch.channels_last if memory == "channels-last" else torch.contiguous_format
    model = Net(wide=True, rows=5000, long=197 * 96).to(GPU).to(memory_format=layout)
    assert_steps_agree(name, model, GPU, 2e-4, steps=4, by=BACKEND, misaligned=memory == "misaligned")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", [name for name in SOME if name != "unitstep-plain"])
def test_a_fused_step_serves_half_precision_in_channels_last(dtype, name):
    if GPU.type == "cpu" and dtype != torch.float32:
        pytest.skip("without kernels half precision is stepped block by block")
    torch.manual_seed(3)
    model = Net().to(GPU, dtype).to(memory_format=torch.channels_last)
    assert_steps_agree(name, model, GPU, 2e-4 if dtype == torch.float32 else 0.03, steps=3, by=BACKEND)


@pytest.mark.parametrize(
    ("outside", "units", "columns", "expected"),
    [
        (True, 1, 197 * 768, 197),  # the positions of a ViT
        (True, 1, 1024, 1),  # short
        (True, 300, 197 * 768, 1),  # many rows
        (True, 1, 16411, 0),  # a prime
        (True, 1, 19 * 945, 19),  # pieces of odd lengths alone
        (False, 10, 197 * 768, 0),  # a layer's rows stay whole
    ],
)
def test_long_rows_outside_layers_are_cut_into_equal_pieces(outside, units, columns, expected):
    assert tables.pieces(SimpleNamespace(entry=None if outside else 1), units, columns) == expected


class HalfWhitening(Whitening):
    """Coordinates that the kernels do not know, with the name and the state of some that they know."""

    def at(self, state, batch, layers):
        return super().at(state, batch, layers)._replace(mu=None)


@pytest.mark.parametrize(("coordinates", "served"), [(Whitening, True), (HalfWhitening, False)])
def test_kernels_leave_coordinates_that_they_do_not_know_to_torch(coordinates, served, monkeypatch):
    monkeypatch.setattr(triton_step, "runs_on", lambda weight: True)
    optimizer = type("Derived", (evenstep.WhitenedSGD,), {"coordinates": coordinates})(nn.Linear(4, 3))
    (block,) = optimizer._blocks(lambda p: True)
    assert triton_step.serves(block, optimizer.state) is served


@pytest.mark.filterwarnings("ignore:.*no layer of this Embedding is covered")
@pytest.mark.parametrize("foreach", [None, False])
@pytest.mark.parametrize("device", CPU_AND_GPU)
def test_rows_outside_layers_step_by_their_own_length(foreach, device):
    """Units in whitened coordinates have a length of about 1; rows of an embedding may be far longer."""
    torch.manual_seed(0)
    dtype = torch.float64 if device == "cpu" else torch.float32
    model = nn.Embedding(4, 64).to(device, dtype)
    with torch.no_grad():
        model.weight[1:].mul_(torch.tensor([[0.01], [3.0], [10.0]], device=device))
    before = model.weight.detach().clone()
    optimizer = evenstep.UnitStep(model, lr=0.05, momentum=0.0, foreach=foreach)
    (model.weight * torch.randn(4, 64).to(before)).sum().backward()
    optimizer.step()
    moved = (model.weight - before).norm(dim=1)
    assert_close(moved, 0.05 * before.norm(dim=1).clamp(min=1), rtol=1e-9 if device == "cpu" else 1e-5, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("limit", [None, 500])
@pytest.mark.parametrize(("shape", "dim"), SHAPES, ids=str)
def test_moments_kernel_against_float64(shape, dim, limit, dtype, layout):
    x = inputs_like(shape, dtype, layout, "cuda")
    assert kernel.serves(x, LayerStatistics(shape[dim], 0, torch.zeros(1, device="cuda")).slots)
    assert_moments_agree(x, dim, LayerStatistics.add_call, limit)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:.*not finite")
@pytest.mark.parametrize("cls", [evenstep.WhitenedSGD, evenstep.UnitStep])
@pytest.mark.parametrize("where", [0, 1])
def test_a_network_on_two_devices_steps_on_both_or_on_none(where, cls):
    """If one device has a gradient that is not finite, the other does not move either."""
    parts = nn.ModuleList([nn.Linear(4, 5), nn.Linear(5, 3).to(GPU)])
    optimizer = cls(parts, lr=0.01)
    for step in range(3):
        optimizer.zero_grad()
        parts[1](parts[0](torch.randn(6, 4)).relu().to(GPU)).square().sum().backward()
        before = weights(parts)
        if step == 1:
            parts[where].weight.grad[0, 0] = torch.nan
        optimizer.step()
        assert still(parts, before) == [step == 1] * 4
    assert optimizer.nonfinite_steps == 1


@pytest.mark.gpu
def test_kernels_for_matrices_against_float64():
    if GPU.type == "cpu":
        pytest.skip("the kernels need a GPU")
    assert_matrix_kernels_agree(GPU)


def test_kernels_are_launched_on_the_device_of_their_tensors(monkeypatch):
    """Triton launches on the current device, which may not be the model's."""
    log = []

    @contextmanager
    def selected(device):
        log.append(device.index)
        yield
        log.append(None)

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", selected)
    for device in ("cpu", "cuda:0", "cuda:1"):
        with launch.on(torch.device(device)):
            log.append(device)
    assert log == ["cpu", "cuda:0", 1, "cuda:1", None]
