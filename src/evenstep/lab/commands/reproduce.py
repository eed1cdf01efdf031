"""`evenstep reproduce`: the paper's figures and claims, one experiment each."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from .. import experiments, usage

if TYPE_CHECKING:
    from rich.console import Console


NAMES = f"{', '.join(experiments.EXPERIMENTS)}, or all."


@dataclass(frozen=True)
class Options:
    """Repeat the paper's experiments and say which of its claims held; what is finished is kept and not repeated."""

    experiments: Annotated[
        tyro.conf.Positional[tuple[str, ...]],
        tyro.conf.arg(metavar="EXPERIMENT [EXPERIMENT ...]", help=NAMES, help_behavior_hint="(required)"),
    ]
    data: Annotated[str | None, tyro.conf.arg(metavar="PATH")] = None
    """A path to CIFAR-10, idx files or an image folder, or a folder of several; without it the shipped images serve."""
    data_name: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None
    """What figures call the data, where it is a copy that differs from the original."""
    quick: bool = False
    """Seconds instead of hours: shows that all of it runs, and nothing else."""
    seed: int = 0
    """First seed."""
    budget: Annotated[float | None, tyro.conf.arg(metavar="SECONDS")] = None
    """Start nothing new after so many seconds; the same command goes on later."""
    device: str = "cpu"
    """Where to train: cpu, cuda, mps, ..."""
    out: Path = Path("runs/reproduce")
    """Folder for the records, the figures and the report."""


def main(options: Options) -> int:
    """Run the experiments, print their verdicts and report; the exit code."""
    from rich.console import Console

    from .. import progress, report, running
    from .. import reproduce as runner

    names = chosen(options.experiments)
    usage.in_range(options.seed, 0, 2**63 - 1, "--seed")
    usage.budget(options.budget)
    device = usage.usable_device(options.device)
    out = usage.writable_folder(options.out)
    if device.type == "cuda":
        runner.fast_cuda()
    wanted = experiments.Options(options.quick, options.data, options.data_name, options.seed)
    console, left = Console(), names

    def warn(message: str) -> None:
        console.print(message, soft_wrap=True, highlight=False, markup=False)

    with running.one_thread(), progress.bar(console, 1) as bar:
        pieces = 1

        def show(what: str, done: int, total: int) -> None:
            nonlocal pieces
            pieces = max(1, total)
            bar.say(what)
            bar.at(done, pieces)

        stopped = False
        try:
            left = runner.reproduce(names, wanted, out, device, options.budget, show, warn)
        except KeyboardInterrupt:
            stopped = True
        if not (stopped or left):
            bar.at(pieces, pieces)
    conclude(out, console, warn)
    if stopped or left:
        why = "Stopped" if stopped else "Out of time"
        console.print(f"{why}: what is finished is kept; the same command goes on with the rest.")
    console.print(f"Report: {report.write(out)}", soft_wrap=True, highlight=False, markup=False)
    return 130 if stopped else 3 if left else 0


def conclude(out: Path, console: "Console", warn: Callable[[str], None]) -> None:
    """Judge the claims by the records that are there, print and keep the verdicts, and draw the figures."""
    from rich.text import Text

    from .. import reproduce as runner
    from .. import reproduction, verdicts

    kept = runner.everything(out, warn)
    found = [v for name, records in kept.items() for v in verdicts.judge(name, experiments.EXPERIMENTS[name], records)]
    for verdict in found:
        console.print(Text(f"{verdict.experiment}: {verdict.claim} ({verdict.section})", style="bold"))
        console.print(Text(f"  {verdict.word}. {verdict.text}"))
    if found:
        verdicts.write(out, found)
        reproduction.write(out, out, kept)


def chosen(names: tuple[str, ...]) -> list[str]:
    """The experiments that are asked for, each once; `all` is every one."""
    if not names:
        raise usage.UsageError(f"name an experiment to reproduce: {NAMES.rstrip('.')}")
    for name in names:
        usage.known_name(name, (*experiments.EXPERIMENTS, "all"), "experiment")
    return list(experiments.EXPERIMENTS) if "all" in names else list(dict.fromkeys(names))
