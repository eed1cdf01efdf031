"""Shocks: a tenth of a hidden layer's units rescaled by κ in mid-training, the function unchanged (§4.4).

An MLP 256-120-84-10 on the shipped Fashion-MNIST subset at half resolution, batch 64. After BEFORE steps, 12 of the 120
units of the first layer get their weights and bias times κ, and the next layer's weights over κ. A ratio is the mean
training loss over the next AFTER steps over that of a run without a shock, on the same batches. Mean of four seeds, as
`python tests/test_shock.py` prints it (a seed alone is within 0.02 of it where the ratio is near 1):

| κ | 0.01 | 0.03 | 10 | 30 | 100 |
| --- | --- | --- | --- | --- | --- |
| WhitenedSGD | 1.016 | 1.017 | 1.004 | 1.007 | 1.008 |
| EvenStep | 0.928 | 0.943 | 0.978 | 0.969 | 0.962 |
| Whitened(AdamW) | 1.005 | 1.004 | 1.001 | 1.004 | 1.004 |
| unguarded WhitenedSGD | 4584 | 24.30 | 1.111 | 10.40 | 782.5 |
| unguarded EvenStep | 2.346 | 1.324 | 0.989 | 1.045 | 1.553 |
| unguarded Whitened(AdamW) | 1.562 | 1.146 | 0.999 | 1.009 | 1.105 |
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
OFF = {"fresh_max": None, "trust": None}
OPTIMIZERS = {
    "WhitenedSGD": lambda model: evenstep.WhitenedSGD(model, lr=0.3),
    "EvenStep": lambda model: evenstep.EvenStep(model, lr=0.05),
    "Whitened(AdamW)": lambda model: evenstep.Whitened(model, torch.optim.AdamW, lr=1e-3),
    "unguarded WhitenedSGD": lambda model: evenstep.WhitenedSGD(model, lr=0.3, **OFF),
    "unguarded EvenStep": lambda model: evenstep.EvenStep(model, lr=0.05, **OFF),
    "unguarded Whitened(AdamW)": lambda model: evenstep.Whitened(model, torch.optim.AdamW, lr=1e-3, **OFF),
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
        error = functional.cross_entropy(model(x[rows]), y[rows])
        error.backward()
        optimizer.step()
        losses.append(error.detach())
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
def before_the_shock(name, seed):
    """The state of a model and its optimizer, trained up to the shock."""
    model = network(seed)
    optimizer = OPTIMIZERS[name](model)
    train(model, optimizer, batches(seed)[:BEFORE])
    return copy.deepcopy((model.state_dict(), optimizer.state_dict()))


@functools.cache
def loss(name, seed, kappa):
    """Mean training loss after a shock of κ, or after none (κ = 1)."""
    model_state, optimizer_state = copy.deepcopy(before_the_shock(name, seed))
    model = network(seed)
    model.load_state_dict(model_state)
    optimizer = OPTIMIZERS[name](model)
    optimizer.load_state_dict(optimizer_state)
    if kappa != 1:
        shock(model, kappa, seed)
    return train(model, optimizer, batches(seed)[BEFORE:])


def ratio(name, kappa, seeds=SEEDS):
    """The loss after a shock over that without, each a mean over seeds."""
    return sum(loss(name, seed, kappa) for seed in seeds) / sum(loss(name, seed, 1) for seed in seeds)


@pytest.mark.parametrize("kappa", KAPPAS)
@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if "unguarded" not in name])
def test_guarded_training_goes_on_as_if_nothing_had_happened(name, kappa):
    """At most 5 % above the loss without a shock; below it is no fault."""
    assert ratio(name, kappa) < 1.05


@pytest.mark.parametrize("seed", SEEDS)
def test_unguarded_whitening_breaks(seed):
    """At κ = 100 the mean loss is far above ln 10, that of a network that knows nothing."""
    assert loss("unguarded WhitenedSGD", seed, 1) < 0.6
    assert not loss("unguarded WhitenedSGD", seed, 100) < 5 * 2.303


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name in OPTIMIZERS:
        print(f"| {name} |", *(f"{ratio(name, kappa, range(4)):#.4g} |" for kappa in KAPPAS))
