"""Batch norm inserted, trained and folded: the same function, the same names, and errors that change nothing."""

import copy
import warnings

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_module
from torch.nn.utils import parametrizations, prune
from torch.testing import assert_close

import evenstep
from cases import LAYERS
from evenstep.batchnorm import BatchNormed, fold_batchnorm, insert_batchnorm
from helpers import Forward, assert_all_moved, descend, randn

KINDS = [
    *("linear", "linear-biasless", "conv1d", "strided", "padded-reflect", "grouped", "conv2d-biasless", "conv3d"),
    *("transposed1d", "transposed2d", "transposed-grouped", "transposed-biasless", "transposed3d"),
]
NORMS = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}  # by the inputs' dimensions
EXACT = {"rtol": 1e-12, "atol": 1e-12}


def train(model, x, optimizer=None, steps=4):
    """Train a few steps; then draw all scales and shifts, which would still be near 1 and 0."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.05)
    model.train()
    for _ in range(steps):
        descend(optimizer, model(x + torch.randn_like(x)).pow(2).mean())
    for bn in model.modules():
        if isinstance(bn, nn.modules.batchnorm._BatchNorm) and bn.affine:
            nn.init.normal_(bn.weight)
            nn.init.normal_(bn.bias)
    return model


def evaluated(model, x):
    """The output of a copy of the model in eval mode."""
    with torch.no_grad():
        return copy.deepcopy(model).eval()(x)


def assert_fold_keeps_the_function(model, x):
    expected = evaluated(model, x)
    assert fold_batchnorm(model) is model
    assert_close(evaluated(model, x), expected, **EXACT)


def seen(bn):
    """The batch norm with random running statistics."""
    bn.running_mean.normal_()
    bn.running_var.uniform_(0.5, 2)
    bn.num_batches_tracked.fill_(3)
    return bn


def linears():
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).double()


def normed(layer=None, bn=None):
    """A Linear, its batch norm, a ReLU."""
    return nn.Sequential(layer or nn.Linear(3, 3), bn or seen(nn.BatchNorm1d(3)), nn.ReLU()).double()


def changed(model, change):
    change(model)
    return model


def fingerprint(model):
    """Everything that an operation must leave unchanged when it raises."""
    attributes = [{name: id(value) for name, value in vars(m).items()} for m in model.modules()]
    return repr(model), [m.training for m in model.modules()], attributes


def assert_refuses(operation, model, *parts, **options):
    """`operation` raises a ValueError with all `parts` and leaves the model unchanged."""
    before, state = fingerprint(model), copy.deepcopy(dict(model.state_dict()))
    with pytest.raises(ValueError, match=operation.__name__) as caught:
        operation(model, **options)
    for part in parts:
        assert part in str(caught.value)
    assert fingerprint(model) == before
    lazy = [n for n, p in model.named_parameters() if isinstance(p, nn.UninitializedParameter)]
    for name in state.keys() - set(lazy):
        assert_close(model.state_dict()[name], state[name], rtol=0, atol=0, equal_nan=True)


def attributes():
    """A Linear and its batch norm as attributes, a pair that only a trace of the forward can find."""
    bn = seen(nn.BatchNorm1d(3))
    return Forward(lambda self, x: self.b(self.bn(self.a(x))), a=nn.Linear(3, 3), bn=bn, b=normed()).double()


# Inserted, trained, folded


@pytest.mark.parametrize("norm", ["inserted", "own", "own, not affine"])
@pytest.mark.parametrize("kind", KINDS)
def test_folding_after_training_keeps_the_function_and_restores_names(kind, norm):
    layer, x = LAYERS[kind].layer(), LAYERS[kind].inputs(16)
    out = layer(x)
    bn = NORMS[x.dim()](out.shape[1], affine=norm == "own", eps=0.1)
    own = [] if norm == "inserted" else [bn.double()]
    head = nn.ReLU(), nn.Flatten(), nn.Linear(out.flatten(1).shape[1], 1).double()
    model = nn.Sequential(layer, *own, *head)
    weight, before = layer.weight, layer.weight.detach().clone()
    if not own:
        assert insert_batchnorm(model) is model
        assert isinstance(model[0], BatchNormed) and type(model[-1]) is nn.Linear
    assert_fold_keeps_the_function(train(model, x), x)
    assert model[0] is layer and layer.weight is weight and isinstance(layer.bias, nn.Parameter)
    assert not own or type(model[1]) is nn.Identity
    last = len(model) - 1
    assert list(model.state_dict()) == ["0.weight", "0.bias", f"{last}.weight", f"{last}.bias"]
    assert (weight - before).abs().max() > 0.01


def test_inserted_batch_norm_is_folded_under_any_forward():
    model = Forward(lambda self, x: self.b(self.a(self.a(x))), a=nn.Linear(3, 3), b=nn.Linear(3, 2)).double()
    x = randn(8, 3)
    train(insert_batchnorm(model), x)
    assert_fold_keeps_the_function(model, x)
    assert type(model.a) is nn.Linear


def test_batch_norm_has_the_dtype_device_and_mode_of_its_layer():
    model = nn.Sequential(nn.Conv1d(2, 4, 3).double(), nn.ReLU(), nn.Conv1d(4, 2, 3, device="meta"), nn.Conv1d(2, 2, 3))
    insert_batchnorm(model.eval())
    assert model[0][1].weight.dtype == torch.float64 and model[2][1].running_var.device.type == "meta"
    assert not any(m.training for m in model.modules())


def test_the_last_and_skipped_layers_are_left_out():
    model = nn.ModuleDict({"features": nn.Sequential(nn.Conv2d(1, 2, 3), nn.Conv2d(2, 2, 3)), "fc": nn.Linear(2, 2)})
    insert_batchnorm(model, skip=["*.0"])
    assert [path for path, m in model.named_modules() if isinstance(m, BatchNormed)] == ["features.1"]


def test_an_inserted_layer_takes_its_arguments():
    model = insert_batchnorm(nn.Sequential(nn.ConvTranspose1d(2, 2, 3, stride=2), nn.Conv1d(2, 1, 1)))
    assert model[0](torch.randn(3, 2, 5), output_size=[12]).shape[-1] == 12


@pytest.mark.parametrize("shape", [(2, 5, 3), (3,)])
def test_a_linear_on_sequences_raises_in_its_forward(shape):
    model = insert_batchnorm(nn.Sequential(linears(), nn.Linear(3, 2)))
    with pytest.raises(ValueError, match=r"layer '0\.0' \(Linear\).*shape \[.*skip=\['0\.0'\]"):
        model(torch.randn(*shape).double())


# Folding a model's own batch norm


UNUSUAL = {
    "synchronized": nn.SyncBatchNorm.convert_sync_batchnorm,
    "without shift": lambda m: changed(m, lambda m: m[1].register_parameter("bias", None)),
    "without count": lambda m: changed(m, lambda m: setattr(m[1], "num_batches_tracked", None)),  # an old checkpoint's
}


@pytest.mark.parametrize("which", UNUSUAL)
def test_unusual_batch_norm_is_folded(which):
    assert_fold_keeps_the_function(UNUSUAL[which](normed()), randn(4, 3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision_rounds_once(dtype):
    """The batch norm may be float32 or bfloat16 as the layer is."""
    model = nn.Sequential(nn.Linear(32, 32).bfloat16(), seen(nn.BatchNorm1d(32)).to(dtype))
    layer, bn = copy.deepcopy(model).double()
    fold_batchnorm(model)
    scale = bn.weight / (bn.running_var + bn.eps).sqrt()
    assert model[0].weight.dtype == model[0].bias.dtype == torch.bfloat16
    assert_close(model[0].weight.double(), layer.weight * scale[:, None], rtol=2**-8, atol=0)


@pytest.mark.parametrize("mode", [True, False])
def test_a_new_bias_is_frozen_like_its_weight_and_the_mode_is_kept(mode):
    model = fold_batchnorm(normed(nn.Linear(3, 3, bias=False)).requires_grad_(False).train(mode))
    assert not model[0].weight.requires_grad and not model[0].bias.requires_grad
    assert {m.training for m in model.modules()} == {mode}


def test_batch_norm_behind_no_layer_of_a_sequential_is_left_to_torch():
    """The warning's advice works: torch.fx.experimental.optimization.fuse folds the rest."""
    model, x = attributes(), randn(4, 3)
    with pytest.warns(UserWarning, match=r"left alone \['bn'\] not.*torch\.nn\.utils\.fusion.*optimization\.fuse"):
        assert_fold_keeps_the_function(model, x)
    assert type(model.bn) is nn.BatchNorm1d and type(model.b[1]) is nn.Identity
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, when it is imported
        from torch.fx.experimental.optimization import fuse
    fused = fuse(model.eval())
    assert not any(isinstance(m, nn.BatchNorm1d) for m in fused.modules())
    assert_close(fused(x), model(x), **EXACT)


