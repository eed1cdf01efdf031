"""Choices behind the guards and the bias-less form, on a small convolutional net: minutes on one CPU core.

    python scripts/study_small.py biasless --data DIR --out FILE.jsonl
    python scripts/study_small.py kl-clip --data DIR --out FILE.jsonl
    python scripts/study_small.py depth --out FILE.jsonl

conv 16-16-P-32-32-P-64-64-P-F128-F128-F10, He's initialization, 6,000 images of CIFAR-10, batch 64, 4 epochs, linear
decay. `biasless` compares, for layers without bias, the implied-b form with uncentred inputs (μ = 0, α² = 1/E[x²]);
`kl-clip` bounds, on top of the guards, the whole step's length lr² · Σ δw·g in the metric that whitening stands for.

`depth` trains dense nets of 4 to 24 layers of 64 units, PyTorch's initialization, under which signals vanish, on the
package's own 4,000 images, batch 64, 8 epochs, constant stepsizes (ours the defaults), three seeds; ours also without
what the guards foresee (`guards.unproven`).
"""

import argparse
import itertools
import warnings
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor, nn

import evenstep
from evenstep.lab import models, records
from evenstep.lab.data import Arrays, cifar10, fashion_mnist_subset
from evenstep.lab.train import linear_decay, train
from evenstep.math import guards, update


def network(bias: bool) -> nn.Sequential:
    modules: list[nn.Module] = []
    channels = 3
    for outputs in (16, 32, 64):
        for _ in range(2):
            modules += [nn.Conv2d(channels, outputs, 3, padding=1, bias=bias), nn.ReLU()]
            channels = outputs
        modules.append(nn.MaxPool2d(2))
    modules += [nn.Flatten(), nn.Linear(64 * 16, 128, bias=bias), nn.ReLU(), nn.Linear(128, 128, bias=bias), nn.ReLU()]
    model = nn.Sequential(*modules, nn.Linear(128, 10))
    models._he_init(model)
    return model


def uncentred(running, sums, centre, beta2, **settings):
    """`update.moving_frame` with μ = 0 and the second moment about 0 for the variance."""
    about_zero = running._replace(mx=torch.zeros_like(running.mx), vx=running.vx + running.mx**2)
    frame = CENTRED(about_zero, sums, centre, beta2, **settings)
    return frame._replace(constants=frame.constants._replace(mu=torch.zeros_like(frame.constants.mu)))


CENTRED = update.moving_frame


def kl_clipped(cls: type, bound: float) -> type:
    """`cls` with its whole step δw multiplied by min(1, √(bound / −lr Σ δw·g)) before the trust radius."""

    class Clipped(cls):
        clipped = steps = 0

        def _advance(self, blocks: list, ok: Tensor | None) -> None:
            self._waiting: list = []
            super()._advance(blocks, ok)
            size = sum(self._size(*move) for move in self._waiting)
            factor = (bound / size.clamp(min=1e-30)).sqrt().clamp(max=1)
            self.clipped, self.steps = self.clipped + int(factor < 1), self.steps + 1
            for block, frame, on_weight, on_bias in self._waiting:
                super()._move(block, frame, factor * on_weight, None if on_bias is None else factor * on_bias, ok)

        def _move(self, block, frame, weight_step, bias_steps, ok) -> None:
            self._waiting.append((block, frame, weight_step, bias_steps))

        def _size(self, block, frame, weight_step, bias_steps) -> Tensor:
            (dw, db), (g, b) = update.step_on_w(weight_step, bias_steps, frame), self._gradients(block)
            return -block.group["lr"] * ((dw * g).sum() + (0 if db is None else (db * b).sum()))

    return Clipped


