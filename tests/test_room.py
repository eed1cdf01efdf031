"""Steps of many blocks on the CPU: what hooks hold until it is asked for, and state that lies end to end."""

import copy
import pickle
import sys
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import evenstep
from evenstep.math.moments import thinned
from evenstep.model.layers import Look
from evenstep.statistics import batch as stages
from evenstep.statistics.batch import LayerStatistics
from evenstep.step import room
from test_kernels import CPU_AND_GPU, OPTIMIZERS, Net, states, train

pytestmark = pytest.mark.usefixtures("by")
CLOSE = {"rtol": 1e-9, "atol": 1e-11}


def pair(name="even", **options):
    """The same network under the loop and under the step of many blocks."""
    torch.manual_seed(3)
    single = Net().double()
    many = copy.deepcopy(single)
    make = OPTIMIZERS[name]
    return (single, make(single, foreach=False, **options)), (many, make(many, **options))


def assert_same(one, other):
    (single, loop), (many, together) = one, other
    assert together._plan.layouts and not loop._plan.layouts
    for a, b in zip(single.parameters(), many.parameters(), strict=True):
        assert_close(b, a, **CLOSE)
    expected, found = states(loop, single), states(together, many)
    assert expected.keys() == found.keys()
    for key, value in expected.items():
        assert_close(found[key], value, msg=lambda m, key=key: f"{key}: {m}", **CLOSE)
    for key, shares in loop.fired().items():
        assert shares == pytest.approx(together.fired()[key], abs=0.02)  # one input whose variance is rounding alone
    for a, b in zip(loop._statistics.layers.values(), together._statistics.layers.values(), strict=True):
        assert_close(b.last, a.last, rtol=1e-5, atol=1e-7)


def asked(stage):
    """What a stage has added up, by the way of a step on the CPU."""
    places = [torch.full_like(stage.centre, torch.nan) for _ in range(2)]
    stage.write_sums(*places)
    return places


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize(("shape", "dim"), [((9, 5), 1), ((4, 3, 7), 2), ((5, 6, 8, 9), 1), ((7,), 0)])
def test_a_held_call_adds_up_to_what_was_seen(shape, dim, dtype):
    torch.manual_seed(0)
    held, plain = (LayerStatistics(shape[dim], 0, torch.zeros(1), limit=40) for _ in range(2))
    held.mark_zero()
    for k in range(3):
        x = (3 + torch.randn(shape)).to(dtype)
        look = Look(x, dim, 2, 6, zeros=k)
        held.add_planned_call(x, stages.plan_call(x, look, 40))
        plain._add(thinned(x, dim, 40), look)
    counts, sums = held.counts(), asked(held)
    assert held.pending is not None and plain.pending is None
    assert counts == plain.tally.tolist() == held.tally.tolist()
    assert_close(sums, [*plain.slots[0]])
    assert_close(held.slots, plain.slots)
    assert_close(held.centre, plain.centre, equal_nan=True)


def test_what_is_asked_for_can_be_asked_for_again():
    model = nn.Sequential(nn.Linear(4, 4))
    optimizer = evenstep.WhitenedSGD(model)
    model(torch.randn(8, 4))
    (stage,) = optimizer._statistics.layers.values()
    sums = asked(stage)
    assert_close(asked(stage), sums)
    assert_close([*stage.slots[0]], sums)
    assert_close([*stage.slots[0]], sums)
    assert stage.applied == stage.rows == stage.examples == 8


def test_examples_are_counted_once_per_announced_forward_and_in_every_call_outside():
    layer = nn.Linear(4, 4)
    model = nn.Sequential(layer, layer)
    optimizer = evenstep.WhitenedSGD(model)
    (stage,) = optimizer._statistics.layers.values()
    model(torch.randn(8, 4))
    model(torch.randn(8, 4))
    assert stage.examples.item() == 16 and stage.applied.item() == 32
    layer(layer(torch.randn(8, 4)))
    assert stage.examples.item() == 32 and stage.applied.item() == 48


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_small_rooms_serve_large_layers(name, monkeypatch):
    monkeypatch.setattr(room, "KEPT", 0)
    monkeypatch.setattr(room, "PIECE", 16)
    monkeypatch.setattr(stages, "PENDING_LIMIT", 0)
    both = pair(name)
    for model, optimizer in both:
        train(optimizer, model, "cpu")
    assert_same(*both)


