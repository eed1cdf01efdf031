"""torch.optim's contract and the faults to survive, for every optimizer of the library."""

import copy
import gc
import pickle
from collections import defaultdict

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import prune

import evenstep
from cases import OPTIMIZERS, RUNS_TORCH_RULES
from helpers import (
    UNGUARDED,
    assert_same,
    classify,
    descend,
    every_optimizer,
    images,
    is_finite,
    same,
    small_network,
    still,
    through_a_file,
    twins,
    weights,
)

by_parts_and_fused = pytest.mark.parametrize("foreach", [None, False])


def backward(model, x, y):
    functional.cross_entropy(model(x), y).backward()


def state_of(optimizer):
    return copy.deepcopy(optimizer.state_dict()["state"])


# state


@pytest.mark.feature("save, load and continue, bit for bit")
@every_optimizer
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_save_load_continue_is_bit_equal(case, dtype):
    batches = [(x.to(dtype), y) for x, y in (images() for _ in range(6))]
    model, other = small_network().to(dtype), small_network().to(dtype)
    optimizer = case.build(model)
    classify(optimizer, model, batches[:3])
    saved_model, saved_optimizer = through_a_file([model.state_dict(), optimizer.state_dict()])
    other.load_state_dict(saved_model)
    resumed = case.build(other)
    resumed.load_state_dict(saved_optimizer)
    for o, m in ((optimizer, model), (resumed, other)):
        classify(o, m, batches[3:])
    assert_same(model, other)
    assert same(state_of(optimizer), state_of(resumed))


def test_loading_fills_the_live_tensors():
    model = small_network()
    optimizer = evenstep.WhitenedSGD(model)
    classify(optimizer, model, [images()])
    saved = copy.deepcopy(optimizer.state_dict())
    classify(optimizer, model, [images()])
    live = optimizer.state[model[0].weight]["mx"]
    optimizer.load_state_dict(saved)
    assert optimizer.state[model[0].weight]["mx"] is live
    assert torch.equal(live, saved["state"][0]["mx"])


@pytest.mark.feature("full state at the first step (distributed checkpoints)")
@every_optimizer
@pytest.mark.parametrize("factor", [0.0, 1.0])
def test_a_first_step_with_lr_0_gives_every_parameter_state_and_moves_nothing(case, factor):
    """Frameworks make it with gradients of zero before they load a checkpoint into the state."""
    model = small_network()
    optimizer, before = case.build(model, lr=0.0), weights(model)
    backward(model, *images())
    for p in model.parameters():
        p.grad *= factor
    optimizer.step()
    assert all(still(model, before))
    assert all(optimizer.state[p]["step"] == 1 for p in model.parameters())


@by_parts_and_fused
@pytest.mark.parametrize("how", ["all", "new", "one", "empty", "emptied"])
@every_optimizer
def test_state_that_is_taken_away_is_made_anew(case, how, foreach):
    """As torch's optimizers do; what is left goes on."""
    model = small_network()
    optimizer = case.build(model, foreach=foreach)
    classify(optimizer, model, [images(), images()])
    known, first = {p: set(state) for p, state in optimizer.state.items()}, model[0].weight
    if how == "all":
        optimizer.state.clear()
    elif how == "new":
        optimizer.state = defaultdict(dict)
    elif how == "one":
        del optimizer.state[first]
    elif how == "empty":
        optimizer.state[first] = {}
    else:
        optimizer.state[first].clear()
    classify(optimizer, model, [images()])
    assert {p: set(state) for p, state in optimizer.state.items()} == known
    assert is_finite(model)
    steps = [int(optimizer.state[p]["step"]) for p in model.parameters() if "step" in optimizer.state[p]]
    assert steps == [1 if p is first or how in ("all", "new") else 3 for p in model.parameters() if "step" in known[p]]


# gradients, stepsizes and groups


@every_optimizer
def test_gradients_are_neither_changed_nor_cleared(case):
    model = small_network()
    optimizer = case.build(model)
    backward(model, *images())
    grads = [p.grad for p in model.parameters()]
    values = [g.clone() for g in grads]
    optimizer.step()
    assert all(p.grad is g for p, g in zip(model.parameters(), grads, strict=True))
    assert same(values, grads)


