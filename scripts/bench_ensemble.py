"""How much faster members of an ensemble train than one after the other: the paper's CNN, batch 64, 24 members.

    python scripts/bench_ensemble.py --device cuda --out FILE.jsonl

Needs torch and numpy. On a GPU times are of the second epoch, so that captures and first choices of algorithms are not
in them; "whole run" has both epochs. On a CPU they are processor time of one thread, whole runs, so that other programs
do not count. One after the other is measured on a sample of the members and scaled. `difference` is the largest
relative difference of a sampled member's training loss from its separate run. At the end an ensemble of every method
trains in turn with the others, against one of them after the other.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from evenstep.lab import records
from evenstep.lab.data import CIFAR_CLASSES, Arrays
from evenstep.lab.methods import METHODS
from evenstep.lab.reproduce import fast_cuda
from evenstep.lab.together import run_interleaved
from evenstep.lab.trial import Trial, run
from evenstep.lab.usage import usable_device

MEMBERS, BATCH = 24, 64
VARIANTS = {
    True: [("vmap", 24), ("vmap", 8), ("each", 24), ("each", 8)],
    False: [("each", 4), ("each", 8), ("each", 24), ("vmap", 8)],
}


def random_images(count: int) -> Arrays:
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (count + 10, 3, 32, 32), generator=generator).byte()
    y = torch.randint(0, 10, (count + 10,), generator=generator)
    return Arrays(x[:count], y[:count], x[count:], y[count:], "random", CIFAR_CLASSES)


def members(method: str, seeds: int) -> list[Trial]:
    low = METHODS[method].stepsizes[0]
    rates = [low * (1 + k / MEMBERS) for k in range(MEMBERS // seeds)]
    return [Trial(method, lr, seed, epochs=2, batch_size=BATCH) for seed in range(seeds) for lr in rates]


def in_chunks(trials: list[Trial], size: int) -> list[list[Trial]]:
    return [trials[k : k + size] for k in range(0, len(trials), size)]


def variants(cuda: bool, arrays: Arrays, device: str) -> dict[str, Callable[[list[Trial]], list]]:
    """Ensembles of so many members one after the other, or (`at_once`) several of them in turn."""

    def ensemble(forward: str, size: int, at_once: int = 1) -> Callable[[list[Trial]], list]:
        train = partial(run_interleaved, data=arrays, device=device, forward=forward, at_once=at_once)
        return lambda trials: [r for found in train(in_chunks(trials, size)) for r in found]

    found = {f"{forward}, {size} at a time": ensemble(forward, size) for forward, size in VARIANTS[cuda]}
    return found | ({f"vmap, 3 of {MEMBERS // 3} in turn": ensemble("vmap", MEMBERS // 3, 3)} if cuda else {})


def loss(record: records.Record) -> float:
    return record["metrics"][-1]["train_loss"] or float("nan")


def timed(train: Callable[[], list[records.Record]], cuda: bool) -> tuple[list[records.Record], float, float]:
    """Records, seconds of an epoch, and seconds of the whole."""
    clock = time.perf_counter if cuda else time.process_time
    start = clock()
    found = train()
    whole = clock() - start
    return found, sum(r["metrics"][-1]["seconds"] for r in found) if cuda else whole / 2, whole


def bench(method: str, args: argparse.Namespace, arrays: Arrays, deadline: float) -> list[dict]:
    trials, cuda, rows = members(method, args.seeds), args.device.startswith("cuda"), []
    sample = trials[:: max(1, MEMBERS // args.sample)]
    run(trials[0], arrays, args.device)  # warm the device up
    alone, base, whole = timed(lambda: [run(trial, arrays, args.device) for trial in sample], cuda)
    scale = len(trials) / len(sample)
    base = scale * base
    rows.append(line(method, "one after the other", base, scale * whole, base, args.steps, 0.0))
    for name, train in variants(cuda, arrays, args.device).items():
        if time.perf_counter() > deadline:
            print(f"{method:14} {name:26} skipped: out of budget", flush=True)
            continue
        try:
            found, taken, whole = timed(partial(train, trials), cuda)
        except Exception as error:  # the other variants are still worth measuring
            print(f"{method:14} {name:26} failed: {type(error).__name__}: {error}", flush=True)
            continue
        losses = {records.dumps(r["config"]): loss(r) for r in found}
        off = max(abs(losses[records.dumps(r["config"])] / loss(r) - 1) for r in alone)
        rows.append(line(method, name, taken, whole, base, args.steps, off))
    return rows


def all_methods(args: argparse.Namespace, arrays: Arrays, rows: list[dict]) -> list[dict]:
    """An ensemble of each method, all of them in turn, against one of these ensembles after the other."""
    alone = [row["ms_per_step"] for row in rows if row["variant"] == f"vmap, {MEMBERS} at a time"]
    if len(alone) < len(args.methods):
        return []
    parts = [members(method, args.seeds) for method in args.methods]
    train = partial(run_interleaved, parts, arrays, args.device, forward="vmap", at_once=len(parts))
    _, taken, whole = timed(lambda: [r for found in train() for r in found], True)
    name = f"vmap, {len(parts)} of {MEMBERS} in turn"
    return [line("all methods", name, taken, whole, sum(alone) * args.steps / 1e3, args.steps, 0.0)]


def line(method: str, name: str, taken: float, whole: float, base: float, steps: int, off: float) -> dict:
    row = {"method": method, "variant": name, "ms_per_step": 1e3 * taken / steps, "times_faster": base / taken,
           "whole_run_seconds": whole, "difference": off}  # fmt: skip
    print(f"{method:14} {name:26} {row['ms_per_step']:8.2f} ms per step of all   {base / taken:5.2f} times faster"
          f"   whole run {whole:6.2f} s   difference {off:.1e}", flush=True)  # fmt: skip
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--methods", nargs="+", default=["sg", "whitening", "evenstep", "batch-norm"],
                        choices=METHODS)  # fmt: skip
    parser.add_argument("--seeds", type=int, default=2, help="how many seeds the 24 members have")
    parser.add_argument("--steps", type=int, help="per epoch; default 100 on a GPU, 8 on a CPU")
    parser.add_argument("--sample", type=int, default=6, help="how many members are run one after the other")
    parser.add_argument("--budget", type=float, help="start nothing after so many seconds; 75 on a GPU, 180 on a CPU")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    begin = time.perf_counter()
    cuda = args.device.startswith("cuda")
    args.steps, args.budget = args.steps or (100 if cuda else 8), args.budget or (75 if cuda else 180)
    usable_device(args.device)
    if cuda:
        fast_cuda()
    torch.set_num_threads(1)
    arrays = random_images(BATCH * args.steps).to(args.device)
    rows = [row for m in args.methods for row in bench(m, args, arrays, begin + args.budget)]
    if cuda and len(args.methods) > 1:
        rows += all_methods(args, arrays, rows)
    if args.out:
        config = {
            "bench": "ensemble",
            "members": MEMBERS,
            "batch_size": BATCH,
            "steps": args.steps,
            "seeds": args.seeds,
        }
        records.append(args.out, records.make(config, 0, rows, args.device))
    print(f"{time.perf_counter() - begin:.0f} s in all")


if __name__ == "__main__":
    main()
