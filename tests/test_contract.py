"""torch.optim's contract and the faults to survive, for every optimizer of the library."""

import copy
import gc
import io
import pickle
import warnings
from collections import defaultdict

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import prune
from torch.utils._python_dispatch import TorchDispatchMode

import evenstep
from cases import OPTIMIZERS

every_optimizer = pytest.mark.parametrize("case", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(64, 5), nn.LayerNorm(5), nn.Linear(5, 3)
    )


def batch(rows: int = 8):
    return torch.randn(rows, 2, 4, 4) + 1, torch.randint(0, 3, (rows,))


def backward(model, x, y):
    loss = functional.cross_entropy(model(x), y)
    loss.backward()
    return loss


def train(model, optimizer, batches):
    for x, y in batches:
        optimizer.zero_grad()
        backward(model, x, y)
        optimizer.step()


def weights(model):
    return [p.detach().clone() for p in model.parameters()]


def assert_same(left, right):
    for a, b in zip(left, right, strict=True):
        assert torch.equal(a, b)


def snapshot(optimizer):
    return copy.deepcopy(optimizer.state_dict()["state"])


def assert_same_state(left, right):
    assert left.keys() == right.keys()
    for k in left:
        assert left[k].keys() == right[k].keys()
        for name, value in left[k].items():
            assert value is right[k][name] is None or torch.equal(
                torch.as_tensor(value), torch.as_tensor(right[k][name])
            )


# state


@pytest.mark.feature("save, load and continue, bit for bit")
@every_optimizer
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_save_load_continue_is_bit_equal(case, dtype):
    batches = [(x.to(dtype), y) for x, y in (batch() for _ in range(6))]
    model = network().to(dtype)
    optimizer = case.build(model)
    train(model, optimizer, batches[:3])
    file = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict()], file)
    train(model, optimizer, batches[3:])

    file.seek(0)
    saved_model, saved_optimizer = torch.load(file, weights_only=True)
    other = network().to(dtype)
    other.load_state_dict(saved_model)
    resumed = case.build(other)
    resumed.load_state_dict(saved_optimizer)
    train(other, resumed, batches[3:])
    assert_same(weights(model), weights(other))
    assert_same_state(snapshot(optimizer), snapshot(resumed))


def test_moments_are_float32_whatever_the_parameters_dtype_and_load_uncast():
    model = network().bfloat16()
    optimizer = evenstep.WhitenedSGD(model)
    train(model, optimizer, [(x.bfloat16(), y) for x, y in (batch() for _ in range(2))])
    mx = optimizer.state[model[0].weight]["mx"]
    assert mx.dtype == torch.float32
    assert not torch.equal(mx, mx.bfloat16().float())
    other = evenstep.WhitenedSGD(copy.deepcopy(model))
    other.load_state_dict(optimizer.state_dict())
    loaded = other.state[other.param_groups[0]["params"][0]]["mx"]
    assert loaded.dtype == torch.float32
    assert torch.equal(loaded, mx)


def test_loading_fills_the_live_tensors():
    model = network()
    optimizer = evenstep.WhitenedSGD(model)
    train(model, optimizer, [batch()])
    saved = copy.deepcopy(optimizer.state_dict())
    train(model, optimizer, [batch()])
    live = optimizer.state[model[0].weight]["mx"]
    optimizer.load_state_dict(saved)
    assert optimizer.state[model[0].weight]["mx"] is live
    assert torch.equal(live, saved["state"][0]["mx"])


@pytest.mark.feature("full state at the first step (distributed checkpoints)")
@every_optimizer
def test_first_step_gives_every_parameter_state(case):
    model = network()
    optimizer = case.build(model, lr=0.0)  # as frameworks do before they load a checkpoint into the state
    x, y = batch()
    functional.cross_entropy(model(x), y)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    before = weights(model)
    optimizer.step()
    assert_same(before, weights(model))
    assert all(optimizer.state[p] for p in model.parameters())


