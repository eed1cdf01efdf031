"""Kernels against the plain versions and float64 (GPU), and the step of many blocks against the loop (any device)."""

import copy
import functools
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import evenstep
from evenstep.kernels import input_sums as kernel
from evenstep.kernels import launch
from evenstep.math.moments import batch_moments, thinned
from evenstep.model.layers import Look
from evenstep.statistics.batch import LayerStatistics
from evenstep.step.triton import tables

CPU_AND_GPU = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


class Net(nn.Module):
    """Every way a block can move: biases and none, groups, a norm, an embedding, bare parameters, a frozen bias.

    Of a wide one rows lie evenly in memory.
    """

    def __init__(self, wide=False, rows=11, long=6):
        super().__init__()
        token, first, second, self.maps, maps, last = (16, 24, 32, 8, 16, 16) if wide else (12, 20, 18, 4, 6, 8)
        self.token = nn.Embedding(rows, token)
        self.first, self.norm = nn.Linear(token, first, bias=False), nn.LayerNorm(first)
        self.second, self.frozen = nn.Linear(first, second), nn.Linear(second, 9 * self.maps)
        self.frozen.bias.requires_grad_(False)
        self.conv = nn.Conv2d(self.maps, maps, 3, padding=1)
        self.depth = nn.Conv2d(maps, maps, 3, groups=maps, bias=False)
        self.grouped, self.last = nn.Conv2d(maps, last, 2, groups=2), nn.Linear(last, 3)
        self.scale, self.places = nn.Parameter(torch.ones(3, 1)), nn.Parameter(torch.randn(2, long))
        for layer in (self.second, self.frozen, self.conv, self.grouped):  # inputs vary: whitening rounds little
            nn.init.zeros_(layer.bias)
            nn.init.normal_(layer.weight, std=(2 / layer.weight[0].numel()) ** 0.5)

    def forward(self, tokens):
        x = self.norm(self.first(self.token(tokens)).relu())
        x = self.frozen(self.second(x).relu()).view(-1, self.maps, 3, 3).relu()
        x = self.grouped(nn.functional.pad(self.depth(self.conv(x).relu()), (1, 1, 1, 1))).relu().mean((2, 3))
        places = self.places * torch.linspace(-1, 1, self.places.numel(), device=x.device).view_as(self.places)
        return self.last(x) * self.scale.sum() + places.mean(1).sum().to(x.dtype)


OPTIMIZERS = {
    "sg": lambda m, **k: evenstep.WhitenedSGD(m, lr=0.002, **k),
    "momentum": lambda m, **k: evenstep.WhitenedSGD(m, lr=0.001, momentum=0.9, weight_decay=0.1, **k),
    "unguarded": lambda m, **k: evenstep.WhitenedSGD(m, lr=1e-4, momentum=0.9, trust=None, fresh_max=None, **k),
    "fan-in": lambda m, **k: evenstep.FanInSGD(m, lr=0.5, momentum=0.9, trust=0.1, **k),
    "even": lambda m, **k: evenstep.UnitStep(m, lr=0.03, weight_decay=0.1, **k),
    "even-plain": lambda m, **k: evenstep.UnitStep(m, lr=0.03, momentum=0.0, maximize=True, **k),
    "even-tight": lambda m, **k: evenstep.UnitStep(m, lr=0.3, trust=0.02, fresh_max=0.8, **k),
    "even-tensor-lr": lambda m, **k: evenstep.UnitStep(m, lr=torch.tensor(0.03), **k),
}
# rules of torch's, which kernels alone show many blocks at once; eps: they would blow rounding up to whole steps
RULES = {
    "adamw": lambda m, **k: evenstep.Whitened(m, torch.optim.AdamW, lr=0.01, eps=0.01, weight_decay=0.1, **k),
    "adamw-tight": lambda m, **k: evenstep.Whitened(
        m, torch.optim.AdamW, lr=0.1, eps=0.01, trust=0.02, fresh_max=0.8, fan_in_power=0.25, maximize=True, **k
    ),
    "adamw-tensor-lr": lambda m, **k: evenstep.Whitened(m, torch.optim.AdamW, lr=torch.tensor(0.01), eps=0.01, **k),
    "muon": lambda m, **k: evenstep.Whitened(m, torch.optim.Muon, lr=0.02, plain=smooth_adam, **k),
    "nesterov-joint": lambda m, **k: evenstep.Whitened(
        m, torch.optim.SGD, lr=0.001, momentum=0.9, nesterov=True, joint=True, **k
    ),
    "unguarded-rule": lambda m, **k: evenstep.Whitened(
        m, torch.optim.RMSprop, lr=1e-3, eps=0.1, trust=None, fresh_max=None, **k
    ),
}
smooth_adam = functools.partial(torch.optim.Adam, lr=0.01, eps=0.01)
ALL = OPTIMIZERS | RULES


