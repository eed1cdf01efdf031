"""`UnitStep` against its documentation, unit by unit, in a slow loop on explicit v."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import evenstep
import oracle
from evenstep.math.stepsize import LONG
from helpers import UNGUARDED, assert_follows, descend
from rules import RuleOnV, deep_network, drifting

GUARDS = {"fresh_max": 2.0, "trust": 0.1}


class UnitStepOnV(RuleOnV):
    """Nesterov momentum over the root of each unit's running mean square, damped by the layer's; β = 1."""

    def __init__(self, model, *, lr, momentum, eps, **keywords):
        super().__init__(model, None, **keywords)
        self.lr, self.momentum, self.eps = lr, momentum, eps
        self.squares = [oracle.Moments(self.decay) for _ in self.layers]
        self.buffers = [[0.0, 0.0] for _ in self.layers]

    def frame(self, k, x, y, g2):
        c, spread, fresh = oracle.OnV.frame(self, k, x, y, g2)
        return c._replace(beta=torch.ones_like(c.beta)), spread, fresh

    def steps(self, k, grads, v):
        _, unit = oracle.places(self.layers[k])

        def per_unit(weight, bias=0.0):
            return oracle.sum_per_unit(unit, weight**2, oracle.units(self.layers[k])) + bias**2

        square, m = per_unit(*grads), self.momentum
        self.squares[k].update(square.unsqueeze(0))
        average, _ = self.squares[k].mean_var()
        root = (self.eps + torch.maximum(average, square) + self.damping * average.mean()).sqrt()
        scale = (per_unit(*v).sqrt() / LONG).clamp(min=1) / root
        self.buffers[k] = [m * old + g for old, g in zip(self.buffers[k], grads, strict=False)]
        ahead = [(1 - m) * (g + m * b) for g, b in zip(grads, self.buffers[k], strict=True)]
        return [-self.lr * scale[unit] * ahead[0], *(-self.lr * scale * one for one in ahead[1:])]


@pytest.mark.parametrize("eps", [1e-12, 1e-2])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("guards", [UNGUARDED, GUARDS], ids=["bare", "guarded"])
def test_unit_step_is_its_documentation(guards, momentum, eps):
    model, batches = deep_network(), drifting(shock=1.0 if guards is UNGUARDED else 30.0)
    with torch.no_grad():
        model[2].weight[:3] *= 20  # units that are longer than usual
    settings = {"lr": 0.1, "momentum": momentum, "eps": eps, "decay": 0.6, "damping": 0.1, **guards}
    smallest = assert_follows(UnitStepOnV(model, **settings), evenstep.UnitStep(model, **settings), model, batches)
    assert smallest == 1 if guards is UNGUARDED else smallest < 0.9


def test_unit_step_keeps_one_momentum_one_float_per_unit_and_two_per_input():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32, 5))
    optimizer = evenstep.UnitStep(model)
    descend(optimizer, functional.cross_entropy(model(torch.randn(4, 3, 4, 4)), torch.randint(0, 5, (4,))))
    for layer, inputs, units in ((model[0], 3, 8), (model[3], 32, 5)):
        for p, arrays in ((layer.weight, [inputs, inputs, units]), (layer.bias, [])):
            state = dict(optimizer.state[p])
            assert state.pop("momentum_buffer").shape == p.shape
            sizes = [v.numel() for v in state.values()]
            assert sorted(size for size in sizes if size > 1) == sorted(arrays)
            assert sizes.count(1) <= 5
