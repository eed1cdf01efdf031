"""Shocks: a tenth of a hidden layer's units rescaled by κ in mid-training, the function unchanged (§4.4).

An MLP 256-120-84-10 on the shipped Fashion-MNIST subset at half resolution, batch 64 (`shock.mlp_scene`): 150 steps,
the shock, 100 steps more. A ratio is the mean training loss after it over that of a run without a shock, on the same
batches. docs/guards.md shows the ratios over four seeds, as `python tests/test_shock.py` prints them.
"""

import functools

import pytest
import torch

from evenstep.lab.data import fashion_mnist_subset
from evenstep.lab.experiments import shock
from evenstep.lab.experiments.shock import KAPPAS, OPTIMIZERS

SEEDS = (0, 1)


@functools.cache
def scene():
    return shock.mlp_scene(fashion_mnist_subset())


@functools.cache
def prepared(name, seed):
    return shock.prepared(scene(), name, seed)


@functools.cache
def loss(name, seed, kappa):
    """Mean training loss after a shock of κ, or after none (κ = 1)."""
    return shock.mean_loss(shock.aftermath(scene(), name, seed, kappa, prepared(name, seed)))


def ratio(name, kappa, seeds=SEEDS):
    """The loss after a shock over that without, each a mean over seeds."""
    return sum(loss(name, seed, kappa) for seed in seeds) / sum(loss(name, seed, 1) for seed in seeds)


@pytest.mark.parametrize("kappa", KAPPAS)
def test_a_shock_rescales_twelve_units_and_leaves_the_function(kappa):
    model, x = scene().build(0), scene().x[:500]
    before, weights = model(x).detach(), model[0].weight.detach().clone()
    shock.shock(model, kappa, seed=0)
    assert (model(x) - before).abs().max() < 1e-5 * before.abs().max()
    changed = (model[0].weight != weights).any(1)
    assert changed.sum() == 12
    torch.testing.assert_close(model[0].weight[changed], kappa * weights[changed])


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


def test_a_shock_shows_at_once_and_is_an_event_three_steps_later():
    """Most of the 12 rescaled units, and few others, have a variance far above the running one."""
    rows = shock.aftermath(scene(), "WhitenedSGD", 0, 100.0, prepared("WhitenedSGD", 0))
    calm = shock.aftermath(scene(), "WhitenedSGD", 0, 1.0, prepared("WhitenedSGD", 0))
    assert 8 <= rows[0]["grown"] <= 16
    assert [told for row in rows[:3] for told in row["events"]] == rows[2]["events"] != []
    assert "inputs grew" in rows[2]["events"][0]
    assert sum(row["grown"] for row in calm) / len(calm) < 1


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name in OPTIMIZERS:
        print(f"| {name} |", *(f"{ratio(name, kappa, range(4)):#.4g} |" for kappa in KAPPAS))