# shapes of use


@pytest.mark.feature("closures")
@every_optimizer
def test_closure_runs_first_and_its_loss_comes_back(case):
    twins = network(), network()
    twins[1].load_state_dict(twins[0].state_dict())
    x, y = batch()
    plain, inside = (case.build(m) for m in twins)
    backward(twins[0], x, y)
    plain.step()

    def closure():
        inside.zero_grad()
        return backward(twins[1], x, y)

    assert inside.step(closure).requires_grad
    assert_same(weights(twins[0]), weights(twins[1]))


@pytest.mark.feature("lr as a tensor")
@every_optimizer
@pytest.mark.parametrize("shape", [(), (1,)])
def test_tensor_lr_equals_a_number(case, shape):
    twins = network(), network()
    twins[1].load_state_dict(twins[0].state_dict())
    batches = [batch() for _ in range(3)]
    lr = case.keywords["lr"]
    train(twins[0], case.build(twins[0]), batches)
    train(twins[1], case.build(twins[1], lr=torch.full(shape, lr)), batches)
    for a, b in zip(weights(twins[0]), weights(twins[1]), strict=True):
        torch.testing.assert_close(a, b)


@every_optimizer
def test_lr_zero_changes_nothing(case):
    model = network()
    before = weights(model)
    train(model, case.build(model, lr=0.0), [batch() for _ in range(3)])
    assert_same(before, weights(model))


@pytest.mark.feature("maximize")
@every_optimizer
def test_maximize_is_descent_on_the_negated_loss(case):
    twins = network(), network()
    twins[1].load_state_dict(twins[0].state_dict())
    optimizers = case.build(twins[0]), case.build(twins[1], maximize=True)
    for x, y in [batch() for _ in range(3)]:
        for model, optimizer, sign in zip(twins, optimizers, (1, -1), strict=True):
            optimizer.zero_grad()
            (sign * functional.cross_entropy(model(x), y)).backward()
            optimizer.step()
    for a, b in zip(weights(twins[0]), weights(twins[1]), strict=True):
        torch.testing.assert_close(a, b)


@every_optimizer
def test_gradients_are_neither_changed_nor_cleared(case):
    model = network()
    optimizer = case.build(model)
    backward(model, *batch())
    grads = [p.grad for p in model.parameters()]
    values = [g.clone() for g in grads]
    optimizer.step()
    assert all(p.grad is g for p, g in zip(model.parameters(), grads, strict=True))
    assert_same(values, grads)


def test_groups_bias_takes_lr_and_decay_from_its_own_weight_rules_the_layer():
    model = nn.Linear(3, 2).double()
    x = torch.randn(5, 3).double()
    groups = [
        {"params": [model.weight], "lr": 0.0, "weight_decay": 0.5},
        {"params": [model.bias], "lr": 0.25, "weight_decay": 0.5},
    ]
    optimizer = evenstep.WhitenedSGD(groups, model=model, fresh_max=None, trust=None)
    weight, bias = weights(model)
    model(x).sum().div(5).backward()
    optimizer.step()
    assert torch.equal(model.weight, weight)
    expected = bias * (1 - 0.25 * 0.5) - 0.25 * torch.ones(2).double() / 3**0.5
    torch.testing.assert_close(model.bias.detach(), expected)


