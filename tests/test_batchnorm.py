"""Batch norm inserted, trained and folded: the same function, the same names, and refusals that change nothing."""

import copy
import pickle
import re
from types import SimpleNamespace

import pytest
import torch
from torch import fx, nn
from torch.nn.utils import parametrizations, prune
from torch.testing import assert_close

import evenstep
from evenstep.batchnorm import BatchNormed, fold_batchnorm, insert_batchnorm

SPATIAL = {
    "conv1d": (nn.Conv1d, 1, {}),
    "conv2d-stride": (nn.Conv2d, 2, {"stride": 2, "padding": 1}),
    "conv2d-reflect": (nn.Conv2d, 2, {"padding": 1, "padding_mode": "reflect"}),
    "conv2d-groups": (nn.Conv2d, 2, {"groups": 2}),
    "conv3d": (nn.Conv3d, 3, {}),
    "transpose1d": (nn.ConvTranspose1d, 1, {"stride": 2}),
    "transpose2d": (nn.ConvTranspose2d, 2, {}),
    "transpose2d-groups": (nn.ConvTranspose2d, 2, {"groups": 2, "stride": 2}),
    "transpose3d-groups": (nn.ConvTranspose3d, 3, {"groups": 4}),
}
NORMS = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}


def layer_and_inputs(kind, bias):
    """A layer of 4 inputs and 8 units, and a batch that is neither centred nor even."""
    if kind == "linear":
        return nn.Linear(4, 8, bias=bias).double(), torch.randn(16, 4).double() * 3 + 1
    cls, rank, options = SPATIAL[kind]
    return cls(4, 8, 3, bias=bias, **options).double(), torch.randn(6, 4, *[5] * rank).double() * 3 + 1


def head(out):
    """What closes a small network: one output per example."""
    return [nn.ReLU(), nn.Flatten(), nn.Linear(out.flatten(1).shape[1], 1).double()]


