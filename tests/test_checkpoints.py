"""Checkpoints: old formats load, and what does not fit is refused before anything changes."""

import copy
from math import inf, nan
from pathlib import Path

import pytest
import torch
from torch import nn

import evenstep
from cases import ONE_EACH, OPTIMIZERS
from evenstep import even_step
from evenstep.torch_optimizer import checkpoint as checkpoints
from helpers import Forward, assert_same, every_optimizer, is_finite, module_at, moved_by, same, through_a_file

HERE = Path(__file__).parent
maker = module_at(HERE.parent / "scripts" / "make_checkpoint_fixture.py")
STORED = [(path, name) for path in sorted((HERE / "fixtures").glob("format-*.pt")) for name in maker.NAMES]
NAMES = [*maker.NAMES, "evenstep"]
THEN = {"unitstep": "evenstep"}  # what stored files call the rows that are called otherwise today


def stored_run(path, name):
    """The weights and the state_dict of a row in a stored file."""
    runs = torch.load(path, weights_only=True)
    return runs[name if name in runs else THEN[name]]


def batches(count):
    return torch.randn(count, 5, 2, 3) + 1


def trained(case):
    model = maker.network()
    optimizer = case.build(model)
    maker.train(model, optimizer, batches(3))
    return model, optimizer


def snapshot(model, optimizer):
    """Weights, groups and state, by value and by identity."""
    groups = [group | {"params": list(map(id, group["params"]))} for group in optimizer.param_groups]
    state = {id(p): {name: (id(t), t) for name, t in kept.items()} for p, kept in optimizer.state.items()}
    return copy.deepcopy([maker.flat(model), groups, state])


def assert_refused(model, optimizer, state_dict, message):
    before = snapshot(model, optimizer)
    with pytest.raises(ValueError, match=f"this state_dict does not fit, and nothing was loaded: .*{message}"):
        optimizer.load_state_dict(state_dict)
    assert same(before, snapshot(model, optimizer))


# formats and marks


def test_fixtures_reach_from_the_first_format_to_this_one():
    assert sorted({path.stem for path, _ in STORED}) == [f"format-{n}" for n in range(checkpoints.FORMAT + 1)]


@pytest.mark.parametrize(("path", "name"), STORED, ids=[f"{path.stem}-{name}" for path, name in STORED])
def test_every_stored_format_loads_whole_and_goes_on(path, name):
    run = stored_run(path, name)
    model = maker.network()
    nn.utils.vector_to_parameters(run["weights"].clone(), model.parameters())
    optimizer = OPTIMIZERS[name].build(model)
    optimizer.load_state_dict(run["state_dict"])
    now, then = optimizer.state_dict()["state"], run["state_dict"]["state"]
    assert then and all(same(value, now[key][kept]) for key in then for kept, value in then[key].items())
    maker.train(model, optimizer, batches(2))
    assert is_finite(model) and not torch.equal(maker.flat(model), run["weights"])
    least = 2 if path.stem == "format-0" else 5  # format 0 had no counts under rules that keep none
    assert all(kept["step"] >= least for kept in optimizer.state_dict()["state"].values())


@pytest.mark.parametrize("copied", [through_a_file, copy.copy, copy.deepcopy])
@every_optimizer
def test_the_mark_survives_files_and_copies_and_no_tensor_is_shared(case, copied):
    """torch's own loading shares the step counts."""
    _, optimizer = trained(case)
    state_dict = copied(optimizer.state_dict())
    mark = checkpoints.mark_of(state_dict)
    assert mark["format"] == checkpoints.FORMAT and mark["optimizer"].startswith(case.cls.__name__)
    twin = case.build(maker.network())
    twin.load_state_dict(state_dict)
    assert same(twin.state_dict()["state"], optimizer.state_dict()["state"])
    assert checkpoints.mark_of(twin.state_dict()) == mark
    places, others = ({t.data_ptr() for s in o.state.values() for t in s.values()} for o in (optimizer, twin))
    assert not places & others


