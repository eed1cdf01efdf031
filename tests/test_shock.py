"""Shocks: a tenth of a hidden layer's units rescaled by κ in mid-training, the function unchanged (§4.4).

An MLP 256-120-84-10 on the shipped Fashion-MNIST subset at half resolution, batch 64: 150 steps, the shock, 100 steps
more. A ratio is the mean training loss after it over that of a run without a shock, on the same batches.
docs/guards.md shows the ratios over four seeds, as `python tests/test_shock.py` prints them.
"""

import functools
import math
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.functional import avg_pool2d

from evenstep.lab.data import fashion_mnist_subset
from evenstep.lab.experiments.common import failures_expected
from evenstep.lab.experiments.shock import GUARDED, KAPPAS, OPTIMIZERS, aftermath, mean_loss, shock

SEEDS = (0, 1)


@functools.cache
def arrays():
    shipped = fashion_mnist_subset()
    x = {half: avg_pool2d(getattr(shipped, half).float(), 2).byte() for half in ("train_x", "test_x")}
    return replace(shipped, **x)


def network(seed):
    torch.manual_seed(seed)
    hidden = [m for a, b in ((256, 120), (120, 84)) for m in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(84, 10))


@functools.cache
def shocked(name, seed, kappa):
    with failures_expected():
        return aftermath(arrays(), name, seed, kappa, before=150, after=100, model=network(seed))


def loss(name, seed, kappa):
    """Mean training loss after a shock of κ, or after none (κ = 1)."""
    found = mean_loss(shocked(name, seed, kappa))
    return found if math.isfinite(found) else math.inf


def ratio(name, kappa, seeds=SEEDS):
    """The loss after a shock over that without, each a mean over seeds."""
    return sum(loss(name, seed, kappa) for seed in seeds) / sum(loss(name, seed, 1) for seed in seeds)


@pytest.mark.parametrize("kappa", KAPPAS)
def test_a_shock_rescales_twelve_units_and_leaves_the_function(kappa):
    model, x = network(0), arrays().normalize(arrays().train_x[:500])
    before, weights = model(x).detach(), model[1].weight.detach().clone()
    shock(model, kappa, seed=0)
    assert (model(x) - before).abs().max() < 1e-5 * before.abs().max()
    changed = (model[1].weight != weights).any(1)
    assert changed.sum() == 12
    torch.testing.assert_close(model[1].weight[changed], kappa * weights[changed])


@pytest.mark.parametrize("kappa", [KAPPAS[0], KAPPAS[-1]])
@pytest.mark.parametrize("name", GUARDED)
def test_guarded_training_goes_on_as_if_nothing_had_happened(name, kappa):
    """At most 5 % above the loss without a shock; below it is no fault.

    `Whitened`'s steps grow with a layer's inputs, as plain ones do: AdamW in plain coordinates has 1.25 at κ = 100.
    """
    assert ratio(name, kappa) < (1.25 if (name, kappa) == ("Whitened(AdamW)", 100.0) else 1.05)


@pytest.mark.parametrize("seed", SEEDS)
def test_unguarded_whitening_breaks(seed):
    """At κ = 100 the mean loss is far above ln 10, that of a network that knows nothing."""
    assert loss("unguarded WhitenedSGD", seed, 1) < 0.6
    assert loss("unguarded WhitenedSGD", seed, 100) > 5 * math.log(10)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name in OPTIMIZERS:
        print(f"| {name} |", *(f"{ratio(name, kappa, range(4)):#.4g} |" for kappa in KAPPAS), flush=True)
