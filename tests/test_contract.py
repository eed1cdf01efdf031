"""torch.optim's contract and the faults to survive, for every optimizer of the library."""

import copy
import gc
import inspect
import pickle
from collections import defaultdict

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import prune
from torch.testing import assert_close

import evenstep
from cases import OPTIMIZERS, RUNS_TORCH_RULES
from helpers import (
    UNGUARDED,
    assert_resumes,
    assert_same,
    classify,
    descend,
    every_optimizer,
    images,
    is_finite,
    layer_statistics,
    moved_by,
    same,
    small_network,
    still,
    trained,
    twins,
    weights,
)

by_parts_and_fused = pytest.mark.parametrize("foreach", [None, False])


def loss_of(model, x, y):
    return functional.cross_entropy(model(x), y)


def state_of(optimizer):
    return copy.deepcopy(optimizer.state_dict()["state"])


# state


@pytest.mark.feature("save, load and continue, bit for bit")
@every_optimizer
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_save_load_continue_is_bit_equal(case, dtype):
    batches = [(x.to(dtype), y) for x, y in (images() for _ in range(6))]
    assert_resumes(lambda: small_network().to(dtype), case, batches, functional.cross_entropy)


@pytest.mark.feature("full state at the first step (distributed checkpoints)")
@every_optimizer
@pytest.mark.parametrize("factor", [0.0, 1.0])
def test_a_first_step_with_lr_0_gives_every_parameter_state_and_moves_nothing(case, factor):
    """Frameworks make it with gradients of zero before they load a checkpoint into the state."""
    model = small_network()
    optimizer, before = case.build(model, lr=0.0), weights(model)
    descend(optimizer, factor * loss_of(model, *images()))
    assert all(still(model, before))
    assert all(optimizer.state[p]["step"] == 1 for p in model.parameters())


DELETIONS = {  # of an optimizer's state: all of it, or that of one parameter
    "all": lambda optimizer, p: optimizer.state.clear(),
    "new": lambda optimizer, p: setattr(optimizer, "state", defaultdict(dict)),
    "one": lambda optimizer, p: optimizer.state.pop(p),
    "empty": lambda optimizer, p: optimizer.state.update({p: {}}),
    "emptied": lambda optimizer, p: optimizer.state[p].clear(),
}


@by_parts_and_fused
@pytest.mark.parametrize("how", DELETIONS)
@every_optimizer
def test_deleted_state_starts_anew_and_the_rest_goes_on(case, how, foreach):
    model, optimizer = trained(case, steps=2, foreach=foreach)
    known, first = {p: set(state) for p, state in optimizer.state.items()}, model[0].weight
    DELETIONS[how](optimizer, first)
    classify(optimizer, model, [images()])
    assert {p: set(state) for p, state in optimizer.state.items()} == known
    assert is_finite(model)
    for p, state in optimizer.state.items():
        assert state.get("step", 1) == (1 if p is first or how in ("all", "new") or "step" not in state else 3)


# gradients, stepsizes and groups


@every_optimizer
def test_gradients_are_neither_changed_nor_cleared(case):
    model = small_network()
    optimizer = case.build(model)
    loss_of(model, *images()).backward()
    grads = [p.grad for p in model.parameters()]
    values, versions = [g.clone() for g in grads], [g._version for g in grads]
    optimizer.step()
    assert versions == [g._version for g in grads]
    assert all(p.grad is g for p, g in zip(model.parameters(), grads, strict=True))
    assert same(values, grads)


def test_groups_bias_takes_lr_and_decay_from_its_own_weight_rules_the_layer():
    model = nn.Linear(3, 2).double()
    groups = [
        {"params": [model.weight], "lr": 0.0, "weight_decay": 0.5},
        {"params": [model.bias], "lr": 0.25, "weight_decay": 0.5},
    ]
    optimizer, bias = evenstep.WhitenedSGD(groups, model=model, **UNGUARDED), model.bias.detach().clone()
    moved = moved_by(optimizer, model(torch.randn(5, 3).double()).sum() / 5)
    assert not moved[model.weight].any()
    assert_close(moved[model.bias], -0.25 * (0.5 * bias + 1 / 3**0.5))


