"""`evenstep bench`: step time and memory of optimizers, as ratios to SGD."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from .. import bench, records, usage
from ..bench_tables import table
from . import shared


@dataclass(frozen=True)
class Options:
    """Time training steps of several optimizers on the same network, interleaved in one run, as ratios to the first."""

    model: tuple[str, ...] = bench.MODELS
    """Networks: paper-cnn, paper-cnn-4, alexnet, resnet50, resnet50-plain, vit-b16, gpt2-small, gpt-tiny, mlp."""
    contenders: tuple[str, ...] = ("sgd", "batch-norm", "whitened-sgd", "evenstep")
    """Optimizers: sgd, adamw-fused, muon, batch-norm (SGD with it), whitened-sgd, evenstep, evenstep-loop (the loop),
    whitened-adamw; where they are installed, shampoo, soap, kfac, singd. The first is what the others are measured by;
    those that a network cannot have are left out."""
    device: str = "cpu"
    """Where to train: cpu, cuda, ..."""
    batch: Annotated[tuple[int, ...], tyro.conf.arg(help_behavior_hint=shared.NONE)] = ()
    """Batch sizes; without any, each network's usual one."""
    rounds: int = 50
    """Steps of each contender that are timed."""
    compiled: bool = False
    """Compile the networks."""
    autocast: bool = False
    """Compute in bfloat16 where autocast does."""
    half: bool = False
    """Keep the networks themselves in bfloat16."""
    channels_last: bool = False
    """Lay images out with channels last."""
    sweep: bool = False
    """Also show how cost grows with width, batch and depth of a dense network."""
    goals: bool = False
    """Time what has a goal on this device instead (its own networks and contenders), and say whether it is met; the
    exit code is 1 where a limit is exceeded."""
    seed: int = 0
    """Seed of weights and data."""
    threads: int = 0
    """CPU threads; 0 leaves them as they are."""
    out: Path = Path("runs/bench")
    """Folder for the records."""


def main(options: Options) -> int:
    """Time what is asked for, show each table as it is done; the exit code."""
    from rich.console import Console
    from rich.progress import Progress

    base = bench.Setting(
        "",
        options.contenders,
        options.device,
        None,
        options.rounds,
        options.compiled,
        options.autocast,
        options.channels_last,
        options.threads,
        seed=options.seed,
        half=options.half,
    )
    found = bench.checked(base, options.model, options.batch, options.sweep, options.goals)
    path = usage.writable_folder(options.out) / "bench.jsonl"
    console, made = Console(), []
    for line in bench.left_out(found):
        console.print(line, highlight=False, soft_wrap=True)
    with Progress(console=console, transient=True) as progress:
        bar = progress.add_task("", total=len(found) * options.rounds)  # of all, so that the time left is, too
        for setting in found:
            progress.update(bar, description=setting.model)
            made.append(record := bench.run(setting, lambda _: progress.advance(bar)))
            records.append(path, record)
            console.print(table(record), highlight=False, soft_wrap=True)
    missed = options.goals and bench.judge(made, lambda text: console.print(text, highlight=False, soft_wrap=True))
    console.print(f"Records: {path}", highlight=False, soft_wrap=True)
    return int(missed)
