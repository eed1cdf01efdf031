"""What users change between two steps: state, memory, devices, dtypes, groups, parameters; fused steps must follow.

Each test makes the same changes for an optimizer that steps block by block (`foreach=False`) and for a fused one.
"""

import copy
import pickle
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import evenstep
from cases import BY_HAND
from helpers import CPU_AND_GPU, GPU, Net, states, train

CLOSE = {"rtol": 1e-9, "atol": 1e-11}
ROUNDED = {"rtol": 1e-3, "atol": 1e-4}  # for float32
some_optimizers = pytest.mark.parametrize("name", ["momentum", "even"])


def pair(name="even"):
    """The same network with a step block by block and with a fused one."""
    torch.manual_seed(3)
    single = Net().double()
    many = copy.deepcopy(single)
    return (single, BY_HAND[name].build(single, foreach=False)), (many, BY_HAND[name].build(many))


def assert_same(one, other, close=CLOSE):
    """Compare weights, state and guards of two runs."""
    (model, optimizer), (changed, copied) = one, other
    for a, b in zip(model.parameters(), changed.parameters(), strict=True):
        assert_close(b, a, **close)
    expected, found = states(optimizer, model), states(copied, changed)
    assert expected.keys() == found.keys()
    for key, value in expected.items():
        assert_close(found[key], value, msg=lambda m, key=key: f"{key}: {m}", **close)
    for key, shares in optimizer.fired().items():
        assert shares == pytest.approx(copied.fired()[key], abs=0.02)  # an input may have a variance of rounding alone


@some_optimizers
def test_state_replaced_by_other_tensors_is_used(name):
    both = pair(name)
    for model, optimizer in both:
        train(optimizer, model, "cpu", steps=3)
        for state in optimizer.state.values():
            for key, value in state.items():
                state[key] = value.clone() if key == "step" else value * 1.5
        train(optimizer, model, "cpu", steps=3)
    assert_same(*both)


def test_state_written_in_place_is_used():
    both = pair()
    for model, optimizer in both:
        train(optimizer, model, "cpu", steps=3)
        optimizer.state[model.second.weight]["mx"].add_(0.5)
        optimizer.state[model.second.weight]["mass"].fill_(0.25)
        train(optimizer, model, "cpu", steps=3)
    assert_same(*both)


@pytest.mark.parametrize("name", BY_HAND)
def test_state_that_is_deleted_is_made_anew(name):
    both = pair(name)
    for model, optimizer in both:
        train(optimizer, model, "cpu", steps=3)
        del optimizer.state[model.second.weight]
        train(optimizer, model, "cpu", steps=3)
        optimizer.state.clear()
        train(optimizer, model, "cpu", steps=3)
    assert_same(*both)


def test_a_pickled_optimizer_holds_each_number_once():
    """If state tensors are views of shared storage, a naive pickle writes the whole storage for each view."""
    model = nn.Sequential(*[nn.Linear(32, 32) for _ in range(10)])
    optimizer = evenstep.UnitStep(model)
    model(torch.randn(8, 32)).square().mean().backward()
    optimizer.step()
    numbers = sum(t.numel() for t in [*model.parameters(), *(t for s in optimizer.state.values() for t in s.values())])
    written = pickle.dumps(optimizer)
    assert len(written) < 1.5 * 4 * numbers + 400 * 10 * 10
    for mine, copied in zip(optimizer.state.values(), pickle.loads(written).state.values(), strict=True):
        assert_close(copied, mine)


@pytest.mark.parametrize("foreach", [None, False])
@some_optimizers
def test_a_checkpoint_loaded_into_a_live_optimizer_goes_on_as_the_saved_one(name, foreach):
    saved, live = pair(name)[0][0], pair(name)[0][0]
    case = BY_HAND[name]
    optimizer, loaded = case.build(saved, foreach=foreach), case.build(live, foreach=foreach)
    train(optimizer, saved, "cpu", steps=3)
    train(loaded, live, "cpu", steps=2)
    live.load_state_dict(saved.state_dict())
    loaded.load_state_dict(optimizer.state_dict())
    for model, resumed in ((saved, optimizer), (live, loaded)):
        train(resumed, model, "cpu", steps=3)
    for a, b in zip(saved.parameters(), live.parameters(), strict=True):
        assert_close(b, a, **CLOSE)
    for key, value in states(optimizer, saved).items():
        assert_close(states(loaded, live)[key], value, msg=lambda m, key=key: f"{key}: {m}", **CLOSE)


def convolutions(dtype):
    torch.manual_seed(3)
    layers = [nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=2), nn.Flatten(), nn.Linear(128, 4)]
    return nn.Sequential(*layers).to(dtype)


def train_images(model, optimizer, steps, change=lambda step: None):
    """Train on random images; `change(step)` comes before each step's forward pass."""
    for step in steps:
        change(step)
        x = torch.randn(5, 3, 8, 8, generator=torch.Generator().manual_seed(step)).to(model[0].weight)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("foreach", [None, False])
@pytest.mark.parametrize("device", CPU_AND_GPU)
@some_optimizers
def test_a_new_memory_layout_changes_nothing(name, device, foreach):
    model = convolutions(torch.float64 if device == "cpu" else torch.float32).to(device)
    changing = copy.deepcopy(model)
    optimizer, other = (BY_HAND[name].build(m, foreach=foreach) for m in (model, changing))
    layouts = torch.contiguous_format, torch.channels_last
    train_images(model, optimizer, range(4))
    train_images(changing, other, range(4), lambda step: changing.to(memory_format=layouts[step % 2]))
    assert_same((model, optimizer), (changing, other), CLOSE if device == "cpu" else ROUNDED)


