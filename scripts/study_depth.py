"""Dense nets of 4 to 24 layers under PyTorch's initialization, where signals vanish: the table of docs/guards.md.

    python scripts/study_depth.py --out FILE.jsonl

64 units a layer, the shipped 4,000 images, batch 64, 8 epochs, constant stepsizes (ours the defaults), three seeds, one
CPU thread; ours also without the guard's bound on the drift of later inputs (`guards.unproven`).
"""

import argparse
import itertools
import warnings
from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from pathlib import Path
from unittest import mock

import torch
from torch import nn

import evenstep
from evenstep.lab import records
from evenstep.lab.data import Arrays, fashion_mnist_subset
from evenstep.lab.train import train
from evenstep.math import guards

DEPTHS, SEEDS = (4, 8, 16, 24), range(3)
OURS = {
    "UnitStep": (evenstep.UnitStep, 0.05),
    "WhitenedSGD": (evenstep.WhitenedSGD, 0.3),
    "Whitened(AdamW)": (partial(evenstep.Whitened, base=torch.optim.AdamW), 1e-3),
}
TORCH = {
    "Adam": (lambda model, lr: torch.optim.Adam(model.parameters(), lr=lr), (3e-4, 1e-3, 3e-3)),
    "SGD": (lambda model, lr: torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9), (0.03, 0.1, 0.3)),
}
CASES = [(name, build, lr, foresight) for name, (build, lr) in OURS.items() for foresight in (True, False)]
CASES += [(name, build, lr, True) for name, (build, rates) in TORCH.items() for lr in rates]


def dense(data: Arrays, depth: int) -> nn.Sequential:
    sizes = [data.train_x[0].numel(), *[64] * depth]
    hidden = [m for a, b in pairwise(sizes) for m in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(64, 10))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    args, data = parser.parse_args(), fashion_mnist_subset()
    torch.set_num_threads(1)
    for layers, (name, build, lr, foresight), seed in itertools.product(DEPTHS, CASES, SEEDS):
        torch.manual_seed(seed)
        model = dense(data, layers)
        with nullcontext() if foresight else mock.patch.object(guards, "DRIFT", 0.0), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*not finite")
            optimizer = build(model, lr=lr) if foresight else build(model, lr=lr, foreach=False)
            rows = train(model, optimizer, data, epochs=8, batch_size=64, seed=seed)
        config = {"study": "depth", "layers": layers, "rule": name, "lr": lr, "foresight": foresight}
        records.append(args.out, records.make({**config, "data": data.name}, seed, rows))
        losses = " ".join(f"{row['train_loss']:.3g}" for row in rows)
        how = "" if foresight else "without foresight"
        print(f"{layers:2} {name:16} {lr:<6g} {how:18} seed {seed}  {losses}", flush=True)


if __name__ == "__main__":
    main()