def test_plain_lr_follows_schedules_of_lr():
    model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))
    optimizer = evenstep.WhitenedSGD(model, lr=0.5, plain_lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    moved = []
    for _ in range(2):
        before = model[1].bias.detach().clone()
        optimizer.zero_grad()
        model(torch.randn(4, 3)).sum().backward()
        optimizer.step()
        scheduler.step()
        moved.append((model[1].bias.detach() - before) / model[1].bias.grad)
    torch.testing.assert_close(moved[0], torch.full((3,), -0.1))
    torch.testing.assert_close(moved[1], torch.full((3,), -0.05))


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
@pytest.mark.parametrize("foreach", [None, False])
def test_plain_lr_may_be_set_in_a_group(first, foreach):
    """As of the lr it was built with, whatever a schedule has made of that."""
    model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))
    optimizer = evenstep.WhitenedSGD(model, lr=0.5, plain_lr=first, foreach=foreach)
    (group,) = optimizer.param_groups
    for plain_lr, lr, expected in ((first, 0.5, first or 0.5), (0.0, 0.5, 0.0), (0.2, 0.25, 0.1), (None, 0.25, 0.25)):
        group["plain_lr"], group["lr"] = plain_lr, lr
        before = model[1].bias.detach().clone()
        optimizer.zero_grad()
        model(torch.randn(4, 3)).sum().backward()
        optimizer.step()
        torch.testing.assert_close(model[1].bias.detach() - before, -expected * model[1].bias.grad)


def test_plain_lr_beside_an_lr_of_0_says_that_there_is_no_ratio():
    model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))
    optimizer = evenstep.CanonicalSGD(model, lr=0.0)
    model(torch.randn(4, 3)).square().sum().backward()
    optimizer.step()
    optimizer.param_groups[0]["lr"] = 1e-4
    model(torch.randn(4, 3)).square().sum().backward()
    with pytest.warns(UserWarning, match="CanonicalSGD: plain_lr was given with lr=0"):
        optimizer.step()


def test_decoupled_decay_shrinks_the_weights_alone():
    model = network()
    optimizer = evenstep.WhitenedSGD(model, lr=0.5, weight_decay=0.1)
    before = weights(model)
    (model(batch()[0]) * 0).sum().backward()
    optimizer.step()
    for p, old in zip(model.parameters(), before, strict=True):
        torch.testing.assert_close(p.detach(), old * 0.95)


def test_a_group_added_later_trains():
    first, second = nn.Linear(3, 4), nn.Linear(4, 2)
    model = nn.Sequential(first, second)
    optimizer = evenstep.WhitenedSGD(first.parameters(), model=model)
    assert [row.treatment for row in optimizer.coverage()] == ["whitened"] * 2
    optimizer.add_param_group({"params": second.parameters(), "lr": 0.01})
    assert [row.treatment for row in optimizer.coverage()] == ["whitened"] * 4
    before = second.weight.detach().clone()
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    assert not torch.equal(before, second.weight)


def test_a_group_added_to_an_optimizer_built_from_a_module_needs_no_names():
    model = nn.Sequential(nn.Linear(3, 4))
    optimizer = evenstep.WhitenedSGD(model)
    model.append(nn.Linear(4, 2))
    optimizer.add_param_group({"params": model[1].parameters(), "lr": 0.01})
    optimizer.add_param_group({"params": nn.Parameter(torch.zeros(2))})
    assert [group["param_names"] for group in optimizer.param_groups[1:]] == [["1.weight", "1.bias"], ["added.0"]]
    with pytest.raises(TypeError, match="ordered collections"):
        optimizer.add_param_group({"params": set(nn.Linear(2, 2).parameters())})


def test_freezing_half_way_leaves_the_layer_alone():
    model = network()
    optimizer = evenstep.WhitenedSGD(model)
    train(model, optimizer, [batch()])
    model[0].requires_grad_(False)
    before = model[0].weight.detach().clone()
    train(model, optimizer, [batch()])
    assert torch.equal(before, model[0].weight)


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


def test_tensors_alone_train_in_plain_coordinates_and_warn_once():
    model = network()
    optimizer = evenstep.WhitenedSGD(model.parameters(), lr=0.1)
    before = weights(model)
    backward(model, *batch())
    grads = [p.grad.clone() for p in model.parameters()]
    with pytest.warns(UserWarning, match=r"WhitenedSGD: no model is attached.*opt\.attach\(model\)"):
        optimizer.step()
    for p, old, g in zip(model.parameters(), before, grads, strict=True):
        torch.testing.assert_close(p.detach(), old - 0.1 * g)
    optimizer.step()  # silent: warnings are errors here
    optimizer.attach(model)
    assert "whitened" in optimizer.coverage().summary()


