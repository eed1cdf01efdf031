"""Two optimizers on one model: a warning if both train a parameter, silence otherwise."""

import warnings

import pytest
import torch
from torch import nn

from evenstep import BlockNaturalSGD, UnitStep, WhitenedSGD


def network():
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


@pytest.mark.parametrize(
    ("first", "second"), [(WhitenedSGD, UnitStep), (UnitStep, BlockNaturalSGD), (BlockNaturalSGD, WhitenedSGD)]
)
def test_a_second_optimizer_on_the_same_parameters_warns_once(first, second):
    model = network()
    one = first(model)
    message = rf"{second.__name__}: 4 of its 4 parameters .* \({first.__name__}\) .* its detach\(\); else give each"
    with pytest.warns(UserWarning, match=message) as caught:
        two = second(model)
    assert len(caught) == 1 and caught[0].filename == __file__
    two.attach(model)  # a second warning would be an error
    assert one.param_groups


def after_detach(model):
    first = UnitStep(model)
    first.detach()
    return first, UnitStep(model)


def after_deletion(model):
    first = UnitStep(model)
    schedule = torch.optim.lr_scheduler.ConstantLR(first)
    del first, schedule
    return UnitStep(model)


def on_frozen_parameters(model):
    model.requires_grad_(False)
    return UnitStep(model), UnitStep(model)


SILENT = {
    "without overlap": lambda model: [UnitStep(layer.parameters(), model=model) for layer in model],
    "after detach": after_detach,
    "after deletion": after_deletion,
    "on frozen parameters": on_frozen_parameters,
    "without a model": lambda model: [UnitStep(model.parameters()), UnitStep(model)],
    "on another model": lambda model: [UnitStep(model), UnitStep(network())],
    "refreshed": lambda model: UnitStep(model).refresh() or True,
}


@pytest.mark.parametrize("build", SILENT.values(), ids=SILENT)
def test_optimizers_that_do_not_meet_are_silent(build):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert build(network())


def test_an_optimizer_that_is_attached_again_meets_the_second_and_one_on_a_part():
    model = network()
    first, second = after_detach(model)
    with pytest.warns(UserWarning, match="4 of its 4 parameters are also trained"):
        first.attach(model)
    with pytest.warns(UserWarning, match="UnitStep: 2 of its 2 parameters are also trained"):
        UnitStep(model[1])
    assert second.param_groups
