"""Checkpoints: old formats load, and what does not fit is refused before anything changes."""

import copy
import importlib.util
import io
from pathlib import Path

import pytest
import torch
from torch import nn

import evenstep
from cases import OPTIMIZERS
from evenstep.step.block import plain_share
from evenstep.torch_optimizer import checkpoint as checkpoints

HERE = Path(__file__).parent
spec = importlib.util.spec_from_file_location(
    "make_checkpoint_fixture", HERE.parent / "scripts" / "make_checkpoint_fixture.py"
)
maker = importlib.util.module_from_spec(spec)
spec.loader.exec_module(maker)

STORED = [(path, name) for path in sorted((HERE / "fixtures").glob("format-*.pt")) for name in maker.NAMES]
every_optimizer = pytest.mark.parametrize("case", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())


def trained(case, steps=3):
    model = maker.network()
    optimizer = case.build(model)
    maker.train(model, optimizer, torch.randn(steps, 5, 2, 3) + 1)
    return model, optimizer


def snapshot(model, optimizer):
    """Weights, groups and state, by value and by identity."""
    groups = [group | {"params": list(map(id, group["params"]))} for group in optimizer.param_groups]
    state = {id(p): {name: (id(t), t) for name, t in kept.items()} for p, kept in optimizer.state.items()}
    return copy.deepcopy([maker.flat(model), groups, state])


def same(left, right):
    if isinstance(left, torch.Tensor):
        return isinstance(right, torch.Tensor) and left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[k], right[k]) for k in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return left == right


def through_a_file(state_dict):
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


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
    run = torch.load(path, weights_only=True)[name]
    model = maker.network()
    nn.utils.vector_to_parameters(run["weights"].clone(), model.parameters())
    optimizer = OPTIMIZERS[name].build(model)
    optimizer.load_state_dict(run["state_dict"])
    now, then = optimizer.state_dict()["state"], run["state_dict"]["state"]
    assert then and all(same(value, now[key][kept]) for key in then for kept, value in then[key].items())
    maker.train(model, optimizer, torch.randn(2, 5, 2, 3) + 1)
    assert maker.flat(model).isfinite().all() and not torch.equal(maker.flat(model), run["weights"])
    least = 2 if path.stem == "format-0" else 5  # format 0 had no counts under rules that keep none
    assert all(kept["step"] >= least for kept in optimizer.state_dict()["state"].values())


def test_a_newer_format_is_refused():
    model, optimizer = trained(OPTIMIZERS["evenstep"])
    state_dict = copy.deepcopy(optimizer.state_dict())
    state_dict._evenstep["format"] = checkpoints.FORMAT + 1
    assert_refused(model, optimizer, state_dict, r"its format is \d+, this version reads up to")


@pytest.mark.parametrize("copied", [through_a_file, copy.copy, copy.deepcopy])
@every_optimizer
def test_the_mark_survives_files_and_copies(case, copied):
    _, optimizer = trained(case)
    state_dict = copied(optimizer.state_dict())
    assert checkpoints.mark_of(state_dict) == {"format": checkpoints.FORMAT, "optimizer": optimizer._writer()}
    twin = case.build(maker.network())
    twin.load_state_dict(state_dict)
    assert same(twin.state_dict()["state"], optimizer.state_dict()["state"])


def test_a_state_dict_holds_the_optimizers_own_tensors():
    """As torch's: what is loaded are the values at the time of loading."""
    model, optimizer = trained(OPTIMIZERS["evenstep"])
    state_dict = optimizer.state_dict()
    maker.train(model, optimizer, torch.randn(1, 5, 2, 3))
    twin = OPTIMIZERS["evenstep"].build(maker.network())
    twin.load_state_dict(state_dict)
    assert same(twin.state_dict()["state"], optimizer.state_dict()["state"])


# state that does not fit


