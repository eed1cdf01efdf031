"""Twelve small tasks without normalization: do the defaults train there?

    python scripts/unnormalized.py --processes 16 --out results/unnormalized.jsonl

Each task is trained by AdamW at 1e-3, and by `EvenStep`, `UnitStep` and `Whitened(AdamW)` at their default lr, with
linear decay to zero, on one thread. A method passes a task if its held-out loss, a mean over seeds, is at most twice
AdamW's plus 1 % of the loss before training. Inputs are raw on purpose. Targets are of unit scale, except for `dqn`,
whose returns are about ten times the rewards. Trainings that the file has are not run again.
"""

import argparse
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import evenstep
from evenstep.lab import records
from evenstep.lab.data import fashion_mnist_subset

BATCH, HELD_OUT = 64, 1000
SLACK = 0.01  # the share of the loss before training that the criterion adds to twice AdamW's loss
Loss = Callable[[Tensor, Tensor], Tensor]
Raw = Callable[[Tensor, float], Tensor]  # features to inputs, at this much of training's progress


@dataclass
class Task:
    """A model, the training loss of a step as a function of training's progress (0 to 1), and the held-out loss."""

    model: nn.Module
    loss: Callable[[float], Tensor]
    held_out: Callable[[], Tensor]
    steps: int