def train(model, *batches, optimizer=None, steps=4):
    """Some steps of training, so that statistics, scales and shifts are far from where they began."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.05)
    model.train()
    for _ in range(steps):
        optimizer.zero_grad()
        model(*(x + torch.randn_like(x) for x in batches)).pow(2).mean().backward()
        optimizer.step()
    for bn in model.modules():
        if isinstance(bn, nn.modules.batchnorm._BatchNorm) and bn.affine:
            nn.init.normal_(bn.weight)
            nn.init.normal_(bn.bias)
    return model


def evaluated(model, *args, **kwargs):
    """What a copy of the model computes in eval mode."""
    with torch.no_grad():
        return copy.deepcopy(model).eval()(*args, **kwargs)


def seen(bn):
    """A batch norm with statistics of its own."""
    bn.running_mean.normal_()
    bn.running_var.uniform_(0.5, 2)
    bn.num_batches_tracked.fill_(3)
    return bn


def fingerprint(model):
    """All that an operation must leave alone when it refuses."""
    state = {name: value.clone() for name, value in model.state_dict().items()}
    attributes = [{k: id(v) for k, v in vars(m).items()} for m in model.modules()]
    return repr(model), state, [m.training for m in model.modules()], attributes


def assert_refuses(operation, model, *parts, **options):
    """`operation` raises a ValueError that has all `parts`, and the model is as it was."""
    before = fingerprint(model)
    with pytest.raises(ValueError, match=re.escape(operation.__name__)) as caught:
        operation(model, **options)
    after = fingerprint(model)
    for part in parts:
        assert part in str(caught.value)
    assert before[0] == after[0] and before[2:] == after[2:]
    assert_close(before[1], after[1], rtol=0, atol=0, equal_nan=True)


class Block(nn.Module):
    """A residual block, its batch norms attributes as in ResNets."""

    def __init__(self, width, bias=False):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(width, width, 3, padding=1, bias=bias), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, padding=1, bias=bias), nn.BatchNorm2d(width)

    def forward(self, x):
        return torch.relu(self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x))))) + x)


class ResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU())
        self.blocks = nn.ModuleList([Block(4), Block(4)])
        self.fc = nn.Linear(4, 2)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.fc(x.mean((2, 3)))


class Forward(nn.Module):
    """Modules by name, and a forward given as a function."""

    def __init__(self, forward, **modules):
        super().__init__()
        self.function = forward
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, x):
        return self.function(self, x)


def pair(forward, **modules):
    """A Linear `a`, its batch norm `bn`, a Linear `b`."""
    return Forward(forward, **{"a": nn.Linear(3, 3), "bn": seen(nn.BatchNorm1d(3)), "b": nn.Linear(3, 3), **modules})


# Inserted, trained, folded


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", ["linear", *SPATIAL])
def test_insert_train_fold_keeps_the_function_and_restores_names(kind, bias):
    layer, x = layer_and_inputs(kind, bias)
    model = nn.Sequential(layer, *head(layer(x)))
    keys = list(nn.Sequential(layer_and_inputs(kind, True)[0], *head(layer(x))).state_dict())
    assert insert_batchnorm(model) is model
    assert isinstance(model[0], BatchNormed) and type(model[3]) is nn.Linear
    train(model, x)
    expected = evaluated(model, x)
    weight = layer.weight
    assert fold_batchnorm(model) is model
    assert model[0] is layer and layer.weight is weight and isinstance(layer.bias, nn.Parameter)
    assert list(model.state_dict()) == keys
    assert_close(evaluated(model, x), expected, rtol=1e-10, atol=1e-10)


def test_folding_does_change_the_layer():
    """The exactness above is not that of doing nothing."""
    layer, x = layer_and_inputs("linear", True)
    model = train(insert_batchnorm(nn.Sequential(layer, *head(layer(x)))), x)
    before = layer.weight.detach().clone()
    fold_batchnorm(model)
    assert (layer.weight - before).abs().max() > 0.01


def test_the_batch_norm_is_like_its_layer():
    model = nn.Sequential(nn.Conv1d(2, 4, 3).double(), nn.ReLU(), nn.Conv1d(4, 2, 3).half(), nn.Conv1d(2, 2, 3)).eval()
    insert_batchnorm(model)
    assert [m[1].weight.dtype for m in (model[0], model[2])] == [torch.float64, torch.float16]
    assert not any(m.training for m in model.modules())
    meta = insert_batchnorm(nn.Sequential(nn.Linear(2, 2, device="meta"), nn.Linear(2, 2, device="meta")))
    assert meta[0][1].running_var.device.type == "meta"


def test_skip_and_the_last_are_left_alone():
    model = nn.ModuleDict({"features": nn.Sequential(nn.Conv2d(1, 2, 3), nn.Conv2d(2, 2, 3)), "fc": nn.Linear(2, 2)})
    insert_batchnorm(model, skip=["*.0"])
    assert [path for path, m in model.named_modules() if isinstance(m, BatchNormed)] == ["features.1"]


def test_a_nested_layer_gets_its_name_back():
    model = ResNet()
    for block in model.blocks:
        block.bn1 = block.bn2 = nn.Identity()
    model.stem[1] = nn.Identity()
    keys = list(model.state_dict())
    train(insert_batchnorm(model), torch.randn(4, 3, 6, 6))
    x = torch.randn(2, 3, 6, 6)
    expected = evaluated(model, x)
    fold_batchnorm(model)
    assert [k for k in model.state_dict() if "bias" not in k] == [k for k in keys if "bias" not in k]
    assert_close(evaluated(model, x), expected)


def test_an_inserted_model_can_be_copied_and_pickled():
    layer, x = layer_and_inputs("conv2d-groups", False)
    model = train(insert_batchnorm(nn.Sequential(layer, *head(layer(x)))), x)
    expected = evaluated(model, x)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert_close(evaluated(twin, x), expected, rtol=0, atol=0)
        assert_close(evaluated(fold_batchnorm(twin), x), expected)
        assert type(twin[0]) is nn.Conv2d
    assert isinstance(model[0], BatchNormed)


def test_an_inserted_layer_is_called_as_before():
    """A ConvTranspose's output_size passes, and fx can trace a Linear with its check."""
    up = nn.ConvTranspose1d(2, 2, 3, stride=2)
    model = Forward(lambda self, x: self.b(self.a(x, output_size=[12])), a=up, b=nn.Conv1d(2, 1, 1))
    x = torch.randn(3, 2, 5)
    train(insert_batchnorm(model), x)
    expected = evaluated(model, x)
    assert expected.shape[-1] == 12
    assert_close(evaluated(fold_batchnorm(model), x), expected)
    traced = fx.symbolic_trace(insert_batchnorm(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))).eval())
    assert traced(torch.randn(5, 3)).shape == (5, 2)


