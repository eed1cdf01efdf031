"""Checkpoints: old formats load, and what is damaged or foreign is refused before anything changes."""

import copy
import importlib.util
import io
import random
import warnings
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


def snapshot(optimizer):
    """Groups and state, as they are."""
    return copy.deepcopy([dict(optimizer.state_dict()), {id(p): s for p, s in optimizer.state.items()}])


def same(left, right):
    if isinstance(left, torch.Tensor):
        return isinstance(right, torch.Tensor) and left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[k], right[k]) for k in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return left == right


def saved(state_dict):
    file = io.BytesIO()
    torch.save(state_dict, file)
    return file.getvalue()


def loaded(raw):
    return torch.load(io.BytesIO(raw), weights_only=True)


def assert_refused(optimizer, state_dict, message):
    before = snapshot(optimizer)
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(state_dict)
    assert same(before, snapshot(optimizer))


# formats


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
    _, optimizer = trained(OPTIMIZERS["evenstep"])
    state_dict = copy.deepcopy(optimizer.state_dict())
    state_dict._evenstep["format"] = checkpoints.FORMAT + 1
    assert_refused(optimizer, state_dict, r"UnitStep: this state_dict does not fit, and nothing was loaded: its format")


# the seal


@every_optimizer
def test_a_file_keeps_the_seal_and_loads_without_code(case):
    _, optimizer = trained(case)
    state_dict = loaded(saved(optimizer.state_dict()))
    sums = checkpoints.seal_of(state_dict)["sums"]
    assert {key: set(names) for key, names in sums.items()} == {
        key: {name for name, value in kept.items() if torch.is_tensor(value)}
        for key, kept in optimizer.state_dict()["state"].items()
    }
    twin = case.build(maker.network())
    twin.load_state_dict(state_dict)
    assert same(twin.state_dict()["state"], optimizer.state_dict()["state"])


def test_in_memory_a_state_dict_stays_live():
    """As torch's, whose tensors are the optimizer's own: what is loaded is what they are by then."""
    model, optimizer = trained(OPTIMIZERS["evenstep"])
    state_dict = optimizer.state_dict()
    maker.train(model, optimizer, torch.randn(1, 5, 2, 3))
    twin = OPTIMIZERS["evenstep"].build(maker.network())
    twin.load_state_dict(state_dict)
    assert same(twin.state_dict()["state"], optimizer.state_dict()["state"])


def test_copies_in_memory_may_be_changed():
    _, optimizer = trained(OPTIMIZERS["evenstep"])
    for state_dict in (
        copy.deepcopy(optimizer.state_dict()),
        optimizer.state_dict().copy(),
        dict(optimizer.state_dict()),
    ):
        state_dict["state"] = {k: {n: v + 1 for n, v in kept.items()} for k, kept in state_dict["state"].items()}
        twin = OPTIMIZERS["evenstep"].build(maker.network())
        twin.load_state_dict(state_dict)
        assert same(twin.state_dict()["state"], state_dict["state"])
        assert loaded(saved(state_dict)).keys() == state_dict.keys()


def test_a_changed_tensor_is_named_and_loads_without_its_seal():
    _, optimizer = trained(OPTIMIZERS["evenstep"])
    state_dict = loaded(saved(optimizer.state_dict()))
    state_dict["state"][0]["momentum_buffer"][0, 0, 0] += 1
    del state_dict["state"][4]["square"]
    assert_refused(optimizer, state_dict, "momentum_buffer of parameter 0 is damaged; square of parameter 4 is missing")
    assert_refused(optimizer, dict(state_dict), "'4.weight' lacks square")
    state_dict["state"][4]["square"] = optimizer.state_dict()["state"][4]["square"]
    optimizer.load_state_dict(dict(state_dict))


def test_a_changed_option_is_told_of_and_loads():
    _, optimizer = trained(OPTIMIZERS["evenstep"])
    state_dict = loaded(saved(optimizer.state_dict()))
    state_dict["param_groups"][0]["lr"] = 0.5
    with pytest.warns(UserWarning, match="UnitStep: lr of group 0 changed since this state_dict was saved"):
        optimizer.load_state_dict(state_dict)
    assert optimizer.param_groups[0]["lr"] == 0.5


# damage


@pytest.mark.feature("damaged checkpoints are refused")
@every_optimizer
def test_a_truncated_file_is_refused(case):
    _, optimizer = trained(case)
    raw, before = saved(optimizer.state_dict()), snapshot(optimizer)
    for share in (0.0, 0.1, 0.5, 0.9, 0.999):
        with pytest.raises((RuntimeError, EOFError, ValueError)):
            optimizer.load_state_dict(loaded(raw[: int(share * len(raw))]))
    assert same(before, snapshot(optimizer))