@pytest.mark.filterwarnings("ignore:.*no layer of this ModuleList is covered")
def test_plain_lr_follows_a_groups_own_lr_unless_the_group_has_both():
    """Layers that get a smaller lr get a smaller plain_lr with it."""
    norms = nn.ModuleList(nn.LayerNorm(3) for _ in range(3))
    own = [{}, {"lr": 0.05}, {"lr": 0.05, "plain_lr": 0.1}]
    groups = [{"params": norm.parameters(), **keywords} for norm, keywords in zip(norms, own, strict=True)]
    optimizer = evenstep.WhitenedSGD(groups, lr=0.5, plain_lr=0.1, model=norms)
    moved = moved_by(optimizer, sum(norm.bias.sum() for norm in norms))
    assert [moved[norm.bias][0].item() for norm in norms] == pytest.approx([-0.1, -0.01, -0.1])


@pytest.mark.parametrize("first", [None, 0.1])
@by_parts_and_fused
def test_plain_lr_follows_schedules_and_may_be_set_in_a_group(first, foreach):
    """As of the lr it was built with, times the factor of the schedule."""
    model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))
    optimizer = evenstep.WhitenedSGD(model, lr=0.5, plain_lr=first, foreach=foreach)
    (group,) = optimizer.param_groups
    half = (first or 0.5) / 2
    for plain_lr, lr, expected in (
        (first, 0.5, 2 * half), (first, 0.25, half), (0.0, 0.5, 0.0), (0.2, 0.25, 0.1), (None, 0.25, 0.25),
    ):  # fmt: skip
        group["plain_lr"], group["lr"] = plain_lr, lr
        moved = moved_by(optimizer, model(torch.randn(4, 3)).sum())
        assert_close(moved[model[1].bias], -expected * model[1].bias.grad)


def test_groups_added_later_are_covered_train_and_need_no_names():
    model = nn.Sequential(nn.Linear(3, 4))
    optimizer = evenstep.WhitenedSGD(model)
    model.append(nn.Linear(4, 2))
    optimizer.add_param_group({"params": model[1].parameters(), "lr": 0.01})
    optimizer.add_param_group({"params": nn.Parameter(torch.zeros(2))})
    assert [row.treatment for row in optimizer.coverage()] == ["whitened"] * 4 + ["plain"]
    assert [group["param_names"] for group in optimizer.param_groups[1:]] == [["1.weight", "1.bias"], ["added.0"]]
    before = weights(model)
    descend(optimizer, model(torch.randn(5, 3)).sum())
    assert not any(still(model, before))
    with pytest.raises(TypeError, match="ordered collections"):
        optimizer.add_param_group({"params": set(nn.Linear(2, 2).parameters())})


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_frozen_layer_is_not_looked_at_until_it_thaws(compiled):
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(6, 8), nn.MultiheadAttention(8, 2), nn.Linear(8, 3))
    model.forward = lambda x: model[2](model[1](*[model[0](x)] * 3)[0])
    optimizer = evenstep.UnitStep(model)
    forward = torch.compile(model, fullgraph=True, backend="eager") if compiled else model

    def applied():
        optimizer.zero_grad(set_to_none=False)
        forward(torch.randn(5, 6)).square().mean().backward()
        found = {name: int(layer.applied) for name, layer in layer_statistics(optimizer).items()}
        optimizer.step()
        return found

    everything = {"0.weight": 5, "1.in_proj_weight": 5, "1.out_proj.weight": 5, "2.weight": 5}
    assert applied() == everything
    model[0].requires_grad_(False)
    model[1].in_proj_weight.requires_grad_(False)
    assert applied() == everything | {"0.weight": 0}  # the attention trains in part
    model[1].requires_grad_(False)
    assert applied() == everything | dict.fromkeys(["0.weight", "1.in_proj_weight", "1.out_proj.weight"], 0)
    model.requires_grad_(True)
    assert applied() == everything


# the model: attached later, changed, detached


def test_tensors_alone_train_in_plain_coordinates_and_warn_once():
    model = small_network()
    optimizer = evenstep.WhitenedSGD(model.parameters(), lr=0.1)
    with pytest.warns(UserWarning, match=r"WhitenedSGD: no model is attached.*opt\.attach\(model\)"):
        moved = moved_by(optimizer, loss_of(model, *images()))
    for p, step in moved.items():
        assert_close(step, -0.1 * p.grad)
    optimizer.step()  # silent: warnings are errors here
    optimizer.attach(model)
    assert "whitened" in str(optimizer.coverage())


def upsampler():
    """A transposed convolution, whose units are not the rows of its weight."""
    return nn.Sequential(nn.ConvTranspose2d(2, 4, 1), nn.Flatten(), nn.Linear(64, 3))


