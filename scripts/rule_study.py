"""Compare rules on a byte GPT, ResNet-like nets and a deep net without batch norm, side by side on one GPU.

    python scripts/rule_study.py --data DIR --out FILE.jsonl gpt:evenstep:0.02:0 deep:muon:0.02:0

A job is TASK:METHOD:LR:SEED. DIR holds cifar-10-batches-py and python-source.txt. Each job appends a record: held-out
loss or accuracy, training loss, seconds.
"""

import argparse
import math
import pickle
import time
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import evenstep
from evenstep.even_step import EvenStep
from evenstep.lab import records
from evenstep.rules.orthogonal import OrthogonalRule

CONTEXT, GPT_BATCH, GPT_STEPS, WARM_UP = 256, 64, 800, 80
BATCH, EPOCHS = 128, 5


# tasks


class Block(nn.Module):
    """A pre-norm transformer block with heads of 64."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, -1, 64)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class GPT(nn.Module):
    """A language model of bytes; weights are N(0, 0.02²), a block's output projections divided by √(2 · depth)."""

    def __init__(self, width: int = 384, depth: int = 6) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(256, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)
        for name, p in self.named_parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.02 / (math.sqrt(2 * depth) if name.split(".")[-2] in ("out", "down") else 1))
            elif name.endswith("bias"):
                nn.init.zeros_(p)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.place.weight[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x)))


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


@cache
def text(data: Path) -> Tensor:
    return torch.from_numpy(np.fromfile(data / "python-source.txt", dtype=np.uint8)).cuda()


@cache
def images(data: Path) -> list[Tensor]:
    """Standardized training images with labels, then those held out."""
    found = []
    for names in ([f"data_batch_{k}" for k in range(1, 6)], ["test_batch"]):
        parts = [pickle.loads((data / "cifar-10-batches-py" / name).read_bytes(), encoding="bytes") for name in names]
        x = torch.from_numpy(np.concatenate([part[b"data"] for part in parts])).view(-1, 3, 32, 32).cuda().float()
        found += [x, torch.tensor([label for part in parts for label in part[b"labels"]]).cuda()]
    mean, std = found[0].mean((0, 2, 3), keepdim=True), found[0].std((0, 2, 3), keepdim=True)
    return [(x - mean) / std if x.dim() == 4 else x for x in found]


def augmented(x: Tensor) -> Tensor:
    """A crop by 4 with reflection, and a flip, drawn for each image."""
    count, device = len(x), x.device
    padded = F.pad(x, (4, 4, 4, 4), mode="reflect")
    rows = torch.randint(9, (count, 1), device=device) + torch.arange(32, device=device)
    columns = torch.randint(9, (count, 1), device=device) + torch.arange(32, device=device)
    columns = torch.where(torch.rand(count, 1, device=device) < 0.5, columns, columns.flip(1))
    index = torch.arange(count, device=device)
    return padded[index[:, None, None], :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2).contiguous()


# methods


class Variant(EvenStep):
    """`EvenStep` with other coordinates or another rule."""


def variant(steps: int = 5, even_lines: bool = True, conv: tuple[float, float] | None = None,
            dense: tuple[float, float] | None = None) -> type[EvenStep]:  # fmt: skip
    """A class with this rule, and powers and centres for convolutions and dense layers."""
    fields: dict[str, Any] = {"rule": OrthogonalRule(steps, even_lines)}
    for name, pair in (("convolutions", conv), ("dense", dense)):
        if pair is not None:
            fields[name] = {"power": pair[0], "centre": pair[1]}
    return type("Variant", (EvenStep,), fields)


PLAIN: dict[str, Any] = {"conv": (0, 0), "dense": (0, 0)}
METHODS: dict[str, Any] = {
    "muon": (variant(even_lines=False, **PLAIN), {"trust": None}),
    "normuon": (variant(**PLAIN), {"trust": None}),
    "evenstep": (EvenStep, {}),
    "whitened": (variant(conv=(1, 1)), {}),
    "half-mean": (variant(conv=(0.5, 0.5), dense=(0.5, 0.5)), {}),
    "half": (variant(conv=(0.5, 0), dense=(0.5, 0)), {}),
    "half-centred": (variant(conv=(0.5, 1), dense=(0.5, 1)), {}),
    "four": (variant(steps=4), {}),
    "three": (variant(steps=3), {}),
    "no-head": (EvenStep, {"head": None}),
    "m90": (EvenStep, {"momentum": 0.9}),
    "unitstep": (evenstep.UnitStep, {}),
    "adamw": (lambda model, lr: torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0), {}),
}