def test_groups_bias_takes_lr_and_decay_from_its_own_weight_rules_the_layer():
    model = nn.Linear(3, 2).double()
    groups = [
        {"params": [model.weight], "lr": 0.0, "weight_decay": 0.5},
        {"params": [model.bias], "lr": 0.25, "weight_decay": 0.5},
    ]
    optimizer = evenstep.WhitenedSGD(groups, model=model, **UNGUARDED)
    weight, bias = weights(model)
    descend(optimizer, model(torch.randn(5, 3).double()).sum() / 5)
    assert torch.equal(model.weight, weight)
    expected = bias * (1 - 0.25 * 0.5) - 0.25 * torch.ones(2).double() / 3**0.5
    torch.testing.assert_close(model.bias.detach(), expected)


def test_plain_lr_follows_a_groups_own_lr_unless_the_group_has_both():
    """Layers that get a smaller lr get a smaller plain_lr with it."""
    moved = []
    for own in ({}, {"lr": 0.05}, {"lr": 0.05, "plain_lr": 0.1}):
        norm = nn.LayerNorm(3)
        optimizer = evenstep.WhitenedSGD([{"params": [nn.Parameter(torch.zeros(1))]}], lr=0.5, plain_lr=0.1)
        optimizer.add_param_group({"params": norm.parameters(), **own})
        norm.bias.grad = torch.ones(3)
        with pytest.warns(UserWarning, match="no model is attached"):
            optimizer.step()
        moved.append(norm.bias[0].item())
    assert moved == pytest.approx([-0.1, -0.01, -0.1])


@pytest.mark.parametrize("first", [None, 0.1])
@by_parts_and_fused
def test_plain_lr_follows_schedules_and_may_be_set_in_a_group(first, foreach):
    """As of the lr it was built with, whatever a schedule has made of that."""
    model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))
    optimizer = evenstep.WhitenedSGD(model, lr=0.5, plain_lr=first, foreach=foreach)
    (group,) = optimizer.param_groups
    half = (first or 0.5) / 2
    for plain_lr, lr, expected in (
        (first, 0.5, 2 * half), (first, 0.25, half), (0.0, 0.5, 0.0), (0.2, 0.25, 0.1), (None, 0.25, 0.25),
    ):  # fmt: skip
        group["plain_lr"], group["lr"] = plain_lr, lr
        before = model[1].bias.detach().clone()
        descend(optimizer, model(torch.randn(4, 3)).sum())
        torch.testing.assert_close(model[1].bias.detach() - before, -expected * model[1].bias.grad)


def test_plain_lr_beside_an_lr_of_0_says_that_there_is_no_ratio():
    model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))
    optimizer = evenstep.CanonicalSGD(model, lr=0.0)
    descend(optimizer, model(torch.randn(4, 3)).square().sum())
    optimizer.param_groups[0]["lr"] = 1e-4
    with pytest.warns(UserWarning, match="CanonicalSGD: plain_lr was given with lr=0"):
        descend(optimizer, model(torch.randn(4, 3)).square().sum())


def test_a_group_added_later_trains():
    first, second = nn.Linear(3, 4), nn.Linear(4, 2)
    model = nn.Sequential(first, second)
    optimizer = evenstep.WhitenedSGD(first.parameters(), model=model)
    assert [row.treatment for row in optimizer.coverage()] == ["whitened"] * 2
    optimizer.add_param_group({"params": second.parameters(), "lr": 0.01})
    assert [row.treatment for row in optimizer.coverage()] == ["whitened"] * 4
    before = weights(second)
    descend(optimizer, model(torch.randn(5, 3)).sum())
    assert not any(still(second, before))