@pytest.mark.parametrize("shape", [(2, 5, 3), (3,)])
def test_a_linear_on_sequences_is_refused_when_it_meets_one(shape):
    model = insert_batchnorm(nn.Sequential(nn.Sequential(nn.Linear(3, 4)), nn.Linear(4, 2)))
    with pytest.raises(ValueError, match=r"layer '0\.0' \(Linear\).*shape \[.*skip=\['0\.0'\]"):
        model(torch.randn(*shape))


# Refused before anything is inserted


class OwnForward(nn.Linear):
    def forward(self, x):
        return super().forward(x) + 1


def tied():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    return model


def shared():
    layer = nn.Linear(3, 3)
    return nn.Sequential(layer, nn.ReLU(), layer, nn.Linear(3, 3))


def pruned():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    prune.identity(model[0], "bias")
    return model


NOT_INSERTED = {
    "shared": (shared, "'0' (Linear) is shared: '0', '2' are one module"),
    "tied": (tied, "'0' (Linear) has a tied weight: '0.weight', '1.weight' are one parameter"),
    "parametrized": (
        lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(3, 3)), nn.Linear(3, 3)),
        "'0' (ParametrizedLinear) has a weight computed from other parameters",
    ),
    "pruned bias": (pruned, "'0' (Linear) has a bias computed from other parameters"),
    "attention": (
        lambda: nn.ModuleDict({"attn": nn.MultiheadAttention(4, 2), "fc": nn.Linear(4, 4)}),
        "'attn.out_proj' (NonDynamicallyQuantizableLinear) belongs to an nn.MultiheadAttention",
    ),
    "encoder": (
        lambda: nn.ModuleList([nn.TransformerEncoderLayer(4, 2), nn.Linear(4, 4)]),
        "'0.linear1' (Linear) belongs to an nn.TransformerEncoderLayer",
    ),
    "lazy": (lambda: nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 3)), "weight that is not initialized yet"),
    "forward of its own": (lambda: nn.Sequential(OwnForward(3, 3), nn.Linear(3, 3)), "(OwnForward) has a forward"),
    "called twice": (
        lambda: Forward(lambda self, x: self.b(self.a(self.a(x))), a=nn.Linear(3, 3), b=nn.Linear(3, 3)),
        "'a' (Linear) is shared: it is called 2 times",
    ),
    "weight used elsewhere": (
        lambda: Forward(lambda self, x: self.b(self.a(x)) @ self.a.weight, a=nn.Linear(3, 3), b=nn.Linear(3, 3)),
        "'a' (Linear) has a weight that another forward uses too",
    ),
    "inserted before": (
        lambda: insert_batchnorm(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))),
        "'0.0' (Linear) has batch norm inserted already",
    ),
    "batch norm there": (
        lambda: pair(lambda self, x: self.b(self.bn(self.a(x)))),
        "'a' (Linear) is already followed by batch norm, 'bn' (BatchNorm1d)",
    ),
}


@pytest.mark.filterwarnings("ignore:Lazy modules")
@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@pytest.mark.parametrize("case", NOT_INSERTED)
def test_insert_refuses(case):
    make, part = NOT_INSERTED[case]
    model = make()
    if case == "lazy":
        with pytest.raises(ValueError, match=part):
            insert_batchnorm(model)
        return
    assert_refuses(insert_batchnorm, model, part, "skip=", "unchanged")


def test_a_refused_layer_can_be_skipped():
    model = nn.ModuleDict({"fc": nn.Linear(4, 4), "attn": nn.MultiheadAttention(4, 2), "out": nn.Linear(4, 4)})
    insert_batchnorm(model, skip=["attn.*"])
    assert isinstance(model["fc"], BatchNormed)