BAD_VALUES = {
    "text": ("full", "of type str; a dense floating-point tensor is allowed"),
    "none": (None, "of type NoneType; a dense floating-point tensor is allowed"),
    "bool": (True, "of type bool; a dense floating-point tensor is allowed"),
    "complex": (lambda t: t.to(torch.cfloat), r"of type tensor \(torch.complex64\); a dense floating-point"),
    "sparse": (lambda t: t.to_sparse(), r"of type tensor \(torch.float32, torch.sparse_coo\); a dense floating-point"),
    "integers": (lambda t: t.long(), r"of type tensor \(torch.int64\); a dense floating-point tensor is allowed"),
    "shape": (lambda t: t.new_zeros(7, 7, 7), r"of shape \[7, 7, 7\]; .* is allowed"),
    "nan": (lambda t: torch.full_like(t, torch.nan), "with values (that are negative or )?not finite"),
    "inf": (lambda t: torch.full_like(t, torch.inf), "with values (that are negative or )?not finite"),
}


@pytest.mark.feature("checkpoints that do not fit are refused")
@pytest.mark.parametrize("bad", BAD_VALUES)
@pytest.mark.parametrize("case", [OPTIMIZERS[name] for name in maker.NAMES], ids=maker.NAMES)
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


@pytest.mark.parametrize("name", ["vx", "mass", "sharing", "square", "square_mass", "step"])
def test_negative_squares_and_counts_are_refused(name):
    model, optimizer = trained(OPTIMIZERS["evenstep"])
    state_dict = copy.deepcopy(optimizer.state_dict())
    state_dict["state"][0][name].sub_(1e6)
    assert_refused(model, optimizer, state_dict, f"'0.weight' has {name} with values that are negative")


@pytest.mark.parametrize("count", [-1, float("nan"), float("inf")])
def test_a_step_count_is_finite_and_not_negative(count):
    model, optimizer = trained(OPTIMIZERS["evenstep"])
    state_dict = copy.deepcopy(optimizer.state_dict())
    state_dict["state"][0]["step"] = count
    assert_refused(model, optimizer, state_dict, f"'0.weight' has step = {count}; a finite number >= 0 is allowed")


@pytest.mark.parametrize("name", ["mx", "vx", "mass", "sharing", "square", "square_mass"])
def test_rounded_moments_are_refused(name):
    model, optimizer = trained(OPTIMIZERS["evenstep"])
    state_dict = copy.deepcopy(optimizer.state_dict())
    state_dict["state"][0][name] = state_dict["state"][0][name].bfloat16()
    assert_refused(model, optimizer, state_dict, rf"{name} of type tensor \(torch.bfloat16\); float32 or float64 is")


def test_a_torch_rules_memory_has_the_dtype_of_its_parameter():
    """torch's rules raise at their next step otherwise."""
    model, optimizer = trained(OPTIMIZERS["whitened-adamw"])
    state_dict = copy.deepcopy(optimizer.state_dict())
    state_dict["state"][0]["exp_avg"] = state_dict["state"][0]["exp_avg"].double()
    assert_refused(model, optimizer, state_dict, r"exp_avg of type tensor \(torch.float64\); torch.float32, as its")


def test_step_counts_may_be_plain_numbers():
    _, optimizer = trained(OPTIMIZERS["evenstep"])
    state_dict = copy.deepcopy(optimizer.state_dict())
    for kept in state_dict["state"].values():
        kept["step"] = int(kept["step"])
    optimizer.load_state_dict(state_dict)
    assert all(kept["step"] == 3 and torch.is_tensor(kept["step"]) for kept in optimizer.state.values())


def other_optimizers(model):
    """The state_dicts of other optimizers on networks of the same shape, and what is wrong with them."""
    wide = nn.Sequential(nn.Conv1d(2, 4, 2), nn.Tanh(), nn.Flatten(), nn.LayerNorm(8), nn.Linear(8, 2))
    parameters = list(model.parameters())
    return {
        "other shapes": (wide, evenstep.UnitStep(wide), r"'0\.weight' has momentum_buffer of shape \[4, 2, 2\]"),
        "adam": (model, torch.optim.Adam(parameters), "'0.weight' has exp_avg, which is no state of this optimizer"),
        "sgd": (model, torch.optim.SGD(parameters, momentum=0.9), "'0.weight' lacks mass, mx, sharing, square"),
        "another class": (model, evenstep.WhitenedSGD(model), "it was saved by WhitenedSGD, not by UnitStep"),
        "fewer parameters": (model[4], evenstep.UnitStep(model[4]), "size of optimizer's group: group 0 has 2, here 6"),
    }


