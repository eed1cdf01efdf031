"""Appendix E on the deep net: batch norm for the first epoch, fold it into the weights, go on in whitened coordinates.

    python scripts/appendix_e.py --data DIR --out FILE.jsonl

Against batch norm throughout, per epoch and per second. As in figure 3, the training loss is measured after each
epoch by a full sweep of the training set. Each run has the GPU to itself, so that its seconds mean something.
"""

import argparse
import time
from dataclasses import asdict, replace
from pathlib import Path

import torch

import evenstep
from evenstep.lab import records
from evenstep.lab.data import Arrays, cifar10
from evenstep.lab.evaluate import evaluate
from evenstep.lab.graphed import Feed, Member
from evenstep.lab.trial import Trial

EPOCHS = 5
BASE = {"model": "deep_net", "batch_size": 128, "augment": True, "epochs": EPOCHS, "decay_lr": True}
FIRST = Trial("batch-norm", 0.05, **BASE, options={"momentum": 0.9}, model_options={"he": True})


def epoch(member: Member, number: int) -> float:
    """One epoch; its seconds, less the first step's capture."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for k, _ in enumerate(member.feed.epoch()):
        member.step((number * member.feed.steps + k) / (EPOCHS * member.feed.steps))
        torch.cuda.current_stream().wait_stream(member.stream)
    torch.cuda.synchronize()
    return time.perf_counter() - start


def row(member: Member, number: int, seconds: float, arrays: Arrays) -> dict:
    swept = evaluate(member.model, replace(arrays, test_x=arrays.train_x, test_y=arrays.train_y), 1000)
    return {
        "epoch": number + 1,
        "seconds": seconds,
        "swept_train_loss": swept["test_loss"],
        **evaluate(member.model, arrays),
    }


def run(name: str, arrays: Arrays, then: Trial | None) -> records.Record:
    feed = Feed(arrays, FIRST.seed, FIRST.batch_size, FIRST.augment)
    member, rows = Member(FIRST, feed), []
    for number in range(EPOCHS):
        if number == 1 and then is not None:
            member = Member(then, feed, evenstep.fold_batchnorm(member.model))
        rows.append(row(member, number, epoch(member, number), arrays))
        print(name, {k: round(v, 4) for k, v in rows[-1].items()}, flush=True)
    config = {"name": name, "first": asdict(FIRST), "then": None if then is None else asdict(then), "data": arrays.name}
    return records.make(config, FIRST.seed, rows, "cuda")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.benchmark = True
    arrays = cifar10(args.data, "CIFAR-10 (JPEG)").to("cuda")
    for name, then in [
        ("batch norm throughout", None),
        ("batch norm, then EvenStep", Trial("evenstep", 0.05, **BASE)),
        ("batch norm, then WhitenedSGD", Trial("whitening", 3.2, **BASE)),
    ]:
        records.append(args.out, run(name, arrays, then))


if __name__ == "__main__":
    main()
