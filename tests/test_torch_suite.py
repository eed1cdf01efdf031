"""What PyTorch's own optimizer tests ask of an optimizer, asked of ours: bare tensors, every configuration.

scripts/torch_optim_suite.py runs PyTorch's file itself. Models and layers are in test_contract.py.
"""

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.testing import assert_close
from torch.testing._internal.common_optimizers import OptimizerErrorEnum

import optim_infos

ROWS = {row.name: row for row in optim_infos.rows()}
FLAGS = [None, False, True]
every_row = pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
every_configuration = pytest.mark.parametrize(
    ("row", "keywords"),
    [
        pytest.param(row, given.kwargs, id=f"{name}-{given.desc}")
        for name, row in ROWS.items()
        for given in row.optim_inputs_func("cpu")
    ],
)
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*no model is attached"),
    pytest.mark.feature("what PyTorch's own optimizer tests ask"),
]


class Problem:
    """Σ(Wx + b)² for a bare weight and bias."""

    def __init__(self, contiguous=True):
        spare = () if contiguous else (2,)
        weight, bias = (torch.randn(*shape, *spare) for shape in ((10, 5), (10,)))
        self.params = [nn.Parameter(t if contiguous else t[..., 0]) for t in (weight, bias)]
        self.x = torch.randn(5)

    def clone(self):
        other = copy.copy(self)
        other.params = [nn.Parameter(p.detach().clone()) for p in self.params]
        return other

    def loss(self):
        weight, bias = self.params
        return (weight.mv(self.x) + bias).square().sum()

    def closure(self, optimizer):
        def run():
            optimizer.zero_grad()
            loss = self.loss()
            loss.backward()
            return loss

        return run

    def train(self, optimizer, steps):
        for _ in range(steps):
            optimizer.step(self.closure(optimizer))

    def values(self):
        return [p.detach().clone() for p in self.params]


def build(row, params, keywords, **more):
    """The keywords are copied: schedulers change a tensor lr in place."""
    return row.optim_cls(params, **copy.deepcopy(keywords), **more)


def named(params, on):
    return [(f"name{k}", p) for k, p in enumerate(params)] if on else params


# construction


@every_row
def test_bad_inputs_are_refused_in_torchs_words_or_ours(row):
    for wrong in row.optim_error_inputs_func("cpu", torch.float32):
        given = wrong.optimizer_error_input
        assert wrong.error_on == OptimizerErrorEnum.CONSTRUCTION_ERROR
        expected = pytest.warns if issubclass(wrong.error_type, Warning) else pytest.raises
        with expected(wrong.error_type, match=wrong.error_regex):
            row.optim_cls(given.params, **given.kwargs)


@every_configuration
def test_it_prints(row, keywords):
    text = repr(build(row, Problem().params, keywords))
    assert text.startswith(row.name) and text.endswith("coverage: 2 plain")


@every_row
@pytest.mark.parametrize("foreach", FLAGS)
def test_foreach_is_kept_in_the_groups(row, foreach):
    assert row.optim_cls(Problem().params, foreach=foreach).param_groups[0]["foreach"] is foreach


@every_row
def test_a_group_may_have_flags_of_its_own(row):
    one, two = Problem().params
    optimizer = row.optim_cls([{"params": [one], "foreach": True}, {"params": [two]}], foreach=False)
    assert [group["foreach"] for group in optimizer.param_groups] == [True, False]


def test_a_rule_gets_foreach_where_it_has_one():
    params = Problem().params
    assert optim_infos.WhitenedByAdamW(params, foreach=True)._base.instance.defaults["foreach"] is True
    assert "foreach" not in optim_infos.WhitenedByMuon(params, foreach=True)._base.instance.defaults


# the step


@every_configuration
def test_it_goes_the_right_way(row, keywords):
    problem = Problem()
    optimizer = build(row, problem.params, keywords)
    before = problem.loss()
    problem.train(optimizer, 20)
    assert (problem.loss() > before) == keywords.get("maximize", False)


@every_row
def test_parameters_need_not_be_contiguous(row):
    problem = Problem(contiguous=False)
    twin = problem.clone()
    for some in (problem, twin):
        some.train(row.optim_cls(some.params), 5)
    for p, q in zip(problem.params, twin.params, strict=True):
        assert_close(p, q)


@every_row
@pytest.mark.parametrize("tensor_lr", [False, True])
@pytest.mark.parametrize("which", range(len(optim_infos.SCHEDULES)))
def test_it_goes_the_right_way_under_schedulers(row, tensor_lr, which):
    problem = Problem()
    optimizer = row.optim_cls(problem.params, lr=torch.tensor(1e-3) if tensor_lr else 1e-3)
    schedulers = [make(optimizer) for make in row.scheduler_inputs[which]]
    before, rates = problem.loss(), []
    for _ in range(12):
        rates.append(float(optimizer.param_groups[0]["lr"]))
        loss = optimizer.step(problem.closure(optimizer)).detach()
        for scheduler in schedulers:
            scheduler.step(*([loss] if isinstance(scheduler, ReduceLROnPlateau) else []))
    assert problem.loss() < before
    assert min(rates) < 0.95e-3