@pytest.mark.feature("checkpoints that do not fit are refused")
@pytest.mark.filterwarnings("ignore:.*are also trained by another optimizer")  # built for their checkpoints alone
@pytest.mark.parametrize("which", ["other shapes", "adam", "sgd", "another class", "fewer parameters"])
def test_the_state_of_another_optimizer_is_refused(which):
    network, other, message = other_optimizers(maker.network())[which]
    maker.train(network, other, torch.randn(1, 5, 6) if isinstance(network, nn.Linear) else torch.randn(1, 5, 2, 3))
    assert_refused(*trained(OPTIMIZERS["evenstep"]), other.state_dict(), message)


BROKEN = {
    "a module's": (lambda s: maker.network().state_dict(), r"has 'state' and 'param_groups'; got \['0\.bias', '0\.wei"),
    "a list": (lambda s: [1, 2], "has 'state' and 'param_groups'; got list"),
    "none": (lambda s: None, "has 'state' and 'param_groups'; got NoneType"),
    "groups": (lambda s: s["param_groups"].append({"params": []}), "number of parameter groups: 2, here 1"),
    "no groups": (lambda s: s.update(param_groups=None), "'param_groups' a list of dicts"),
    "no group": (lambda s: s.update(param_groups=[3]), "'param_groups' a list of dicts"),
    "no parameters": (lambda s: s["param_groups"][0].pop("params"), "'param_groups' a list of dicts with a list of"),
    "no state": (lambda s: s.update(state=None), "'state' must be a dict"),
    "key": (lambda s: s["state"].update({17: {}}), "state of an unknown parameter 17"),
    "number": (lambda s: s["state"].update({0: 3}), "'0.weight' has int for its state; a dict is allowed"),
    "moment": (lambda s: s["state"][0].pop("vx") * 0, "'0.weight' lacks vx"),
    "many": (lambda s: s["state"].update({k: {} for k in range(10, 30)}), "unknown parameter 17; and 12 more"),
}


@pytest.mark.parametrize("which", BROKEN)
def test_a_broken_state_dict_is_refused(which):
    model, optimizer = trained(OPTIMIZERS["evenstep"])
    state_dict = dict(copy.deepcopy(optimizer.state_dict()))
    change, message = BROKEN[which]
    found = change(state_dict)
    broken = found if which in ("a module's", "a list", "none") else state_dict
    assert_refused(model, optimizer, broken, message)


# hyperparameters that do not fit


BAD_OPTIONS = [
    *[("lr", bad) for bad in (float("nan"), float("inf"), -1.0, "0.1", None, True, torch.tensor(torch.nan))],
    *[("lr", bad) for bad in (torch.tensor([torch.inf]), torch.tensor(-0.1), torch.ones(2), torch.tensor(1j))],
    *[("momentum", bad) for bad in (1.0, -0.1, float("nan"), "0.9", torch.tensor(0.9))],
    *[("damping", -0.1), ("decay", 1.5), ("eps", float("inf")), ("weight_decay", float("nan"))],
    *[("trust", 0.0), ("fresh_max", -4.0), ("rows", 0.5), ("plain_lr", -1.0), ("plain_at", float("nan"))],
    *[("maximize", "no"), ("capturable", 2), ("foreach", "yes"), ("exclude", "head.*")],
]