@pytest.mark.parametrize("name", ["momentum", "even"])
def test_state_put_in_place_of_ours_is_taken_over(name):
    both = pair(name)
    for model, optimizer in both:
        train(optimizer, model, "cpu", steps=3)
        for state in optimizer.state.values():
            for key, value in state.items():
                state[key] = value.clone() if key == "step" else value * 1.5
        train(optimizer, model, "cpu", steps=3)
    assert_same(*both)


@pytest.mark.parametrize("device", CPU_AND_GPU)
@pytest.mark.parametrize("name", ["momentum", "even"])
def test_a_network_may_change_its_layout_in_memory(name, device):
    torch.manual_seed(3)
    layers = [nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=2), nn.Flatten(), nn.Linear(128, 4)]
    one = nn.Sequential(*layers).to(device, torch.float64 if device == "cpu" else torch.float32)
    other = copy.deepcopy(one)
    both = (one, OPTIMIZERS[name](one, foreach=False)), (other, OPTIMIZERS[name](other))
    for step in range(4):
        x = torch.randn(5, 3, 8, 8).to(one[0].weight)
        for model, optimizer in both:
            model.to(memory_format=torch.channels_last if step % 2 else torch.contiguous_format)
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    close = CLOSE if device == "cpu" else {"rtol": 1e-3, "atol": 1e-4}
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        assert_close(b, a, **close)


def test_a_pickled_optimizer_has_every_number_once():
    """State lies end to end; pickle would write all of it for every part."""
    model = nn.Sequential(*[nn.Linear(32, 32) for _ in range(10)])
    optimizer = evenstep.UnitStep(model)
    model(torch.randn(8, 32)).square().mean().backward()
    optimizer.step()
    numbers = sum(t.numel() for t in [*model.parameters(), *(t for s in optimizer.state.values() for t in s.values())])
    written = pickle.dumps(optimizer)
    assert len(written) < 1.5 * 4 * numbers + 400 * 10 * 10
    for mine, copied in zip(optimizer.state.values(), pickle.loads(written).state.values(), strict=True):
        assert_close(copied, mine)


def test_state_written_to_is_seen():
    both = pair()
    for model, optimizer in both:
        train(optimizer, model, "cpu", steps=3)
        optimizer.state[model.second.weight]["mx"].add_(0.5)
        optimizer.state[model.second.weight]["mass"].fill_(0.25)
        train(optimizer, model, "cpu", steps=3)
    assert_same(*both)


@pytest.mark.parametrize("name", ["momentum", "even"])
def test_a_checkpoint_goes_on(name):
    both = pair(name)
    after = []
    for model, optimizer in both:
        train(optimizer, model, "cpu", steps=3)
        again = copy.deepcopy(model)
        option = {"foreach": False} if optimizer is both[0][1] else {}
        loaded = OPTIMIZERS[name](again, **option)
        train(loaded, again, "cpu", steps=2)
        again.load_state_dict(model.state_dict())
        loaded.load_state_dict(optimizer.state_dict())
        train(loaded, again, "cpu", steps=3)
        train(optimizer, model, "cpu", steps=3)
        after.append((again, loaded))
    for (model, optimizer), (again, loaded) in zip(both, after, strict=True):
        for key, value in states(optimizer, model).items():
            assert_close(states(loaded, again)[key], value, msg=lambda m, key=key: f"{key}: {m}", **CLOSE)
    for a, b in zip(both[0][0].parameters(), after[1][0].parameters(), strict=True):
        assert_close(b, a, **CLOSE)