def train(optimizer, model, device, steps=6):
    for step in range(steps):
        backward(optimizer, model, device, step)
        optimizer.step()


def backward(optimizer, model, device, step):
    tokens = torch.randint(0, 11, (16,), generator=torch.Generator().manual_seed(step)).to(device)
    loss = (model(tokens) - 1).square().mean() * (3.0 if step == 3 else 1.0)
    optimizer.zero_grad()
    loss.backward()


def states(optimizer, model):
    return {
        f"{name}.{key}": value
        for name, p in model.named_parameters()
        for key, value in optimizer.state.get(p, {}).items()
        if isinstance(value, torch.Tensor)
    }


def shift(model):
    """Let no parameter begin where memory is aligned."""
    for p in model.parameters():
        p.data = p.new_empty(p.numel() + 1)[1:].view_as(p).copy_(p.data)


def assert_steps_agree(name, single, device, close, steps=6, poison=(), by="triton", shifted=False):
    """Each step from the same weights, state and gradients: rounding is not to grow from step to step."""
    many = copy.deepcopy(single)
    if shifted:
        shift(many)
    loop, together = ALL[name](single, foreach=False), ALL[name](many)
    pairs = list(zip(single.named_parameters(), many.parameters(), strict=True))
    for step in range(steps):
        for optimizer, model in ((loop, single), (together, many)):
            backward(optimizer, model, device, step)
        for (_, p), q in pairs:
            if p.grad is not None:
                q.grad.copy_(p.grad)
        if step in poison:
            single.second.weight.grad[0, 0] = many.second.weight.grad[0, 0] = torch.nan
        before = [p.detach().clone() for (_, p), _ in pairs]
        loop.step()
        together.step()
        assert not loop._plan.layouts and {lay.by for lay in together._plan.layouts} == {by}
        for ((label, p), q), old in zip(pairs, before, strict=True):
            moved = (p - old).double().abs().max().item()
            lost = 2 * torch.finfo(p.dtype).eps * p.double().abs().max().item()  # to rounding of the weight itself
            off = (q - p).double().abs().max().item()
            assert off <= close * moved + lost, f"step {step}, {label}: {off} of a step of {moved}"
            with torch.no_grad():
                q.copy_(p)
        expected, found = states(loop, single), states(together, many)
        assert expected.keys() == found.keys()
        for key, value in expected.items():
            scale = value.double().abs().max().item() if value.numel() else 0.0
            label = f"step {step}, {key}"
            assert_close(found[key], value, rtol=close, atol=close * scale, msg=lambda m, at=label: f"{at}: {m}")
            found[key].copy_(value)
        assert loop.nonfinite_steps == together.nonfinite_steps == sum(k <= step for k in poison)
    for key, rates in loop.fired().items():
        assert rates == pytest.approx(together.fired()[key], abs=0 if device == "cpu" else 0.1)  # ties


@pytest.mark.filterwarnings("ignore:.*not finite")
@pytest.mark.parametrize("poison", [(), (2,)], ids=["", "a NaN"])
@pytest.mark.parametrize("name", ALL)
def test_together_is_one_by_one(by, name, poison):
    if by == "torch" and name in RULES:
        pytest.skip("without kernels torch's rules are shown one block at a time")
    torch.manual_seed(3)
    assert_steps_agree(name, Net().double(), "cpu", 1e-9, poison=poison, by=by)


