"""Rules of torch's that are shown many blocks at once, against the same rules shown one after the other."""

import copy
import functools

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from conftest import needs_c
from evenstep import Whitened
from evenstep.given import EVENLY, Given
from test_kernels import RULES, Net, backward, states, train
from test_whitened import CountsInGroup, Lion

pytestmark = needs_c
CLOSE = {"rtol": 1e-9, "atol": 1e-11}


def replace_state(model, optimizer):
    """Other tensors, and in another order in memory."""
    for state in optimizer.state.values():
        for key, value in state.items():
            if torch.is_tensor(value) and key != "step":
                state[key] = value.clone().mT.contiguous().mT if value.dim() > 1 else value.clone()


def take_state_away(model, optimizer):
    del optimizer.state[model.second.weight]
    optimizer.state[model.conv.weight].clear()


def change_settings(model, optimizer):
    (group,) = optimizer.param_groups
    group.update({"lr": 0.002, "trust": 0.01, "damping": 0.5, "decay": 0.5, "weight_decay": 0.2, "fan_in_power": 0.1})


def change_what_it_sees(model, optimizer):
    """As one matrix, or as weight and bias."""
    (group,) = optimizer.param_groups
    group["joint"] = not group["joint"]


def lay_otherwise(model, optimizer):
    model.to(memory_format=torch.channels_last)


def freeze(model, optimizer):
    optimizer.zero_grad()
    model.second.bias.requires_grad_(False)
    model.grouped.weight.requires_grad_(False)


def load(model, optimizer):
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def load_from_pickle(model, optimizer):
    """Steps made, a copy has no model and no plan, and its state is its own."""
    copied = copy.deepcopy(optimizer)
    assert copied._plan is None
    optimizer.load_state_dict(copied.state_dict())


CHANGES = [
    replace_state,
    take_state_away,
    change_settings,
    change_what_it_sees,
    lay_otherwise,
    freeze,
    load,
    load_from_pickle,
]


@pytest.mark.parametrize(
    ("name", "change"),
    [
        (name, change)
        for name in ("adamw", "nesterov-joint", "muon")
        for change in CHANGES
        if (name, change) != ("muon", change_what_it_sees)  # it takes matrices alone, and this network has others
    ],
    ids=lambda x: x if isinstance(x, str) else x.__name__,
)
def test_what_changes_between_steps_is_followed(name, change):
    torch.manual_seed(3)
    single = Net().double()
    many = copy.deepcopy(single)
    both = (single, RULES[name](single, foreach=False)), (many, RULES[name](many))
    for model, optimizer in both:
        train(optimizer, model, "cpu", steps=3)
        change(model, optimizer)
        train(optimizer, model, "cpu", steps=3)
    (_, loop), (_, together) = both
    assert together._plan.layouts and not loop._plan.layouts
    for (label, a), b in zip(single.named_parameters(), many.parameters(), strict=True):
        assert_close(b, a, msg=lambda m, label=label: f"{label}: {m}", **CLOSE)
    expected, found = states(loop, single), states(together, many)
    assert expected.keys() == found.keys()
    for key, value in expected.items():
        assert_close(found[key], value, msg=lambda m, key=key: f"{key}: {m}", **CLOSE)


class Mixed(nn.Module):
    """Two layers that are shown together, and one that is not: what it is given lies between zeros."""

    def __init__(self):
        super().__init__()
        self.first, self.apart, self.last = nn.Linear(6, 8), nn.ConvTranspose1d(2, 3, 3, stride=2), nn.Linear(27, 3)

    def forward(self, x):
        return self.last(self.apart(self.first(x).relu().view(-1, 2, 4)).flatten(1).relu())