@pytest.mark.parametrize("name", ["momentum", "even"])
def test_settings_that_change_are_followed(name):
    both = pair(name)
    for model, optimizer in both:
        (group,) = optimizer.param_groups
        for setting in ({}, {"lr": 0.01}, {"trust": 0.01}, {"damping": 0.5, "decay": 0.5}, {"fresh_max": 0.5}, {}):
            group.update(setting)
            train(optimizer, model, "cpu", steps=2)
    assert_same(*both)


def test_layers_with_settings_of_their_own():
    both = []
    for foreach in (False, None):
        torch.manual_seed(3)
        model = Net().double()
        first = [*model.second.parameters(), *model.conv.parameters()]
        rest = [p for p in model.parameters() if not any(p is q for q in first)]
        groups = [{"params": first, "decay": 0.5, "lr": 0.1, "trust": 0.01}, {"params": rest, "weight_decay": 0.1}]
        optimizer = evenstep.UnitStep(groups, lr=0.03, model=model, foreach=foreach)
        train(optimizer, model, "cpu")
        both.append((model, optimizer))
    assert_same(*both)


def test_a_batch_that_overflows_leaves_the_moments():
    both = pair("momentum")
    for model, optimizer in both:
        train(optimizer, model, "cpu", steps=3)
        optimizer.zero_grad()
        (model(torch.arange(11)) - 1).square().mean().backward()
        stage = next(s for e, s in optimizer._statistics.items() if e.weight is model.second.weight)
        stage.slots[0, 1, 2] = torch.inf
        before = optimizer.state[model.second.weight]["mx"].clone()
        optimizer.step()
        assert torch.equal(optimizer.state[model.second.weight]["mx"], before)
        train(optimizer, model, "cpu", steps=2)
    assert_same(*both)


def test_gradients_in_another_order_in_memory():
    both = pair("momentum")
    for model, optimizer in both:
        for _ in range(3):
            optimizer.zero_grad()
            (model(torch.arange(11)) - 1).square().mean().backward()
            for p in model.parameters():
                if p.grad is not None and p.dim() == 4:
                    p.grad = p.grad.contiguous(memory_format=torch.channels_last)
                elif p.grad is not None and p.dim() == 2:
                    p.grad = p.grad.T.contiguous().T
            optimizer.step()
    assert_same(*both)


def test_unused_layers_keep_their_moments():
    """A layer that has a gradient but was not called since the last step."""
    both = []
    for foreach in (False, None):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 3)).double()
        optimizer = evenstep.WhitenedSGD(model, lr=0.01, momentum=0.9, foreach=foreach)
        for step in range(5):
            optimizer.zero_grad()
            x = torch.randn(16, 5, generator=torch.Generator().manual_seed(step)).double()
            if step == 3:
                model[2].eval()
            model(x).square().mean().backward()
            with pytest.warns(UserWarning, match="saw no input") if step == 3 else nullcontext():
                optimizer.step()
            model.train()
        both.append((model, optimizer))
    assert_same(*both)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_taken_away_is_made_anew_alike(name):
    both = pair(name)
    for model, optimizer in both:
        train(optimizer, model, "cpu", steps=3)
        del optimizer.state[model.second.weight]
        train(optimizer, model, "cpu", steps=3)
        optimizer.state.clear()
        train(optimizer, model, "cpu", steps=3)
    assert_same(*both)


def opcodes(run, package=f"{evenstep.__path__[0]}/"):
    """How many instructions of the library's own code `run` takes, whatever the machine."""
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


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("foreach", [None, False])
def test_building_and_planning_grow_in_proportion_to_the_layers(foreach, bias):
    def work(layers):
        model, made = nn.Sequential(*[nn.Linear(2, 2, bias) for _ in range(layers)]), []
        built = opcodes(lambda: made.append(evenstep.UnitStep(model, foreach=foreach)))
        model(torch.randn(4, 2)).sum().backward()
        return torch.tensor([built, opcodes(made[0].step)])

    few, more, many = map(work, (10, 30, 90))
    assert ((many - more) < 3.2 * (more - few)).all()