@every_configuration
def test_groups_have_options_of_their_own(row, keywords):
    problem, idle = Problem(), nn.Parameter(torch.randn(2, 2))
    before, kept = problem.loss(), idle.detach().clone()
    own = {"lr": 1e-3, **copy.deepcopy(keywords)}
    optimizer = row.optim_cls([{"params": problem.params, **own}, {"params": [idle]}], lr=1e-28)
    for _ in range(20):
        idle.grad = torch.rand_like(idle)
        optimizer.step(problem.closure(optimizer))
    assert (problem.loss() > before) == keywords.get("maximize", False)
    assert_close(idle.detach(), kept)


@every_configuration
def test_a_group_without_decay_does_not_decay(row, keywords):
    one, two = (nn.Parameter(torch.randn(3, 2)) for _ in range(2))
    kept, rest = two.detach().clone(), {k: v for k, v in keywords.items() if k != "weight_decay"}
    optimizer = row.optim_cls([{"params": [one], "weight_decay": 0.5}, {"params": [two]}], **copy.deepcopy(rest))
    old = one.detach().clone()
    for p in (one, two):
        p.grad = torch.zeros_like(p)
    optimizer.step()
    assert torch.equal(two, kept)
    assert not torch.equal(one, old)


@every_row
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_a_tensor_lr_of_any_shape_equals_a_number(row, shape):
    problem = Problem()
    twin = problem.clone()
    for some, lr in ((problem, 1e-3), (twin, torch.full(shape, 1e-3))):
        some.train(row.optim_cls(some.params, lr=lr, weight_decay=0.1), 5)
    for p, q in zip(problem.params, twin.params, strict=True):
        assert_close(p, q)


@every_configuration
def test_foreach_is_the_plain_loop(row, keywords):
    """With a layer frozen for a step, a step without gradients, and a parameter without dimensions."""
    torch.manual_seed(0)
    x, results = torch.rand(3, 2).double(), []
    for foreach in (False, True):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(2, 3), nn.Sigmoid(), nn.Linear(3, 1), nn.Sigmoid()).double()
        scalar = nn.Parameter(torch.rand((), dtype=torch.float64))
        params = [*model.parameters(), scalar]
        optimizer = build(row, params, keywords, foreach=foreach, model=model)
        for step in range(5):
            optimizer.zero_grad()
            model[2].requires_grad_(step != 3)
            if step != 2:
                (model(x).sum() * scalar).backward()
            optimizer.step()
        state = [{k: v for k, v in optimizer.state[p].items() if torch.is_tensor(v)} for p in params]
        results.append([[p.detach() for p in params], state])
    assert_close(*results)


@every_row
def test_capturable_is_the_plain_step(row):
    if row.name == "WhitenedByAdamW":
        pytest.skip("AdamW itself is capturable on a GPU alone")
    problem = Problem()
    twin = problem.clone()
    for some, capturable in ((problem, False), (twin, True)):
        some.train(row.optim_cls(some.params, lr=1e-3, capturable=capturable), 5)
    for p, q in zip(problem.params, twin.params, strict=True):
        assert_close(p, q)


@every_configuration
def test_without_gradients_a_step_does_nothing(row, keywords):
    frozen = [torch.randn(2, 3) for _ in range(2)]
    kept = [p.clone() for p in frozen]
    assert build(row, frozen, keywords).step(lambda: torch.ones(())) == 1
    assert all(torch.equal(p, q) for p, q in zip(frozen, kept, strict=True))


@every_configuration
def test_zero_gradients_move_nothing_and_no_gradient_is_written_into(row, keywords):
    p = nn.Parameter(torch.randn(5, 1))
    kept = p.detach().clone()
    optimizer = build(row, [p], {**keywords, "weight_decay": 0.0})
    p.grad = torch.zeros_like(p)
    grad, version = p.grad, p.grad._version
    for _ in range(3):
        optimizer.step()
    assert_close(p.detach(), kept)
    grad.copy_(torch.rand_like(p))
    version = grad._version
    for _ in range(3):
        optimizer.step()
    assert p.grad is grad and grad._version == version


@every_configuration
def test_every_parameter_has_state_after_a_step(row, keywords):
    """Distributed checkpoints refuse a parameter without any."""
    problem = Problem()
    optimizer = build(row, problem.params, keywords)
    problem.train(optimizer, 1)
    assert all(len(optimizer.state[p]) for p in problem.params)
    assert all(optimizer.state[p]["step"] == 1 for p in problem.params)


@every_row
@pytest.mark.parametrize("default", [torch.float16, torch.float32, torch.float64])
def test_step_counts_have_torchs_dtype_for_them(row, default):
    problem = Problem()
    optimizer = row.optim_cls(problem.params, lr=1e-3)
    torch.set_default_dtype(default)
    try:
        problem.train(optimizer, 1)
    finally:
        torch.set_default_dtype(torch.float32)
    wanted = torch.float64 if default == torch.float64 else torch.float32
    assert all(optimizer.state[p]["step"].dtype == wanted for p in problem.params)


