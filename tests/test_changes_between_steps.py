"""What users change between two steps: state, memory, devices, dtypes, groups, parameters; fused steps must follow.

Each test makes the same changes for an optimizer that steps block by block (`foreach=False`) and for a fused one.
"""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import evenstep
from cases import BY_HAND
from helpers import GPU, Net, backward, classify, descend, images, small_network, states, train, twins
from helpers import assert_same as assert_weights_agree

CLOSE = {"rtol": 1e-9, "atol": 1e-11}
ROUNDED = {"rtol": 1e-3, "atol": 1e-4}  # for float32
some_optimizers = pytest.mark.parametrize("name", ["momentum", "unitstep"])


def pair(name="unitstep"):
    """The same network with a step block by block and with a fused one."""
    torch.manual_seed(3)
    single = Net().double()
    many = copy.deepcopy(single)
    return (single, BY_HAND[name].build(single, foreach=False)), (many, BY_HAND[name].build(many))


def assert_same(one, other, close=CLOSE):
    """Compare weights, state and guards of two runs."""
    (model, optimizer), (changed, copied) = one, other
    assert_weights_agree(model, changed, **close)
    expected, found = states(optimizer, model), states(copied, changed)
    assert expected.keys() == found.keys()
    for key, value in expected.items():
        assert_close(found[key], value, msg=lambda m, key=key: f"{key}: {m}", **close)
    for key, shares in optimizer.fired().items():
        assert shares == pytest.approx(copied.fired()[key], abs=0.02)  # an input may have a variance of rounding alone


def replace_state(model, optimizer):
    for state in optimizer.state.values():
        for key, value in state.items():
            state[key] = value.clone() if key == "step" else value * 1.5


def write_into_state(model, optimizer):
    for state in optimizer.state.values():
        for key, value in state.items():
            value.mul_(1.0 if key == "step" else 1.5)


def load_a_checkpoint(model, optimizer):
    """From before the last two steps."""
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    train(optimizer, model, "cpu", steps=2)
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])


def move_weights_in_memory(model, optimizer):
    for p in model.parameters():
        p.data = p.data.clone()


def freeze_layers(model, optimizer):
    for layer in (model.conv, model.second):
        layer.requires_grad_(False)


def thaw_layers(model, optimizer):
    model.requires_grad_(True)
    model.frozen.bias.requires_grad_(False)


def change_settings(**settings):
    return lambda model, optimizer: optimizer.param_groups[0].update(settings)


CHANGES = {
    "state is replaced": [replace_state],
    "state is written into": [write_into_state],
    "state is deleted": [
        lambda model, optimizer: optimizer.state.pop(model.second.weight),
        lambda model, optimizer: optimizer.state.clear(),
    ],
    "a checkpoint is loaded": [load_a_checkpoint],
    "weights move in memory": [move_weights_in_memory],
    "layers freeze and thaw": [freeze_layers, thaw_layers],
    "layers are in eval mode": [lambda model, _: model.second.eval(), lambda model, _: model.train()],
    "the dtype is another": [lambda model, _: model.float(), lambda model, _: model.double()],
    "settings change": [
        change_settings(**settings)
        for settings in ({"lr": 0.01}, {"trust": 0.01}, {"damping": 0.5, "decay": 0.5}, {"fresh_max": 0.5})
    ],
}


@pytest.mark.filterwarnings("ignore:.*layer 'second' .* saw no input")
@pytest.mark.parametrize("name", BY_HAND)
@pytest.mark.parametrize("change", CHANGES)
def test_a_fused_step_follows_what_changes_as_one_block_by_block_does(name, change):
    both = pair(name)
    for model, optimizer in both:
        train(optimizer, model, "cpu", steps=3)
        for alter in CHANGES[change]:
            alter(model, optimizer)
            train(optimizer, model, "cpu", steps=2)
    assert_same(*both, ROUNDED if change == "the dtype is another" else CLOSE)


def test_the_state_of_frozen_layers_does_not_keep_that_of_all_others_in_memory():
    sizes = []
    for model, optimizer in pair():
        train(optimizer, model, "cpu", steps=3)
        freeze_layers(model, optimizer)
        train(optimizer, model, "cpu", steps=2)
        storages = [t.untyped_storage() for state in optimizer.state.values() for t in state.values()]
        sizes.append(sum({s.data_ptr(): s.nbytes() for s in storages}.values()))
    assert sizes[1] < 1.2 * sizes[0]


def test_a_pickled_optimizer_holds_each_number_once():
    """If state tensors are views of shared storage, a naive pickle writes the whole storage for each view."""
    model = nn.Sequential(*[nn.Linear(32, 32) for _ in range(10)])
    optimizer = evenstep.UnitStep(model)
    descend(optimizer, model(torch.randn(8, 32)).square().mean())
    numbers = sum(t.numel() for t in [*model.parameters(), *(t for s in optimizer.state.values() for t in s.values())])
    written = pickle.dumps(optimizer)
    assert len(written) < 1.5 * 4 * numbers + 400 * 10 * 10
    for mine, copied in zip(optimizer.state.values(), pickle.loads(written).state.values(), strict=True):
        assert_close(copied, mine)


def train_images(model, optimizer, steps, change=lambda step: None):
    """Train on random images; `change(step)` comes before each step's forward pass."""
    for step in range(steps):
        change(step)
        torch.manual_seed(step)
        x, y = images(5)
        classify(optimizer, model, [(x.to(model[0].weight), y.to(model[0].weight.device))])


def lay_out_anew(model, step):
    model.to(memory_format=(torch.contiguous_format, torch.channels_last)[step % 2])


def visit_the_gpu(model, step):
    model.to(GPU if step in (2, 3) else "cpu")


ON_GPU = [pytest.param(at, move, marks=pytest.mark.gpu) for at, move in ((GPU, lay_out_anew), ("cpu", visit_the_gpu))]


@pytest.mark.parametrize("foreach", [None, False])
@pytest.mark.parametrize(("device", "move"), [("cpu", lay_out_anew), *ON_GPU])
@some_optimizers
def test_a_new_memory_layout_or_device_changes_nothing(name, device, move, foreach):
    exact = device == "cpu" and move is lay_out_anew
    model, moving = twins(lambda: small_network().to(device, torch.float64 if exact else torch.float32))
    optimizer, other = (BY_HAND[name].build(m, foreach=foreach) for m in (model, moving))
    train_images(model, optimizer, 6)
    train_images(moving, other, 6, lambda step: move(moving, step))
    assert_same((model, optimizer), (moving, other), CLOSE if exact else ROUNDED)


def test_gradients_in_another_memory_order_change_nothing():
    both = pair("momentum")
    for model, optimizer in both:
        for step in range(3):
            backward(optimizer, model, "cpu", step)
            for p in model.parameters():
                if optimizer is both[1][1] and p.grad is not None and p.dim() > 1:
                    p.grad = p.grad.transpose(0, 1).contiguous().transpose(0, 1)
            optimizer.step()
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
