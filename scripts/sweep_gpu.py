"""Sweeps of stepsizes on one GPU, many trials at once: the records behind the docs' tables.

    python scripts/sweep_gpu.py cifar-cnn --data DIR --out FILE.jsonl [--budget SECONDS] [--seeds 0 1 2]

Needs torch, numpy and a CUDA device. Trials whose record is in the file already are not run again; `--budget` begins
nothing new after so many seconds.
"""

import argparse
import time
from dataclasses import replace
from pathlib import Path

from evenstep.lab import records
from evenstep.lab.data import cifar10, text_file
from evenstep.lab.reproduce import fast_cuda
from evenstep.lab.sweep import sweep
from evenstep.lab.trial import Trial
from evenstep.lab.usage import usable_device

PAPER = {"damping": 1e-3, "fresh_max": None, "trust": None}
DEEP = {"model": "deep_net", "batch_size": 128, "augment": True, "epochs": 5}
HE = {**DEEP, "model_options": {"he": True}, "decay_lr": True}
TEXT = {"model": "transformer", "epochs": 4, "decay_lr": True}
BN = {"momentum": 0.9}
SLOW = {"decay": 0.99, "damping": 0.3}
NEAR = [0.0125, 0.025, 0.035, 0.05, 0.07, 0.1]


def grid(method: str, rates: list[float], **settings) -> list[Trial]:
    return [Trial(method, lr, **settings) for lr in rates]


def decades(low: float, high: float, count: int) -> list[float]:
    return [float(f"{low * (high / low) ** (k / (count - 1)):.3g}") for k in range(count)]