@pytest.mark.parametrize("name", ["momentum", "even"])
def test_what_leaves_the_step_of_many_takes_no_room_with_it(name):
    """Layers frozen one by one: their state does not keep that of all others."""
    both = pair(name)
    sizes = []
    for model, optimizer in both:
        train(optimizer, model, "cpu", steps=3)
        for layer in (model.conv, model.second):
            layer.requires_grad_(False)
            train(optimizer, model, "cpu", steps=2)
        tensors = [t for state in optimizer.state.values() for t in state.values()]
        sizes.append(sum({s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in tensors)}.values()))
        model.requires_grad_(True)
        train(optimizer, model, "cpu", steps=2)
    assert_same(*both)
    assert sizes[1] < 1.2 * sizes[0]


@pytest.mark.parametrize("trust", [0.01, 10.0])
@pytest.mark.parametrize("fresh_max", [None, 4.0])
@pytest.mark.parametrize("name", ["momentum", "even"])
def test_steps_of_layers_without_a_radius_are_not_told_of(name, fresh_max, trust):
    both = []
    for foreach in (False, None):
        torch.manual_seed(3)
        model = Net().double()
        free = [*model.second.parameters(), *model.conv.parameters()]
        held = [p for p in model.parameters() if not any(p is q for q in free)]
        groups = [{"params": free, "trust": None}, {"params": held, "trust": trust}]
        optimizer = OPTIMIZERS[name](groups, model=model, foreach=foreach, fresh_max=fresh_max)
        train(optimizer, model, "cpu")
        stages = {entry.path: stage for entry, stage in optimizer._statistics.items()}
        assert not stages["second"].last[2] and any(stage.last[2] for stage in stages.values())
        both.append((model, optimizer))
    assert_same(*both)


@pytest.mark.parametrize("device", CPU_AND_GPU)
@pytest.mark.parametrize("foreach", [None, False])
@pytest.mark.parametrize("cls", [evenstep.WhitenedSGD, evenstep.UnitStep])
def test_a_layer_without_bias_whose_inputs_never_vary_trains(cls, foreach, device):
    """Its weights are what the means of its inputs are multiplied by; a variance of 0 would give them no coordinate."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2, bias=False).to(device)
    x, target = torch.tensor([[2.0, 0.0, -1.0]], device=device).expand(8, 3), torch.tensor([1.0, -2.0], device=device)
    optimizer = cls(model, lr=0.05, foreach=foreach)
    unused = model.weight.detach()[:, 1].clone()
    for _ in range(200):
        optimizer.zero_grad()
        loss = (model(x) - target).square().mean()
        loss.backward()
        optimizer.step()
    assert loss < 1e-3
    assert torch.equal(model.weight[:, 1], unused), "an input that is 0 moves nothing"


def test_a_constant_input_is_the_limit_of_small_variances():
    """Down to the floor, a layer without bias takes the same step whatever little its inputs vary."""
    torch.manual_seed(0)
    start = nn.Linear(4, 3, bias=False).double()
    noise, mean, pull = (
        torch.randn(64, 4).double(),
        torch.tensor([1.0, -2.0, 0.5, 3.0]).double(),
        torch.randn(3).double(),
    )
    steps = []
    for spread in (0.0, 1e-4, 1e-2):
        model = copy.deepcopy(start)
        optimizer = evenstep.WhitenedSGD(model, lr=0.01, trust=None, damping=0.0)
        (model(mean + spread * noise) * pull).sum(1).mean().backward()
        optimizer.step()
        steps.append(model.weight.detach() - start.weight)
    response = [(step @ mean) for step in steps]  # how far outputs move
    assert_close(response[0], response[1], rtol=1e-3, atol=0)
    assert_close(response[0], response[2], rtol=0.02, atol=0)