@pytest.mark.feature("damaged checkpoints are refused")
@every_optimizer
def test_a_file_with_a_flipped_bit_is_refused_or_says_the_same(case):
    """Anywhere in the file: torch.load fails, we refuse or warn, or the bit was in none of the values."""
    _, optimizer = trained(case)
    raw, before = saved(optimizer.state_dict()), snapshot(optimizer)
    where, refused = random.Random(case.cls.__name__), 0
    for _ in range(40):
        broken = bytearray(raw)
        broken[where.randrange(len(raw))] ^= 1 << where.randrange(8)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            try:
                optimizer.load_state_dict(loaded(bytes(broken)))
            except Exception:
                refused += 1
        assert same(before[1:], snapshot(optimizer)[1:])
        assert same(before[0]["state"], snapshot(optimizer)[0]["state"])
    assert refused


def test_every_flipped_bit_of_a_tensor_is_found():
    value = torch.randn(3, dtype=torch.bfloat16)
    for dtype in (torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.bool):
        raw = value.to(dtype).view(torch.uint8).clone()
        clean = checkpoints.bit_sum(raw.view(dtype))
        for place in range(raw.numel()):
            for bit in range(1 if dtype == torch.bool else 8):
                raw[place] ^= 1 << bit
                assert checkpoints.bit_sum(raw.view(dtype)) != clean
                raw[place] ^= 1 << bit


# foreign


def foreign(optimizer):
    """State dicts that are not this optimizer's, and what is said of them."""
    wide = nn.Sequential(nn.Conv1d(2, 4, 2), nn.Tanh(), nn.Flatten(), nn.LayerNorm(8), nn.Linear(8, 2))
    other = evenstep.UnitStep(wide)
    maker.train(wide, other, torch.randn(1, 5, 2, 3))
    small = maker.network()
    adam = torch.optim.Adam(small.parameters())
    maker.train(small, adam, torch.randn(1, 5, 2, 3))
    sgd = torch.optim.SGD(small.parameters(), momentum=0.9)
    maker.train(small, sgd, torch.randn(1, 5, 2, 3))
    own = copy.deepcopy(optimizer.state_dict())
    whitened = evenstep.WhitenedSGD(small)
    maker.train(small, whitened, torch.randn(1, 5, 2, 3))

    def changed(change):
        state_dict = copy.deepcopy(dict(own))
        change(state_dict)
        return state_dict

    return [
        (small.state_dict(), r"an optimizer's has 'state' and 'param_groups'; got \['0\.bias', '0\.weight'"),
        ([1, 2], "an optimizer's has 'state' and 'param_groups'; got list"),
        (None, "an optimizer's has 'state' and 'param_groups'; got NoneType"),
        (other.state_dict(), r"'0\.weight' has momentum_buffer of shape \[4, 2, 2\]; .*\[3, 2, 2\].* is wanted"),
        (adam.state_dict(), "'0.weight' has exp_avg, which is no state of this optimizer"),
        (sgd.state_dict(), "'0.weight' lacks mass, mx, step, vx"),
        (whitened.state_dict(), "it was saved by WhitenedSGD, not by UnitStep"),
        (evenstep.UnitStep(nn.Linear(2, 2)).state_dict(), "match the size of optimizer's group: group 0 has 2, here 6"),
        (
            changed(lambda s: s["param_groups"].append({"params": []})),
            "number of parameter groups: 2, here 1",
        ),
        (changed(lambda s: s["state"].update({17: {}})), "state of an unknown parameter 17"),
        (changed(lambda s: s["state"].update({0: 3})), "'0.weight' has no state but a int"),
        (changed(lambda s: s["state"][0].pop("vx")), "'0.weight' lacks vx"),
        (changed(lambda s: s["state"][0]["mx"].fill_(torch.nan)), "'0.weight' has mx with values that are negative or"),
        (
            changed(lambda s: s["state"][0]["vx"].neg_()),
            "'0.weight' has vx with values that are negative or",
        ),
    ]


@pytest.mark.parametrize("which", range(14))
def test_what_is_foreign_is_refused_by_name(which):
    _, optimizer = trained(OPTIMIZERS["evenstep"])
    cases = foreign(optimizer)
    assert len(cases) == 14
    state_dict, message = cases[which]
    assert_refused(optimizer, state_dict, message)


def test_a_long_list_is_cut_short():
    _, optimizer = trained(OPTIMIZERS["evenstep"])
    state_dict = dict(copy.deepcopy(optimizer.state_dict()))
    state_dict["state"].update({k: {} for k in range(10, 30)})
    assert_refused(optimizer, state_dict, "unknown parameter 17; and 12 more")


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