@pytest.mark.filterwarnings("ignore:.*not finite")
@pytest.mark.parametrize("poison", [(), (2,)], ids=["", "a NaN"])
@pytest.mark.parametrize("name", [name for name in ALL if name != "muon"])  # which orthogonalizes in bfloat16
@pytest.mark.parametrize(
    ("device", "how"),
    [pytest.param("cuda", "triton", marks=pytest.mark.gpu)],
)
def test_kernels_in_single_precision_are_one_by_one(device, how, name, poison):
    torch.manual_seed(3)
    assert_steps_agree(name, Net().to(device), device, 2e-4, poison=poison, by=how)


@pytest.mark.parametrize("lying", ["evenly", "channels-last", "off"])
@pytest.mark.parametrize("name", ["momentum", "even", "even-plain", "adamw", "nesterov-joint"])
@pytest.mark.parametrize(
    ("device", "how"),
    [pytest.param("cuda", "triton", marks=pytest.mark.gpu)],
)
def test_rows_that_lie_evenly_and_many_of_them(device, how, name, lying):
    torch.manual_seed(3)
    layout = torch.channels_last if lying == "channels-last" else torch.contiguous_format
    model = Net(wide=True, rows=5000, long=197 * 96).to(device).to(memory_format=layout)
    assert_steps_agree(name, model, device, 2e-4, steps=4, by=how, shifted=lying == "off")


@pytest.mark.parametrize(
    ("outside", "units", "columns", "expected"),
    [
        (True, 1, 197 * 768, 197),  # a ViT's positions
        (True, 1, 1024, 1),  # short
        (True, 300, 197 * 768, 1),  # many
        (True, 1, 16411, 0),  # a prime
        (True, 2, 3 * 16411, 0),
        (True, 1, 19 * 945, 19),  # into odd ones
        (False, 10, 197 * 768, 0),  # a layer's
    ],
)
def test_long_rows_are_cut_where_that_can_be(outside, units, columns, expected):
    assert tables.pieces(SimpleNamespace(entry=None if outside else 1), units, columns) == expected


@pytest.mark.filterwarnings("ignore:.*no layer of this Embedding is covered")
def test_rows_outside_layers_step_by_their_own_length():
    """Units in whitened coordinates have length 1 or so; rows of an embedding may be far longer."""
    torch.manual_seed(0)
    model = nn.Embedding(4, 64).double()
    with torch.no_grad():
        model.weight[1:].mul_(torch.tensor([[0.01], [3.0], [10.0]]))
    for foreach in (None, False):
        net = copy.deepcopy(model)
        optimizer = evenstep.UnitStep(net, lr=0.05, momentum=0.0, foreach=foreach)
        (net.weight * torch.randn(4, 64).double()).sum().backward()
        optimizer.step()
        moved = (net.weight - model.weight).norm(dim=1)
        assert_close(moved, 0.05 * model.weight.detach().norm(dim=1).clamp(min=1), rtol=1e-9, atol=0)


@pytest.mark.parametrize("name", ["momentum", "even", "adamw", "nesterov-joint"])
@pytest.mark.parametrize(
    ("device", "how", "dtype"),
    [
        *(
            pytest.param("cuda", "triton", dtype, marks=pytest.mark.gpu)
            for dtype in (torch.float32, torch.bfloat16, torch.float16)
        ),
    ],
)
def test_channels_last_and_half_precision_together(device, how, dtype, name):
    torch.manual_seed(3)
    model = Net().to(device, dtype).to(memory_format=torch.channels_last)
    assert_steps_agree(name, model, device, 2e-4 if dtype == torch.float32 else 0.03, steps=3, by=how)


SHAPES = [
    ((7, 5), 1),
    ((1, 1), 1),
    ((3, 1000), 1),
    ((4097, 3), 1),
    ((2, 17, 64), 2),
    ((5, 3, 9, 7), 1),
    ((2, 130, 1, 1), 1),
    ((3, 2, 4, 5, 6), 1),
    ((64, 700), 1),
]


LAYOUTS = ["contiguous", "channels_last", "strided"]