def run(name: str, cls: type, lr: float, arrays: Arrays, out: Path, *, bias: bool = True) -> None:
    torch.manual_seed(0)
    model = network(bias)
    optimizer = cls(model, lr=lr, foreach=False)  # layer by layer, where the variants act
    rows = train(model, optimizer, arrays, epochs=4, batch_size=64, seed=0, schedule=linear_decay)
    share = optimizer.clipped / optimizer.steps if hasattr(optimizer, "clipped") else None
    config = {"study": name, "lr": lr, "bias": bias, "data": arrays.name, "clipped_share": share}
    records.append(out, records.make(config, 0, rows))
    last = rows[-1]
    print(f"{name:24} lr {lr:<6g} loss {last['train_loss']:.4f} acc {last['test_accuracy']:.4f} "
          f"dead {last['dead_share']:.3f} clipped {share}", flush=True)  # fmt: skip


def biasless(arrays: Arrays, out: Path) -> None:
    grids = [(evenstep.UnitStep, (0.03, 0.06, 0.12)), (evenstep.WhitenedSGD, (0.8, 3.2))]
    for form, frame in (("implied b", CENTRED), ("uncentred", uncentred)):
        with mock.patch.object(update, "moving_frame", frame):
            for cls, rates in grids:
                for lr in rates:
                    run(f"{cls.__name__}, {form}", cls, lr, arrays, out, bias=False)


def kl_clip(arrays: Arrays, out: Path) -> None:
    for lr in (1.6, 6.4, 25.6):
        run("WhitenedSGD", evenstep.WhitenedSGD, lr, arrays, out)
        for bound in (0.3, 0.03):
            run(f"WhitenedSGD, KL {bound}", kl_clipped(evenstep.WhitenedSGD, bound), lr, arrays, out)


def dense(data: Arrays, depth: int) -> nn.Sequential:
    sizes = [data.train_x[0].numel(), *[64] * depth]
    hidden = [m for a, b in pairwise(sizes) for m in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(64, 10))


RULES = {
    "UnitStep": (evenstep.UnitStep, (0.05,)),
    "WhitenedSGD": (evenstep.WhitenedSGD, (0.3,)),
    "Whitened(AdamW)": (partial(evenstep.Whitened, base=torch.optim.AdamW), (1e-3,)),
    "Adam": (lambda model, lr: torch.optim.Adam(model.parameters(), lr=lr), (3e-4, 1e-3, 3e-3)),
    "SGD": (lambda model, lr: torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9), (0.03, 0.1, 0.3)),
}


def depth(arrays: Arrays, out: Path) -> None:
    for layers, (name, (build, rates)), seed in itertools.product((4, 8, 16, 24), RULES.items(), range(3)):
        for foresight, lr in itertools.product((True, False) if len(rates) == 1 else (True,), rates):
            torch.manual_seed(seed)
            model = dense(arrays, layers)
            with nullcontext() if foresight else mock.patch.object(guards, "DRIFT", 0.0), warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=".*not finite")
                optimizer = build(model, lr=lr) if foresight else build(model, lr=lr, foreach=False)
                rows = train(model, optimizer, arrays, epochs=8, batch_size=64, seed=seed)
            config = {"study": "depth", "layers": layers, "rule": name, "lr": lr, "foresight": foresight}
            records.append(out, records.make({**config, "data": arrays.name}, seed, rows))
            losses = " ".join(f"{row['train_loss']:.3g}" for row in rows)
            how = "" if foresight else "without foresight"
            print(f"{layers:2} {name:16} {lr:<6g} {how:18} seed {seed}  {losses}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", choices=["biasless", "kl-clip", "depth"])
    parser.add_argument("--data")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.study == "depth":
        return depth(fashion_mnist_subset(), args.out)
    if args.data is None:
        parser.error("this study needs --data")
    full = cifar10(args.data, "CIFAR-10 (JPEG), 6,000 images")
    arrays = replace(full, train_x=full.train_x[:6000], train_y=full.train_y[:6000], test_x=full.test_x[:2000],
                     test_y=full.test_y[:2000])  # fmt: skip
    {"biasless": biasless, "kl-clip": kl_clip}[args.study](arrays, args.out)


if __name__ == "__main__":
    main()
