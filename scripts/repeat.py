"""Run the trials of a file of records again: how the records behind the docs' tables are made.

    python scripts/repeat.py results/deep.jsonl --data DIR [--text FILE] --out FILE.jsonl [--budget SECONDS]

Trials whose record is in the output file already are not run again; `--budget` begins nothing new after so many
seconds.
"""

import argparse
import time
from dataclasses import fields
from pathlib import Path

from evenstep.lab import records
from evenstep.lab.data import cifar10, text_file
from evenstep.lab.reproduce import fast_cuda
from evenstep.lab.sweep import sweep
from evenstep.lab.trial import Trial
from evenstep.lab.usage import usable_device


def trials(path: Path) -> list[Trial]:
    """The trials that the records of a file are of, each once."""
    names = {field.name for field in fields(Trial)}
    found = [record["config"] for record in records.read(path) if "method" in record["config"]]
    configs = [{key: value for key, value in config.items() if key in names} for config in found]
    return [Trial(**config) for config in {records.dumps(config): config for config in configs}.values()]


def show(record: records.Record) -> None:
    """Print a finished run in a line."""
    config, last = record["config"], record["metrics"][-1]
    loss = "NaN" if last["train_loss"] is None else f"{last['train_loss']:.4f}"
    options = " ".join(f"{k}={v}" for k, v in {**config["options"], **config["model_options"]}.items())
    print(f"{config['method']:14} lr {config['lr']:<9g} seed {config['seed']} loss {loss} "
          f"accuracy {last['test_accuracy']:.4f} dead {last['dead_share']:.3f} {options}", flush=True)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="records whose trials are run")
    parser.add_argument("--data", help="a folder with cifar-10-batches-py")
    parser.add_argument("--text", help="a text file, for trials of the transformer")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--budget", type=float)
    args = parser.parse_args()
    device, start = usable_device(args.device), time.perf_counter()
    if device.type == "cuda":
        fast_cuda()
    wanted = trials(args.file)
    sources = {
        "data": ([t for t in wanted if t.model != "transformer"], lambda path: cifar10(path, "CIFAR-10 (JPEG)")),
        "text": ([t for t in wanted if t.model == "transformer"], text_file),
    }
    for flag, (chosen, load) in sources.items():
        if not chosen:
            continue
        if (source := getattr(args, flag)) is None:
            parser.error(f"{args.file} has trials on other data: give --{flag}")
        left = None if args.budget is None else max(0.0, args.budget - (time.perf_counter() - start))
        sweep(chosen, load(source), args.out, device=device, on_record=show, budget=left)


if __name__ == "__main__":
    main()