def build(method: str, model: nn.Module, lr: float) -> torch.optim.Optimizer:
    cls, options = METHODS[method]
    return cls(model, lr=lr, **options)


# training


def train(job: tuple[str, str, float, int, Path]) -> dict[str, Any]:
    """Held-out loss or accuracy, training loss and seconds of one job."""
    task, method, lr, seed, data = job
    torch.manual_seed(seed)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    begin = time.perf_counter()
    run = train_gpt if task.startswith("gpt") else train_images
    with torch.device("cuda"):
        model = GPT(*map(int, task.split("-")[1:])) if task.startswith("gpt") else {
            "deep": deep, "resnet-bn": lambda: resnet(True), "resnet": lambda: resnet(False)
        }[task]()  # fmt: skip
    found = run(model, build(method, model, lr), data)
    return {**found, "seconds": time.perf_counter() - begin}


def train_gpt(model: nn.Module, optimizer: torch.optim.Optimizer, data: Path) -> dict[str, float]:
    source = text(data)
    cut, base = len(source) * 49 // 50, [group["lr"] for group in optimizer.param_groups]
    window, losses = torch.arange(CONTEXT + 1, device="cuda"), []

    def loss_of(starts: Tensor) -> Tensor:
        tokens = source[starts[:, None] + window].long()
        with torch.autocast("cuda", torch.bfloat16):
            return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())

    for k in range(GPT_STEPS):
        rate = min((k + 1) / WARM_UP, (GPT_STEPS - k) / (GPT_STEPS - WARM_UP))
        for group, lr in zip(optimizer.param_groups, base, strict=True):
            group["lr"] = lr * rate
        optimizer.zero_grad()
        loss = loss_of(torch.randint(cut - CONTEXT - 1, (GPT_BATCH,), device="cuda"))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    with torch.no_grad():
        starts = cut + torch.arange(512, device="cuda") * CONTEXT
        held_out = sum(float(loss_of(part)) for part in starts.split(64)) / 8
    return {"held_out_loss": held_out, "training_loss": float(torch.stack(losses[-50:]).mean())}


def train_images(model: nn.Module, optimizer: torch.optim.Optimizer, data: Path) -> dict[str, float]:
    x, y, test_x, test_y = images(data)
    steps, losses = EPOCHS * (len(x) // BATCH), []
    base = [group["lr"] for group in optimizer.param_groups]
    for k in range(steps):
        if k % (steps // EPOCHS) == 0:
            order, losses = torch.randperm(len(x), device="cuda"), []
        for group, lr in zip(optimizer.param_groups, base, strict=True):
            group["lr"] = lr * (1 - k / steps)
        rows = order[k % (steps // EPOCHS) * BATCH :][:BATCH]
        optimizer.zero_grad()
        loss = F.cross_entropy(model(augmented(x[rows])), y[rows])
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    model.eval()
    with torch.no_grad():
        right = sum(
            int((model(a).argmax(1) == b).sum()) for a, b in zip(test_x.split(1000), test_y.split(1000), strict=True)
        )
    return {"held_out_accuracy": right / len(test_y), "training_loss": float(torch.stack(losses).mean())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("jobs", nargs="+", metavar="TASK:METHOD:LR:SEED")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--processes", type=int, default=5)
    args = parser.parse_args()
    jobs = [
        (task, method, float(lr), int(seed), args.data) for task, method, lr, seed in (j.split(":") for j in args.jobs)
    ]
    with get_context("spawn").Pool(args.processes) as pool:
        for job, found in pool.imap_unordered(guarded, jobs):
            config = {"study": "rules", "task": job[0], "method": job[1], "lr": job[2]}
            records.append(args.out, records.make(config, job[3], found, torch.device("cuda")))
            print(*job[:4], {k: round(v, 4) if isinstance(v, float) else v for k, v in found.items()}, flush=True)


def guarded(job: Any) -> tuple[Any, dict[str, Any]]:
    """A job with its result, or its error."""
    try:
        return job, train(job)
    except Exception as error:  # one job's failure must not lose the others
        return job, {"error": repr(error)[:300]}


if __name__ == "__main__":
    main()
