"""Two optimizers on one model: a warning if both train a parameter, silence otherwise."""

import gc
import warnings

import pytest
import torch
from torch import nn

import evenstep
from evenstep.torch_optimizer.two_optimizers import claim, release

CLASSES = [evenstep.WhitenedSGD, evenstep.UnitStep, evenstep.BlockNaturalSGD]


def network():
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


class Bare:
    """An optimizer as `claim` sees it."""

    def __init__(self, *params):
        self.param_groups = [{"params": list(params)}]


# the registry


def test_a_claim_on_claimed_parameters_names_the_rival_and_counts_them():
    a, b, c = (nn.Parameter(torch.zeros(1)) for _ in range(3))
    first, second = Bare(a, b), Bare(b, c)
    assert claim(first) is None
    assert claim(second).startswith("1 of its 2 parameters are also trained by another optimizer, a Bare that is")
    release(first)
    assert claim(second) is None


def test_a_deleted_optimizer_in_a_cycle_claims_nothing():
    p = nn.Parameter(torch.zeros(1))
    first, second = Bare(p), Bare(p)
    first.itself = first
    claim(first)
    gc.disable()
    try:
        del first
        assert claim(second) is None
    finally:
        gc.enable()


def test_frozen_parameters_are_nobodys():
    p = nn.Parameter(torch.zeros(1), requires_grad=False)
    first, second = Bare(p), Bare(p)
    assert claim(first) is None and claim(second) is None


# the optimizers


@pytest.mark.parametrize("first", CLASSES)
@pytest.mark.parametrize("second", CLASSES)
def test_a_second_optimizer_on_the_same_parameters_warns_once(first, second):
    model = network()
    one = first(model)
    message = rf"{second.__name__}: 4 of its 4 parameters .* a {first.__name__} .* call its detach\(\), else give each"
    with pytest.warns(UserWarning, match=message) as caught:
        two = second(model)
    assert len(caught) == 1
    two.attach(model)  # a second warning would be an error
    assert one.param_groups


def test_an_optimizer_on_a_part_and_one_on_the_whole_warn():
    model = network()
    part = evenstep.UnitStep(model[1])
    with pytest.warns(UserWarning, match="UnitStep: 2 of its 4 parameters are also trained"):
        evenstep.UnitStep(model)
    assert part.param_groups


def without_overlap(model):
    return evenstep.UnitStep(model[0].parameters(), model=model), evenstep.UnitStep(model[1].parameters(), model=model)


def after_detach(model):
    first = evenstep.UnitStep(model)
    first.detach()
    return first, evenstep.UnitStep(model)


def after_deletion(model):
    first = evenstep.UnitStep(model)
    schedule = torch.optim.lr_scheduler.ConstantLR(first)
    del first, schedule
    return evenstep.UnitStep(model)


def without_a_model(model):
    return evenstep.UnitStep(model.parameters()), evenstep.UnitStep(model)


def on_another_model(model):
    return evenstep.UnitStep(model), evenstep.UnitStep(network())


def refreshed(model):
    optimizer = evenstep.UnitStep(model)
    optimizer.refresh()
    return optimizer


@pytest.mark.parametrize(
    "build", [without_overlap, after_detach, after_deletion, without_a_model, on_another_model, refreshed]
)
def test_optimizers_that_do_not_meet_are_silent(build):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert build(network())


def test_an_optimizer_that_is_attached_again_meets_the_second():
    model = network()
    first, second = after_detach(model)
    with pytest.warns(UserWarning, match="4 of its 4 parameters are also trained"):
        first.attach(model)
    assert second.param_groups
