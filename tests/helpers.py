"""Networks, training loops and comparisons that several test files share. Tables of cases are in cases.py.

EVENSTEP_GPU=cpu runs most GPU tests on the CPU, to develop them where there is no GPU.
"""

import copy
import importlib.util
import io
import itertools
import os
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.testing import assert_close

from cases import BY_HAND, ONE_EACH, OPTIMIZERS, TORCH_RULES
from evenstep.kernels import matrices
from evenstep.lab import checkpoint
from evenstep.math import polar
from evenstep.math.moments import batch_moments, thinned
from evenstep.model.layer_kind import Look
from evenstep.statistics.layer_statistics import LayerStatistics
from evenstep.step.torch_step import TorchStep
from oracle import assert_same_parameters, log_cosh

UNGUARDED = {"fresh_max": None, "trust": None}
PAPER = {"damping": 0.0, **UNGUARDED}
GPU = torch.device(os.environ.get("EVENSTEP_GPU", "cuda"))
CPU_AND_GPU = ["cpu", pytest.param(str(GPU), marks=pytest.mark.gpu)]


every_optimizer = pytest.mark.parametrize("case", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
one_of_each_class = pytest.mark.parametrize("case", ONE_EACH.values(), ids=ONE_EACH.keys())


def small_network():
    """A network for `images`, with a norm, which is no covered layer."""
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(64, 8), nn.LayerNorm(8), nn.Linear(8, 3)
    )


def images(rows=8):
    """Random images and their classes."""
    return torch.randn(rows, 2, 4, 4) + 1, torch.randint(0, 3, (rows,))


def classify(optimizer, model, batches):
    """Take a step on the cross-entropy of each batch."""
    fit(optimizer, model, batches, functional.cross_entropy)


def trained(case, steps=1, **more):
    """A small network and its optimizer after some steps."""
    model = small_network()
    optimizer = case.build(model, **more)
    classify(optimizer, model, [images() for _ in range(steps)])
    return model, optimizer


def descend(optimizer, loss):
    """Take a step on a loss."""
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def twins(build=small_network):
    """A network and its copy."""
    model = build()
    return model, copy.deepcopy(model)


def weights(model):
    """Copies of all parameters."""
    return [p.detach().clone() for p in model.parameters()]


def still(model, before):
    """Which parameters have not moved since `weights` copied them."""
    return [torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True)]


def is_finite(model):
    """Whether no parameter is NaN or infinite."""
    return all(p.isfinite().all() for p in model.parameters())


def same(left, right):
    """Whether nested containers hold equal values, and tensors of the same dtype."""
    if isinstance(left, Tensor):
        return isinstance(right, Tensor) and left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[k], right[k]) for k in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return left == right


def through_a_file(saved):
    """What is loaded from a file in which this was saved."""
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def assert_resumes(build, case, batches, energy):
    """Training that goes on from a file in another network ends where the whole one does, bit by bit: its optimizer."""
    model, other = build(), build()
    optimizer = case.build(model)
    fit(optimizer, model, batches[:3], energy)
    saved_model, saved_optimizer = through_a_file([model.state_dict(), optimizer.state_dict()])
    fit(optimizer, model, batches[3:], energy)
    other.load_state_dict(saved_model)
    resumed = case.build(other)
    resumed.load_state_dict(saved_optimizer)
    fit(resumed, other, batches[3:], energy)
    assert_same(model, other)
    assert same(optimizer.state_dict()["state"], resumed.state_dict()["state"])
    return optimizer


class Net(nn.Module):
    """One of each kind of block: biases, none, a frozen one; groups, a norm, an embedding, bare parameters.

    With `wide`, all rows have a multiple of 8 elements.
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
        for layer in (self.second, self.frozen, self.conv, self.grouped):  # inputs that vary: whitening rounds little
            nn.init.zeros_(layer.bias)
            nn.init.normal_(layer.weight, std=(2 / layer.weight[0].numel()) ** 0.5)

    def forward(self, tokens):
        x = self.norm(self.first(self.token(tokens)).relu())
        x = self.frozen(self.second(x).relu()).view(-1, self.maps, 3, 3).relu()
        x = self.grouped(nn.functional.pad(self.depth(self.conv(x).relu()), (1, 1, 1, 1))).relu().mean((2, 3))
        places = self.places * torch.linspace(-1, 1, self.places.numel(), device=x.device).view_as(self.places)
        return self.last(x) * self.scale.sum() + places.mean(1).sum().to(x.dtype)


def train(optimizer, model, device, steps=6):
    """Train a `Net` for some steps."""
    for step in range(steps):
        backward(optimizer, model, device, step)
        optimizer.step()


def backward(optimizer, model, device, step):
    """Compute the gradients of a `Net` for one step; the batch depends on the step's number alone."""
    tokens = torch.randint(0, 11, (16,), generator=torch.Generator().manual_seed(step)).to(device)
    loss = (model(tokens) - 1).square().mean() * (3.0 if step == 3 else 1.0)
    optimizer.zero_grad()
    loss.backward()