# checkpoints


@every_configuration
def test_loaded_state_goes_on_alike(row, keywords):
    """With parameters that are named in one of the two, in both or in none: names are no part of the match."""
    names = [(False, False), (False, True), (True, False), (True, True)][len(keywords)]
    problem = Problem()
    optimizer = build(row, named(problem.params, names[0]), keywords)
    problem.train(optimizer, 5)
    twin = problem.clone()
    other = build(row, named(twin.params, names[1]), keywords)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for some, o in ((problem, optimizer), (twin, other)):
        some.train(o, 5)
    for p, q in zip(problem.params, twin.params, strict=True):
        assert torch.equal(p, q)
    left, right = optimizer.state_dict(), other.state_dict()
    assert any(names) == ("param_names" in right["param_groups"][0])
    for group in left["param_groups"] + right["param_groups"]:
        group.pop("param_names", None)
    assert_close(left["state"], right["state"], rtol=0, atol=0)
    assert left["param_groups"] == right["param_groups"]


@every_configuration
def test_saved_state_loads_without_code(row, keywords):
    problem = Problem()
    optimizer = build(row, problem.params, keywords)
    problem.train(optimizer, 3)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert_close(loaded["state"], optimizer.state_dict()["state"], rtol=0, atol=0)
    assert loaded["param_groups"] == optimizer.state_dict()["param_groups"]


@every_configuration
def test_state_without_newer_flags_and_with_plain_step_counts_loads(row, keywords):
    problem = Problem()
    optimizer = build(row, problem.params, keywords)
    problem.train(optimizer, 3)
    old = copy.deepcopy(optimizer.state_dict())
    for group in old["param_groups"]:
        for flag in row.not_og_supported_flags:
            del group[flag]
    for state in old["state"].values():
        state["step"] = state["step"].item()
    optimizer.load_state_dict(old)
    assert all(torch.is_tensor(optimizer.state[p]["step"]) for p in problem.params)
    problem.train(optimizer, 1)
    assert all(optimizer.state[p]["step"] == 4 for p in problem.params)
    assert all(optimizer.param_groups[0][flag] == optimizer.defaults[flag] for flag in row.not_og_supported_flags)


@every_row
def test_hooks_of_state_dicts_run(row):
    optimizer = row.optim_cls(Problem().params)

    def note(opt):
        opt.state["test"] = 1

    def take(opt, state):
        state["noted"] = state["state"].pop("test")
        return state

    optimizer.register_state_dict_pre_hook(note)
    assert optimizer.state_dict()["state"]["test"] == 1
    optimizer.register_state_dict_post_hook(take)
    saved = optimizer.state_dict()
    assert saved["noted"] == 1 and "test" not in saved["state"]


@every_row
def test_hooks_of_loading_run_in_order(row):
    optimizer, seen = row.optim_cls(Problem().params), []
    saved = optimizer.state_dict()

    def replace(opt, state):
        seen.append("replace")
        state = copy.deepcopy(state)
        state["param_groups"][0]["lr"] = 0.003
        return state

    def change(opt, state):
        seen.append("change")
        state["param_groups"][0]["lr"] = 0.002

    optimizer.register_load_state_dict_pre_hook(replace)
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["lr"] == 0.003
    optimizer.register_load_state_dict_pre_hook(change, prepend=True)
    optimizer.register_load_state_dict_post_hook(lambda opt: seen.append("loaded"))
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["lr"] == 0.003
    assert seen == ["replace", "change", "replace", "loaded"]


# hooks and copies


@every_row
def test_hooks_of_the_step_run_once_each(row):
    """Those of every optimizer, too: a rule inside ours must not run them again."""
    problem, seen = Problem(), []
    optimizer = row.optim_cls(problem.params)
    for p in problem.params:
        p.grad = torch.rand_like(p)
    handles = [
        register_optimizer_step_pre_hook(lambda *_: seen.append("all before")),
        register_optimizer_step_post_hook(lambda *_: seen.append("all after")),
        optimizer.register_step_pre_hook(lambda *_: seen.append("before")),
        optimizer.register_step_post_hook(lambda *_: seen.append("after")),
    ]
    try:
        optimizer.step()
    finally:
        for handle in handles:
            handle.remove()
    assert seen == ["all before", "before", "after", "all after"]
    optimizer.step()
    assert len(seen) == 4


@every_configuration
def test_copies_have_all_of_it(row, keywords):
    problem = Problem()
    optimizer = build(row, problem.params, keywords)
    problem.train(optimizer, 3)
    for twin in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        public = [{k for k in vars(o) if not k.startswith("_")} for o in (optimizer, twin)]
        assert public[0] == public[1]
        assert_close(twin.state_dict()["state"], optimizer.state_dict()["state"], rtol=0, atol=0)
        assert twin.state_dict()["param_groups"] == optimizer.state_dict()["param_groups"]