@pytest.mark.parametrize("rule", [CountsInGroup, Lion, functools.partial(torch.optim.SGD, momentum=0.9)])
def test_a_rule_steps_once_whatever_it_is_shown_together(rule):
    torch.manual_seed(0)
    single = Mixed().double()
    many = copy.deepcopy(single)
    loop, together = (Whitened(m, rule, lr=0.01, foreach=f) for m, f in ((single, False), (many, None)))
    for _ in range(4):
        x = torch.randn(16, 6, dtype=torch.float64)
        for model, optimizer in ((single, loop), (many, together)):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    assert [len(lay.blocks) for lay in together._plan.layouts] == [2] and len(together._plan.rest) == 1
    assert together.param_groups[0].get("k") == loop.param_groups[0].get("k") == (4 if rule is CountsInGroup else None)
    for a, b in zip(single.parameters(), many.parameters(), strict=True):
        assert_close(b, a, **CLOSE)


class Fails(torch.optim.AdamW):
    """Fails when it is told to."""

    now = False

    def step(self, closure=None):
        if self.now:
            raise RuntimeError("not now")
        return super().step(closure)


def memory(optimizer):
    return [lay.given.both.untyped_storage().nbytes() for lay in optimizer._plan.layouts]


def test_memory_is_given_back_whatever_the_rule_does(monkeypatch):
    model = Net()
    optimizer = Whitened(model, Fails, lr=0.001)
    train(optimizer, model, "cpu", steps=1)
    assert memory(optimizer) == [0]
    backward(optimizer, model, "cpu", 1)
    before = copy.deepcopy(model.state_dict())
    monkeypatch.setattr(Fails, "now", True)
    with pytest.raises(RuntimeError, match="not now"):
        optimizer.step()
    assert memory(optimizer) == [0]
    assert_close(model.state_dict(), before, rtol=0, atol=0)
    monkeypatch.setattr(Fails, "now", False)
    optimizer.step()
    assert not torch.equal(model.second.weight, before["second.weight"])


@pytest.mark.filterwarnings("ignore:.*not finite")
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_the_rule_is_not_shown_what_is_not_finite(value):
    model = Net()
    optimizer = RULES["adamw"](model)
    train(optimizer, model, "cpu", steps=2)
    before = copy.deepcopy((model.state_dict(), states(optimizer, model)))
    backward(optimizer, model, "cpu", 2)
    model.conv.bias.grad[1] = value
    optimizer.step()
    assert optimizer.nonfinite_steps == 1 and memory(optimizer) == [0]
    assert_close((model.state_dict(), states(optimizer, model)), before, rtol=0, atol=0)


def test_gradients_whose_squares_overflow_are_finite():
    """A rule's step of them may be as good as any."""
    model = nn.Sequential(nn.Linear(4, 3)).double()
    optimizer = Whitened(model, Lion, lr=0.01, trust=None)
    before = model[0].weight.detach().clone()
    model(torch.randn(8, 4, dtype=torch.float64)).mul(1e200).sum().backward()
    optimizer.step()
    assert optimizer.nonfinite_steps == 0 and (model[0].weight - before).abs().max() > 0


def test_stand_ins_lie_evenly_apart_and_where_kernels_write():
    model = Net()
    optimizer = Whitened(model, torch.optim.AdamW)
    blocks = [b for b in optimizer._blocks(lambda p: p.requires_grad) if len(b.biases) < 2]
    for joint in (lambda block: False, lambda block: block.entry is not None):
        given = Given(blocks, joint)
        given.open()
        given.both.zero_()
        places = [one.q for some in given.stand_ins for one in some]
        for count, q in enumerate(places, start=1):
            assert (q.data_ptr() - given.both.data_ptr()) % (EVENLY * 4) == 0
            with torch.no_grad():
                q.fill_(count)
                q.grad.fill_(-count)
        for half, sign in zip(given.both, (-1, 1), strict=True):
            for count, q in enumerate(places, start=1):
                assert (half == sign * count).sum() == q.numel()
        size = given.both.element_size()
        first = [(a - given.both.data_ptr()) // size for a, *_ in given.addresses()]
        assert first == [place.start for place in given.places]