# Errors


def with_own_forward(cls):
    return type(f"Own{cls.__name__}", (cls,), {"forward": lambda self, x: cls.forward(self, x) + 1})


OwnLinear, OwnNorm, OwnSequential = map(with_own_forward, (nn.Linear, nn.BatchNorm1d, nn.Sequential))


def tied(model):
    model.append(nn.Embedding(3, 3)).double()
    model[-1].weight = model[0].weight


UNFIT = {
    "tied": (tied, "'0' (Linear) has a tied weight: ['0.weight', '{last}.weight'] are one parameter"),
    "shared": (lambda m: m.append(m[0]), "'0' (Linear) is shared: ['0', '{last}'] are one module"),
    "parametrized": (
        lambda m: parametrizations.weight_norm(m[0]),
        "'0' (ParametrizedLinear) has a weight computed from other parameters",
    ),
    "pruned": (lambda m: prune.identity(m[0], "bias"), "'0' (Linear) has a bias computed from other parameters"),
    "lazy": (lambda m: m.__setitem__(0, nn.LazyLinear(3)), "of a lazy layer: run one forward pass"),
    "own forward": (lambda m: m.__setitem__(0, OwnLinear(3, 3)), "'0' (OwnLinear) has a forward of its own"),
    "hook": (lambda m: m[0].register_forward_hook(lambda *_: None), "'0' (Linear) has a forward hook; remove it first"),
}