@every_optimizer
@pytest.mark.filterwarnings("ignore:.*no model is attached")
def test_state_follows_a_parameter_that_a_model_is_attached_to_later(case):
    model = upsampler()
    optimizer = case.build(model.parameters())
    classify(optimizer, model, [images(), images()])
    optimizer.attach(model)
    classify(optimizer, model, [images(), images()])
    clone, twin = copy.deepcopy((model, optimizer))
    classify(twin, clone, [images()])
    twin.attach(clone)
    classify(twin, clone, [images()])
    assert is_finite(model) and is_finite(clone)


def test_squares_are_made_anew_for_other_units_alone():
    model = upsampler()
    optimizer = evenstep.UnitStep(model.parameters())
    with pytest.warns(UserWarning, match="no model is attached"):
        classify(optimizer, model, [images()])
    squares = [optimizer.state[model[k].weight]["square"].clone() for k in (0, 2)]
    assert [len(square) for square in squares] == [2, 3]
    optimizer.attach(model)
    descend(optimizer, model(images()[0]).mul(0).sum())
    found = [optimizer.state[model[k].weight] for k in (0, 2)]
    assert_close(found[0]["square"], torch.zeros(4))
    assert_close(found[1]["square"], squares[1] * 0.01 * 0.99 / (1 - 0.99**2))
    masses = [float(state["square_mass"]) for state in found]
    assert masses == pytest.approx([0.01, 1 - 0.99**2])


def test_refresh_follows_the_model_and_keeps_what_was_not_the_models():
    """Weights of a loss, for instance, stay; a layer with a group of its own may leave."""
    model = nn.Sequential(nn.Linear(3, 4, bias=False), nn.Tanh(), nn.Linear(4, 2))
    optimizer = evenstep.UnitStep(model)
    model.append(nn.Linear(2, 2))
    own = nn.Parameter(torch.zeros(2))
    optimizer.add_param_group({"params": model[3].parameters(), "lr": 0.01})
    optimizer.add_param_group({"params": [("loss", own)]})
    model[0].bias, model[2].bias = nn.Parameter(torch.zeros(4)), None
    model[3] = nn.Linear(2, 2, bias=False)
    optimizer.refresh()
    names = [["0.weight", "2.weight", "0.bias", "3.weight"], [], ["loss"]]
    assert [group["param_names"] for group in optimizer.param_groups] == names
    assert optimizer.param_groups[0]["params"][2] is model[0].bias


@by_parts_and_fused
@pytest.mark.parametrize("name", ["unitstep", "whitened", "fan-in", "whitened-adamw"])
def test_a_layer_whose_weight_has_gone_wants_a_refresh(name, foreach):
    """Pruning computes the weight from another parameter: everything says so, until the model is looked at again."""
    model, optimizer = trained(OPTIMIZERS[name], foreach=foreach)
    prune.l1_unstructured(model[3], "weight", 0.5)
    before = weights(model)
    for ask in (lambda: classify(optimizer, model, [images()]), optimizer.coverage, optimizer.fired):
        with pytest.raises(RuntimeError, match=r"layer '3' no longer has a parameter 'weight'; call opt\.refresh\(\)"):
            ask()
    assert all(still(model, before))
    optimizer.refresh()
    classify(optimizer, model, [images()])
    assert optimizer.coverage()


def test_hooks_go_with_detach_and_with_the_optimizer():
    model = small_network()

    def hooks():
        return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())

    optimizer = evenstep.WhitenedSGD(model)
    attached = hooks()
    assert attached > 0
    optimizer.detach()
    assert hooks() == 0
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    assert hooks() == 0
    optimizer.attach(model)
    optimizer.attach(model)
    assert hooks() == attached
    del optimizer
    gc.collect()
    assert hooks() == 0


def test_attaching_another_model_looks_at_that_one_and_a_foreign_model_is_refused():
    first, second = nn.Linear(3, 4), nn.Linear(4, 2)
    optimizer = evenstep.UnitStep([*first.parameters(), *second.parameters()], model=first)
    model = nn.Sequential(first, second)
    optimizer.attach(model)
    with pytest.raises(ValueError, match="none of the parameters of this Linear is in the optimizer"):
        optimizer.attach(nn.Linear(2, 2))
    assert [row.treatment for row in optimizer.coverage()] == ["whitened"] * 4
    descend(optimizer, model(torch.randn(5, 3)).sum())
    assert optimizer.state[first.weight]["mass"] > 0


# copies and devices