class Forward(nn.Module):
    """Named modules, and a function of the module and its input for a forward."""

    def __init__(self, forward, **modules):
        super().__init__()
        self.function = forward
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, x):
        return self.function(self, x)


def randn(*shape):
    """Normal random numbers in float64."""
    return torch.randn(*shape, dtype=torch.float64)


def module_at(path):
    """A Python file that belongs to no package, imported."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def fit(optimizer, model, batches, energy=log_cosh):
    """Take a step on the mean of `energy` over each batch."""
    for x, t in batches:
        descend(optimizer, energy(model(x), t).mean())


def regression(count=6):
    """A small network, a copy of it, and batches for both."""
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 2))
    return net, copy.deepcopy(net), [(torch.randn(8, 4) + 1, torch.randn(8, 2)) for _ in range(count)]


def plain_loop(optimizer, net, batches, every=1, clip=None):
    """The loop by hand that trainers are compared with: gradients of `every` batches a step, clipped or not."""
    for k, (x, y) in enumerate(batches):
        (functional.mse_loss(net(x), y) / every).backward()
        if (k + 1) % every == 0:
            if clip is not None:
                nn.utils.clip_grad_norm_(net.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
    return net


def moved_by(optimizer, loss):
    """How far a step on `loss` moves each parameter."""
    before = {p: p.detach().clone() for group in optimizer.param_groups for p in group["params"]}
    descend(optimizer, loss)
    return {p: p.detach() - old for p, old in before.items()}


def assert_same(model, other, **close):
    """Compare parameters by name: bit by bit, or as close as `rtol` and `atol` say."""
    for (name, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
        assert_close(q, p, msg=lambda m, name=name: f"{name}: {m}", **(close or {"rtol": 0, "atol": 0}))


def assert_all_moved(model, before):
    """Every parameter is finite and differs from `before`, a list."""
    for (name, p), q in zip(model.named_parameters(), before, strict=True):
        assert p.isfinite().all() and not torch.equal(p, q), name


def states(optimizer, model):
    """All tensors of the optimizer's state, by parameter and name."""
    return {
        f"{name}.{key}": value
        for name, p in model.named_parameters()
        for key, value in optimizer.state.get(p, {}).items()
        if isinstance(value, Tensor)
    }


def mean_and_variance(layer):
    """Those of the inputs that a layer's hook has added up."""
    offset, var = batch_moments(layer.sums())
    return layer.centre + offset, var


def layer_statistics(optimizer):
    """What each layer has added up of its inputs since the last step, by its weight's name."""
    return {entry.name: layer for entry, layer in optimizer._statistics.layers.items()}


def backends(optimizer):
    """The backends that stepped this optimizer's blocks in the newest step."""
    return {"torch" if isinstance(step, TorchStep) else "triton" for step in optimizer._plan.steps}


def misalign(model):
    """Move each parameter one element further in memory, so that none begins at an aligned address."""
    for p in model.parameters():
        p.data = p.new_empty(p.numel() + 1)[1:].view_as(p).copy_(p.data)


def assert_steps_agree(name, single, device, close, steps=6, poison=(), by="triton", misaligned=False):
    """Compare fused steps with steps block by block, for the optimizer of this name in cases.py.

    Each step starts from the same weights, state and gradients, so that rounding does not grow from step to step.
    Steps in `poison` have a gradient that is NaN.
    """
    many = copy.deepcopy(single)
    if misaligned:
        misalign(many)
    case = (BY_HAND | TORCH_RULES)[name]
    loop, fused = case.build(single, foreach=False), case.build(many)
    pairs = list(zip(single.named_parameters(), many.parameters(), strict=True))
    for step in range(steps):
        for optimizer, model in ((loop, single), (fused, many)):
            backward(optimizer, model, device, step)
        for (_, p), q in pairs:
            if p.grad is not None:
                q.grad.copy_(p.grad)
        if step in poison:
            single.second.weight.grad[0, 0] = many.second.weight.grad[0, 0] = torch.nan
        before = [p.detach().clone() for (_, p), _ in pairs]
        loop.step()
        fused.step()
        assert backends(loop) == {"torch"} and by in backends(fused)
        assert_moves_agree(step, pairs, before, close)
        assert_states_agree(step, states(loop, single), states(fused, many), close)
        assert loop.nonfinite_steps == fused.nonfinite_steps == sum(k <= step for k in poison)
    for key, rates in loop.fired().items():
        assert rates == pytest.approx(fused.fired()[key], abs=0 if device == "cpu" else 0.1)  # rounding decides ties


def assert_moves_agree(step, pairs, before, close):
    """Compare how far weights moved, then copy the expected weights over the others."""
    for ((label, p), q), old in zip(pairs, before, strict=True):
        moved = (p - old).double().abs().max().item()
        lost = 2 * torch.finfo(p.dtype).eps * p.double().abs().max().item()  # to rounding of the weight itself
        off = (q - p).double().abs().max().item()
        assert off <= close * moved + lost, f"step {step}, {label}: {off} of a step of {moved}"
        with torch.no_grad():
            q.copy_(p)


