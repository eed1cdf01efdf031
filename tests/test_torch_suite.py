"""What PyTorch's own optimizer tests ask of an optimizer: bare tensors, every configuration.

scripts/torch_optim_suite.py runs PyTorch's file itself. Tests with models and layers are in test_contract.py.
"""

import copy

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ConstantLR, LinearLR, PolynomialLR, ReduceLROnPlateau, StepLR
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.testing import assert_close
from torch.testing._internal.common_optimizers import OptimizerErrorEnum

import optim_infos
from helpers import assert_same, descend, same, twins

ROWS = {row.name: row for row in optim_infos.rows()}
every_row = pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
every_configuration = pytest.mark.parametrize(
    ("row", "keywords"),
    [
        pytest.param(row, chosen.kwargs, id=f"{name}-{chosen.desc}")
        for name, row in ROWS.items()
        for chosen in row.optim_inputs_func("cpu")
    ],
)
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*no model is attached"),
    pytest.mark.feature("what PyTorch's own optimizer tests ask"),
]


class Problem(nn.Module):
    """Σ(Wx + b)² for a bare weight and bias."""

    def __init__(self, contiguous=True):
        super().__init__()
        spare = () if contiguous else (2,)
        weight, bias = (torch.randn(*shape, *spare) for shape in ((10, 5), (10,)))
        self.weight, self.bias = (nn.Parameter(t if contiguous else t[..., 0]) for t in (weight, bias))
        self.params, self.x = [self.weight, self.bias], torch.randn(5)

    def loss(self):
        return (self.weight.mv(self.x) + self.bias).square().sum()

    def train_by(self, optimizer, steps):
        for _ in range(steps):
            descend(optimizer, self.loss())


def build(row, params, keywords, **more):
    """The keywords are copied: schedulers change a tensor lr in place."""
    return row.optim_cls(params, **copy.deepcopy(keywords), **more)


# construction


@every_row
def test_bad_inputs_are_refused_in_torchs_words(row):
    for wrong in row.optim_error_inputs_func("cpu", torch.float32):
        bad = wrong.optimizer_error_input
        assert wrong.error_on == OptimizerErrorEnum.CONSTRUCTION_ERROR
        expected = pytest.warns if issubclass(wrong.error_type, Warning) else pytest.raises
        with expected(wrong.error_type, match=wrong.error_regex):
            row.optim_cls(bad.params, **bad.kwargs)


# the step


@every_configuration
def test_a_group_with_options_of_its_own_goes_the_right_way_and_others_stay(row, keywords):
    problem, idle = Problem(), nn.Parameter(torch.randn(2, 2))
    before, kept = problem.loss(), idle.detach().clone()
    own = {"lr": 1e-3, **copy.deepcopy(keywords)}
    optimizer = row.optim_cls([{"params": problem.params, **own}, {"params": [idle]}], lr=1e-28)
    for _ in range(20):
        descend(optimizer, problem.loss() + (torch.rand_like(idle) * idle).sum())
    assert (problem.loss() > before) == bool(keywords.get("maximize"))
    assert_close(idle.detach(), kept)


@every_row
def test_parameters_need_not_be_contiguous(row):
    problem, twin = twins(lambda: Problem(contiguous=False))
    assert [p.is_contiguous() for p in (problem.params[0], twin.params[0])] == [False, True]
    for some in (problem, twin):
        some.train_by(row.optim_cls(some.params), 5)
    assert_same(problem, twin, rtol=None, atol=None)


SCHEDULERS = [
    lambda opt: StepLR(opt, gamma=0.9, step_size=10),
    lambda opt: LinearLR(opt, start_factor=0.4, end_factor=0.8, total_iters=4),
    lambda opt: ConstantLR(opt, factor=0.8, total_iters=4),
    lambda opt: PolynomialLR(opt, power=0.1, total_iters=40),
    ReduceLROnPlateau,
]


@every_row
@pytest.mark.parametrize("tensor_lr", [False, True])
def test_it_goes_the_right_way_under_schedulers(row, tensor_lr):
    problem = Problem()
    optimizer = row.optim_cls(problem.params, lr=torch.tensor(1e-3) if tensor_lr else 1e-3)
    schedulers = [make(optimizer) for make in SCHEDULERS]
    before, rates = problem.loss(), []
    for _ in range(12):
        rates.append(float(optimizer.param_groups[0]["lr"]))
        loss = problem.loss()
        descend(optimizer, loss)
        for scheduler in schedulers:
            scheduler.step(*([loss.detach()] if isinstance(scheduler, ReduceLROnPlateau) else []))
    assert problem.loss() < before
    assert rates[0] == pytest.approx(0.4 * 0.8 * 1e-3) and max(rates) > 0.6e-3


