"""Two optimizers on one model: a warning if both train a parameter, silence otherwise."""

import gc
import warnings

import pytest
import torch
from torch import nn

import evenstep

CLASSES = [evenstep.WhitenedSGD, evenstep.UnitStep, evenstep.BlockNaturalSGD]


def network():
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


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


def after_deletion_in_a_cycle(model):
    first = evenstep.UnitStep(model)
    first.itself = first
    gc.disable()
    try:
        del first
        return evenstep.UnitStep(model)
    finally:
        gc.enable()


def on_frozen_parameters(model):
    model.requires_grad_(False)
    return evenstep.UnitStep(model), evenstep.UnitStep(model)


def without_a_model(model):
    return evenstep.UnitStep(model.parameters()), evenstep.UnitStep(model)


def on_another_model(model):
    return evenstep.UnitStep(model), evenstep.UnitStep(network())


def refreshed(model):
    optimizer = evenstep.UnitStep(model)
    optimizer.refresh()
    return optimizer


SILENT = [without_overlap, after_detach, after_deletion, after_deletion_in_a_cycle]
SILENT += [on_frozen_parameters, without_a_model, on_another_model, refreshed]


@pytest.mark.parametrize("build", SILENT)
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
