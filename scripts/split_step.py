"""Where the time of a step goes: parts of it left out, and the device's own kernels, UnitStep beside SGD.

    python scripts/split_step.py --model gpt2-small --compiled --autocast --out FILE.jsonl

Needs torch and a GPU. Variants are interleaved: whole steps of both, steps without the moments kernel's launches, and
forward and backward passes alone. Then a profile of three steps of each tells how long the device was busy, in how many
kernels, and what ours took.
"""

import argparse
import statistics
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from unittest import mock

import torch
from torch.profiler import ProfilerActivity, profile

from evenstep.kernels import input_sums as moments
from evenstep.lab import bench, records
from evenstep.lab.bench_models import SUBJECTS

OURS = ("frame", "add_up", "measure", "move", "commit", "add_moments")
PROFILED = 3


def variants(sgd: bench.Contender, even: bench.Contender) -> dict[str, Callable[[], None]]:
    def without(contender: bench.Contender, place: object, name: str) -> Callable[[], None]:
        def step() -> None:
            with mock.patch.object(place, name, lambda *_: None):
                contender.step()

        return step

    return {
        "sgd": sgd.step,
        "evenstep": even.step,
        "evenstep, no moments kernel": without(even, moments, "launch"),
        "sgd, no step": without(sgd, sgd.optimizer, "step"),
        "evenstep, no step": without(even, even.optimizer, "step"),
    }


def times(steps: dict[str, Callable[[], None]], device: torch.device, rounds: int, burst: int) -> list[dict]:
    found: dict[str, list[float]] = {name: [] for name in steps}
    for k in range(-1, rounds):
        for name in list(steps) if k % 2 else reversed(steps):
            took = bench.timed(device, steps[name], burst if k >= 0 else 2)
            if k >= 0:
                found[name].append(took)
    first = statistics.median(found["sgd"])
    middles = {name: statistics.median(some) for name, some in found.items()}
    return [
        {"variant": name, "seconds": middle, "ratio": middle / first, "fastest": min(found[name])}
        for name, middle in middles.items()
    ]


def kernels(contender: bench.Contender) -> dict:
    """Milliseconds and launches of one step."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(PROFILED):
            contender.step()
        torch.cuda.synchronize()
    spent: Counter[str] = Counter()
    launches: Counter[str] = Counter()
    for event in found.events():
        if event.device_type == torch.autograd.DeviceType.CUDA and not event.name.startswith("Optimizer."):
            spent[event.name] += event.time_range.elapsed_us() / 1e3 / PROFILED
            launches[event.name] += 1
    ours = {name: {"ms": spent[name], "launches": launches[name] / PROFILED} for name in OURS if name in spent}
    return {
        "contender": contender.name,
        "busy_ms": sum(spent.values()),
        "launches": sum(launches.values()) / PROFILED,
        "ours": ours,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SUBJECTS, required=True)
    for flag in ("--compiled", "--autocast", "--channels-last"):
        parser.add_argument(flag, action="store_true")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--burst", type=int, default=12, help="steps in a row")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(2, "split_step: needs a GPU; evenstep bench times whole steps on a CPU\n")
    setting = bench.Setting(
        args.model, ("sgd", "evenstep"), "cuda", rounds=args.rounds, compiled=args.compiled, autocast=args.autocast,
        channels_last=args.channels_last,
    )  # fmt: skip
    both = [bench.Contender(name, setting) for name in setting.contenders]
    for contender in both:
        for _ in range(5):
            contender.step()
    rows = times(variants(*both), both[0].device, args.rounds, args.burst)
    rows += [kernels(contender) for contender in both]
    for row in rows:
        print(row)
    if args.out is not None:
        config = {"split": True, **asdict(setting), "burst": args.burst}
        records.append(args.out, records.make(config, setting.seed, rows, both[0].device))


if __name__ == "__main__":
    main()
