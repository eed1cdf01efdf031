"""The cost of building an optimizer and of its first step grows in proportion to the number of layers."""

import sys

import pytest
import torch
from torch import nn

import evenstep


def opcodes(run, package=f"{evenstep.__path__[0]}/"):
    """How many bytecode instructions of the library `run` executes: a cost that does not depend on the machine."""
    count = 0

    def trace(frame, event, _):
        nonlocal count
        if not frame.f_code.co_filename.startswith(package):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        run()
    finally:
        sys.settrace(before)
    return count


def cost(layers, bias, foreach):
    """Instructions for building an optimizer and for its first step."""
    model, made = nn.Sequential(*[nn.Linear(2, 2, bias) for _ in range(layers)]), []
    built = opcodes(lambda: made.append(evenstep.UnitStep(model, foreach=foreach)))
    model(torch.randn(4, 2)).sum().backward()
    return torch.tensor([built, opcodes(made[0].step)])


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("foreach", [None, False])
def test_building_and_the_first_step_cost_in_proportion_to_the_layers(foreach, bias):
    few, more, many = (cost(layers, bias, foreach) for layers in (10, 30, 90))
    assert ((many - more) < 3.2 * (more - few)).all()
