"""The library in C: how it is built and done without, its sums against float64, threads, and what it must not write."""

import copy
import os
import platform
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import evenstep
from conftest import needs_c
from evenstep.kernels import native, native_step
from evenstep.layers import Look
from evenstep.moments import accumulation_dtype, batch_moments, thinned
from evenstep.stages import Stage, glance
from test_kernels import OPTIMIZERS, SHAPES, Net, assert_steps_agree, backward, states, train

pytestmark = needs_c


# built, or done without


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """Nothing built or loaded yet, and a folder of its own for what will be."""
    monkeypatch.setenv("EVENSTEP_CACHE", str(tmp_path))
    native.loaded.cache_clear()
    yield tmp_path
    native.loaded.cache_clear()


def step_once(expected):
    model = nn.Linear(3, 2)
    optimizer = evenstep.EvenStep(model)
    before = model.weight.detach().clone()
    model(torch.randn(5, 3)).square().sum().backward()
    optimizer.step()
    assert not torch.equal(before, model.weight)
    assert optimizer._plan.layouts[0].by == expected


def test_it_is_built_once(fresh, monkeypatch):
    step_once("c")
    (made,) = fresh.glob("native/*.so")
    assert not (fresh / "native").stat().st_mode & 0o077
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: pytest.fail("built again"))
    native.loaded.cache_clear()
    step_once("c")
    assert [*fresh.glob("native/*")] == [made]


def test_a_damaged_one_is_built_anew(fresh):
    path = native.built(native.command(torch.float32))
    path.write_bytes(b"")
    step_once("c")
    assert path.stat().st_size > 1000 and native.loaded(torch.float32)[1] == ""


def test_it_is_built_whole_by_whoever_comes_first(fresh):
    command = native.command(torch.float32)
    with ThreadPoolExecutor(4) as pool:
        paths = {*pool.map(lambda _: native.built(command), range(4))}
    assert len(paths) == 1 and [*(fresh / "native").iterdir()] == [*paths]


@pytest.mark.skipif(platform.machine() not in {"x86_64", "AMD64"}, reason="other processors have other vectors")
def test_another_processor_has_another_library(fresh, monkeypatch):
    built = []
    for capability in ("DEFAULT", "AVX2"):
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda found=capability: found)
        command = native.command(torch.float32)
        assert ("-mavx2" in command) == (capability == "AVX2")
        built.append(native.built(command))
    assert built[0] != built[1]


@pytest.mark.parametrize("name", ["momentum", "even", "even-plain"])
@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 2e-4), (torch.bfloat16, 0.03)], ids=str)
@pytest.mark.parametrize("capability", ["DEFAULT", "AVX2"])
def test_vectors_of_any_length(fresh, monkeypatch, capability, dtype, close, name):
    if capability == "AVX2" and torch.backends.cpu.get_cpu_capability() not in native.VECTORS:
        pytest.skip("this processor does not have them")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert_steps_agree(name, Net().to(dtype), "cpu", close, by="c")


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("EVENSTEP_NATIVE", "0", "EVENSTEP_NATIVE is 0"),
        ("CC", "no-such-compiler", "No such file"),
        ("CC", "false", "compiler failed"),
        ("CC", "true", "cannot|No such file"),  # a compiler that makes nothing
        ("CC", 'cc "', "No closing quotation"),
        ("CC", "cc -fvisibility=hidden", "undefined symbol|symbol not found"),  # a library that shows nothing
    ],
)
def test_without_it_torch_makes_the_step(fresh, monkeypatch, name, value, reason):
    monkeypatch.setenv(name, value)
    step_once("torch")
    found, why = native.loaded(torch.float32)
    assert found is None and re.search(reason, why)


@pytest.mark.filterwarnings("ignore:.*not finite")
def test_a_compiler_that_knows_no_nan_is_told_of_it(fresh, monkeypatch):
    monkeypatch.setenv("CC", "cc -ffast-math")
    step_once("c")
    model = nn.Linear(8, 6)
    optimizer = evenstep.EvenStep(model)
    model(torch.randn(5, 8)).sum().backward()
    model.weight.grad[0, 0] = torch.nan
    optimizer.step()
    assert optimizer.nonfinite_steps == 1 and model.weight.isfinite().all()


