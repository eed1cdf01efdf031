"""`evenstep reproduce`: the paper's figures and claims, one experiment each."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from .. import experiments, usage

NAMES = f"{', '.join(experiments.EXPERIMENTS)}, or all."


@dataclass(frozen=True)
class Options:
    """Repeat the paper's experiments and say which of its claims held; finished runs are kept and not repeated."""

    experiments: tuple[str, ...] = field(metadata={"metavar": "EXPERIMENT", "help": NAMES})
    data: str | None = field(default=None, metadata={"metavar": "PATH"})
    """CIFAR-10, idx files or an image folder, or a folder with several of them; default: the images in the package."""
    data_name: str | None = field(default=None, metadata={"metavar": "NAME"})
    """The name of the data in figures, where they are a copy that differs from the original."""
    quick: bool = False
    """Seconds instead of hours: only shows that everything runs."""
    seed: int = 0
    """First seed."""
    budget: float | None = field(default=None, metadata={"metavar": "SECONDS"})
    """Begin no run that is likely to end after so many seconds; the same command goes on later."""
    device: str = "cpu"
    """Where to train: cpu, cuda, mps, ..."""
    out: Path = Path("runs/reproduce")
    """Folder for the records, the figures and the report."""


def main(options: Options) -> int:
    """Run the experiments, print their verdicts and report; the exit code."""
    from .. import display, reproduce, running

    names = chosen(options.experiments)
    usage.in_range(options.seed, 0, 2**63 - 1, "--seed")
    usage.budget(options.budget)
    device = usage.usable_device(options.device)
    out = usage.writable_folder(options.out)
    if device.type == "cuda":
        reproduce.fast_cuda()
    wanted = experiments.Options(options.quick, options.data, options.data_name, options.seed)
    left, stopped, pieces = names, False, 1
    with running.one_thread(), display.bar(1) as bar:

        def show(what: str, done: int, total: int) -> None:
            nonlocal pieces
            pieces = max(1, total)
            bar.say(what)
            bar.at(done, pieces)

        try:
            left = reproduce.reproduce(names, wanted, out, device, options.budget, show, print)
        except KeyboardInterrupt:
            stopped = True
        if not (stopped or left):
            bar.at(pieces, pieces)
    conclude(out, print)
    if stopped or left:
        why = "Stopped" if stopped else "Out of time"
        print(f"{why}: finished runs are kept; the same command goes on with the rest.")
    with running.optional("report"):
        from .. import report

        print(f"Report: {report.write(out)}")
    return 130 if stopped else 3 if left else 0


def conclude(out: Path, warn: Callable[[str], None]) -> None:
    """Judge the claims by the records in `out`, print and keep the verdicts, and draw the figures."""
    from .. import reproduce, reproduction, running, verdicts

    kept = reproduce.everything(out, warn)
    found = [v for name, records in kept.items() for v in verdicts.judge(name, experiments.EXPERIMENTS[name], records)]
    for verdict in found:
        print(f"{verdict.experiment}: {verdict.claim} ({verdict.section})\n  {verdict.word}. {verdict.text}")
    if found:
        verdicts.write(out, found)
        with running.optional("figures"):
            reproduction.write(out, out, kept)


def chosen(names: tuple[str, ...]) -> list[str]:
    """The named experiments, each once; `all` stands for every one."""
    if not names:
        raise usage.UsageError(f"name an experiment to reproduce: {NAMES.rstrip('.')}")
    for name in names:
        usage.known_name(name, (*experiments.EXPERIMENTS, "all"), "experiment")
    return list(experiments.EXPERIMENTS) if "all" in names else list(dict.fromkeys(names))