@pytest.mark.parametrize(
    ("model", "skip", "part"),
    [
        (nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), "0", "must be a list of path patterns; got the string '0'"),
        (nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), ["fc"], "'fc' fits none of the layers '0', '1'"),
        (nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), ["0"], "no layer to be followed"),
        (nn.Linear(3, 3), [], "no layer to be followed"),
        (nn.ReLU(), [], "no layer to be followed"),
    ],
)
def test_insert_refuses_a_skip_that_makes_no_sense(model, skip, part):
    assert_refuses(insert_batchnorm, model, part, skip=skip)


# Folding a model's own batch norms


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", ["linear", *SPATIAL])
def test_fold_in_a_sequential(kind, bias, affine):
    layer, x = layer_and_inputs(kind, bias)
    norm = NORMS[SPATIAL[kind][1] if kind in SPATIAL else 1]
    model = train(nn.Sequential(layer, norm(8, affine=affine, eps=0.1).double(), *head(layer(x))), x)
    expected = evaluated(model, x)
    fold_batchnorm(model)
    assert type(model[1]) is nn.Identity
    assert list(model.state_dict()) == ["0.weight", "0.bias", "4.weight", "4.bias"]
    assert_close(evaluated(model, x), expected, rtol=1e-10, atol=1e-10)


def test_fold_a_residual_network():
    model = ResNet().double()
    x = torch.randn(5, 3, 8, 8).double()
    train(model, x)
    expected = evaluated(model, x)
    fold_batchnorm(model)
    assert not any(isinstance(m, nn.BatchNorm2d) for m in model.modules())
    assert type(model.blocks[0].bn1) is nn.Identity and model.blocks[1].conv2.bias is not None
    assert_close(evaluated(model, x), expected, rtol=1e-10, atol=1e-10)


def test_a_scale_without_shift_is_folded():
    bn = nn.BatchNorm1d(3)
    bn.register_parameter("bias", None)
    model, x = nn.Sequential(nn.Linear(3, 3), seen(bn)), torch.randn(4, 3)
    expected = evaluated(model, x)
    assert_close(evaluated(fold_batchnorm(model), x), expected)


def test_low_precision_rounds_once():
    """The folded weight is the float64 product, rounded to bfloat16 at the end."""
    model = nn.Sequential(nn.Linear(3, 4).bfloat16(), seen(nn.BatchNorm1d(4)))
    layer, bn = copy.deepcopy(model).double()
    fold_batchnorm(model)
    scale = bn.weight / (bn.running_var + bn.eps).sqrt()
    assert model[0].weight.dtype == model[0].bias.dtype == torch.bfloat16
    assert_close(model[0].weight.double(), layer.weight * scale[:, None], rtol=2**-8, atol=0)


def test_frozen_stays_frozen_and_a_new_bias_with_it():
    model = nn.Sequential(nn.Linear(3, 3, bias=False), seen(nn.BatchNorm1d(3))).requires_grad_(False)
    fold_batchnorm(model)
    assert not model[0].weight.requires_grad and not model[0].bias.requires_grad


@pytest.mark.parametrize("mode", [True, False])
def test_the_mode_is_kept(mode):
    model = ResNet()
    train(model, torch.randn(4, 3, 6, 6)).train(mode)
    fold_batchnorm(model)
    assert {m.training for m in model.modules()} == {mode}


def test_a_frozen_batch_norm_in_a_training_model_is_folded():
    """Modes must agree among batch norms alone."""
    model = pair(lambda self, x: self.b(self.bn(self.a(x))))
    model.bn.eval()
    fold_batchnorm(model)
    assert model.training and not model.bn.training


def test_a_head_that_eval_mode_does_not_call_is_folded_if_sequential():
    aux = nn.Sequential(nn.Linear(3, 3), seen(nn.BatchNorm1d(3)))
    model = pair(lambda self, x: self.b(self.bn(self.a(x))) + (self.aux(x) if self.training else 0), aux=aux)
    x = torch.randn(4, 3)
    expected, expected_aux = evaluated(model, x), evaluated(aux, x)
    fold_batchnorm(model)
    assert_close(evaluated(model, x), expected)
    assert_close(evaluated(aux, x), expected_aux)


def test_what_cannot_be_traced_is_folded_if_sequential():
    """Inserted batch norms and those in an nn.Sequential need no trace."""
    own = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    model = Forward(lambda self, x: self.b(self.a(x)) if x.sum() > -1e9 else x, a=nn.Linear(3, 3), b=own)
    x = torch.randn(4, 3)
    train(insert_batchnorm(model), x)
    expected = evaluated(model, x)
    assert_close(evaluated(fold_batchnorm(model), x), expected)
    assert type(model.a) is nn.Linear and type(model.b[1]) is nn.Identity