def test_a_group_added_to_an_optimizer_built_from_a_module_needs_no_names():
    model = nn.Sequential(nn.Linear(3, 4))
    optimizer = evenstep.WhitenedSGD(model)
    model.append(nn.Linear(4, 2))
    optimizer.add_param_group({"params": model[1].parameters(), "lr": 0.01})
    optimizer.add_param_group({"params": nn.Parameter(torch.zeros(2))})
    assert [group["param_names"] for group in optimizer.param_groups[1:]] == [["1.weight", "1.bias"], ["added.0"]]
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
        found = {name: int(stage.applied) for name, stage in optimizer._statistics.layers.items()}
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
    optimizer, before = evenstep.WhitenedSGD(model.parameters(), lr=0.1), weights(model)
    backward(model, *images())
    with pytest.warns(UserWarning, match=r"WhitenedSGD: no model is attached.*opt\.attach\(model\)"):
        optimizer.step()
    for p, old in zip(model.parameters(), before, strict=True):
        torch.testing.assert_close(p.detach(), old - 0.1 * p.grad)
    optimizer.step()  # silent: warnings are errors here
    optimizer.attach(model)
    assert "whitened" in optimizer.coverage().summary()


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
    torch.testing.assert_close(found[0]["square"], torch.zeros(4))
    torch.testing.assert_close(found[1]["square"], squares[1] * 0.01 * 0.99 / (1 - 0.99**2))
    masses = [float(state["square_mass"]) for state in found]
    assert masses == pytest.approx([0.01, 1 - 0.99**2])


def test_refresh_keeps_the_models_order():
    model = nn.Sequential(nn.Linear(3, 4, bias=False), nn.Tanh(), nn.Linear(4, 2))
    optimizer = evenstep.UnitStep(model)
    model[0].bias = nn.Parameter(torch.zeros(4))
    model[2].bias = None
    optimizer.refresh()
    (group,) = optimizer.param_groups
    assert group["param_names"] == ["0.weight", "0.bias", "2.weight"]
    assert all(p is q for p, q in zip(group["params"], model.parameters(), strict=True))


def test_refresh_drops_only_what_was_the_models():
    """Weights of a loss, for instance, stay; a layer with a group of its own may leave."""
    model = nn.Sequential(nn.Linear(3, 4))
    optimizer = evenstep.UnitStep(model)
    model.append(nn.Linear(4, 2))
    own = nn.Parameter(torch.zeros(2))
    optimizer.add_param_group({"params": model[1].parameters(), "lr": 0.01})
    optimizer.add_param_group({"params": [("loss", own)]})
    model[1] = nn.Linear(4, 2, bias=False)
    optimizer.refresh()
    names = [["0.weight", "0.bias", "1.weight"], [], ["loss"]]
    assert [group["param_names"] for group in optimizer.param_groups] == names
    assert optimizer.param_groups[2]["params"][0] is own


@by_parts_and_fused
@pytest.mark.parametrize("name", ["evenstep", "whitened", "fan-in", "whitened-adamw"])
def test_a_layer_whose_weight_has_gone_wants_a_refresh(name, foreach):
    """Pruning computes the weight from another parameter: everything says so, until the model is looked at again."""
    model = small_network()
    optimizer = OPTIMIZERS[name].build(model, foreach=foreach)
    classify(optimizer, model, [images()])
    prune.l1_unstructured(model[3], "weight", 0.5)
    before = weights(model)
    for ask in (lambda: classify(optimizer, model, [images()]), optimizer.coverage, optimizer.fired):
        with pytest.raises(RuntimeError, match=r"layer '3' no longer has a parameter 'weight'; call opt\.refresh\(\)"):
            ask()
    assert all(still(model, before))
    assert "coverage: layer '3' no longer has" in repr(optimizer)
    optimizer.refresh()
    classify(optimizer, model, [images()])
    assert optimizer.coverage() and "no longer" not in repr(optimizer)


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


def test_a_second_model_says_what_becomes_of_the_first():
    first, second = nn.Linear(3, 4), nn.Linear(4, 2)
    optimizer = evenstep.UnitStep([*first.parameters(), *second.parameters()], model=first)
    with pytest.warns(UserWarning, match=r"parameters of the Linear attached before.*one module that holds both"):
        optimizer.attach(second)
    optimizer.attach(nn.Sequential(first, second))
    assert optimizer.coverage().summary() == "4 whitened"