@every_configuration
def test_foreach_is_the_plain_loop(row, keywords):
    """With a layer frozen for a step, a step without gradients, and a parameter without dimensions."""
    model = nn.Sequential(nn.Linear(2, 3), nn.Sigmoid(), nn.Linear(3, 1), nn.Sigmoid()).double()
    model.register_parameter("scalar", nn.Parameter(torch.rand((), dtype=torch.float64)))
    x, results = torch.rand(3, 2).double(), []
    for m, foreach in zip(twins(lambda: model), (False, True), strict=True):
        optimizer = build(row, m.parameters(), keywords, foreach=foreach, model=m)
        for step in range(5):
            optimizer.zero_grad()
            m[2].requires_grad_(step != 3)
            if step != 2:
                (m(x).sum() * m.scalar).backward()
            optimizer.step()
        state = [{k: v for k, v in optimizer.state[p].items() if torch.is_tensor(v)} for p in m.parameters()]
        results.append([[p.detach() for p in m.parameters()], state])
    assert_close(*results)


@every_configuration
def test_without_gradients_a_step_does_nothing(row, keywords):
    frozen = [torch.randn(2, 3) for _ in range(2)]
    kept = copy.deepcopy(frozen)
    assert build(row, frozen, keywords).step(lambda: torch.ones(())) == 1
    assert same(frozen, kept)


@every_configuration
def test_zero_gradients_move_nothing(row, keywords):
    p = nn.Parameter(torch.randn(5, 1))
    kept, optimizer = p.detach().clone(), build(row, [p], {**keywords, "weight_decay": 0.0})
    p.grad = torch.zeros_like(p)
    for _ in range(3):
        optimizer.step()
    assert_close(p.detach(), kept)


@every_row
@pytest.mark.parametrize("default", [torch.float16, torch.float32, torch.float64])
def test_step_counts_have_torchs_dtype_for_them(row, default):
    problem = Problem()
    optimizer = row.optim_cls(problem.params, lr=1e-3)
    torch.set_default_dtype(default)
    try:
        problem.train_by(optimizer, 1)
    finally:
        torch.set_default_dtype(torch.float32)
    wanted = torch.float64 if default == torch.float64 else torch.float32
    assert all(optimizer.state[p]["step"].dtype == wanted for p in problem.params)


# checkpoints


@every_configuration
@pytest.mark.parametrize("old", [False, True])
def test_loaded_state_goes_on_alike(row, keywords, old):
    """Also an older one, without newer flags, with plain numbers for step counts, into parameters that have names."""
    problem, twin = twins(Problem)
    named = [(f"name{k}", p) for k, p in enumerate(twin.params)]
    optimizer, other = build(row, problem.params, keywords), build(row, named if old else twin.params, keywords)
    problem.train_by(optimizer, 3)
    twin.load_state_dict(problem.state_dict())
    saved = copy.deepcopy(optimizer.state_dict())
    if old:
        for flag in row.not_og_supported_flags:
            del saved["param_groups"][0][flag]
        for state in saved["state"].values():
            state["step"] = state["step"].item()
    other.load_state_dict(saved)
    for some, o in ((problem, optimizer), (twin, other)):
        some.train_by(o, 3)
    assert_same(problem, twin)
    assert same(dict(optimizer.state_dict()["state"]), dict(other.state_dict()["state"]))
    assert all(other.param_groups[0][flag] == other.defaults[flag] for flag in row.not_og_supported_flags)


# hooks


@every_row
def test_hooks_of_saving_and_loading_run_in_order(row):
    optimizer, seen = row.optim_cls(Problem().params), []

    def replace(opt, saved):
        seen.append("replace")
        return {**saved, "param_groups": [{**saved["param_groups"][0], "lr": 0.003}]}

    optimizer.register_state_dict_pre_hook(lambda opt: opt.state.update(test=1))
    assert optimizer.state_dict()["state"]["test"] == 1
    optimizer.register_state_dict_post_hook(lambda opt, saved: saved["state"].pop("test") and {**saved, "noted": 1})
    saved = optimizer.state_dict()
    assert saved.pop("noted") == 1 and "test" not in saved["state"]
    del optimizer.state["test"]
    optimizer.register_load_state_dict_pre_hook(replace)
    optimizer.register_load_state_dict_pre_hook(lambda opt, saved: seen.append("first"), prepend=True)
    optimizer.register_load_state_dict_post_hook(lambda opt: seen.append("loaded"))
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["lr"] == 0.003
    assert seen == ["first", "replace", "loaded"]


@every_row
def test_hooks_of_the_step_run_once_each(row):
    """Those of all optimizers, too: the rule inside `Whitened` must not run them again."""
    problem, seen = Problem(), []
    optimizer = row.optim_cls(problem.params)
    handles = [
        register_optimizer_step_pre_hook(lambda *_: seen.append("all before")),
        register_optimizer_step_post_hook(lambda *_: seen.append("all after")),
        optimizer.register_step_pre_hook(lambda *_: seen.append("before")),
        optimizer.register_step_post_hook(lambda *_: seen.append("after")),
    ]
    try:
        problem.train_by(optimizer, 1)
    finally:
        for handle in handles:
            handle.remove()
    assert seen == ["all before", "before", "after", "all after"]
    problem.train_by(optimizer, 1)
    assert len(seen) == 4