@pytest.mark.feature("deepcopy and pickle")
@every_optimizer
def test_copies_of_the_model_and_the_optimizer_are_free_of_each_other(case):
    model, optimizer = trained(case)
    state = state_of(optimizer)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        loss_of(other, *images()).backward()
    assert same(state, state_of(optimizer))
    assert not any(layer.applied for layer in layer_statistics(optimizer).values())
    for twin in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert same(dict(twin.state_dict()), dict(optimizer.state_dict()))
        assert {k for k in vars(twin) if k[0] != "_"} == {k for k in vars(optimizer) if k[0] != "_"}


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))], ids=["copy", "pickle"]
)
def test_a_copy_knows_that_it_was_built_from_a_module(copied):
    model = nn.Sequential(nn.Linear(3, 4))
    other, twin = copied((model, evenstep.UnitStep(model)))
    twin.attach(other)
    other.append(nn.Linear(4, 2))
    twin.refresh()
    twin.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    names = [["0.weight", "0.bias", "1.weight", "1.bias"], ["added.0"]]
    assert [group["param_names"] for group in twin.param_groups] == names


def assert_state_follows(case, model, optimizer, device):
    """After two steps all state is on the device, but for step counts of torch's rules, which stay on the host."""
    classify(optimizer, model, [(x.to(device), y.to(device)) for x, y in [images(), images()]])
    for p in model.parameters():
        moved = {name for name, value in optimizer.state[p].items() if value.device.type == device}
        assert moved and optimizer.state[p].keys() - moved <= ({"step"} if case.cls in RUNS_TORCH_RULES else set())


@pytest.mark.feature("model moved to another device")
@every_optimizer
def test_a_model_moved_to_another_device_is_followed_in_every_tensor(case):
    """The meta device has no values, but refuses to mix with the CPU as a GPU does."""
    if case.keywords.get("base") is torch.optim.AdamW:
        pytest.skip("AdamW itself cannot run on the meta device without reading it")
    model, optimizer = trained(case, **({"capturable": True} if case.cls is evenstep.Whitened else {}))
    old = list(model.parameters())
    model.to("meta")  # makes new parameters, where a GPU would keep them: hand their state on
    optimizer.param_groups[0]["params"] = list(model.parameters())
    for p, q in zip(old, model.parameters(), strict=True):
        optimizer.state[q] = optimizer.state.pop(p)
    assert_state_follows(case, model, optimizer, "meta")


@pytest.mark.gpu
@every_optimizer
def test_a_model_moved_to_another_device_is_followed(case):
    model, optimizer = trained(case)
    assert_state_follows(case, model.cuda(), optimizer, "cuda")
    assert is_finite(model)


# faults


@pytest.mark.feature("NaN and inf batches are skipped")
@every_optimizer
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("steps", [0, 2])
def test_a_batch_that_is_not_finite_changes_nothing_and_is_counted(case, steps, bad):
    """Weights, and all steps after it, are as if it had not come."""
    model, optimizer = trained(case, steps)
    before, state, (x, y) = weights(model), state_of(optimizer), images()
    twin = copy.deepcopy(model)
    clean = case.build(twin)
    clean.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    x[0, 0, 0, 0] = bad
    with pytest.warns(UserWarning, match=f"{type(optimizer).__name__}: a gradient is not finite; the step is skipped"):
        classify(optimizer, model, [(x, y)])
    optimizer.step()  # counted again, warned of no more
    assert optimizer.nonfinite_steps == 2
    assert all(still(model, before))
    assert same(state, {p: kept for p, kept in state_of(optimizer).items() if p in state})
    following = [images(), images()]
    classify(optimizer, model, following)
    classify(clean, twin, following)
    assert_same(model, twin)


@pytest.mark.feature("capturable")
@every_optimizer
def test_capturable_masks_a_bad_batch_without_reading_it(case):
    """As on a GPU: the same weights as with a look at the gradients, and a warning when the count is read."""
    if case.keywords.get("base") is torch.optim.AdamW:
        pytest.skip("AdamW itself is capturable on a GPU alone")
    model, twin = twins()
    looking, blind = case.build(model), case.build(twin, capturable=True)
    for bad in (False, True):
        x, y = images()
        if bad:
            classify(blind, twin, [(x * float("nan"), y)])
        classify(looking, model, [(x, y)])
        classify(blind, twin, [(x, y)])
        if bad and case.cls in RUNS_TORCH_RULES:  # the rule's memory has taken a zero gradient
            assert is_finite(twin)
        else:
            assert_same(model, twin, rtol=None, atol=None)
    with pytest.warns(UserWarning, match="a gradient is not finite"):
        assert blind.nonfinite_steps == 1


