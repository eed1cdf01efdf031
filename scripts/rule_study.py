"""Compare rules on the tasks that `EvenStep` was tuned on, side by side on one GPU.

    python scripts/rule_study.py --data DIR --out FILE.jsonl gpt:evenstep:0.02:0 deep:muon:0.02:0

A job is TASK:METHOD:LR:SEED. DIR holds cifar-10-batches-py and python-source.txt. Each job appends a record: held-out
loss or accuracy, training loss, seconds. Jobs that are in the file already are not run again, and no job begins after
`--budget` seconds.
"""

import argparse
import math
import pickle
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import evenstep
from evenstep.even_step import EvenStep
from evenstep.lab import records
from evenstep.lab.parallel_trials import CapturedStep, Work, round_robin
from evenstep.rules.orthogonal import OrthogonalRule

CONTEXT = 256


# networks


class Block(nn.Module):
    """A pre-norm transformer block with heads of 64, or fewer."""

    def __init__(self, width: int, causal: bool) -> None:
        super().__init__()
        self.head_size, self.causal = min(64, width // 3), causal
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, -1, self.head_size)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


def first_weights(model: nn.Module, depth: int) -> None:
    """N(0, 0.02²), a block's output projections divided by √(2 · depth), biases 0."""
    for name, p in model.named_parameters():
        if p.dim() > 1:
            nn.init.normal_(
                p,
                std=0.02
                / (math.sqrt(2 * depth) if name.rpartition(".")[0].rpartition(".")[2] in ("out", "down") else 1),
            )
        elif name.endswith("bias"):
            nn.init.zeros_(p)


