"""torch_geometric's own Linear, the real one, alone and inside its graph convolutions."""

import pytest
import torch
from torch import nn

from helpers import assert_all_moved, assert_same, descend, fit, weights

pyg = pytest.importorskip("torch_geometric.nn")

EDGES = torch.tensor([[0, 1, 1, 2, 3, 4], [1, 0, 2, 1, 4, 3]])


class Graphs(nn.Module):
    """Two graph convolutions and a Linear; the first gets its shape from its input if `inputs` is -1."""

    def __init__(self, inputs=4):
        super().__init__()
        self.one, self.two = pyg.GCNConv(inputs, 8), pyg.SAGEConv(8, 8)
        self.last = pyg.Linear(8, 2)

    def forward(self, x):
        return self.last(self.two(self.one(x, EDGES).relu(), EDGES).relu())


@pytest.mark.feature("torch_geometric's Linear, the real one")
def test_every_linear_of_a_graph_network_is_covered_and_trains(case):
    model, x = Graphs(), torch.randn(5, 4)
    optimizer = case.build(model)
    rows = {row.parameter: row for row in optimizer.coverage()}
    layers = [name for name, row in rows.items() if row.layer == "Linear"]
    assert {"one.lin.weight", "two.lin_l.weight", "two.lin_r.weight", "last.weight", "last.bias"} <= {*layers}
    assert {rows[name].treatment for name in layers} == {case.cls.coordinates.name}
    before = weights(model)
    for _ in range(3):
        descend(optimizer, (model(x) - 1).square().mean())
    assert_all_moved(model, before)


def test_it_steps_like_torchs_linear(case):
    model, x = nn.Sequential(pyg.Linear(4, 6), nn.Tanh(), pyg.Linear(6, 2)).double(), torch.randn(5, 4).double()
    twin = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).double()
    twin.load_state_dict(model.state_dict())
    for network in (model, twin):
        fit(case.build(network), network, [(x + k, torch.zeros(5, 2).double()) for k in range(3)])
    assert_same(twin, model, rtol=1e-7, atol=1e-7)


def test_a_lazy_layer_is_covered_after_one_forward_pass(case):
    model, x = Graphs(-1), torch.randn(5, 4)
    with pytest.raises(ValueError, match=r"parameter 'one\.lin\.weight' is not initialized yet; run one forward pass"):
        case.build(model)
    model(x)
    treatments = {row.parameter: row.treatment for row in case.build(model).coverage()}
    assert treatments["one.lin.weight"] == treatments["last.weight"]
