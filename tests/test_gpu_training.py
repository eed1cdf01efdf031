"""Every public optimizer trains small networks on a GPU at its defaults, as it does on the CPU.

Each network is trained eagerly, under bfloat16 autocast and with `capturable=True`, by every optimizer. Compiling takes
seconds for each case, so the compiled model is tried with every optimizer on one network, and on every network with one
optimizer; the compiled step with two. Warnings attributed to evenstep are errors in all tests.
"""

import inspect
from functools import cache
from itertools import product
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import evenstep
from cases import OptimizerCase, WideEvenStep
from helpers import GPU

STEPS, CLASSES, LONG = 50, 8, 16
SEED = 4  # one at which no gradient is so near 0 that rounding decides its sign, which Adam and RMSProp go by
# how far the first step may be from the CPU's: products in bfloat16 amplify rounding where a gradient has few ranks
CLOSE = {"EvenStep": 0.1, "Whitened(Muon)": 0.03}
DEFAULTS = {
    "EvenStep": OptimizerCase(evenstep.EvenStep, {}),
    "EvenStep in float32": OptimizerCase(WideEvenStep, {}),
    "UnitStep": OptimizerCase(evenstep.UnitStep, {}),
    "Whitened(SGD)": OptimizerCase(evenstep.Whitened, {"base": torch.optim.SGD, "lr": 0.1}),  # torch's 1e-3 is too slow
    "Whitened(AdamW)": OptimizerCase(evenstep.Whitened, {"base": torch.optim.AdamW}),
    "Whitened(Muon)": OptimizerCase(evenstep.Whitened, {"base": torch.optim.Muon}),
    "WhitenedSGD": OptimizerCase(evenstep.WhitenedSGD, {}),
    "CanonicalSGD": OptimizerCase(evenstep.CanonicalSGD, {}),
    "FanInSGD": OptimizerCase(evenstep.FanInSGD, {}),
    **{
        f"BlockNaturalSGD({block})": OptimizerCase(evenstep.BlockNaturalSGD, {"block": block})
        for block in ("network", "unit", "weight")
    },
}


class Attention(nn.Module):
    """Causal self-attention with one packed layer for queries, keys and values.

    It has no biases there: the gradient of the keys' bias is rounding alone, and Adam would make full steps of it.
    """

    def __init__(self, width, heads):
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Transformer(nn.Module):
    """One pre-norm block between an embedding with positions and a head."""

    def __init__(self, width=32):
        super().__init__()
        self.token, self.place = nn.Embedding(CLASSES, width), nn.Parameter(0.1 * torch.randn(LONG, width))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.attention = Attention(width, heads=4)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, tokens):
        x = self.token(tokens) + self.place
        x = x + self.attention(self.norms[0](x))
        x = x + self.mlp(self.norms[1](x))
        return 4 * self.head(self.norms[2](x)).flatten(0, 1)  # steep enough for SGD at its default lr


def mlp():
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, CLASSES))


def conv_net():
    convs = [nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 24, 3, stride=2, groups=2), nn.ReLU()]
    return nn.Sequential(*convs, nn.Flatten(), nn.Linear(24 * 9, CLASSES))


def noisy_prototypes(shape, generator, count=64):
    """Inputs that are one of a few prototypes with noise; the prototype is the class."""
    prototypes = torch.randn(CLASSES, *shape, generator=torch.Generator().manual_seed(0))
    kind = torch.randint(CLASSES, (count,), generator=generator)
    return 0.5 + prototypes[kind] + torch.randn(count, *shape, generator=generator), noisy(kind, generator)


def counting(generator, count=32):
    """Sequences that count in steps of the first token, with noise; each label is the next token."""
    first = torch.randint(1, CLASSES, (count, 1), generator=generator)
    tokens = noisy(first * torch.arange(1, LONG + 2) % CLASSES, generator)
    return tokens[:, :-1], tokens[:, 1:].flatten()


def noisy(labels, generator):
    """A tenth of the labels drawn at random, so that no loss comes near 0, where 10 % would be rounding."""
    random = torch.randint(CLASSES, labels.shape, generator=generator)
    return torch.where(torch.rand(labels.shape, generator=generator) < 0.1, random, labels)