def test_a_state_dict_holds_the_live_tensors_and_loading_fills_them():
    """As torch's: what is loaded are the values at the time of loading."""
    model, optimizer = trained(OPTIMIZERS["unitstep"])
    live, earlier = optimizer.state_dict()["state"], copy.deepcopy(optimizer.state_dict())
    tensors = [state["mx"] for state in live.values() if "mx" in state]
    maker.train(model, optimizer, batches(1))
    assert same(live, optimizer.state_dict()["state"]) and not same(live, earlier["state"])
    optimizer.load_state_dict(earlier)
    found = [state["mx"] for state in optimizer.state.values() if "mx" in state]
    assert found and all(value is kept for value, kept in zip(found, tensors, strict=True))
    assert same(optimizer.state_dict()["state"], earlier["state"])


# state that does not fit


BAD_VALUES = {
    "text": ("full", "of type str; a dense floating-point tensor is allowed"),
    "none": (None, "of type NoneType; a dense floating-point tensor is allowed"),
    "bool": (True, "of type bool; a dense floating-point tensor is allowed"),
    "complex": (
        lambda t: t.to(torch.cfloat),
        r"of type tensor \(torch.complex64, torch.strided\); a dense floating-point",
    ),
    "sparse": (lambda t: t.to_sparse(), r"of type tensor \(torch.float32, torch.sparse_coo\); a dense floating-point"),
    "integers": (
        lambda t: t.long(),
        r"of type tensor \(torch.int64, torch.strided\); a dense floating-point tensor is allowed",
    ),
    "shape": (lambda t: t.new_zeros(7, 7, 7), r"of shape \[7, 7, 7\]; .* is allowed"),
    "nan": (lambda t: torch.full_like(t, nan), "with values that are (negative or )?not finite"),
    "inf": (lambda t: torch.full_like(t, inf), "with values that are (negative or )?not finite"),
}


@pytest.mark.feature("checkpoints that do not fit are refused")
@pytest.mark.parametrize("bad", BAD_VALUES)
@pytest.mark.parametrize("case", [OPTIMIZERS[name] for name in NAMES], ids=NAMES)
def test_a_wrong_value_is_refused_with_its_name(case, bad):
    model, optimizer = trained(case)
    value, message = BAD_VALUES[bad]
    names = optimizer.param_groups[0]["param_names"]
    for key, kept in optimizer.state_dict()["state"].items():
        for name, good in kept.items():
            state_dict = copy.deepcopy(optimizer.state_dict())
            state_dict["state"][key][name] = value(good) if callable(value) else value
            for loaded in (state_dict, dict(state_dict)):
                assert_refused(model, optimizer, loaded, f"'{names[key]}' has {name} {message}")


def first(name, change):
    """A change of one value in the state of the first parameter."""
    return lambda s: s["state"][0].update({name: change(s["state"][0][name])})


NOT_ONE = "it needs 'state', a dict, and 'param_groups', dicts with a list of 'params' each"
# how a state_dict is broken, in place or by another, and what the error says
BROKEN = [
    *[
        (first(name, lambda t: t - 1e6), f"'0.weight' has {name} with values that are negative")
        for name in ("vx", "mass", "sharing", "square", "square_mass", "step")
    ],
    *[
        (first("step", lambda _, count=count: count), "'0.weight' has step with values that are negative or not finite")
        for count in (-1, nan, inf)
    ],
    *[
        (first(name, torch.Tensor.bfloat16), rf"{name} of type tensor \(torch.bfloat16, .*\); torch.float32 or")
        for name in ("mx", "vx", "mass", "sharing", "square", "square_mass")
    ],
    (lambda s: maker.network().state_dict(), NOT_ONE),
    (lambda s: [1, 2], NOT_ONE),
    (lambda s: 3, NOT_ONE),
    (lambda s: s.update(param_groups=None), NOT_ONE),
    (lambda s: s.update(param_groups=[3]), NOT_ONE),
    (lambda s: s["param_groups"][0].update(params=None), NOT_ONE),
    (lambda s: s.update(state=None), NOT_ONE),
    (lambda s: s["param_groups"].append({"params": []}), r"its groups have \[6, 0\] parameters, here they have \[6\]"),
    (lambda s: s["state"].update({17: {}}), r"state of unknown parameters: \[17\]"),
    (lambda s: s["state"].update({0: 3}), "the state of each parameter must be a dict"),
    (lambda s: s["state"][0].__delitem__("vx"), "'0.weight' lacks vx"),
]
BROKEN_ADAMW = [  # torch's rules raise at their next step otherwise
    (first("exp_avg", torch.Tensor.double), r"exp_avg of type tensor \(torch.float64, .*\); torch.float32 is allowed"),
    (lambda s: s["param_groups"][0].update(betas=(0.9, nan)), "Whitened: betas must be without nan"),
]