def dense(*sizes: int, activation: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    layers = [m for a, b in itertools.pairwise(sizes) for m in (nn.Linear(a, b), activation())]
    return nn.Sequential(*layers[:-1])


def fitting(model: nn.Module, x: Tensor, y: Tensor, loss: Loss, raw: Raw = lambda x, _: x, steps: int = 600) -> Task:
    """Minibatches from all but the last examples, which are held out; `raw` is what the model is fed."""
    count = len(x) - HELD_OUT

    def train(progress: float) -> Tensor:
        rows = torch.randint(count, (BATCH,))
        return loss(model(raw(x[rows], progress)), y[rows])

    return Task(model, train, lambda: loss(model(raw(x[count:], 1.0)), y[count:]), steps)


RAW: dict[str, Raw] = {
    "ranges": lambda z, progress: z * torch.logspace(-6, 6, z.shape[1]),  # features from 1e-6 to 1e6
    "offset": lambda z, progress: 1e4 + 1e-3 * z,  # far from zero; float32 resolves just the thousandths
    "tails": lambda z, progress: z * torch.exp(z * z / 3),  # P(|x| > t) falls as t^−1.5: no variance
    "jump": lambda z, progress: z * (100.0 if progress >= 0.5 else 1.0),  # a hundredfold half-way
}


def regression(raw: Raw) -> Task:
    """A smooth function of 20 independent features z, of which the model sees `raw(z)`."""
    z = torch.randn(4000 + HELD_OUT, 20)
    y = torch.tanh(z @ torch.randn(20, 8) / 20**0.5) @ torch.randn(8, 1)
    return fitting(dense(20, 64, 64, 1), z, (y - y.mean()) / y.std(), F.mse_loss, raw)


def bytes_() -> Task:
    """Classification of images from 0 to 255 by a small convolutional net."""
    data, convolutions = fashion_mnist_subset(), [nn.Conv2d(1, 8, 3, stride=2), nn.Conv2d(8, 16, 3, stride=2)]
    layers = [m for layer in convolutions for m in (layer, nn.ReLU())]
    model = nn.Sequential(*layers, nn.Flatten(), *dense(16 * 49, 64, 10))
    x, y = torch.cat([data.train_x, data.test_x]).float(), torch.cat([data.train_y, data.test_y])
    return fitting(model, x, y, F.cross_entropy)


def words() -> Task:
    """The class of a word, one of 10,000 by Zipf's law and one-hot."""
    words = torch.multinomial(1 / torch.arange(1.0, 10_001), 20_000 + HELD_OUT, replacement=True)
    classes = torch.randint(5, (10_000,))
    model = dense(10_000, 64, 5)
    return fitting(model, words, classes[words], F.cross_entropy, lambda w, _: F.one_hot(w, 10_000).float(), steps=400)


def sparse() -> Task:
    """Regression on 5,000 inputs of which 99.9 % are zero."""
    places, values = torch.randint(5000, (20_000 + HELD_OUT, 5)), torch.randn(20_000 + HELD_OUT, 5)
    y = (torch.randn(5000)[places] * values).mean(1, keepdim=True) * 5**0.5
    return fitting(
        dense(5000, 64, 1), torch.cat([places.float(), values], 1), y, F.mse_loss,
        lambda pairs, _: torch.zeros(len(pairs), 5000).scatter_(1, pairs[:, :5].long(), pairs[:, 5:]),
    )  # fmt: skip


class Residual(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


def residual() -> Task:
    """Classification by 100 residual layers, each of which makes signals a seventh larger at first."""
    z = torch.randn(4000 + HELD_OUT, 20)
    classes = (torch.tanh(z @ torch.randn(20, 16)) @ torch.randn(16, 5)).argmax(1)
    middle = [Residual(nn.ReLU(), nn.Linear(32, 32)) for _ in range(100)]
    for _, layer in middle:
        nn.init.normal_(layer.weight, std=0.8 / 32**0.5)
    return fitting(nn.Sequential(nn.Linear(20, 32), *middle, nn.Linear(32, 5)), z, classes, F.cross_entropy, steps=150)


def pinn() -> Task:
    """A physics-informed net: u'' = −π² sin(πx) on [−1, 1], u(±1) = 0; held out is the distance to sin(πx)."""
    model = dense(1, 32, 32, 32, 1, activation=nn.Tanh)
    grid, ends = torch.linspace(-1, 1, 200)[:, None], torch.tensor([[-1.0], [1.0]])

    def loss(progress: float) -> Tensor:
        x = (2 * torch.rand(BATCH, 1) - 1).requires_grad_()
        slope = torch.autograd.grad(model(x).sum(), x, create_graph=True)[0]
        bend = torch.autograd.grad(slope.sum(), x, create_graph=True)[0]
        return (bend / math.pi**2 + torch.sin(math.pi * x)).square().mean() + model(ends).square().mean()

    return Task(model, loss, lambda: F.mse_loss(model(grid), torch.sin(math.pi * grid)), steps=800)


class Sine(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(30 * x)


def siren() -> Task:
    """SIREN: a wavy surface over the square from points, with its own first weights."""
    model = dense(2, 64, 64, 64, 1, activation=Sine)
    for k, layer in enumerate(m for m in model if isinstance(m, nn.Linear)):
        bound = 1 / 2 if k == 0 else (6 / 64) ** 0.5 / 30
        nn.init.uniform_(layer.weight, -bound, bound)
    x = 2 * torch.rand(4000 + HELD_OUT, 2) - 1
    y = torch.sin(x @ (8 * torch.randn(2, 6)) + torch.randn(6)).mean(1, keepdim=True) * 12**0.5
    return fitting(model, x, y, F.mse_loss)


def dqn() -> Task:
    """Q-learning with a target network: four actions, discount 0.9; held out is the distance to the true returns."""
    model, target = (dense(8, 64, 64, 4) for _ in range(2))
    turn, worth, discount = torch.linalg.qr(torch.randn(8, 8))[0], torch.randn(8, 4) / 8**0.5, 0.9
    states = torch.randn(HELD_OUT, 8)

    def rewards(state: Tensor) -> Tensor:
        return torch.tanh(state @ worth) + 1

    def returns(state: Tensor, depth: int = 100) -> Tensor:
        later = returns(state @ turn, depth - 1).amax(1, keepdim=True) if depth else 0.0
        return rewards(state) + discount * later

    truth = returns(states)

    def loss(progress: float) -> Tensor:
        if round(1000 * progress) % 20 == 0:
            target.load_state_dict(model.state_dict())
        state = torch.randn(BATCH, 8)
        with torch.no_grad():
            wanted = rewards(state) + discount * target(state @ turn).amax(1, keepdim=True)
        action = torch.randint(4, (BATCH, 1))
        return F.mse_loss(model(state).gather(1, action), wanted.gather(1, action))

    return Task(model, loss, lambda: F.mse_loss(model(states), truth), steps=1000)


class Outputs(nn.LSTM):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[0]


def lstm() -> Task:
    """The next symbol of a chain in which it depends on the last and the third last one."""
    table = torch.softmax(3 * torch.randn(12, 12, 12), -1)
    text = torch.randint(12, (1000 + HELD_OUT, 24))
    for k in range(3, 24):
        text[:, k] = torch.multinomial(table[text[:, k - 1], text[:, k - 3]], 1)[:, 0]
    model = nn.Sequential(nn.Embedding(12, 16), Outputs(16, 64, batch_first=True), nn.Linear(64, 12))
    return fitting(model, text[:, :-1], text[:, 1:], lambda y, t: F.cross_entropy(y.mT, t), steps=300)


TASKS = {name: partial(regression, raw) for name, raw in RAW.items()} | {
    made.__name__.strip("_"): made for made in (bytes_, words, sparse, residual, pinn, siren, dqn, lstm)
}
METHODS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
    "EvenStep": evenstep.EvenStep,
    "UnitStep": evenstep.UnitStep,
    "Whitened(AdamW)": lambda model: evenstep.Whitened(model, torch.optim.AdamW, lr=1e-3),
}
RIVALS = [name for name in METHODS if name != "AdamW"]
Losses = dict[tuple[str, str], list[dict[str, float]]]  # of each task and method, seed by seed


def train(job: tuple[str, str, int]) -> dict[str, float]:
    """Task, method, seed: the held-out loss before and after, and the mean training loss of the last 50 steps."""
    task, method, seed = job
    torch.manual_seed(seed)
    run = TASKS[task]()
    optimizer = METHODS[method](run.model)
    decay = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / run.steps)
    before, losses = run.held_out().item(), []
    for step in range(run.steps):
        optimizer.zero_grad()
        loss = run.loss(step / run.steps)
        loss.backward()
        optimizer.step()
        decay.step()
        losses.append(loss.item())
    return {"before": before, "held_out": run.held_out().item(), "training": sum(losses[-50:]) / 50}


def mean(found: Losses, task: str, method: str, field: str) -> float:
    """Over seeds; NaN, which passes nothing, if a training ended there."""
    return sum(run[field] for run in found[task, method]) / len(found[task, method])


def allowed(found: Losses, task: str) -> float:
    """The largest held-out loss that passes."""
    return 2 * mean(found, task, "AdamW", "held_out") + SLACK * mean(found, task, "AdamW", "before")


def table(found: Losses) -> str:
    """Held-out losses as a Markdown table; those that miss the criterion are bold."""
    rows = [["task", "before", "AdamW", "allowed", *RIVALS], ["---"] * (4 + len(RIVALS))]
    for task in dict.fromkeys(task for task, _ in found):
        limit = allowed(found, task)
        cells = [mean(found, task, "AdamW", "before"), mean(found, task, "AdamW", "held_out"), limit]
        losses = [mean(found, task, method, "held_out") for method in RIVALS]
        marked = [f"{v:.3g}" if v <= limit else f"**{v:.3g}**" for v in losses]
        rows.append([task, *map("{:.3g}".format, cells), *marked])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def key(record: records.Record) -> tuple[str, str, int]:
    """The task, method and seed of a record."""
    return record["config"]["task"], record["config"]["method"], record["seed"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--out", type=Path, help="append a record of each training that this file does not have yet")
    args = parser.parse_args()
    jobs = list(itertools.product(args.tasks, METHODS, args.seeds))
    before = records.read(args.out) if args.out and args.out.exists() else []
    known = {key(record): record["metrics"] for record in before}
    missing = [job for job in jobs if job not in known]
    with get_context("spawn").Pool(args.processes, torch.set_num_threads, [1]) as pool:
        for job, losses in zip(missing, pool.imap(train, missing), strict=True):
            known[job] = losses
            print(f"{' '.join(map(str, job))}: {losses['held_out']:.3g}", flush=True)
            if args.out:
                task, method, seed = job
                config = {"study": "unnormalized", "task": task, "method": method}
                records.append(args.out, records.make(config, seed, losses))
    found: Losses = {}
    for job in jobs:
        found.setdefault(job[:2], []).append(known[job])
    print(table(found))


if __name__ == "__main__":
    main()