def assert_states_agree(step, expected, found, close):
    """Compare states, then copy the expected state over the other."""
    assert expected.keys() == found.keys()
    for key, value in expected.items():
        scale = value.double().abs().max().item() if value.numel() else 0.0
        label = f"step {step}, {key}"
        assert_close(found[key], value, rtol=close, atol=close * scale, msg=lambda m, at=label: f"{at}: {m}")
        found[key].copy_(value)


# inputs for kernels that sum a layer's inputs: a shape, and the dimension of its channels
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
    """Inputs with a mean far above their deviation, in a memory layout of `LAYOUTS`."""
    mean = 1e4 if dtype == torch.float32 else 3.0
    x = (mean + torch.randn(shape, device=device, dtype=torch.float64)).to(dtype)
    if layout == "channels_last" and x.dim() == 4:
        return x.to(memory_format=torch.channels_last)
    return torch.stack([x, x], -1)[..., 0] if layout == "strided" else x


def assert_moments_agree(x, dim, see, limit=None):
    """Compare the moments that `see(stage, look)` adds up with float64, and a second run with the first, bit by bit."""
    look = Look(x, dim, x.shape[0], x.numel() // x.shape[dim])
    stage, again = (LayerStatistics(x.shape[dim], 0, torch.zeros(1, device=x.device), limit=limit) for _ in range(2))
    for one in (stage, stage, again, again):
        see(one, look)
    assert torch.equal(stage.slots, again.slots)
    exact = thinned(x, dim, limit).double().movedim(dim, -1).reshape(-1, x.shape[dim])
    assert stage.tally.tolist() == [2 * len(exact), 0, 2 * look.applied, 2 * x.shape[0]]
    found_mean, found_var = mean_and_variance(stage)
    assert_close(found_mean.double(), exact.mean(0), rtol=1e-6, atol=1e-5)
    scale = exact.var(0, correction=0)
    assert_close(found_var.double(), scale, rtol=1e-4, atol=1e-5 * float(scale.max().clamp(min=1e-3)))


def coverage_of(optimizer):
    """Each parameter's treatment and its reason, by name."""
    return {row.parameter: (row.treatment, row.reason) for row in optimizer.coverage()}


def twice():
    """A layer that a forward uses twice, and one it does not use."""
    layers = {"layer": nn.Linear(3, 3), "spare": nn.Linear(3, 3)}
    return Forward(lambda self, x: self.layer(torch.tanh(self.layer(x)) + 1), **layers)


def tied(two, share_bias=False):
    """Two Linear layers that share their weight, and their bias or not."""
    one = nn.Linear(3, 3)
    two.weight = one.weight
    if share_bias:
        two.bias = one.bias
    return Forward(lambda self, x: self.two(torch.tanh(self.one(x)) + 1), one=one, two=two)


def assert_follows(reference, optimizer, model, batches, tolerance=1e-9):
    """Train a model and its reference in oracle.py on the same batches; the smallest trust factor of the reference."""
    fit(optimizer, model, batches)
    smallest = min(float(factor.min()) for x, t in batches for factor in reference.step(x, t))
    assert_same_parameters(reference, model, tolerance)
    return smallest


def assert_matrix_kernels_agree(device):
    """Compare the kernels for batches of matrices with `math.polar` in float64."""
    shapes = [(3, 24, 40), (2, 40, 24), (1, 9, 33), (5, 17, 8), (1, 520, 16)]
    for (batch, rows, columns), dtype in itertools.product(shapes, (torch.float32, torch.bfloat16)):
        close = {"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 0.03, "atol": 0.03}
        x = torch.randn(batch, rows, columns, device=device).to(dtype)
        exact, lines = x.double(), max(rows, columns) - 1
        assert_close(
            polar.polar(x, [polar.MUON], matrices.inverse_norm, matrices.polynomial).double(),
            polar.polar(exact, [polar.MUON]),
            **close,
        )
        by_row, scale = rows >= columns, torch.rand(batch, columns - 1, device=device)
        for own in (None, scale):
            found = matrices.line_sums(x, columns - 1, own, by_row=by_row)
            expected = polar.line_sums(exact, columns - 1, None if own is None else own.double(), by_row=by_row)
            assert_close([f.double() for f in found], list(expected), rtol=1e-4, atol=1e-4)
        old, lengths = torch.rand(batch, lines, device=device), torch.rand(batch, device=device)
        for ok in (None, torch.tensor(False, device=device)):
            numbers = (*expected, old.double(), lengths.double())
            exactly = polar.even_lines(*numbers, min(rows, columns), ok)
            even = matrices.even_lines(*(n.float() for n in numbers), min(rows, columns), ok)
            assert_close([f.double() for f in even], list(exactly), rtol=1e-4, atol=1e-5)
        even, out = torch.rand(batch, lines, device=device), torch.full_like(x, torch.nan)
        matrices.scale_lines(x, even, by_row=by_row, out=out)
        polar.scale_lines(exact, even.double(), by_row=by_row, out=exact)
        assert_close(out.double(), exact, **close)


@contextmanager
def stopped_after_a_checkpoint(monkeypatch):
    """Ctrl-C comes as soon as a training of the lab has written its first checkpoint."""
    real = checkpoint.save

    def save(*arguments):
        real(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save", save)
        yield