@pytest.mark.parametrize("marked", [True, False])
@pytest.mark.parametrize(
    ("name", "change", "message"),
    [*[("unitstep", *row) for row in BROKEN], *[("whitened-adamw", *row) for row in BROKEN_ADAMW]],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_broken_state_dict_is_refused(name, change, message, marked):
    model, optimizer = trained(OPTIMIZERS[name])
    state_dict = copy.deepcopy(optimizer.state_dict())
    state_dict = state_dict if marked else dict(state_dict)
    other = change(state_dict)
    assert_refused(model, optimizer, state_dict if other is None else other, message)


def test_a_newer_format_is_refused():
    model, optimizer = trained(OPTIMIZERS["unitstep"])
    state_dict = copy.deepcopy(optimizer.state_dict())
    state_dict._evenstep["format"] = checkpoints.FORMAT + 1
    assert_refused(model, optimizer, state_dict, r"its format is \d+, this version reads up to")


def other_optimizers(model):
    """The state_dicts of other optimizers on networks of the same shape, and what is wrong with them."""
    wide = nn.Sequential(nn.Conv1d(2, 4, 2), nn.Tanh(), nn.Flatten(), nn.LayerNorm(8), nn.Linear(8, 2))
    parameters = list(model.parameters())
    return {
        "other shapes": (wide, evenstep.UnitStep(wide), r"'0\.weight' has momentum_buffer of shape \[4, 2, 2\]"),
        "adam": (model, torch.optim.Adam(parameters), "'0.weight' has exp_avg, exp_avg_sq, which is no"),
        "sgd": (model, torch.optim.SGD(parameters, momentum=0.9), "'0.weight' lacks mass, mx, sharing, square"),
        "another class": (model, evenstep.WhitenedSGD(model), "it was saved by WhitenedSGD, not by UnitStep"),
        "fewer parameters": (model[4], evenstep.UnitStep(model[4]), r"its groups have \[2\] parameters, here .* \[6\]"),
    }


@pytest.mark.feature("checkpoints that do not fit are refused")
@pytest.mark.filterwarnings("ignore:.*are also trained by another optimizer")  # built for their checkpoints alone
@pytest.mark.parametrize("which", ["other shapes", "adam", "sgd", "another class", "fewer parameters"])
def test_the_state_of_another_optimizer_is_refused(which):
    network, other, message = other_optimizers(maker.network())[which]
    maker.train(network, other, torch.randn(1, 5, 6) if isinstance(network, nn.Linear) else batches(1))
    assert_refused(*trained(OPTIMIZERS["unitstep"]), other.state_dict(), message)


# hyperparameters that do not fit

NONNEGATIVE, POSITIVE = "a finite number >= 0", "a finite number > 0, or None to turn it off"
LR = f"{NONNEGATIVE} or a one-element tensor"
BAD_OPTIONS = {  # what is allowed, and values that are not; torch's own words come first where it has some
    "lr": (LR, [nan, inf, -1.0, "0.1", None, True, *map(torch.tensor, (nan, [inf], -0.1, [1.0, 1.0], 1j))]),
    "decay": (r"in \[0, 1\)", [1.0, -0.1, 1.5]),
    "momentum": (r"in \[0, 1\)", [1.0, -0.5, 1.5, nan, "0.9", torch.tensor(0.9)]),
    **dict.fromkeys(["damping", "eps", "weight_decay", "plain_lr", "plain_at"], (NONNEGATIVE, [-1.0, nan, inf])),
    **dict.fromkeys(["trust", "fresh_max", "sharing"], (POSITIVE, [0.0, -4.0])),
    "rows": ("a whole number > 0, or None for all of them", [0.5]),
    "block": ("one of 'network', 'unit', 'weight'; got 'layer'", ["layer"]),
    "reduction": ("one of 'mean', 'sum'; got 'none'", ["none"]),
    "maximize": ("one of True, False", ["no"]),
    "capturable": ("one of True, False", [2]),
    "foreach": ("one of None, True, False", ["yes"]),
    "exclude": (r"a list of name patterns; got 'head\.\*'", ["head.*"]),
}


@pytest.mark.parametrize("key", BAD_OPTIONS)
@pytest.mark.parametrize("case", ONE_EACH.values(), ids=ONE_EACH)
def test_a_bad_hyperparameter_is_refused_in_constructors_groups_and_checkpoints(case, key):
    model, optimizer = trained(case)
    (group,), (allowed, values), owner = optimizer.param_groups, BAD_OPTIONS[key], case.cls.__name__
    if key not in group:
        pytest.skip(f"{owner} has no {key}")
    message = rf"(Tensor lr must be 1-element|(Invalid .*)?{owner}: {key} must be {allowed})"
    for value in values:
        torchs = value is None or key == "eps" or (key == "momentum" and value != 1.5)  # for torch's rules to check
        rules = case.cls is evenstep.Whitened and torchs
        if key != "plain_at" and not rules:  # which is no keyword
            with pytest.raises(ValueError, match=message):
                case.build(maker.network(), **{key: value})
        with pytest.raises(ValueError, match=message):
            optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))], key: value})
        assert optimizer.param_groups == [group]
        for marked in (True, False):
            state_dict = copy.deepcopy(optimizer.state_dict())
            state_dict["param_groups"][0][key] = value
            assert_refused(model, optimizer, state_dict if marked else dict(state_dict), message)


