"""Shocks: a tenth of a hidden layer's units rescaled by κ in mid-training, the function unchanged (§4.4).

An MLP 256-120-84-10 on the shipped Fashion-MNIST subset at half resolution, batch 64. After BEFORE steps, 12 of the 120
units of the first layer get their weights and bias times κ, and the next layer's weights over κ. What follows is the
mean training loss over the next AFTER steps, on the same batches, over that of the run without a shock; mean of SEEDS.

TABLE
"""

import copy
import functools

import pytest
import torch
from torch import nn
from torch.nn import functional

import evenstep
from evenstep.lab.data import fashion_mnist_subset

KAPPAS = (0.01, 0.03, 10.0, 30.0, 100.0)
BEFORE, AFTER, SEEDS = 150, 100, (0, 1)
OPTIMIZERS = {
    "WhitenedSGD": lambda model: evenstep.WhitenedSGD(model, lr=0.3),
    "EvenStep": lambda model: evenstep.EvenStep(model, lr=0.05),
    "Whitened(AdamW)": lambda model: evenstep.Whitened(model, torch.optim.AdamW, lr=1e-3),
    "unguarded WhitenedSGD": lambda model: evenstep.WhitenedSGD(model, lr=0.3, fresh_max=None, trust=None),
}


@functools.cache
def images():
    arrays = fashion_mnist_subset()
    return functional.avg_pool2d(arrays.normalize(arrays.train_x), 2).flatten(1), arrays.train_y


def network(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(256, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10))


def batches(seed):
    """Row numbers of every step's batch."""
    generator = torch.Generator().manual_seed(1000 + seed)
    epochs = [torch.randperm(4000, generator=generator)[:3968].view(-1, 64) for _ in range(1 + (BEFORE + AFTER) // 62)]
    return torch.cat(epochs)[: BEFORE + AFTER]


def train(model, optimizer, steps):
    """The mean loss over the steps."""
    (x, y), losses = images(), []
    for rows in steps:
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x[rows]), y[rows])
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return float(torch.stack(losses).mean())


@torch.no_grad()
def shock(model, kappa, seed):
    """Rescale 12 of the first layer's units; the outputs stay as they were."""
    first, second, x = model[0], model[2], images()[0][:500]
    units = torch.randperm(120, generator=torch.Generator().manual_seed(seed))[:12]
    before = model.eval()(x)
    first.weight[units] *= kappa
    first.bias[units] *= kappa
    second.weight[:, units] /= kappa
    assert (model(x) - before).abs().max() < 1e-5 * before.abs().max()
    model.train()


@functools.cache
def losses(name, seed):
    """Loss after a shock of each κ, and after none (κ = 1), from one and the same training before it."""
    model, steps = network(seed), batches(seed)
    optimizer = OPTIMIZERS[name](model)
    train(model, optimizer, steps[:BEFORE])
    found = {}
    for kappa in (1.0, *KAPPAS):
        fork = network(seed)
        fork.load_state_dict(model.state_dict())
        forked = OPTIMIZERS[name](fork)
        forked.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        if kappa != 1:
            shock(fork, kappa, seed)
        found[kappa] = train(fork, forked, steps[BEFORE:])
    return found


def ratio(name, kappa):
    """Mean over seeds of the loss after a shock, over that without."""
    return sum(losses(name, seed)[kappa] for seed in SEEDS) / sum(losses(name, seed)[1.0] for seed in SEEDS)


@pytest.mark.parametrize("kappa", KAPPAS)
@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if "unguarded" not in name])
def test_guarded_training_goes_on_as_if_nothing_had_happened(name, kappa):
    assert ratio(name, kappa) < 1.05


@pytest.mark.parametrize("seed", SEEDS)
def test_unguarded_whitening_breaks(seed):
    """At κ = 100 the mean loss is far above that of a network that knows nothing, ln 10."""
    assert losses("unguarded WhitenedSGD", seed)[1.0] < 0.6
    assert not losses("unguarded WhitenedSGD", seed)[100.0] < 5 * 2.303
