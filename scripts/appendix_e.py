"""App. E on the deep net: batch norm for one epoch, folded, then UnitStep or whitening; against batch norm throughout.

    python scripts/appendix_e.py --data DIR --out FILE.jsonl [--device cuda]

The training loss is measured by a full sweep after each epoch. Runs follow one another, so that seconds can be
compared. `python -m evenstep.lab.reproduce fig3` is the same experiment on an AlexNet-like network.
"""

import argparse
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import torch

from evenstep.lab.captured import own_stream
from evenstep.lab.data import cifar10
from evenstep.lab.experiments.common import failures_expected, stored
from evenstep.lab.experiments.fig3 import train
from evenstep.lab.reproduce import fast_cuda
from evenstep.lab.trial import Trial

DEEP = {"model": "deep_net", "model_options": {"he": True}, "batch_size": 128, "augment": True, "epochs": 5}
NORM = [Trial("batch-norm", lr, options={"momentum": 0.9}, **DEEP) for lr in (0.02, 0.05)]
THEN = [Trial("evenstep", 0.02, **DEEP), Trial("evenstep", 0.05, **DEEP),
        Trial("whitening", 0.1, options={"momentum": 0.9}, **DEEP)]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="a folder with cifar-10-batches-py")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    if args.device.startswith("cuda"):
        fast_cuda()
    arrays = cifar10(args.data, "CIFAR-10 (JPEG)").to(args.device)
    swept = replace(arrays, test_x=arrays.train_x, test_y=arrays.train_y)
    for first, then in [*((norm, None) for norm in NORM), *((NORM[0], then) for then in THEN)]:
        config = {"experiment": "appendix-e", "data": arrays.name, "first": asdict(first)}
        config["then"] = None if then is None else asdict(then)
        with failures_expected(), own_stream(args.device):
            record = stored(args.out, config, 0, partial(train, first, then, arrays, swept), args.device)
        rows = [f"{row['swept_loss']:.3f} ({row['seconds']:.2f} s)" for row in record["metrics"]]
        name = f"{first.method} {first.lr:g}" + (f", then {then.method} {then.lr:g}" if then else "")
        print(f"{name:40} {'  '.join(rows)}  accuracy {record['metrics'][-1]['test_accuracy']:.3f}", flush=True)


if __name__ == "__main__":
    main()