def upsampler() -> nn.Sequential:
    """A transposed convolution, whose units are not the rows of its weight."""
    return nn.Sequential(nn.ConvTranspose2d(2, 4, 1), nn.Flatten(), nn.Linear(64, 3))


@every_optimizer
@pytest.mark.filterwarnings("ignore:.*no model is attached")
def test_state_follows_a_parameter_that_a_model_is_attached_to_later(case):
    model = upsampler()
    optimizer = case.build(model.parameters())
    train(model, optimizer, [batch(), batch()])
    optimizer.attach(model)
    train(model, optimizer, [batch(), batch()])
    clone, twin = copy.deepcopy((model, optimizer))
    train(clone, twin, [batch()])
    twin.attach(clone)
    train(clone, twin, [batch()])
    assert all(p.isfinite().all() for m in (model, clone) for p in m.parameters())


def test_squares_are_made_anew_for_other_units_alone():
    model = upsampler()
    optimizer = evenstep.UnitStep(model.parameters())
    with pytest.warns(UserWarning, match="no model is attached"):
        train(model, optimizer, [batch()])
    squares = [optimizer.state[model[k].weight]["square"].clone() for k in (0, 2)]
    assert [len(square) for square in squares] == [2, 3]
    optimizer.attach(model)
    for p in model.parameters():
        p.grad.zero_()
    model(batch()[0]).mul(0).sum().backward()
    optimizer.step()
    found = [optimizer.state[model[k].weight] for k in (0, 2)]
    torch.testing.assert_close(found[0]["square"], torch.zeros(4))
    torch.testing.assert_close(found[1]["square"], squares[1] * 0.01 * 0.99 / (1 - 0.99**2))
    masses = [float(state["square_mass"]) for state in found]
    assert masses == pytest.approx([0.01, 1 - 0.99**2])


# surgery


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


# copies


@pytest.mark.feature("deepcopy and pickle")
@every_optimizer
def test_copies_of_the_model_and_the_optimizer_are_free_of_each_other(case):
    model = network()
    optimizer = case.build(model)
    train(model, optimizer, [batch()])
    clone, thawed = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    state = snapshot(optimizer)
    for other in (clone, thawed):
        backward(other, *batch())
    assert_same_state(state, snapshot(optimizer))
    if optimizer._statistics is not None:
        assert not any(stage.applied for stage in optimizer._statistics.layers.values())
    twin = copy.deepcopy(optimizer)
    assert repr(twin)
    assert_same_state(state, snapshot(twin))
    assert_same_state(state, snapshot(pickle.loads(pickle.dumps(optimizer))))


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


def test_hooks_go_with_detach_and_with_the_optimizer():
    model = network()

    def hooks():
        return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())

    optimizer = evenstep.WhitenedSGD(model)
    assert hooks() == 5
    optimizer.detach()
    assert hooks() == 0
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    assert hooks() == 0
    optimizer.attach(model)
    optimizer.attach(model)
    assert hooks() == 5
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


def test_after_detach_steps_go_on_with_the_last_moments():
    model = nn.Linear(3, 2)
    optimizer = evenstep.WhitenedSGD(model)
    optimizer_state = optimizer.state
    model(torch.randn(6, 3)).sum().backward()
    optimizer.step()
    mx = optimizer_state[model.weight]["mx"].clone()
    optimizer.detach()
    model(torch.randn(6, 3)).sum().backward()
    with pytest.warns(UserWarning, match="has a gradient but saw no input"):
        optimizer.step()
    assert torch.equal(mx, optimizer_state[model.weight]["mx"])