class Task(NamedTuple):
    """A network and its data."""

    build: object
    draw: object

    def batch(self, number, device, **size):
        return [t.to(device) for t in self.draw(generator=torch.Generator().manual_seed(number), **size)]


TASKS = {
    "conv": Task(conv_net, lambda **k: noisy_prototypes((3, 8, 8), **k)),
    "mlp": Task(mlp, lambda **k: noisy_prototypes((32,), **k)),
    "transformer": Task(Transformer, counting),
}


class Run(NamedTuple):
    """The result of training."""

    first_step: Tensor  # of all weights
    rounding: float  # of the weights, which bounds how exactly the step can be read off them
    losses: tuple[float, float]  # on unseen data, before and after
    finite: bool
    skipped: int


def trained(optimizer_name, task_name, device, mode="eager"):
    """Train a network for `STEPS` steps with an optimizer at its defaults."""
    task = TASKS[task_name]
    torch.manual_seed(SEED)
    model = task.build().to(device)
    capturable = {"capturable": True} if mode == "capturable" else {}
    optimizer = DEFAULTS[optimizer_name].build(model, **capturable)
    if mode.startswith("compiled"):
        torch._dynamo.reset()
    forward = torch.compile(model) if mode == "compiled model" else model
    step = torch.compile(optimizer.step) if mode == "compiled step" else optimizer.step
    start, first_step, before = flat(model), None, unseen_loss(task, model, device)
    for number in range(STEPS):
        x, labels = task.batch(number, device)
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16, enabled=mode == "autocast"):
            output = forward(x)
        F.cross_entropy(output.float(), labels).backward()
        step()
        first_step = flat(model) - start if first_step is None else first_step
    finite = bool(flat(model).isfinite().all())
    after, rounding = unseen_loss(task, model, device), torch.finfo(torch.float32).eps * start.norm().item()
    return Run(first_step, rounding, (before, after), finite, optimizer.nonfinite_steps)


def flat(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()]).cpu()


@torch.no_grad()
def unseen_loss(task, model, device):
    x, labels = task.batch(10**6, device, count=512)
    return F.cross_entropy(model(x), labels).item()


@cache
def on_the_cpu(optimizer_name, task_name):
    return trained(optimizer_name, task_name, torch.device("cpu"))


@pytest.fixture(autouse=True)
def full_single_precision():
    with torch.backends.cudnn.flags(allow_tf32=False):  # of matrix products it is False by default
        yield


eager = product(DEFAULTS, TASKS, ["eager", "capturable"])
compiled = [(name, "mlp", "compiled model") for name in DEFAULTS]
compiled += [("EvenStep", task, "compiled model") for task in TASKS if task != "mlp"]
compiled += [(name, "mlp", "compiled step") for name in ("EvenStep", "UnitStep")]


def test_no_public_optimizer_is_left_out():
    public = [getattr(evenstep, name) for name in evenstep.__all__]
    classes = {c for c in public if inspect.isclass(c) and issubclass(c, torch.optim.Optimizer)}
    assert classes == {case.cls for case in DEFAULTS.values()} - {WideEvenStep}


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "task", "mode"), [*eager, *compiled])
def test_training_in_single_precision_is_training_on_the_cpu(name, task, mode):
    if GPU.type == "cpu" and mode == "capturable":
        pytest.skip("capturable needs a GPU")
    here, there = trained(name, task, GPU, mode), on_the_cpu(name, task)
    assert here.finite and here.skipped == 0
    assert here.losses[1] < 0.98 * here.losses[0]
    close = CLOSE.get(name, 1e-4)
    assert (here.first_step - there.first_step).norm() <= close * there.first_step.norm() + there.rounding
    assert here.losses[1] == pytest.approx(there.losses[1], rel=0.1)


@pytest.mark.gpu
@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("name", DEFAULTS)
def test_training_under_autocast_learns(name, task):
    run = trained(name, task, GPU, "autocast")
    assert run.finite and run.skipped == 0
    assert run.losses[1] < 0.98 * run.losses[0]