def inputs_like(shape, dtype, layout, device):
    """Inputs far from zero for their spread, as they may lie in memory."""
    mean = 1e4 if dtype == torch.float32 else 3.0
    x = (mean + torch.randn(shape, device=device, dtype=torch.float64)).to(dtype)
    if layout == "channels_last" and x.dim() == 4:
        return x.to(memory_format=torch.channels_last)
    return torch.stack([x, x], -1)[..., 0] if layout == "strided" else x


def assert_moments_agree(x, dim, see, limit=None):
    """Hold what `see(stage, look)` adds up to the moments of `x` in float64, twice: the same in every run."""
    look = Look(x, dim, x.shape[0], x.numel() // x.shape[dim])
    stage, again = (LayerStatistics(x.shape[dim], 0, torch.zeros(1, device=x.device), limit=limit) for _ in range(2))
    for one in (stage, stage, again, again):
        see(one, look)
    assert torch.equal(stage.slots, again.slots)
    exact = thinned(x, dim, limit).double().movedim(dim, -1).reshape(-1, x.shape[dim])
    assert stage.tally.tolist() == [2 * len(exact), 0, 2 * look.applied, 2 * x.shape[0]]
    found_mean, found_var = batch_moments(stage.sums(), stage.centre)
    assert_close(found_mean.double(), exact.mean(0), rtol=1e-6, atol=1e-5)
    scale = exact.var(0, correction=0)
    assert_close(found_var.double(), scale, rtol=1e-4, atol=1e-5 * float(scale.max().clamp(min=1e-3)))


@pytest.mark.gpu
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("limit", [None, 500])
@pytest.mark.parametrize(("shape", "dim"), SHAPES, ids=str)
def test_moments_kernel_against_float64(shape, dim, limit, dtype, layout):
    x = inputs_like(shape, dtype, layout, "cuda")
    assert kernel.serves(x, LayerStatistics(shape[dim], 0, torch.zeros(1, device="cuda")).slots)
    assert_moments_agree(x, dim, LayerStatistics.add_call, limit)


@pytest.mark.gpu
def test_moments_kernel_counts_examples_once_per_announced_forward_and_in_every_call_outside():
    layer = nn.Linear(4, 4).cuda()
    model = nn.Sequential(layer, layer)
    optimizer = evenstep.WhitenedSGD(model)
    (stage,) = optimizer._statistics.layers.values()
    model(torch.randn(8, 4, device="cuda"))
    model(torch.randn(8, 4, device="cuda"))
    assert stage.examples.item() == 16 and stage.applied.item() == 32
    layer(layer(torch.randn(8, 4, device="cuda")))
    assert stage.examples.item() == 32 and stage.applied.item() == 48


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:.*not finite")
@pytest.mark.parametrize("cls", [evenstep.WhitenedSGD, evenstep.UnitStep])
@pytest.mark.parametrize("where", [0, 1])
def test_a_network_on_two_devices_steps_with_both_parts_or_none(where, cls):
    """A gradient that is not finite on one device is no reason to move on the other."""
    parts = nn.ModuleList([nn.Linear(4, 5), nn.Linear(5, 3).cuda()])
    optimizer = cls(parts, lr=0.01)
    for step in range(3):
        optimizer.zero_grad()
        parts[1](parts[0](torch.randn(6, 4)).relu().cuda()).square().sum().backward()
        before = [p.detach().clone() for p in parts.parameters()]
        if step == 1:
            parts[where].weight.grad[0, 0] = torch.nan
        optimizer.step()
        same = [torch.equal(a, b) for a, b in zip(before, parts.parameters(), strict=True)]
        assert same == [step == 1] * 4
    assert optimizer.nonfinite_steps == 1


def test_kernels_go_to_the_device_of_their_tensors(monkeypatch):
    """Triton launches on the current device: a model may be on another."""
    gone_to = []

    class Device:
        def __init__(self, device):
            self.device = device

        def __enter__(self):
            gone_to.append(self.device.index)

        def __exit__(self, *_):
            gone_to.append(None)

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", Device)
    for device in ("cpu", "cuda:0", "cuda:1"):
        with launch.on(torch.device(device)):
            gone_to.append(device)
    assert gone_to == ["cpu", "cuda:0", 1, "cuda:1", None]