class GPT(nn.Module):
    """A language model of bytes."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(256, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*(Block(width, causal=True) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)
        first_weights(self, depth)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.place.weight[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x)))


class ViT(nn.Module):
    """A vision transformer on patches of 4 x 4, with the mean of all positions in front of the head."""

    def __init__(self, width: int = 192, depth: int = 6) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.place = nn.Parameter(0.02 * torch.randn(64, width))
        self.blocks = nn.Sequential(*(Block(width, causal=False) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)
        patches = self.patches.weight.detach().clone()
        first_weights(self, depth)
        with torch.no_grad():
            self.patches.weight.copy_(patches)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).mT + self.place
        return self.head(self.norm(self.blocks(x)).mean(1))


class Residual(nn.Module):
    """Two convolutions of 3 x 3 with or without batch norm, a 1 x 1 convolution on the way past where shapes change."""

    def __init__(self, inputs: int, outputs: int, stride: int, norm: bool) -> None:
        super().__init__()
        convs = [nn.Conv2d(inputs, outputs, 3, stride, 1), nn.Conv2d(outputs, outputs, 3, 1, 1)]
        first, second = ([conv, nn.BatchNorm2d(outputs)] if norm else [conv] for conv in convs)
        self.body = nn.Sequential(*first, nn.ReLU(), *second)
        self.past = nn.Conv2d(inputs, outputs, 1, stride) if stride > 1 or inputs != outputs else nn.Identity()
        for conv in convs:
            nn.init.kaiming_normal_(conv.weight, nonlinearity="relu")
        with torch.no_grad():
            convs[1].weight /= 2

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.past(x) + self.body(x))


def resnet(norm: bool) -> nn.Module:
    sizes = [(64, 64, 1), (64, 128, 2), (128, 128, 1), (128, 256, 2), (256, 256, 1)]
    first = [nn.Conv2d(3, 64, 3, padding=1), nn.ReLU()]
    blocks = [Residual(*size, norm) for size in sizes]
    return nn.Sequential(*first, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 10))


def deep() -> nn.Module:
    layers: list[nn.Module] = []
    for inputs, outputs in ((3, 64), (64, 128), (128, 256)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU()]
        layers += [nn.Conv2d(outputs, outputs, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    layers += [nn.Flatten(), nn.Linear(4096, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)]
    for layer in layers:
        if isinstance(layer, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
    return nn.Sequential(*layers)


# methods


class NorMuon(OrthogonalRule):
    """The rule without balls: a step is lr · √max(1, units/inputs) times the polar factor, its norm kept."""

    def state(self, momentum: float) -> Any:
        return {name: field for name, field in super().state(momentum).items() if name != "radius"}

    def _lengths(self, step: Any, ok: Tensor | None) -> list[Tensor]:
        return [torch.full((b.groups,), (b.units / b.groups) ** 0.5, device=b.weight.device) for b in step.blocks]


def variant(
    conv: tuple[float, float], dense: tuple[float, float], rule: OrthogonalRule | None = None
) -> type[EvenStep]:
    """`EvenStep` with these powers of α and shares of the mean for convolutions and dense layers, or another rule."""
    names = "convolutions", "dense"
    fields: dict[str, Any] = {
        name: {"power": p, "centre": c} for name, (p, c) in zip(names, (conv, dense), strict=True)
    }
    return type("Variant", (EvenStep,), {**fields, "rule": rule or EvenStep.rule})


normuon = variant((0, 0), (0, 0), NorMuon(steps=5))
# the optimizer and its options
METHODS: dict[str, tuple[Any, dict[str, Any]]] = {
    "evenstep": (EvenStep, {}),
    "normuon": (normuon, {"trust": None, "momentum": 0.95}),
    "normuon-m90": (normuon, {"trust": None}),
    "whitened": (variant((1, 1), (1, 1)), {}),
    "half": (variant((0.5, 0), (0.5, 0)), {}),
    "plain": (variant((0, 0), (0, 0)), {}),
    "half-whitened": (variant((0.5, 0), (1, 1)), {}),
    "no-radius": (variant((0.5, 0), (1, 1), NorMuon()), {}),
    "least-03": (variant((0.5, 0), (1, 1), OrthogonalRule(least=0.3)), {}),
    "least-1": (variant((0.5, 0), (1, 1), OrthogonalRule(least=1.0)), {}),  # steps relative to the radius
    "five": (variant((1, 1), (1, 1), OrthogonalRule(steps=5)), {}),
    "three": (variant((1, 1), (1, 1), OrthogonalRule(steps=3)), {}),
    "no-head": (EvenStep, {"head": None}),
    "m95": (EvenStep, {"momentum": 0.95}),
    "no-trust": (EvenStep, {"trust": None}),
    "unitstep": (evenstep.UnitStep, {}),
}


# tasks


class ImageTask:
    """CIFAR-10 with random crops and flips; held out is the accuracy on the test set."""

    def __init__(self, build: Callable[[], nn.Module], epochs: int = 5, mixed: bool = False, warm_up: int = 0) -> None:
        self.build, self.mixed, self.warm_up, self.steps = build, mixed, warm_up, epochs * (50_000 // 128)

    def batches(self, data: Path, device: torch.device, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
        x, y, _, _ = images(data, device)
        while True:
            for rows in torch.randperm(len(x), generator=generator, device=device)[: len(x) // 128 * 128].split(128):
                yield augmented(x[rows], generator), y[rows]

    def held_out(self, predict: Callable[[Tensor], Tensor], data: Path, device: torch.device) -> dict[str, float]:
        _, _, x, y = images(data, device)
        right = sum((predict(a).argmax(1) == b).sum() for a, b in zip(x.split(1000), y.split(1000), strict=True))
        return {"held_out_accuracy": float(right) / len(y)}


class TextTask:
    """Bytes of Python source; held out is the mean loss of 512 windows of its last fiftieth."""

    def __init__(self, width: int, depth: int, steps: int = 800) -> None:
        self.build, self.mixed, self.warm_up, self.steps = (lambda: GPT(width, depth)), True, steps // 10, steps

    def windows(self, source: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
        tokens = source[starts[:, None] + torch.arange(CONTEXT + 1, device=source.device)].long()
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def batches(self, data: Path, device: torch.device, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
        source = text(data, device)
        last = len(source) * 49 // 50 - CONTEXT - 1
        while True:
            yield self.windows(source, torch.randint(last, (64,), generator=generator, device=device))

    def held_out(self, predict: Callable[[Tensor], Tensor], data: Path, device: torch.device) -> dict[str, float]:
        source = text(data, device)
        starts = len(source) * 49 // 50 + torch.arange(512, device=device) * CONTEXT
        pairs = [self.windows(source, part) for part in starts.split(64)]
        losses = [F.cross_entropy(predict(x).flatten(0, -2), y.flatten()) for x, y in pairs]
        return {"held_out_loss": float(torch.stack(losses).mean())}


TASKS: dict[str, ImageTask | TextTask] = {
    "resnet-bn": ImageTask(lambda: resnet(True)),
    "resnet": ImageTask(lambda: resnet(False)),
    "deep": ImageTask(deep),
    "vit": ImageTask(ViT, epochs=20, mixed=True, warm_up=390),
    "gpt": TextTask(384, 6),
    "gpt-192": TextTask(192, 6),
    "gpt-1024": TextTask(1024, 8, steps=1500),
}


@cache
def text(data: Path, device: torch.device) -> Tensor:
    return torch.from_numpy(np.fromfile(data / "python-source.txt", dtype=np.uint8)).to(device)


@cache
def images(data: Path, device: torch.device) -> list[Tensor]:
    """Standardized training images with labels, then those held out."""
    found = []
    for names in ([f"data_batch_{k}" for k in range(1, 6)], ["test_batch"]):
        parts = [pickle.loads((data / "cifar-10-batches-py" / name).read_bytes(), encoding="bytes") for name in names]
        x = torch.from_numpy(np.concatenate([part[b"data"] for part in parts])).view(-1, 3, 32, 32).to(device).float()
        found += [x, torch.tensor([label for part in parts for label in part[b"labels"]], device=device)]
    mean, std = found[0].mean((0, 2, 3), keepdim=True), found[0].std((0, 2, 3), keepdim=True)
    return [(x - mean) / std if x.dim() == 4 else x for x in found]


def augmented(x: Tensor, generator: torch.Generator) -> Tensor:
    """A crop by 4 with reflection, and a flip, drawn for each image."""
    count, device = len(x), x.device
    padded = F.pad(x, (4, 4, 4, 4), mode="reflect")
    places = torch.randint(9, (2, count, 1), generator=generator, device=device) + torch.arange(32, device=device)
    flips = torch.rand(count, 1, generator=generator, device=device) < 0.5
    rows, columns = places[0], torch.where(flips, places[1].flip(1), places[1])
    index = torch.arange(count, device=device)
    return padded[index[:, None, None], :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2).contiguous()


# training

Job = tuple[str, str, float, int]


def train(job: Job, data: Path, device: torch.device, most: int | None = None) -> Work[tuple[Job, dict[str, Any]]]:
    """Train one network in steps; held-out loss or accuracy, training loss and seconds of one job."""
    task, (cls, options), begin = TASKS[job[0]], METHODS[job[1]], time.perf_counter()
    torch.manual_seed(job[3])
    with torch.device(device):
        model = task.build()
    lr = torch.tensor(job[2], device=device)
    optimizer = cls(model, lr=lr, capturable=True, **options)
    steps = min(task.steps, most or task.steps)
    loss_now, losses = torch.zeros((), device=device), []
    rates = [(group["lr"], group["lr"].clone()) for group in optimizer.param_groups]

    def predict(x: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=task.mixed):
            return model(x).float()

    def step(x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        loss = F.cross_entropy(predict(x).flatten(0, -2), y.flatten())
        loss.backward()
        optimizer.step()
        loss_now.copy_(loss.detach())

    run = CapturedStep(step) if device.type == "cuda" else step
    generator = torch.Generator(device).manual_seed(job[3])
    for k, (x, y) in zip(range(steps), task.batches(data, device, generator), strict=False):
        rate = min((k + 1) / max(1, task.warm_up), (steps - k) / (steps - task.warm_up))
        for now, base in rates:
            now.copy_(base * rate)
        run(x, y)
        if k >= steps - max(1, min(390, steps // 16)):
            losses.append(loss_now.clone())
        yield
    model.eval()
    with torch.no_grad():
        found = task.held_out(predict, data, device)
    training = float(torch.stack(losses).mean())
    return job, {**found, "training_loss": training, "seconds": time.perf_counter() - begin}


def guarded(job: Job, *args: Any) -> Work[tuple[Job, dict[str, Any]]]:
    """A job with its result, or its error: one job's failure must not lose the others."""
    try:
        return (yield from train(job, *args))
    except Exception as error:
        return job, {"error": f"{type(error).__name__}: {error}"[:400]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("jobs", nargs="+", metavar="TASK:METHOD:LR:SEED")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--at-once", type=int, default=12)
    parser.add_argument("--budget", type=float, default=math.inf)
    parser.add_argument("--steps", type=int, help="end each training early, to see that it runs")
    args, begin = parser.parse_args(), time.perf_counter()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    known = [
        (*(r["config"][k] for k in ("task", "method", "lr")), r["seed"])
        for r in (records.read(args.out) if args.out.exists() else [])
    ]
    split = [job.split(":") for job in dict.fromkeys(args.jobs)]
    jobs = [(task, method, float(lr), int(seed)) for task, method, lr, seed in split]

    for task in {job[0] for job in jobs}:  # before there are streams that would not wait for it
        (text if isinstance(TASKS[task], TextTask) else images)(args.data, device)

    def works() -> Iterator[Any]:
        for job in jobs:
            if job not in known and time.perf_counter() - begin < args.budget:
                yield guarded(job, args.data, device, args.steps)

    for job, found in round_robin(works(), device, args.at_once):
        config = {"study": "rules", **dict(zip(("task", "method", "lr"), job, strict=False))}
        records.append(args.out, records.make(config, job[3], found, device))
        print(*job, {k: round(v, 4) if isinstance(v, float) else v for k, v in found.items()}, flush=True)


if __name__ == "__main__":
    main()