def test_a_list_and_a_sequential_of_sequentials_are_folded_where_nothing_is_traced():
    inner = nn.ModuleList([nn.Sequential(normed(), nn.ReLU()), normed()])
    model = Forward(lambda self, x: self.a[1](self.a[0](x)) if x.sum() > -1e9 else x, a=inner)
    x = torch.randn(4, 3)
    expected = evaluated(model, x)
    assert_close(evaluated(fold_batchnorm(model), x), expected)


def test_parts_without_layers_need_no_trace():
    """Only what holds layers is traced: an activation may look at its values."""

    class Odd(nn.Module):
        def forward(self, x):
            return x if x.sum() > 0 else -x

    model = pair(lambda self, x: self.odd(self.bn(self.a(x))), odd=Odd())
    x = torch.randn(4, 3)
    expected = evaluated(model, x)
    assert_close(evaluated(fold_batchnorm(model), x), expected)


class Flag(nn.Module):
    """An optional argument that a trace cannot take as given."""

    def __init__(self):
        super().__init__()
        self.a, self.bn = nn.Linear(3, 3), seen(nn.BatchNorm1d(3))

    def forward(self, x, flag=False):
        return -self.bn(self.a(x)) if flag else self.bn(self.a(x))


class Late(Flag):
    """An optional argument that comes between layer and batch norm."""

    def forward(self, x, late=None):
        h = self.a(x)
        if late is not None:
            h = h + late
        return self.bn(h)


def test_optional_arguments_are_at_their_defaults_and_given_where_that_can_be_traced():
    model, x = Flag(), torch.randn(4, 3)
    expected = evaluated(model, x)
    assert_close(evaluated(fold_batchnorm(model), x), expected)
    assert_refuses(fold_batchnorm, Late(), "'bn' (BatchNorm1d) comes after 'add', not directly after")


def test_tracing_leaves_nothing_behind():
    """What a forward sets, and the constants of fx, are gone."""

    def forward(self, x):
        self.last = self.bn(self.a(x))
        return self.last * torch.tensor([1.0, 2.0, 3.0])

    model = pair(forward)
    fold_batchnorm(model)
    assert not any("constant" in name or name == "last" for name in vars(model))


# Refused before anything is folded


class OwnNorm(nn.BatchNorm1d):
    def forward(self, x):
        return super().forward(x) + 1


def in_order(self, x):
    return self.b(self.bn(self.a(x)))


def both(self, x):
    h = self.a(x)
    return self.bn(h) + h


def in_place(self, x):
    h = self.a(x)
    torch.relu_(h)
    return self.bn(h)


def broken_statistics():
    bn = seen(nn.BatchNorm1d(3))
    bn.running_var[0] = float("nan")
    return bn


def tied_to_embedding():
    model = nn.Sequential(nn.Linear(3, 3), seen(nn.BatchNorm1d(3)), nn.Embedding(3, 3))
    model[2].weight = model[0].weight
    return model


def registered_twice():
    bn = seen(nn.BatchNorm1d(3))
    return nn.Sequential(nn.Linear(3, 3), bn, nn.Linear(3, 3), bn)


def taps(self, x):
    """Untraceable; what the layer gives is used before the batch norm."""
    found = [x := layer(x) for layer in self.net]
    return found[0] + found[-1] if x.sum() > -1e9 else x


def backwards(self, x):
    return self.net[0](self.net[1](x)) if x.sum() > -1e9 else x


def normed():
    return nn.Sequential(nn.Linear(3, 3), seen(nn.BatchNorm1d(3)))


def hooked(at, pre):
    model = normed()
    if pre:
        model[at].register_forward_pre_hook(lambda module, args: (2 * args[0],))
    else:
        model[at].register_forward_hook(lambda module, args, output: 2 * output)
    return model