@by_parts_and_fused
@pytest.mark.parametrize("size", [float("inf"), 1e30])
def test_inputs_that_are_not_finite_or_have_such_squares_leave_the_moments(size, foreach):
    model = nn.Linear(3, 2)
    optimizer = evenstep.WhitenedSGD(model, foreach=foreach)
    descend(optimizer, model(torch.randn(4, 3)).sum())
    kept = {name: optimizer.state[model.weight][name].clone() for name in ("mx", "vx")}
    model(size * torch.randn(4, 3).sign())  # seen, but no part of the loss
    descend(optimizer, model(torch.randn(4, 3)).sum())
    assert all(torch.equal(value, optimizer.state[model.weight][name]) for name, value in kept.items())
    assert is_finite(model)


@pytest.mark.feature("empty batches")
@every_optimizer
def test_an_empty_batch_does_nothing(case):
    if case.cls is evenstep.BlockNaturalSGD:
        pytest.skip("it watches no forward: a zero gradient is all it can see")
    model, optimizer = trained(case)
    before, state, (x, y) = weights(model), state_of(optimizer), images(0)
    descend(optimizer, functional.cross_entropy(model(x), y, reduction="sum"))
    assert all(still(model, before))
    assert same(state, state_of(optimizer))


@every_optimizer
@pytest.mark.parametrize("damping", [0.0, 0.1])
def test_an_input_that_never_varies_gives_a_finite_step(case, damping):
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    more = {"damping": damping} if "damping" in case.build(model).defaults else {}
    optimizer = case.build(model, **more)
    for _ in range(3):
        x = torch.randn(4, 3)
        x[:, 0], x[:, 1] = 5.0, 0.0
        descend(optimizer, model(x).square().mean())
    assert is_finite(model)


# what is refused (bad hyperparameters: test_checkpoints.py)


@every_optimizer
def test_bad_parameters_are_named(case):
    name = case.cls.__name__
    with pytest.raises(ValueError, match="optimizer got an empty parameter list"):
        case.build([])
    with pytest.raises(ValueError, match=f"{name}: the module ReLU has no parameters to train"):
        case.build(nn.ReLU())
    with pytest.raises(ValueError, match=f"{name}: none of the parameters of this Linear is in the optimizer"):
        case.build([nn.Parameter(torch.zeros(2))], model=nn.Linear(2, 2))
    with pytest.raises(ValueError, match=f"{name}: give the model once"):
        case.build(nn.Linear(2, 2), model=nn.Linear(2, 2))
    with pytest.raises(ValueError, match=f"{name}: parameter 'weight' is not initialized yet; run one forward"):
        case.build(nn.LazyLinear(2))


def test_sparse_gradients_are_refused_by_name():
    model = nn.Sequential(nn.Embedding(4, 2, sparse=True), nn.Linear(2, 2))
    optimizer = evenstep.WhitenedSGD(model)
    with pytest.raises(RuntimeError, match="WhitenedSGD does not support sparse gradients"):
        descend(optimizer, model(torch.tensor([1, 2])).sum())


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_canonical_without_covered_layers_trains_in_plain_coordinates(reduction):
    model = nn.LayerNorm(3)
    with pytest.warns(UserWarning, match="CanonicalSGD: no layer of this LayerNorm is covered"):
        optimizer = evenstep.CanonicalSGD(model, lr=0.1, plain_lr=0.1, reduction=reduction)
    descend(optimizer, model(torch.randn(4, 3)).sum())
    assert_close(model.bias.detach(), -0.1 * model.bias.grad)


@every_optimizer
def test_an_unknown_keyword_is_refused_by_name(case):
    if case.cls is not evenstep.Whitened:  # whose base refuses it
        with pytest.raises(TypeError, match=f"{case.cls.__name__}.* got an unexpected keyword argument 'betas'"):
            case.build(nn.Linear(2, 2), betas=(0.9, 0.99))


def test_a_subclass_may_have_a_constructor_of_its_own():
    class Slow(evenstep.UnitStep):
        def __init__(self, params, lr=0.01):
            super().__init__(params, lr, momentum=0.5)

    assert [*inspect.signature(Slow).parameters] == ["params", "lr"]
    (group,) = Slow(nn.Linear(2, 2)).param_groups
    assert (group["lr"], group["momentum"], group["decay"]) == (0.01, 0.5, 0.99)
    assert inspect.signature(evenstep.UnitStep).parameters["momentum"].default == 0.9