# faults


@pytest.mark.feature("NaN and inf batches are skipped")
@every_optimizer
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_batch_that_is_not_finite_changes_nothing_and_is_counted(case, bad):
    model = network()
    optimizer = case.build(model)
    train(model, optimizer, [batch(), batch()])
    before, state = weights(model), snapshot(optimizer)
    x, y = batch()
    x[0, 0, 0, 0] = bad
    optimizer.zero_grad()
    backward(model, x, y)
    with pytest.warns(UserWarning, match=f"{type(optimizer).__name__}: a gradient is not finite; the step is skipped"):
        optimizer.step()
    optimizer.step()  # counted again, warned of no more
    assert optimizer.nonfinite_steps == 2
    assert_same(before, weights(model))
    assert_same_state(state, snapshot(optimizer))

    twin = network()
    twin.load_state_dict(model.state_dict())
    clean = case.build(twin)
    clean.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    following = [batch(), batch()]
    train(model, optimizer, following)
    train(twin, clean, following)
    assert_same(weights(model), weights(twin))


@pytest.mark.feature("capturable")
@every_optimizer
def test_capturable_masks_a_bad_batch_without_reading_it(case):
    """As on a GPU: the same weights as with a look at the gradients, and a count that is told of when read."""
    if case.cls is evenstep.Whitened and case.keywords["base"] is not torch.optim.SGD:
        pytest.skip("torch's own capturable rules need a GPU")
    twins = network(), network()
    twins[1].load_state_dict(twins[0].state_dict())
    looking, blind = case.build(twins[0]), case.build(twins[1], capturable=True)
    good, (x, y) = [batch(), batch()], batch()
    train(twins[0], looking, good)
    train(twins[1], blind, [good[0], (x * float("nan"), y), good[1]])
    if case.cls is evenstep.Whitened:  # the rule's memory takes a zero gradient instead
        assert all(p.isfinite().all() for p in twins[1].parameters())
    else:
        for a, b in zip(weights(twins[0]), weights(twins[1]), strict=True):
            torch.testing.assert_close(a, b)
    with pytest.warns(UserWarning, match="a gradient is not finite"):
        assert blind.nonfinite_steps == 1


def test_a_first_batch_that_is_not_finite_leaves_no_trace():
    model, other = nn.Linear(3, 2), nn.Linear(3, 2)
    other.load_state_dict(model.state_dict())
    x = torch.full((4, 3), float("nan"))
    optimizer, clean = evenstep.WhitenedSGD(model), evenstep.WhitenedSGD(other)
    model(x).sum().backward()
    with pytest.warns(UserWarning, match="not finite"):
        optimizer.step()
    x = torch.randn(4, 3)
    for m, o in ((model, optimizer), (other, clean)):
        o.zero_grad()
        m(x).sum().backward()
        o.step()
    assert_same(weights(model), weights(other))


def test_inputs_that_are_not_finite_under_finite_gradients_are_dropped_from_the_moments():
    model = nn.Linear(3, 2)
    optimizer = evenstep.WhitenedSGD(model)
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    mx = optimizer.state[model.weight]["mx"].clone()
    optimizer.zero_grad()
    with torch.enable_grad():
        model(torch.full((1, 3), float("inf")))  # seen, but no part of the loss
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    assert torch.equal(mx, optimizer.state[model.weight]["mx"])
    assert all(p.isfinite().all() for p in model.parameters())


