"""`evenstep reproduce`: the paper's figures and claims, one experiment each."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from .. import experiments, usage

NAMES = f"{', '.join(experiments.EXPERIMENTS)}, or all."


@dataclass(frozen=True)
class Options:
    """Repeat the paper's experiments and say which of its claims held; finished runs are kept and not repeated."""

    experiments: Annotated[tuple[str, ...], NAMES, "EXPERIMENT"]
    data: Annotated[str | None, "Images, or a folder with several sets; default: the package's.", "PATH"] = None
    data_name: Annotated[str | None, "Name of the data in figures, if a copy that was altered.", "NAME"] = None
    quick: Annotated[bool, "Seconds instead of hours: only shows that everything runs."] = False
    seed: Annotated[int, "First seed."] = 0
    budget: Annotated[float | None, "Begin no run after so many seconds.", "SECONDS"] = None
    device: Annotated[str, "Where to train: cpu, cuda, mps, ..."] = "cpu"
    out: Annotated[Path, "Folder for the records, the figures and the report."] = Path("runs/reproduce")


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
    left, stopped = names, False
    with running.one_thread(), display.Bar(1) as bar:

        def show(what: str, done: int, total: int) -> None:
            bar.say(what)
            bar.at(done, total)

        try:
            left = reproduce.reproduce(names, wanted, out, device, options.budget, show, bar.print)
        except KeyboardInterrupt:
            stopped = True
        if not (stopped or left):
            bar.at(bar.total, bar.total)
    conclude(out)
    if stopped or left:
        why = "Stopped" if stopped else "Out of time"
        print(f"{why}: finished runs are kept; the same command goes on with the rest.")
    with running.optional("report"):
        from .. import report

        print(f"Report: {report.write(out)}")
    return 130 if stopped else 3 if left else 0


def conclude(out: Path) -> None:
    """Judge the claims by the records in `out`, print the verdicts, and draw the figures."""
    from .. import reproduce, reproduction, running

    found, faults = reproduce.everything(out)
    for fault in faults:
        print(fault)
    for name, records in found.items():
        for claim in experiments.EXPERIMENTS[name].CLAIMS:
            verdict = claim.judge(records)
            print(f"{name}: {claim.text} ({claim.section})\n  {verdict.word}. {verdict.text}")
    if found:
        with running.optional("figures"):
            reproduction.write(out, out, found)


def chosen(names: tuple[str, ...]) -> list[str]:
    """The named experiments, each once; `all` stands for every one."""
    if not names:
        raise usage.UsageError(f"name an experiment to reproduce: {NAMES.rstrip('.')}")
    for name in names:
        usage.known_name(name, (*experiments.EXPERIMENTS, "all"), "experiment")
    return list(experiments.EXPERIMENTS) if "all" in names else list(dict.fromkeys(names))