# which parameter gets which state


def test_state_loaded_before_the_model_is_known_serves_after_attach():
    model, optimizer = trained(OPTIMIZERS["unitstep"])
    other = copy.deepcopy(model)
    twin = evenstep.UnitStep(other.parameters(), lr=0.02)
    twin.load_state_dict(optimizer.state_dict())
    twin.attach(other)
    following = batches(2)
    maker.train(model, optimizer, following)
    maker.train(other, twin, following)
    assert same(twin.state_dict()["state"], optimizer.state_dict()["state"])
    assert_same(model, other)


def pair(order, case):
    """Two layers of one shape, in any order, and their optimizer after two steps."""
    model = Forward(lambda self, x: self.b(torch.tanh(self.a(x))), **{name: nn.Linear(4, 4) for name in order})
    optimizer = case.build(model)
    maker.train(model, optimizer, torch.randn(2, 5, 4))
    return model, optimizer


@every_optimizer
def test_layers_in_another_order_are_matched_by_name_and_other_names_by_place(case):
    """A model that is wrapped has other names."""
    model, optimizer = pair("ab", case)
    reordered, twin = pair("ba", case)
    wrapped = nn.Sequential(copy.deepcopy(model))
    other = case.build(wrapped)
    for loaded in (twin, other):
        loaded.load_state_dict(optimizer.state_dict())
    assert twin.param_groups[0]["param_names"] == [name for name, _ in reordered.named_parameters()]
    for name, p in model.named_parameters():
        assert same(dict(optimizer.state[p]), dict(twin.state[reordered.get_parameter(name)]))
        assert same(dict(optimizer.state[p]), dict(other.state[wrapped.get_parameter(f"0.{name}")]))


@pytest.mark.parametrize(("plain_lr", "ratio"), [(0.1, {"plain_ratio": 0.2}), (None, {})])
def test_groups_that_kept_the_ratio_of_plain_stepsizes_load(plain_lr, ratio):
    """A norm, which is no layer, then moves at plain_lr."""
    model = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2))
    optimizer = evenstep.WhitenedSGD(model, lr=0.5, plain_lr=plain_lr)
    old = dict(optimizer.state_dict())
    (group,) = old["param_groups"]
    old["param_groups"] = [{k: v for k, v in group.items() if k != "plain_at"} | ratio]
    optimizer.load_state_dict(old)
    (loaded,) = optimizer.param_groups
    assert loaded["plain_at"] == 0.5 and "plain_ratio" not in loaded
    moved = moved_by(optimizer, model(torch.randn(4, 3)).sum())[model[1].bias]
    torch.testing.assert_close(moved, -(plain_lr or 0.5) * model[1].bias.grad)


@pytest.mark.parametrize("path", sorted((HERE / "fixtures").glob("format-[01].pt")), ids=lambda path: path.stem)
def test_the_even_step_of_version_0_1_is_sent_to_unit_step(path):
    run = stored_run(path, "unitstep")
    model = maker.network()
    assert_refused(model, even_step.EvenStep(model), run["state_dict"], "0.1's EvenStep is UnitStep now: load it into")
