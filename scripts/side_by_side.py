"""How much faster trials of a small network train side by side on a GPU than one after the other.

    python scripts/side_by_side.py --out results/side-by-side.jsonl

A trial is the paper's CNN on the package's images, batch 64, five epochs. One ordinary eager training is timed for each
method, then 24 captured ones at once; the gain is 24 times the first over the second, warm-up and capture included.
"""

import argparse
import time
from pathlib import Path

import torch

from evenstep.lab import records
from evenstep.lab.data import fashion_mnist_subset
from evenstep.lab.methods import METHODS
from evenstep.lab.parallel_trials import AT_ONCE, round_robin
from evenstep.lab.trial import Trial, start

EPOCHS = 5


def seconds(method: str, count: int, capture: bool) -> float:
    """The time of `count` trials at once."""
    trials = [Trial(method, METHODS[method].stepsizes[0], seed, EPOCHS) for seed in range(count)]
    works = [start(trial, fashion_mnist_subset(), "cuda", capture=capture).run() for trial in trials]
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in round_robin(works, "cuda", count):
        pass
    torch.cuda.synchronize()
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=["sg", "unitstep", "evenstep"])
    parser.add_argument("--out", type=Path)
    args, count = parser.parse_args(), AT_ONCE["cuda"]
    for method in args.methods:
        seconds(method, 1, False)  # libraries are loaded, kernels built
        alone, together = seconds(method, 1, False), seconds(method, count, True)
        found = {"alone": alone, "side_by_side": together, "gain": count * alone / together}
        print(f"{method}: one {alone:.2f} s, {count} at once {together:.2f} s, gain {found['gain']:.1f}", flush=True)
        if args.out:
            config = {"study": "side-by-side", "method": method, "count": count, "epochs": EPOCHS}
            records.append(args.out, records.make(config, 0, found, torch.device("cuda")))


if __name__ == "__main__":
    main()