@pytest.mark.feature("empty batches")
@every_optimizer
def test_an_empty_batch_does_nothing(case):
    if case.cls is evenstep.BlockNaturalSGD:
        pytest.skip("it watches no forward: a zero gradient is all it can see")
    model = network()
    optimizer = case.build(model)
    train(model, optimizer, [batch()])
    before, state = weights(model), snapshot(optimizer)
    optimizer.zero_grad()
    x, y = batch(0)
    functional.cross_entropy(model(x), y, reduction="sum").backward()
    optimizer.step()
    assert_same(before, weights(model))
    assert_same_state(state, snapshot(optimizer))


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
        optimizer.zero_grad()
        model(torch.tensor(at, dtype=torch.int64)).backward()
        optimizer.step()
        table, *head = (not torch.equal(p, q) for p, q in zip(before, weights(model), strict=True))
        assert table
        if case.cls is not evenstep.BlockNaturalSGD:  # it watches no forward
            assert head == [bool(at)] * 2


@every_optimizer
@pytest.mark.parametrize("damping", [0.0, 0.1])
def test_an_input_that_never_varies_gives_a_finite_step(case, damping):
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    more = {"damping": damping} if "damping" in case.build(model).defaults else {}
    optimizer = case.build(model, **more)
    for _ in range(3):
        x = torch.randn(4, 3)
        x[:, 0], x[:, 1] = 5.0, 0.0
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    assert all(p.isfinite().all() for p in model.parameters())


# bad input


@every_optimizer
@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"lr": -1.0}, r"Invalid learning rate: -1\.0"),
        ({"lr": float("nan")}, r"{name}: lr must be a finite number >= 0 or a one-element tensor; got nan\."),
        ({"lr": float("inf")}, r"{name}: lr must be a finite number .*; got inf\."),
        ({"lr": "fast"}, r"{name}: lr must be a finite number .*; got 'fast'\."),
        ({"lr": torch.ones(2)}, "Tensor lr must be 1-element"),
        ({"decay": 1.0}, r"{name}: decay must be in \[0, 1\); got 1\.0\."),
        ({"decay": -0.1}, r"{name}: decay must be in \[0, 1\); got -0\.1\."),
        ({"momentum": -0.5}, r"(Invalid momentum value:|momentum should be >= 0 but is:) -0\.5"),  # torch's own words
        ({"momentum": 1.5}, r"{name}: momentum must be in \[0, 1\); got 1\.5\."),
        ({"damping": -1}, r"{name}: damping must be a finite number >= 0; got -1\."),
        (
            {"weight_decay": -1.0},
            r"Invalid weight_decay value: -1\.0\. {name}: weight_decay must be a finite number >= 0; got -1\.0\.",
        ),
        ({"trust": 0.0}, r"{name}: trust must be a finite number > 0, or None to turn it off; got 0\.0\."),
        ({"fresh_max": -4.0}, r"{name}: fresh_max must be a finite number > 0, or None .*; got -4\.0\."),
        ({"eps": -1.0}, r"Invalid epsilon value: -1\.0"),
        ({"foreach": "yes"}, r"{name}: foreach must be one of None, True, False; got 'yes'\."),
        ({"eps": float("inf")}, r"{name}: eps must be a finite number >= 0; got inf\."),
        ({"block": "layer"}, r"{name}: block must be one of 'network', 'unit', 'weight'; got 'layer'\."),
        ({"reduction": "none"}, r"{name}: reduction must be one of 'mean', 'sum'; got 'none'\."),
        ({"exclude": "head.*"}, r"{name}: exclude must be a list of name patterns; got the string 'head\.\*'\."),
    ],
)
def test_bad_hyperparameters_are_named(case, keywords, message):
    model = network()
    [key] = keywords
    public = key in case.build(model).defaults and not (key == "block" and case.cls is evenstep.UnitStep)
    if not public:
        pytest.skip(f"{case.cls.__name__} has no {key}")
    with pytest.raises(ValueError, match=message.format(name=case.cls.__name__)):
        case.build(model, **keywords)
    group = {"params": [nn.Parameter(torch.zeros(2))], **keywords}
    optimizer = case.build(model)
    if key not in ("block", "reduction"):
        with pytest.raises(ValueError, match=message.format(name=case.cls.__name__)):
            optimizer.add_param_group(group)
        assert len(optimizer.param_groups) == 1


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
    with pytest.raises(ValueError, match=f"{name}: complex parameters are not supported"):
        case.build([nn.Parameter(torch.zeros(2, dtype=torch.complex64))])
    with pytest.raises(ValueError, match=rf"{name}: parameter 'weight' is not initialized yet"):
        case.build(nn.LazyLinear(2))