@pytest.mark.filterwarnings("ignore:Lazy modules")
@pytest.mark.parametrize("operation", [insert_batchnorm, fold_batchnorm])
@pytest.mark.parametrize("case", UNFIT)
def test_layers_that_batch_norm_cannot_be_folded_into_are_refused(operation, case):
    change, part = UNFIT[case]
    model = changed(normed() if operation is fold_batchnorm else linears(), change)
    assert_refuses(operation, model, part.format(last=len(model) - 1), "unchanged")


@pytest.mark.parametrize("operation", [insert_batchnorm, fold_batchnorm])
def test_sharded_layers_are_refused(operation, tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = linears() if operation is insert_batchnorm else normed()
        distribute_module(model[0], init_device_mesh("cpu", (1,)))
        assert_refuses(operation, model, "'0' (Linear) has a weight that is a DTensor; insert or fold")
    finally:
        dist.destroy_process_group()


NO_PLACE = {
    "attention": (lambda: nn.MultiheadAttention(4, 2), "'0.out_proj'", "belongs to an nn.MultiheadAttention"),
    "encoder": (lambda: nn.TransformerEncoderLayer(4, 2), "'0.linear1' (Linear)", "an nn.TransformerEncoderLayer"),
    "inserted": (lambda: insert_batchnorm(linears()), "'0.0.0' (Linear) is already followed by batch norm"),
    "own": (normed, "'0.0' (Linear) is already followed by batch norm"),
}


@pytest.mark.parametrize("case", NO_PLACE)
def test_insert_refuses_layers_without_a_place_until_they_are_skipped(case):
    make, *parts = NO_PLACE[case]
    model = nn.ModuleList([make(), *linears()])
    assert_refuses(insert_batchnorm, model, *parts, "leave them out with skip=", "unchanged")
    insert_batchnorm(model, skip=["0.*"])
    assert isinstance(model[1], BatchNormed)


@pytest.mark.parametrize(
    ("model", "skip", "part"),
    [
        (linears(), ["fc"], "'fc' fits none of the layers ['0', '1']"),
        (linears(), ["0"], "no layer is left"),
        (nn.ReLU(), [], "no layer is left"),
    ],
)
def test_insert_refuses_a_skip_that_makes_no_sense(model, skip, part):
    assert_refuses(insert_batchnorm, model, part, skip=skip)


ELSEWHERE = "torch.nn.utils.fusion", "torch.fx.experimental.optimization.fuse"
NO_PAIR = "no batch norm", "attributes", "first", "after an activation", "own Sequential", "one inserted layer"
NOT_FOLDED = {
    "no statistics": (lambda: normed(bn=nn.BatchNorm1d(3, track_running_stats=False)), "has no running statistics"),
    "no batch": (lambda: normed(bn=nn.BatchNorm1d(3)), "'1' (BatchNorm1d) has seen no batch yet"),
    "inserted, no batch": (lambda: insert_batchnorm(linears()), "'0.1' (BatchNorm1d) has seen no batch yet"),
    "features": (lambda: normed(bn=seen(nn.BatchNorm1d(4))), "has 4 features; the layer before it needs BatchNorm1d"),
    "rank": (lambda: normed(bn=seen(nn.BatchNorm2d(3))), "'1' (BatchNorm2d) has 3 features; the layer before it needs"),
    "own forward": (lambda: normed(bn=seen(OwnNorm(3))), "'1' (OwnBatchNorm1d) has a forward of its own"),
    "hook": (lambda: changed(normed(), lambda m: m[1].register_forward_pre_hook(print)), "(BatchNorm1d) has a forward"),
    "shared": (
        lambda: changed(normed(), lambda m: m.extend([nn.Linear(3, 3), m[1]])),
        "'1' (BatchNorm1d) is shared: ['1', '4'] are one module",
    ),
    "several": (
        lambda: nn.Sequential(normed(), normed(bn=seen(OwnNorm(3))), normed(OwnLinear(3, 3))),
        "'1.1' (OwnBatchNorm1d) has",
        "'2.0' (OwnLinear) has",
    ),
    # models without a pair, for which torch has a function
    "no batch norm": (linears, "no layer with its batch norm in this Sequential; got []"),
    "attributes": (lambda: changed(attributes(), lambda m: delattr(m, "b")), "got ['bn']"),
    "first": (lambda: nn.Sequential(seen(nn.BatchNorm1d(3)), nn.Linear(3, 3)), "got ['0']"),
    "after an activation": (lambda: nn.Sequential(nn.Linear(3, 3), nn.ReLU(), seen(nn.BatchNorm1d(3))), "got ['2']"),
    "own Sequential": (lambda: OwnSequential(*normed()), "got ['1']"),
    "one inserted layer": (lambda: insert_batchnorm(linears())[0], "in this BatchNormed"),
}


@pytest.mark.parametrize("case", NOT_FOLDED)
def test_fold_refuses_what_is_no_fixed_scale_and_shift_behind_a_layer(case):
    """All reasons come at once; for models without a pair the message says what torch has."""
    make, *parts = NOT_FOLDED[case]
    assert_refuses(fold_batchnorm, make(), *parts, *(ELSEWHERE if case in NO_PAIR else ["unchanged"]))


# With an optimizer


def small_net():
    """A network with batch norm inserted, and its loss on a task."""
    layers = [nn.Linear(6, 16, bias=False), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 2)]
    model, x = insert_batchnorm(nn.Sequential(*layers)), torch.randn(64, 6)
    y = torch.tanh(x @ torch.randn(6, 2))
    return model, lambda: (model(x) - y).pow(2).mean()


