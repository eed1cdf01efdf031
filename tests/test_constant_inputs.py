"""A layer without bias whose inputs never vary: a variance of 0 would give its weights no coordinate."""

import copy

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import evenstep
from helpers import CPU_AND_GPU, descend, randn


@pytest.mark.parametrize("device", CPU_AND_GPU)
@pytest.mark.parametrize("foreach", [None, False])
@pytest.mark.parametrize("cls", [evenstep.WhitenedSGD, evenstep.UnitStep])
def test_a_layer_without_bias_trains_on_a_constant_input(cls, foreach, device):
    torch.manual_seed(0)
    model = nn.Linear(3, 2, bias=False).to(device)
    x, target = torch.tensor([[2.0, 0.0, -1.0]], device=device).expand(8, 3), torch.tensor([1.0, -2.0], device=device)
    optimizer = cls(model, lr=0.05, foreach=foreach)
    unused = model.weight.detach()[:, 1].clone()
    for _ in range(200):
        loss = (model(x) - target).square().mean()
        descend(optimizer, loss)
    assert loss < 1e-3
    assert torch.equal(model.weight[:, 1], unused), "an input that is 0 moves nothing"


def test_the_step_on_a_constant_input_is_the_limit_of_small_variances():
    start = nn.Linear(4, 3, bias=False).double()
    noise, pull = randn(64, 4), randn(3)
    mean = torch.tensor([1.0, -2.0, 0.5, 3.0]).double()
    responses = []  # how far the step moves the outputs
    for spread in (0.0, 1e-4, 1e-2):
        model = copy.deepcopy(start)
        optimizer = evenstep.WhitenedSGD(model, lr=0.01, trust=None, damping=0.0)
        descend(optimizer, (model(mean + spread * noise) * pull).sum(1).mean())
        responses.append((model.weight.detach() - start.weight) @ mean)
    assert_close(responses[0], responses[1], rtol=1e-3, atol=0)
    assert_close(responses[0], responses[2], rtol=0.02, atol=0)