def test_attaching_to_a_strange_model_keeps_the_old_one():
    model = network()
    optimizer = evenstep.WhitenedSGD(model)
    with pytest.raises(ValueError, match="none of the parameters of this Linear is in the optimizer"):
        optimizer.attach(nn.Linear(2, 2))
    train(model, optimizer, [batch()])
    assert optimizer.state[model[0].weight]["mass"] > 0


def test_sparse_gradients_are_refused_by_name():
    embedding = nn.Embedding(4, 2, sparse=True)
    model = nn.Sequential(embedding, nn.Linear(2, 2))
    optimizer = evenstep.WhitenedSGD(model)
    model(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(RuntimeError, match="WhitenedSGD does not support sparse gradients"):
        optimizer.step()


@pytest.mark.parametrize("scale", [1.0, 1024.0])
def test_a_scaled_loss_gives_canonical_steps_of_the_unscaled_one(scale):
    """The hook on the output sees scaled gradients; the scaler's factor is taken out of g²."""

    class Scaler:
        _scale = torch.tensor(scale)

    twins = network(), network()
    twins[1].load_state_dict(twins[0].state_dict())
    plain, scaled = evenstep.CanonicalSGD(twins[0], lr=0.01), evenstep.CanonicalSGD(twins[1], lr=0.01, scaler=Scaler())
    for x, y in [batch() for _ in range(3)]:
        train(twins[0], plain, [(x, y)])
        scaled.zero_grad()
        (scale * functional.cross_entropy(twins[1](x), y)).backward()
        for p in twins[1].parameters():
            p.grad /= scale  # as GradScaler.unscale_ does
        scaled.step()
    for a, b in zip(weights(twins[0]), weights(twins[1]), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_canonical_without_covered_layers_trains_in_plain_coordinates(reduction):
    with pytest.warns(UserWarning, match="no layer of this LayerNorm is covered"):
        model = nn.LayerNorm(3)
        optimizer = evenstep.CanonicalSGD(model, lr=0.1, plain_lr=0.1, reduction=reduction)
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    torch.testing.assert_close(model.bias.detach(), -0.1 * model.bias.grad)


class Makers(TorchDispatchMode):
    """Names of the operations that make new tensors."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name.startswith(("zeros", "ones", "empty", "full", "new_", "clone", "_to_copy")):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


@every_optimizer
def test_state_that_is_there_is_not_made_again(case):
    """Looking for missing state costs later steps no allocation."""
    model = network()
    optimizer = case.build(model)
    train(model, optimizer, [batch()])
    with Makers() as makers:
        optimizer._init_state(optimizer._blocks(lambda p: p.requires_grad))
    assert makers.names == []


def test_no_covered_layer_warns():
    with pytest.warns(UserWarning, match="WhitenedSGD: no layer of this LayerNorm is covered"):
        evenstep.WhitenedSGD(nn.LayerNorm(3))


def test_coverage_prints_as_a_table_and_repr_sums_it_up():
    optimizer = evenstep.WhitenedSGD(network())
    lines = str(optimizer.coverage()).splitlines()
    assert lines[0].split() == ["parameter", "layer", "treatment", "reason"]
    assert lines[1].split() == ["0.weight", "Conv2d", "whitened"]
    assert "4.weight   LayerNorm  plain      no whitened form for LayerNorm" in lines
    assert repr(optimizer).endswith("coverage: 6 whitened, 2 plain")


def test_a_model_moved_to_another_dtype_is_followed():
    model = network()
    optimizer = evenstep.WhitenedSGD(model, momentum=0.9)
    train(model, optimizer, [batch()])
    model.double()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, optimizer, [(x.double(), y) for x, y in [batch(), batch()]])
    assert all(p.isfinite().all() for p in model.parameters())


@pytest.mark.feature("model moved to another device")
@every_optimizer
def test_a_model_moved_to_another_device_is_followed_in_every_tensor(case):
    """The meta device has no values, but refuses to mix with the CPU as a GPU does."""
    if case.keywords.get("base") is torch.optim.AdamW:
        pytest.skip("AdamW itself cannot run on the meta device without reading it")
    model = network()
    optimizer = case.build(model, **({"capturable": True} if case.cls is evenstep.Whitened else {}))
    train(model, optimizer, [batch()])
    old = list(model.parameters())
    model.to("meta")  # makes new parameters, where a GPU would keep them: hand their state on
    optimizer.param_groups[0]["params"] = list(model.parameters())
    for p, q in zip(old, model.parameters(), strict=True):
        optimizer.state[q] = optimizer.state.pop(p)
    train(model, optimizer, [(x.to("meta"), y.to("meta")) for x, y in [batch(), batch()]])
    for p in model.parameters():
        state = optimizer.state[p]
        assert state and all(v.is_meta for k, v in state.items() if k != "step" or case.cls is not evenstep.Whitened)


@pytest.mark.gpu
@every_optimizer
def test_a_model_moved_to_another_device_is_followed(case):
    model = network()
    optimizer = case.build(model)
    train(model, optimizer, [batch()])
    model.cuda()
    train(model, optimizer, [(x.cuda(), y.cuda()) for x, y in [batch(), batch()]])
    assert all(p.is_cuda and p.isfinite().all() for p in model.parameters())
    kept = [(k, v) for p in model.parameters() for k, v in optimizer.state[p].items() if torch.is_tensor(v)]
    assert all(v.is_cuda for k, v in kept if k != "step" or case.cls is not evenstep.Whitened)  # torch's rules keep it


@pytest.mark.parametrize("foreach", [None, False])
@pytest.mark.parametrize("how", ["all", "new", "one", "empty", "emptied"])
@every_optimizer
def test_state_that_is_taken_away_is_made_anew(case, how, foreach):
    """As torch's optimizers do; what is left goes on."""
    model = network()
    optimizer = case.build(model, foreach=foreach)
    train(model, optimizer, [batch(), batch()])
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
    train(model, optimizer, [batch()])
    assert {p: set(state) for p, state in optimizer.state.items()} == known
    assert all(p.isfinite().all() for p in model.parameters())
    steps = [int(optimizer.state[p]["step"]) for p in model.parameters() if "step" in optimizer.state[p]]
    assert steps == [1 if p is first or how in ("all", "new") else 3 for p in model.parameters() if "step" in known[p]]


@pytest.mark.parametrize("foreach", [None, False])
@pytest.mark.parametrize("name", ["evenstep", "whitened", "fan-in", "whitened-adamw"])
def test_a_layer_whose_weight_has_gone_wants_a_refresh(name, foreach):
    """Pruning computes the weight from another parameter: everything says so, until the model is looked at again."""
    model = network()
    optimizer = OPTIMIZERS[name].build(model, foreach=foreach)
    train(model, optimizer, [batch()])
    prune.l1_unstructured(model[3], "weight", 0.5)
    before = weights(model)
    for ask in (lambda: train(model, optimizer, [batch()]), optimizer.coverage, optimizer.fired):
        with pytest.raises(RuntimeError, match=r"layer '3' no longer has a parameter 'weight'; call opt\.refresh\(\)"):
            ask()
    assert_same(weights(model), before)
    assert "coverage: layer '3' no longer has" in repr(optimizer)
    optimizer.refresh()
    train(model, optimizer, [batch()])
    assert optimizer.coverage() and "no longer" not in repr(optimizer)