@pytest.mark.gpu
@pytest.mark.parametrize("foreach", [None, False])
@some_optimizers
def test_a_move_to_another_device_and_back_changes_nothing(name, foreach):
    model = convolutions(torch.float32)
    moving = copy.deepcopy(model)
    optimizer, other = (BY_HAND[name].build(m, foreach=foreach) for m in (model, moving))
    train_images(model, optimizer, range(6))
    train_images(moving, other, range(6), lambda step: moving.to(GPU if step in (2, 3) else "cpu"))
    assert_same((model, optimizer), (moving, other), ROUNDED)


@some_optimizers
def test_weights_that_move_in_memory_are_followed(name):
    both = pair(name)
    for model, optimizer in both:
        train(optimizer, model, "cpu", steps=3)
        for p in model.parameters():
            p.data = p.data.clone()
        train(optimizer, model, "cpu", steps=3)
    assert_same(*both)


@some_optimizers
def test_a_new_dtype_is_followed(name):
    both = pair(name)
    for model, optimizer in both:
        for dtype in (torch.float64, torch.float32, torch.float64):
            train(optimizer, model.to(dtype), "cpu", steps=2)
    assert all(p.dtype == torch.float64 and p.isfinite().all() for p in both[0][0].parameters())
    assert_same(*both, ROUNDED)


def test_gradients_in_another_memory_order_change_nothing():
    both = pair("momentum")
    for model, optimizer in both:
        for _ in range(3):
            optimizer.zero_grad()
            (model(torch.arange(11)) - 1).square().mean().backward()
            for p in model.parameters():
                if optimizer is both[1][1] and p.grad is not None and p.dim() > 1:
                    p.grad = p.grad.transpose(0, 1).contiguous().transpose(0, 1)
            optimizer.step()
    assert_same(*both)


@some_optimizers
def test_settings_that_change_are_followed(name):
    both = pair(name)
    for model, optimizer in both:
        (group,) = optimizer.param_groups
        for setting in ({}, {"lr": 0.01}, {"trust": 0.01}, {"damping": 0.5, "decay": 0.5}, {"fresh_max": 0.5}, {}):
            group.update(setting)
            train(optimizer, model, "cpu", steps=2)
    assert_same(*both)


def groups_of(model):
    """The parameters of two layers, and all others."""
    some = [*model.second.parameters(), *model.conv.parameters()]
    return some, [p for p in model.parameters() if not any(p is q for q in some)]


@pytest.mark.parametrize(
    "setting", [{"decay": 0.5, "lr": 0.1, "trust": 0.01}, {"trust": None}, {"fresh_max": None, "weight_decay": 0.1}]
)
@pytest.mark.parametrize("added", [False, True], ids=["at the start", "later"])
@some_optimizers
def test_layers_have_settings_of_their_own(name, added, setting):
    both = []
    for foreach in (False, None):
        torch.manual_seed(3)
        model = Net().double()
        some, rest = groups_of(model)
        own = {"params": some, **setting}
        optimizer = BY_HAND[name].build([{"params": rest}] + [own] * (not added), model=model, foreach=foreach)
        if added:
            train(optimizer, model, "cpu", steps=3)
            optimizer.add_param_group(own)
        train(optimizer, model, "cpu")
        both.append((model, optimizer))
        if "trust" in setting and setting["trust"] is None:
            assert optimizer.fired()["second"][1] == optimizer.fired()["conv"][1] == 0
    assert_same(*both)


@pytest.mark.parametrize("foreach", [None, False])
def test_inputs_whose_squares_overflow_leave_the_moments(foreach):
    model = nn.Linear(4, 3).double()
    optimizer = evenstep.WhitenedSGD(model, lr=0.01, foreach=foreach)
    for scale in (1.0, 1e160):
        before = {key: value.clone() for key, value in states(optimizer, model).items()}
        optimizer.zero_grad()
        (model(scale * torch.randn(8, 4).double()) / scale).square().mean().backward()
        optimizer.step()
    for key in ("weight.mx", "weight.vx"):
        assert torch.equal(states(optimizer, model)[key], before[key])


def test_a_layer_in_eval_mode_keeps_its_moments():
    both = []
    for foreach in (False, None):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 3)).double()
        optimizer = evenstep.WhitenedSGD(model, lr=0.01, momentum=0.9, foreach=foreach)
        for step in range(5):
            optimizer.zero_grad()
            x = torch.randn(16, 5, generator=torch.Generator().manual_seed(step)).double()
            model[2].train(step != 3)
            model(x).square().mean().backward()
            with pytest.warns(UserWarning, match="saw no input") if step == 3 else nullcontext():
                optimizer.step()
        both.append((model, optimizer))
    assert_same(*both)


@some_optimizers
def test_layers_may_freeze_and_train_again(name):
    """The state of frozen layers must not keep the state of all others in memory."""
    both, sizes = pair(name), []
    for model, optimizer in both:
        train(optimizer, model, "cpu", steps=3)
        for layer in (model.conv, model.second):
            layer.requires_grad_(False)
            train(optimizer, model, "cpu", steps=2)
        storages = [t.untyped_storage() for state in optimizer.state.values() for t in state.values()]
        sizes.append(sum({s.data_ptr(): s.nbytes() for s in storages}.values()))
        model.requires_grad_(True)
        train(optimizer, model, "cpu", steps=2)
    assert_same(*both)
    assert sizes[1] < 1.2 * sizes[0]