NOT_FOLDED = {
    "tapped where nothing is traced": (lambda: Forward(taps, net=normed()), "that is surely called as a whole, and"),
    "backwards where nothing is traced": (
        lambda: Forward(backwards, net=normed()),
        "does not follow a Conv, ConvTranspose or Linear in an nn.Sequential that is surely called as a whole, and "
        "torch.fx cannot trace the model: TraceError",
    ),
    "in a list where nothing is traced": (
        lambda: Forward(lambda self, x: taps(SimpleNamespace(net=self.list[0]), x), list=nn.ModuleList([normed()])),
        "that is surely called as a whole, and",
    ),
    "hook on the layer": (lambda: hooked(0, False), "'1' (BatchNorm1d) comes after '0' (Linear), which has a forward"),
    "pre-hook on the batch norm": (lambda: hooked(1, True), "'1' (BatchNorm1d) has a forward hook; remove it first"),
    "first": (lambda: nn.Sequential(seen(nn.BatchNorm1d(3)), nn.Linear(3, 3)), "'0' (BatchNorm1d) comes after 'input'"),
    "after an activation": (
        lambda: nn.Sequential(nn.Linear(3, 3), nn.ReLU(), seen(nn.BatchNorm1d(3))),
        "'2' (BatchNorm1d) comes after '1' (ReLU), not directly after a Conv, ConvTranspose or Linear",
    ),
    "after a function": (
        lambda: pair(lambda self, x: self.bn(torch.relu(self.a(x)))),
        "'bn' (BatchNorm1d) comes after 'relu', not directly after",
    ),
    "after an in-place function": (
        lambda: pair(in_place),
        "'bn' (BatchNorm1d) comes after 'a' (Linear), whose output also goes to 'relu_'",
    ),
    "output used twice": (lambda: pair(both), "comes after 'a' (Linear), whose output also goes to 'add'"),
    "tapped in a Sequential": (
        lambda: Forward(
            lambda self, x: self.a(x) + self.a[0](x), a=nn.Sequential(nn.Linear(3, 3), seen(nn.BatchNorm1d(3)))
        ),
        "comes after 'a.0' (Linear), which is shared: it is called 2 times",
    ),
    "layer called twice": (
        lambda: pair(lambda self, x: self.bn(self.a(self.a(x)))),
        "comes after 'a' (Linear), which is shared: it is called 2 times",
    ),
    "batch norm called twice": (
        lambda: pair(lambda self, x: self.bn(self.b(self.bn(self.a(x))))),
        "'bn' (BatchNorm1d) is shared: it is called 2 times",
    ),
    "batch norm registered twice": (registered_twice, "'1' (BatchNorm1d) is shared: '1', '3' are one module"),
    "tied": (tied_to_embedding, "which has a tied weight: '0.weight', '2.weight' are one parameter"),
    "no statistics": (
        lambda: nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3, track_running_stats=False)),
        "'1' (BatchNorm1d) has no running statistics (track_running_stats=False)",
    ),
    "no batch": (
        lambda: insert_batchnorm(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))),
        "'0.1' (BatchNorm1d) has seen no batch yet",
    ),
    "not finite": (lambda: pair(in_order, bn=broken_statistics()), "statistics that are not finite"),
    "other features": (
        lambda: nn.Sequential(nn.Linear(3, 3), seen(nn.BatchNorm1d(4))),
        "comes after '0' (Linear), which has 3 units, not 4",
    ),
    "other rank": (
        lambda: nn.Sequential(nn.Linear(3, 3), seen(nn.BatchNorm2d(3))),
        "comes after '0' (Linear), whose units a BatchNorm1d would normalize",
    ),
    "parametrized": (
        lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(3, 3)), seen(nn.BatchNorm1d(3))),
        "which has a weight computed from other parameters",
    ),
    "layer's own forward": (lambda: pair(in_order, a=OwnForward(3, 3)), "(OwnForward), which has a forward of its own"),
    "own forward": (lambda: pair(in_order, bn=seen(OwnNorm(3))), "'bn' (OwnNorm) has a forward of its own"),
    "not called": (lambda: pair(lambda self, x: self.a(x)), "in an nn.Sequential, and eval mode does not call it"),
    "not traceable": (
        lambda: pair(lambda self, x: in_order(self, x) if x.sum() > 0 else x),
        "'bn' (BatchNorm1d) does not follow a Conv, ConvTranspose or Linear in an nn.Sequential, and torch.fx cannot "
        "trace the model: TraceError: symbolically traced variables cannot be used as inputs to control flow",
    ),
}