@pytest.mark.parametrize(("key", "value"), BAD_OPTIONS, ids=str)
def test_a_bad_hyperparameter_is_refused_everywhere(key, value):
    message = r"Tensor lr must be 1-element|(Invalid .*)?UnitStep: " + f"{key} must be "
    if key != "plain_at":  # no keyword
        with pytest.raises(ValueError, match=message):
            evenstep.UnitStep(maker.network(), **{key: value})
    model, optimizer = trained(OPTIMIZERS["evenstep"])
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))], key: value})
    for marked in (True, False):
        state_dict = copy.deepcopy(optimizer.state_dict())
        state_dict["param_groups"][0][key] = value
        assert_refused(model, optimizer, state_dict if marked else dict(state_dict), f"group 0: ({message})")


def test_nan_among_a_rules_own_options_is_refused():
    model, optimizer = trained(OPTIMIZERS["whitened-adamw"])
    state_dict = copy.deepcopy(optimizer.state_dict())
    state_dict["param_groups"][0]["betas"] = (0.9, float("nan"))
    assert_refused(model, optimizer, state_dict, "group 0: Whitened: betas must be without nan")


# which parameter gets which state


def test_state_loaded_before_the_model_is_known_serves_after_attach():
    model, optimizer = trained(OPTIMIZERS["evenstep"])
    other = copy.deepcopy(model)
    twin = evenstep.UnitStep(other.parameters(), lr=0.02)
    twin.load_state_dict(optimizer.state_dict())
    twin.attach(other)
    batches = torch.randn(2, 5, 2, 3)
    maker.train(model, optimizer, batches)
    maker.train(other, twin, batches)
    assert same(twin.state_dict()["state"], optimizer.state_dict()["state"])
    assert torch.equal(maker.flat(model), maker.flat(other))


class Pair(nn.Module):
    """Two layers of one shape, in any order."""

    def __init__(self, order):
        super().__init__()
        for name in order:
            setattr(self, name, nn.Linear(4, 4))

    def forward(self, x):
        return self.b(torch.tanh(self.a(x)))


def pair(order, case):
    model = Pair(order)
    optimizer = case.build(model)
    maker.train(model, optimizer, torch.randn(2, 5, 4))
    return model, optimizer


@every_optimizer
def test_layers_in_another_order_are_matched_by_name(case):
    model, optimizer = pair("ab", case)
    other, twin = pair("ba", case)
    twin.load_state_dict(optimizer.state_dict())
    assert twin.param_groups[0]["param_names"] == [name for name, _ in other.named_parameters()]
    named = dict(other.named_parameters())
    assert all(same(dict(optimizer.state[p]), dict(twin.state[named[name]])) for name, p in model.named_parameters())


def test_other_names_are_matched_by_their_place():
    """A model that is wrapped has other names."""
    model, optimizer = pair("ab", OPTIMIZERS["evenstep"])
    other = nn.Sequential(copy.deepcopy(model))
    twin = OPTIMIZERS["evenstep"].build(other)
    twin.load_state_dict(optimizer.state_dict())
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    assert all(same(dict(optimizer.state[p]), dict(twin.state[q])) for p, q in pairs)


@every_optimizer
def test_loading_shares_no_tensor(case):
    """torch's own shares the step counts."""
    _, optimizer = trained(case)
    twin = case.build(maker.network())
    twin.load_state_dict(optimizer.state_dict())
    ours, theirs = ({t.data_ptr() for s in o.state.values() for t in s.values()} for o in (optimizer, twin))
    assert not ours & theirs


@pytest.mark.parametrize(("plain_lr", "ratio"), [(0.1, 0.2), (None, None)])
def test_groups_that_kept_the_ratio_of_plain_stepsizes_load(plain_lr, ratio):
    optimizer = evenstep.WhitenedSGD(nn.Linear(3, 2), lr=0.5, plain_lr=plain_lr)
    old = dict(optimizer.state_dict())
    (group,) = old["param_groups"]
    old["param_groups"] = [
        {k: v for k, v in group.items() if k != "plain_at"} | ({"plain_ratio": ratio} if ratio else {})
    ]
    optimizer.load_state_dict(old)
    (loaded,) = optimizer.param_groups
    assert loaded["plain_at"] == 0.5 and "plain_ratio" not in loaded
    assert plain_share(loaded) == (ratio or 1.0)