def test_attaching_to_a_strange_model_keeps_the_old_one():
    model = small_network()
    optimizer = evenstep.WhitenedSGD(model)
    with pytest.raises(ValueError, match="none of the parameters of this Linear is in the optimizer"):
        optimizer.attach(nn.Linear(2, 2))
    classify(optimizer, model, [images()])
    assert optimizer.state[model[0].weight]["mass"] > 0


def test_after_detach_steps_go_on_with_the_last_moments():
    model = nn.Linear(3, 2)
    optimizer = evenstep.WhitenedSGD(model)
    descend(optimizer, model(torch.randn(6, 3)).sum())
    mx = optimizer.state[model.weight]["mx"].clone()
    optimizer.detach()
    with pytest.warns(UserWarning, match="has a gradient but saw no input"):
        descend(optimizer, model(torch.randn(6, 3)).sum())
    assert torch.equal(mx, optimizer.state[model.weight]["mx"])


def test_coverage_prints_as_a_table_and_repr_sums_it_up():
    optimizer = evenstep.WhitenedSGD(small_network())
    lines = str(optimizer.coverage()).splitlines()
    assert lines[0].split() == ["parameter", "layer", "treatment", "reason"]
    assert lines[1].split() == ["0.weight", "Conv2d", "whitened"]
    assert "4.weight   LayerNorm  plain      no whitened form for LayerNorm" in lines
    assert repr(optimizer).endswith("coverage: 6 whitened, 2 plain")


# copies and devices


@pytest.mark.feature("deepcopy and pickle")
@every_optimizer
def test_copies_of_the_model_and_the_optimizer_are_free_of_each_other(case):
    model = small_network()
    optimizer = case.build(model)
    classify(optimizer, model, [images()])
    state = state_of(optimizer)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        backward(other, *images())
    assert same(state, state_of(optimizer))
    if optimizer._statistics is not None:
        assert not any(stage.applied for stage in optimizer._statistics.layers.values())
    for twin in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert repr(twin)
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


def on_the_host(case, name):
    """Torch's rules keep their step counts there."""
    return name == "step" and case.cls in RUNS_TORCH_RULES


@pytest.mark.feature("model moved to another device")
@every_optimizer
def test_a_model_moved_to_another_device_is_followed_in_every_tensor(case):
    """The meta device has no values, but refuses to mix with the CPU as a GPU does."""
    if case.keywords.get("base") is torch.optim.AdamW:
        pytest.skip("AdamW itself cannot run on the meta device without reading it")
    model = small_network()
    optimizer = case.build(model, **({"capturable": True} if case.cls is evenstep.Whitened else {}))
    classify(optimizer, model, [images()])
    old = list(model.parameters())
    model.to("meta")  # makes new parameters, where a GPU would keep them: hand their state on
    optimizer.param_groups[0]["params"] = list(model.parameters())
    for p, q in zip(old, model.parameters(), strict=True):
        optimizer.state[q] = optimizer.state.pop(p)
    classify(optimizer, model, [(x.to("meta"), y.to("meta")) for x, y in [images(), images()]])
    for p in model.parameters():
        state = optimizer.state[p]
        assert state and all(value.is_meta for name, value in state.items() if not on_the_host(case, name))


@pytest.mark.gpu
@every_optimizer
def test_a_model_moved_to_another_device_is_followed(case):
    model = small_network()
    optimizer = case.build(model)
    classify(optimizer, model, [images()])
    model.cuda()
    classify(optimizer, model, [(x.cuda(), y.cuda()) for x, y in [images(), images()]])
    assert is_finite(model) and all(p.is_cuda for p in model.parameters())
    kept = [(k, v) for p in model.parameters() for k, v in optimizer.state[p].items() if torch.is_tensor(v)]
    assert all(v.is_cuda for k, v in kept if not on_the_host(case, k))


# faults