@pytest.mark.parametrize("mode", [True, False])
@pytest.mark.parametrize("case", NOT_FOLDED)
def test_fold_refuses(case, mode):
    make, part = NOT_FOLDED[case]
    assert_refuses(fold_batchnorm, make().train(mode), part, "unchanged")


def test_all_reasons_come_at_once_and_what_could_be_folded_is_not():
    norms = [seen(nn.BatchNorm1d(3)) for _ in range(3)]
    model = nn.Sequential(norms[0], nn.Linear(3, 3), norms[1], nn.ReLU(), norms[2])
    assert_refuses(fold_batchnorm, model, "'0' (BatchNorm1d) comes", "'4' (BatchNorm1d) comes")


def test_fold_refuses_half_a_training_mode():
    model = train(ResNet(), torch.randn(4, 3, 6, 6))
    model.blocks[1].bn2.eval()
    assert_refuses(
        fold_batchnorm, model, "'blocks.1.bn2' in eval mode; call model.eval() or model.train() first", "unchanged"
    )


def test_fold_needs_a_batch_norm_and_the_model_that_holds_it():
    assert_refuses(
        fold_batchnorm, nn.Sequential(nn.Linear(3, 3)), "this Sequential has no BatchNorm1d, 2d or 3d to fold"
    )
    model = insert_batchnorm(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))
    assert_refuses(fold_batchnorm, model[0], "give the model that holds it")


def test_statistics_that_were_never_counted_are_trusted():
    """Old checkpoints have no num_batches_tracked."""
    model = pair(in_order)
    model.bn.num_batches_tracked = None
    fold_batchnorm(model)
    assert type(model.bn) is nn.Identity


# With an optimizer


def small_task():
    x = torch.randn(64, 6)
    return x, torch.tanh(x @ torch.randn(6, 2))


def losses(model, optimizer, x, y, steps):
    found = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (model(x) - y).pow(2).mean()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def small_net():
    layers = [nn.Linear(6, 16, bias=False), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 2)]
    return insert_batchnorm(nn.Sequential(*layers))


def test_training_goes_on_after_folding_with_a_new_optimizer():
    x, y = small_task()
    model = small_net()
    losses(model, evenstep.WhitenedSGD(model, lr=0.1), x, y, 20)
    fold_batchnorm(model)
    rows = evenstep.WhitenedSGD(model, lr=0.1).coverage()
    assert {row.parameter for row in rows if row.treatment == "whitened"} == set(model.state_dict())
    after = losses(model, evenstep.WhitenedSGD(model, lr=0.1), x, y, 40)
    assert after[-1] < 0.8 * after[0]


@pytest.mark.parametrize("whole", [True, False])
def test_training_goes_on_after_folding_with_the_same_optimizer(whole):
    """Refreshed, it holds what is left and what is new (told of it, if it was built from parameters), and trains it."""
    x, y = small_task()
    model = small_net()
    optimizer = evenstep.WhitenedSGD(model if whole else model.named_parameters(), lr=0.1, model=model)
    losses(model, optimizer, x, y, 20)
    fold_batchnorm(model)
    if not whole:
        optimizer.add_param_group({"params": [("0.bias", model[0].bias)]})
    optimizer.refresh()
    if whole:
        assert optimizer.param_groups[0]["param_names"] == list(model.state_dict())
        evenstep.WhitenedSGD(copy.deepcopy(model), lr=0.1).load_state_dict(optimizer.state_dict())
        assert {id(p) for p in optimizer.state} <= {id(p) for p in model.parameters()}
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    after = losses(model, optimizer, x, y, 40)
    assert after[-1] < 0.8 * after[0]
    assert all(not torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_an_optimizer_that_watches_the_model_is_not_disturbed_by_folding():
    """Tracing calls no layer: nothing is staged, and no hook fails on symbols."""
    model = ResNet()
    optimizer = evenstep.WhitenedSGD(model, lr=0.1)
    train(model, torch.randn(4, 3, 6, 6), optimizer=optimizer)
    x = torch.randn(4, 3, 6, 6)
    expected = evaluated(model, x)
    fold_batchnorm(model)
    assert_close(evaluated(model, x), expected)