EXPERIMENTS = {
    "smoke": [
        Trial(m, lr, epochs=1)
        for m, lr in [("sg", 0.1), ("whitening", 0.3), ("canonical", 3e-4), ("evenstep", 0.05), ("adam", 1e-3),
                      ("whitened-adam", 1e-3), ("whitened-muon", 0.02), ("muon", 0.02), ("batch-norm", 0.1),
                      ("rmsprop", 1e-3), ("fan-in", 1.0)]
    ],
    # the paper's CNN, batch 64, constant stepsize, 20 epochs
    "cifar-cnn": [
        *grid("sg", [0.02, 0.05, 0.1], epochs=20),
        *grid("fan-in", [1.25, 2.5, 5], epochs=20),
        *grid("batch-norm", [0.1, 0.2, 0.5], epochs=20),
        *grid("adam", [6e-4, 1.2e-3, 2.5e-3], epochs=20),
        *grid("rmsprop", [1e-3, 2e-3], epochs=20),
        *grid("whitening", [0.0125, 0.025, 0.05], epochs=20, options=PAPER),
        *grid("whitening", [0.05, 0.1, 0.2, 0.4, 0.8], epochs=20, options={**PAPER, "damping": 0.03}),
        *grid("canonical", [3e-5, 1e-4, 3e-4, 1e-3], epochs=20, options={**PAPER, "damping": 0.1}),
        *grid("canonical", [3e-4, 1e-3], epochs=20),
        *grid("whitening", [0.4, 0.8, 1.6, 3.2, 6.4], epochs=20),
        *grid("evenstep", [0.0125, 0.025, 0.05], epochs=20),
        *grid("whitened-adam", [1e-3, 3e-3], epochs=20),
        *grid("whitened-muon", [0.005, 0.01], epochs=20),
        *grid("muon", [0.005, 0.01], epochs=20),
    ],
    # the deep net without batch norm, He's initialization, linear decay
    "deep": [
        *grid("evenstep", decades(2e-3, 2, 10), **HE),
        *grid("whitened-adam", decades(2e-4, 2e-2, 7), **HE),
        *grid("muon", [0.005, 0.01, 0.02, 0.04, 0.08], **HE),
        *grid("whitened-muon", [0.005, 0.01, 0.02, 0.04, 0.08], **HE),
        *grid("batch-norm", [0.02, 0.05, 0.1, 0.2], **HE, options=BN),
        *grid("adam", [3e-4, 6e-4, 1.2e-3], **HE),
        *grid("whitening", [0.2, 0.4, 0.8, 1.6, 3.2], **HE),
    ],
    # which settings of UnitStep, Whitened(AdamW) and Whitened(Muon) serve the deep net best
    "variants": [
        t
        for options in [{"fresh_max": 1.0}, {"decay": 0.99}, {"damping": 0.3}, {"decay": 0.99, "damping": 0.3},
                        {"trust": 0.05}, {"fresh_max": 1.0, "decay": 0.99, "damping": 0.3}, {"momentum": 0.8}]
        for t in grid("evenstep", [0.03, 0.06], **HE, options=options)
    ] + [
        *grid("evenstep-beta", [0.1, 0.2, 0.4], **HE),
        *grid("whitened-adam", [6e-4, 1.2e-3, 2.4e-3], **HE, options={"damping": 0.3}),
        *grid("whitened-adam", [1.2e-3, 2.4e-3], **HE, options={"damping": 0.3, "decay": 0.99}),
        *grid("whitened-adam", [1.2e-3, 2.4e-3], **HE, options={"damping": 0.3, "fresh_max": 1.0}),
        *grid("whitened-adam", [1.2e-3, 2.4e-3], **HE, options={"damping": 1.0}),
        *grid("whitened-muon", [0.005, 0.01], **HE, options={"decay": 0.99}),
        *grid("whitened-muon", [0.005, 0.01], **HE, options={"damping": 1.0, "decay": 0.99}),
        *grid("whitened-muon", [0.005, 0.01], **HE, options={"damping": 100.0}),
        *grid("muon", [0.007, 0.014], **HE),
    ],
    # is one default stepsize of UnitStep near the best everywhere? linear decay, as users train
    "defaults": [
        *grid("evenstep", NEAR, epochs=10, decay_lr=True, options=SLOW),
        *grid("evenstep", NEAR, **TEXT, options=SLOW),
        *grid("evenstep", [0.05], **TEXT, options={**SLOW, "plain_lr": 0.005}),
        *grid("evenstep", [0.05], **TEXT, options={**SLOW, "plain_lr": 0.5}),
        *grid("adam", [1e-3, 2e-3, 4e-3], **TEXT),
        *grid("whitened-adam", [5e-4, 1e-3, 2e-3], **TEXT, options=SLOW),
        *grid("muon", [0.01, 0.02], **TEXT),
        *grid("evenstep", NEAR, **HE, options=SLOW),
        *grid("whitened-adam", [1.2e-3, 2.4e-3], **HE, options={**SLOW, "trust": None}),
        *grid("whitened-adam", [1.2e-3, 2.4e-3], **HE, options={**SLOW, "trust": 0.3}),
        *grid("whitened-adam", [1.2e-3], **HE, options={**SLOW, "trust": None, "fresh_max": 1.0}),
        *grid("whitened-adam-beta", [0.006, 0.012], **HE, options=SLOW),
    ],
    # three seeds at the stepsizes that served best, and UnitStep over three decades
    "final": [
        *grid("evenstep", decades(2e-3, 2, 10), **HE),
        *grid("evenstep", [0.05, 0.07], **HE),
        *grid("whitened-adam", [9e-4, 1.2e-3], **HE),
        *grid("whitened-adam", [9e-4, 1.2e-3], **HE, options={"fresh_max": 1.0, "trust": None}),
    ],
    "seeds": [
        *grid("evenstep", [0.05, 0.07], **HE),
        *grid("whitened-adam", [1.2e-3], **HE),
        *grid("whitened-adam", [9e-4, 1.2e-3], **HE, options={"fresh_max": 1.0, "trust": None}),
        *grid("muon", [0.01], **HE),
        *grid("whitened-muon", [0.012], **HE, options={"damping": 1.0}),
        *grid("batch-norm", [0.05], **HE, options=BN),
    ],
    # three seeds at the stepsizes that served best, with rivals
    "deep-seeds": [
        *grid("evenstep", [0.035, 0.05, 0.07], **HE),
        *grid("evenstep", [0.05], **HE, options={"rows": None}),
        *grid("whitened-adam", [1.2e-3, 1.6e-3], **HE, options={"trust": 0.03}),
        *grid("whitened-adam", [1.2e-3], **HE, options={"trust": 0.02}),
        *grid("muon", [0.01], **HE),
        *grid("batch-norm", [0.05], **HE, options=BN),
    ],
    # Whitened(AdamW) with stepsizes by the fourth root of a layer's inputs, and less momentum than Adam's default
    "deep-adam": [
        *grid("whitened-adam", [0.0059, 0.007, 0.0083], **HE, options={"betas": (0.8, 0.99), "fan_in_power": 0.25}),
        *grid("whitened-adam", [0.007, 0.0083, 0.01], **HE, options={"betas": (0.7, 0.99), "fan_in_power": 0.25}),
    ],
    # does UnitStep diverge anywhere over three decades?
    "decades": grid("evenstep", [0.002, 0.0063, 0.02, 0.2, 0.63, 2.0], **HE),
    # is UnitStep's default stepsize near the best on the CNN and on text? linear decay, as users train
    "default-lr": [
        *grid("evenstep", [*NEAR, 0.14, 0.2], **TEXT),
        *grid("evenstep", NEAR, epochs=10, decay_lr=True),
    ],
    "text": [
        *grid("adam", [0.004, 0.008], **TEXT),
        *grid("muon", [0.02, 0.04], **TEXT),
        *grid("whitened-adam", [0.004], **TEXT),
        *grid("whitened-adam", [0.01], **TEXT, options={"betas": (0.8, 0.99), "fan_in_power": 0.25}),
        *grid("whitened-muon", [0.02, 0.04], **TEXT),
    ],
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiment", choices=EXPERIMENTS)
    parser.add_argument("--data", required=True, help="a folder with cifar-10-batches-py")
    parser.add_argument("--text", help="a text file, for the transformer")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--budget", type=float, help="seconds after which no ensemble is begun")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    args = parser.parse_args()
    device = usable_device("cuda")
    fast_cuda()
    start, wanted = time.perf_counter(), [replace(t, seed=s) for s in args.seeds for t in EXPERIMENTS[args.experiment]]
    text = [t for t in wanted if t.model == "transformer"]
    if text and args.text is None:
        parser.error(f"{args.experiment} trains a transformer: give a text file by --text")
    images = [t for t in wanted if t.model != "transformer"]
    for trials, load in ((images, lambda: cifar10(args.data, "CIFAR-10 (JPEG)")), (text, lambda: text_file(args.text))):
        left = None if args.budget is None else max(0.0, args.budget - (time.perf_counter() - start))
        found = sweep(trials, load(), args.out, device=device, on_record=show, budget=left) if trials else []
        print(f"-- {len(found)} of {len(trials)} trials are done, {time.perf_counter() - start:.1f} s", flush=True)


def show(record: records.Record) -> None:
    config, last = record["config"], record["metrics"][-1]
    loss = "NaN" if last["train_loss"] is None else f"{last['train_loss']:.4f}"
    extra = " ".join(f"{k}={v}" for k, v in {**config["options"], **config["model_options"]}.items())
    print(
        f"{config['method']:14} lr {config['lr']:<9g} seed {config['seed']} loss {loss} "
        f"acc {last['test_accuracy']:.4f} dead {last['dead_share']:.3f} {extra}",
        flush=True,
    )


if __name__ == "__main__":
    main()