@pytest.mark.feature("NaN and inf batches are skipped")
@every_optimizer
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_batch_that_is_not_finite_changes_nothing_and_is_counted(case, bad):
    model = small_network()
    optimizer = case.build(model)
    classify(optimizer, model, [images(), images()])
    before, state, (x, y) = weights(model), state_of(optimizer), images()
    x[0, 0, 0, 0] = bad
    with pytest.warns(UserWarning, match=f"{type(optimizer).__name__}: a gradient is not finite; the step is skipped"):
        classify(optimizer, model, [(x, y)])
    optimizer.step()  # counted again, warned of no more
    assert optimizer.nonfinite_steps == 2
    assert all(still(model, before))
    assert same(state, state_of(optimizer))

    twin = copy.deepcopy(model)
    clean = case.build(twin)
    clean.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    following = [images(), images()]
    classify(optimizer, model, following)
    classify(clean, twin, following)
    assert_same(model, twin)


@pytest.mark.feature("capturable")
@every_optimizer
def test_capturable_masks_a_bad_batch_without_reading_it(case):
    """As on a GPU: the same weights as with a look at the gradients, and a count that is told of when read."""
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


def test_a_first_batch_that_is_not_finite_leaves_no_trace():
    model, twin = twins(lambda: nn.Linear(3, 2))
    optimizer, clean = evenstep.WhitenedSGD(model), evenstep.WhitenedSGD(twin)
    with pytest.warns(UserWarning, match="not finite"):
        descend(optimizer, model(torch.full((4, 3), float("nan"))).sum())
    x = torch.randn(4, 3)
    descend(optimizer, model(x).sum())
    descend(clean, twin(x).sum())
    assert_same(model, twin)


def test_inputs_that_are_not_finite_under_finite_gradients_are_dropped_from_the_moments():
    model = nn.Linear(3, 2)
    optimizer = evenstep.WhitenedSGD(model)
    descend(optimizer, model(torch.randn(4, 3)).sum())
    mx = optimizer.state[model.weight]["mx"].clone()
    model(torch.full((1, 3), float("inf")))  # seen, but no part of the loss
    descend(optimizer, model(torch.randn(4, 3)).sum())
    assert torch.equal(mx, optimizer.state[model.weight]["mx"])
    assert is_finite(model)


@pytest.mark.feature("empty batches")
@every_optimizer
def test_an_empty_batch_does_nothing(case):
    if case.cls is evenstep.BlockNaturalSGD:
        pytest.skip("it watches no forward: a zero gradient is all it can see")
    model = small_network()
    optimizer = case.build(model)
    classify(optimizer, model, [images()])
    before, state, (x, y) = weights(model), state_of(optimizer), images(0)
    descend(optimizer, functional.cross_entropy(model(x), y, reduction="sum"))
    assert all(still(model, before))
    assert same(state, state_of(optimizer))


class Masked(nn.Module):
    """An embedding, and a head for some of what it gives."""

    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(5, 4), nn.Linear(4, 2)

    def forward(self, at):
        x = self.table.weight
        return x.square().mean() + self.head(x[at]).square().sum()


@pytest.mark.feature("empty batches")
@every_optimizer
@pytest.mark.parametrize("first", [True, False])
def test_what_has_a_gradient_moves_beside_layers_that_saw_an_empty_batch(case, first):
    model = Masked()
    optimizer = case.build(model)
    for at in ([] if first else [[0, 1, 2]]) + [[], [], [3, 4]]:
        before = weights(model)
        descend(optimizer, model(torch.tensor(at, dtype=torch.int64)))
        table, *head = still(model, before)
        assert not table
        if case.cls is not evenstep.BlockNaturalSGD:  # it watches no forward
            assert head == [not at] * 2


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
    p = nn.Parameter(torch.zeros(2))
    with pytest.raises(ValueError, match="some parameters appear in more than one parameter group"):
        case.build([{"params": [p]}, {"params": [p]}])
    with pytest.raises(ValueError, match=f"{name}: none of the parameters of this Linear is in the optimizer"):
        case.build([p], model=nn.Linear(2, 2))
    with pytest.raises(ValueError, match=f"{name}: give the model once"):
        case.build(nn.Linear(2, 2), model=nn.Linear(2, 2))
    with pytest.raises(ValueError, match=rf"{name}: parameter 'weight' is not initialized yet"):
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
    torch.testing.assert_close(model.bias.detach(), -0.1 * model.bias.grad)