def descents(optimizer, loss, steps):
    for _ in range(steps):
        descend(optimizer, loss())
    return loss().item()


@pytest.mark.parametrize("way", ["built anew", "refreshed", "added the new bias"])
def test_training_goes_on_after_folding(way):
    model, loss = small_net()
    parameters = model.named_parameters() if way == "added the new bias" else model
    optimizer = evenstep.WhitenedSGD(parameters, lr=0.1, model=model)
    descents(optimizer, loss, 20)
    fold_batchnorm(model)
    if way == "added the new bias":
        optimizer.add_param_group({"params": [("0.bias", model[0].bias)]})
    if way == "built anew":
        optimizer.detach()
        optimizer = evenstep.WhitenedSGD(model, lr=0.1)
    else:
        optimizer.refresh()
    assert {row.parameter for row in optimizer.coverage() if row.treatment == "whitened"} == set(model.state_dict())
    before, start = [p.detach().clone() for p in model.parameters()], loss().item()
    assert descents(optimizer, loss, 40) < 0.8 * start
    assert_all_moved(model, before)


def test_what_a_refreshed_optimizer_saves_loads_into_a_new_one():
    model, loss = small_net()
    optimizer = evenstep.WhitenedSGD(model, lr=0.1)
    descents(optimizer, loss, 2)
    fold_batchnorm(model)
    optimizer.refresh()
    assert {*optimizer.param_groups[0]["param_names"]} == {*model.state_dict()}
    assert {id(p) for p in optimizer.state} <= {id(p) for p in model.parameters()}
    optimizer.detach()
    evenstep.WhitenedSGD(model, lr=0.1).load_state_dict(optimizer.state_dict())
