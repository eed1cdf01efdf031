"""A compiled model is watched as an eager one: one graph, no break, no recompilation, the same weights."""

import copy

import pytest
import torch
from torch import nn

import evenstep


@pytest.mark.parametrize("build", [evenstep.EvenStep, evenstep.WhitenedSGD, evenstep.FanInSGD])
def test_a_compiled_model_trains_to_the_same_weights_in_one_graph(build):
    eager = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 5))
    inner = copy.deepcopy(eager)
    optimizers = build(eager), build(inner)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(inner, fullgraph=True, backend="aot_eager")
    for _ in range(3):
        x = torch.randn(6, 3, 8, 8)
        for model, optimizer in zip((eager, compiled), optimizers, strict=True):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    for p, q in zip(eager.parameters(), inner.parameters(), strict=True):
        assert torch.equal(p, q)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