def test_an_empty_name_is_no_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("EVENSTEP_CACHE", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert native.kept_in() == tmp_path / "evenstep" / "native"


def test_code_is_not_loaded_from_a_folder_that_others_write_to(fresh, monkeypatch, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("tmp")
    monkeypatch.setattr(native.tempfile, "gettempdir", lambda: str(elsewhere))
    (fresh / "native").mkdir(mode=0o700)
    (fresh / "native").chmod(0o777)
    assert native.kept_in().parent == elsewhere
    native.kept_in().chmod(0o777)
    with pytest.raises(PermissionError, match="no folder of this user's own"):
        native.kept_in()
    step_once("torch")


def test_without_a_home_it_is_kept_with_temporary_files(monkeypatch, tmp_path):
    def no_home():
        raise RuntimeError("Could not determine home directory.")

    for name in ("EVENSTEP_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    monkeypatch.setattr(native.tempfile, "gettempdir", lambda: str(tmp_path))
    assert native.kept_in() == tmp_path / f"evenstep-{os.getuid()}"


def test_it_follows_a_fork(tmp_path):
    """Threads do not survive a fork; the library has none of its own."""
    code = """
import os, torch, evenstep
from torch import nn
torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
optimizer = evenstep.EvenStep(model)
def go():  # without a backward pass: autograd's own threads do not survive a fork
    model(torch.randn(4, 8))
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    optimizer.step()
go()
child = os.fork()
go()
if child:
    assert os.waitpid(child, 0)[1] == 0
else:
    os._exit(0)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


# sums


@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "strided", "thinned"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mean", [0.0, 1e4])
@pytest.mark.parametrize(("shape", "dim"), [*SHAPES, ((300,), 0)], ids=str)
def test_sums_against_float64(shape, dim, mean, dtype, layout):
    x = (mean + torch.randn(shape, dtype=torch.float64)).to(dtype)
    if layout == "channels_last" and x.dim() == 4:
        x = x.to(memory_format=torch.channels_last)
    elif layout == "strided":
        x = torch.stack([x, x], -1)[..., 0]
    limit = 40 if layout == "thinned" else None
    wide = accumulation_dtype(dtype)
    stage, again = (Stage(shape[dim], 0, torch.zeros(1, dtype=wide), limit=limit) for _ in range(2))
    for each in (stage, again):
        known = glance(x, Look(None, dim, 1, 1), limit)
        for _ in range(2):
            each.see_like(x, known)
        assert each.held.before is each.in_room, "added up by C"
    assert torch.equal(stage.room, again.room), "the same in every run"
    exact = thinned(x, dim, limit).double().movedim(dim, -1).reshape(-1, shape[dim])
    assert stage.counts_here()[0] == 2 * len(exact)
    found_mean, found_var = batch_moments(stage.sums(), stage.centre)
    close = 1e-6 if wide == torch.float32 else 1e-13
    var = exact.var(0, correction=0)
    assert_close(found_mean.double(), exact.mean(0), rtol=close, atol=10 * close)
    assert_close(found_var.double(), var, rtol=50 * close, atol=10 * close)


def test_a_long_sum_does_not_lose_what_is_small():
    """A million rows in one sum of single precision would be off by more than its spread."""
    x = torch.full((2**18, 1), 1.0)
    x[0] = 0.0  # the centre
    stage = Stage(1, 0, torch.zeros(1))
    for _ in range(8):
        stage.see_like(x, glance(x, Look(None, 1, 1, 1)))
    assert stage.sums().first.item() == 8 * (2**18 - 1)


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x.to(torch.float16),
        lambda x: torch.complex(x, x).conj().imag,  # numbers that are to be negated when read
        lambda x: x.as_subclass(type("Marked", (torch.Tensor,), {})),
        lambda x: x.view(1, 1, 1, 1, 6, 5).expand(2, 1, 3, 1, 6, 5),
    ],
    ids=["another dtype", "negated", "a subclass", "six dimensions"],
)
def test_what_c_cannot_read_torch_adds_up(make):
    x = make(torch.randn(6, 5))
    stage, plain = (Stage(5, 0, torch.zeros(1)) for _ in range(2))
    for _ in range(2):
        stage.see(Look(x, -1, 1, 1))
        plain._add(x, Look(x, -1, 1, 1))
    assert stage.held.before is not stage.in_room
    assert_close(stage.slots, plain.slots)


def test_zeros_that_lie_nowhere():
    """torch keeps some tensors of zeros without any memory."""
    stage = Stage(5, 0, torch.zeros(1))
    stage.see(Look(torch.ones(2, 5), -1, 2, 2))
    stage.see(Look(torch._efficientzerotensor((3, 5)), -1, 3, 3))
    assert stage.rows == 5 and stage.sums().first.tolist() == [-3.0] * 5


def test_calls_of_several_kinds_add_up():
    """The same layer in single precision and in half: what C has added up and what torch holds come together."""
    torch.manual_seed(0)
    x = torch.randn(4, 6, 5)
    stage, plain = (Stage(5, 0, torch.zeros(1)) for _ in range(2))
    for part in (x[0], x[1].bfloat16(), x[2].half(), x[3]):
        stage.see(Look(part, -1, 6, 6))
        plain._add(part, Look(part, -1, 6, 6))
    assert_close(stage.tally[:3], plain.tally[:3])
    assert_close(stage.slots, plain.slots)


# steps


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", ["sg", "momentum", "even"])
@pytest.mark.parametrize("columns", [5, 16, 83])
def test_weights_in_bfloat16_are_those_in_single_precision_rounded(columns, name, bias):
    """The arithmetic is the same; a weight that is NaN or infinite stays what it is."""
    half = nn.Linear(columns, 6, bias=bias).bfloat16()
    with torch.no_grad():
        half.weight[0, 0], half.weight[1, 1] = torch.nan, torch.inf
    single = copy.deepcopy(half).float()
    x, grads = torch.randn(20, columns).bfloat16(), [torch.randn_like(p) for p in half.parameters()]
    for layer in (half, single):
        optimizer = OPTIMIZERS[name](layer)
        with torch.autocast("cpu", torch.bfloat16, enabled=layer is single):
            layer(x.to(layer.weight.dtype))
        for p, grad in zip(layer.parameters(), grads, strict=True):
            p.grad = grad.to(p.dtype)
        optimizer.step()
        assert [lay.by for lay in optimizer._plan.layouts] == ["c"]
    for p, q in zip(half.parameters(), single.parameters(), strict=True):
        assert_close(p, q.bfloat16(), rtol=0, atol=0, equal_nan=True)
    assert half.weight.isnan().sum() >= 1 and half.weight[2:].isfinite().all()


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)], ids=str)
def test_a_model_that_changes_its_dtype_goes_on(dtypes):
    model = nn.Sequential(nn.Linear(7, 9), nn.ReLU(), nn.Linear(9, 3))
    optimizer = evenstep.EvenStep(model, lr=0.01)
    for step in range(6):
        dtype = dtypes[step // 2 % 2]
        model.to(dtype)
        optimizer.zero_grad()
        before = model[0].weight.detach().clone()
        model(torch.randn(8, 7, dtype=dtype)).square().mean().backward()
        optimizer.step()
        assert not torch.equal(before, model[0].weight) and model[0].weight.isfinite().all()


@pytest.mark.parametrize("name", ["momentum", "even"])
def test_threads_do_not_change_the_numbers(name, monkeypatch):
    monkeypatch.setattr(native_step, "ALONE", 50)
    torch.manual_seed(3)
    one = Net()
    many = copy.deepcopy(one)
    for model, threads in ((one, 1), (many, 3)):
        torch.set_num_threads(threads)
        try:
            optimizer = OPTIMIZERS[name](model)
            for step in range(4):
                torch.set_num_threads(1)
                backward(optimizer, model, "cpu", step)
                torch.set_num_threads(threads)
                optimizer.step()
            assert optimizer._plan.layouts[0].native_room.job.parts == threads
        finally:
            torch.set_num_threads(1)
    for p, q in zip(one.parameters(), many.parameters(), strict=True):
        assert torch.equal(p, q)


def test_a_graph_from_before_the_step_is_refused():
    """As torch refuses it: what was saved for its backward pass has changed."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1))
    optimizer = evenstep.WhitenedSGD(model, lr=0.1)
    loss = model(torch.randn(4, 3)).sum()
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("name", ["momentum_buffer", "mx", "square"])
def test_state_of_a_wrong_shape_is_named(name):
    model = nn.Linear(4, 3)
    optimizer = evenstep.EvenStep(model)
    for _ in range(2):
        model(torch.randn(5, 4)).sum().backward()
        optimizer.step()
    weight = model.weight.detach().clone()
    optimizer.state[model.weight][name] = torch.zeros(2)
    model(torch.randn(5, 4)).sum().backward()
    with pytest.raises(RuntimeError, match=rf"state '{name}' of a parameter of shape \[3, 4\] has shape \[2\]"):
        optimizer.step()
    assert torch.equal(model.weight, weight)


@pytest.mark.parametrize("change", ["dtype", "order", "shared memory", "storage", "storage of another dtype", "whole"])
def test_state_that_is_moved_is_followed(change):
    def moved(tensor):
        if change == "dtype":
            return tensor.double()
        if change == "order" and tensor.dim() == 2:
            return tensor.T.contiguous().T
        if change == "shared memory":
            return tensor.share_memory_()
        if change == "storage":
            tensor.data = tensor.data.clone()
        if change == "storage of another dtype":
            tensor.data = tensor.data.double()
        return tensor

    torch.manual_seed(3)
    one = Net()
    other = copy.deepcopy(one)
    optimizers = [OPTIMIZERS["even"](model) for model in (one, other)]
    for step in range(4):
        for model, optimizer in zip((one, other), optimizers, strict=True):
            backward(optimizer, model, "cpu", step)
            optimizer.step()
        for p in other.parameters():
            state = optimizers[1].state.get(p, {})
            for name in [*state]:
                state[name] = moved(state[name]) if name != "step" or "dtype" not in change else state[name]
            if change == "whole" and state:
                optimizers[1].state[p] = {name: value.clone() for name, value in state.items()}
    for p, q in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)


def test_a_weight_that_loses_rows_is_not_written_beyond():
    """The strides stay as they were; what lies behind the rows that are left is not the weight's any more."""
    torch.manual_seed(0)
    model = nn.Linear(4, 6, bias=False)
    optimizer = evenstep.WhitenedSGD(model, lr=0.1, momentum=0.9)
    model(torch.randn(5, 4)).sum().backward()
    optimizer.step()
    whole = model.weight.data
    behind = whole[3:].clone()
    model.weight.data = whole[:3]
    optimizer.zero_grad()
    model(torch.randn(5, 4)).sum().backward()
    with pytest.raises(RuntimeError):
        optimizer.step()
    assert torch.equal(whole[3:], behind)


@pytest.mark.parametrize(
    ("layer", "change", "x"),
    [
        (nn.Linear(4, 3), lambda m: setattr(m.weight, "data", torch.randn(3, 80)), torch.randn(5, 80)),
        (nn.Linear(80, 3), lambda m: setattr(m.weight, "data", torch.randn(3, 4)), torch.randn(5, 4)),
        (nn.Conv2d(4, 4, 1), lambda m: setattr(m, "groups", 4), torch.randn(5, 16, 2, 2)),
    ],
    ids=["wider", "narrower", "more groups"],
)
def test_a_layer_with_other_inputs_than_before_is_not_added_up(layer, change, x):
    """There is room for the inputs that it had when the model was attached."""
    layer = copy.deepcopy(layer)
    optimizer = evenstep.EvenStep(layer)
    old = torch.randn(5, layer.weight.shape[1], *[2] * (layer.weight.dim() - 2))
    layer(old).sum().backward()
    optimizer.step()
    change(layer)
    with pytest.raises(RuntimeError, match="size of tensor"):
        layer(x)


@pytest.mark.filterwarnings("ignore:.*saw no input")
def test_a_weight_with_other_inputs_than_before_does_not_move():
    layer = nn.Linear(4, 3)
    optimizer = evenstep.WhitenedSGD(layer)
    layer(torch.randn(5, 4)).sum().backward()
    optimizer.step()
    layer.weight.data, layer.weight.grad = torch.zeros(3, 80), torch.ones(3, 80)
    with pytest.raises(RuntimeError, match="size of tensor"):
        optimizer.step()
    assert not layer.weight.any()


def test_a_bias_that_all_units_share_is_not_read_beyond():
    """`nn.Linear` takes a bias of one number; blocks that move together have one for each unit."""
    model = nn.Linear(4, 3)
    model.bias = nn.Parameter(torch.zeros(1))
    optimizer = evenstep.EvenStep(model)
    model(torch.randn(5, 4)).sum().backward()
    with pytest.raises(RuntimeError, match=r"shape '\[1\]' is invalid"):
        optimizer.step()


@pytest.mark.parametrize("change", ["shared", "gaps", "another", "none"])
def test_a_frozen_bias_that_changes_is_followed(by, change):
    """It is part of its units' length, and may lie elsewhere at the next step, or have another shape."""
    torch.manual_seed(0)
    together, loop = (nn.Linear(4, 64).double() for _ in range(2))
    loop.load_state_dict(together.state_dict())
    x, bias = torch.randn(5, 4).double(), 10 * torch.randn(128).double()
    for model, foreach in ((together, None), (loop, False)):
        model.bias.requires_grad_(False)
        optimizer = evenstep.EvenStep(model, lr=0.5, foreach=foreach)
        for step in range(4):
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()
            if step == 1 and change in ("another", "none"):
                model.bias = nn.Parameter(bias[:64], requires_grad=False) if change == "another" else None
            elif step == 1:
                model.bias.data = bias[:1] if change == "shared" else bias[::2]
    assert_close(together.weight, loop.weight, rtol=1e-9, atol=1e-12)


def test_a_weight_that_is_negated_when_read():
    expected, found = nn.Linear(1, 1), nn.Linear(1, 1)
    found.load_state_dict(expected.state_dict())
    found.weight = nn.Parameter(torch.complex(expected.weight, -expected.weight).detach().conj().imag)
    x = torch.randn(7, 1)
    assert found.weight.is_neg() and torch.equal(found.weight, expected.weight)
    for model in (expected, found):
        optimizer = evenstep.EvenStep(model)
        for _ in range(3):
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()
    assert_close(found.weight, expected.weight)


@pytest.mark.parametrize("what", ["gradient", "state", "weight", "frozen bias"])
def test_tensors_without_memory_of_their_own(what):
    """Of a subclass that holds its numbers in other tensors there is nothing that C could read."""
    two = pytest.importorskip("torch.testing._internal.two_tensor").TwoTensor
    torch.manual_seed(0)
    expected, found = nn.Linear(4, 3), nn.Linear(4, 3)
    found.load_state_dict(expected.state_dict())
    x = torch.randn(7, 4)

    def both(tensor):
        return two(tensor.detach().clone(), tensor.detach().clone())

    for model, foreach in ((expected, False), (found, None)):
        model.bias.requires_grad_(what != "frozen bias")
        optimizer = evenstep.EvenStep(model, foreach=foreach)
        for step in range(3):
            optimizer.zero_grad()
            if step == 1 and what == "weight":
                torch.utils.swap_tensors(model.weight, nn.Parameter(both(model.weight)))
            if step == 1 and what == "frozen bias":
                model.bias = nn.Parameter(both(model.bias), requires_grad=False)
            model(x).square().sum().backward()
            if model is found and what == "gradient":
                model.weight.grad = both(model.weight.grad)
            if model is found and step == 1 and what == "state":
                optimizer.state[model.weight]["mx"] = both(optimizer.state[model.weight]["mx"])
            optimizer.step()
    pair = (model.weight.a if what == "weight" else model.weight for model in (found, expected))
    assert_close(*pair)


def test_gradients_that_another_thread_drops_are_still_there():
    """As torch's operations hold what they were given."""
    torch.manual_seed(0)
    expected, found = nn.Linear(40, 30), nn.Linear(40, 30)
    found.load_state_dict(expected.state_dict())
    x = torch.randn(7, 40)
    for model in (expected, found):
        optimizer = evenstep.WhitenedSGD(model)
        model(x).square().sum().backward()
        (layout,) = optimizer._planned(compiled=False).layouts
        move = native_step.NativeStep(layout, optimizer.state, linear=True, even=False)
        if model is found:
            optimizer.zero_grad()
            others = [torch.full_like(p, 100.0) for p in model.parameters()]  # they may lie where gradients did
        assert move.finite()
        move.move(None, 1e-3)
    assert_close(found.weight, expected.weight)
    assert len(others) == 2


def test_a_bias_with_gaps_in_memory():
    """Its numbers do not lie end to end, so its layer moves by itself."""
    gaps = nn.Parameter(torch.randn(6)[::2])
    expected, found = nn.Linear(4, 3), nn.Linear(4, 3)
    found.load_state_dict(expected.state_dict() | {"bias": gaps.data})
    expected.bias.data.copy_(gaps.data)
    found.bias = gaps
    x = torch.randn(7, 4)
    for model in (expected, found):
        optimizer = evenstep.EvenStep(model)
        for _ in range(3):
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()
    assert_close(found.bias, expected.bias)
    assert_close(found.weight, expected.weight)


@pytest.mark.filterwarnings("ignore:.*not finite")
@pytest.mark.parametrize("value", [torch.inf, torch.nan, 1e30])
@pytest.mark.parametrize("name", ["momentum", "even"])
def test_gradients_that_overflow(name, value):
    """What is not finite leaves all as it was; what only its square is not does no harm that stays."""
    torch.manual_seed(3)
    model = Net()
    optimizer = OPTIMIZERS[name](model)
    train(optimizer, model, "cpu", steps=2)
    before = [p.detach().clone() for p in model.parameters()]
    backward(optimizer, model, "cpu", 2)
    model.second.weight.grad[0, 0] = value
    optimizer.step()
    taken = name == "momentum" and value == 1e30
    assert optimizer.nonfinite_steps == (not taken)
    assert taken or all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(v.isfinite().all() for v in (*model.parameters(), *states(optimizer, model).values()))
