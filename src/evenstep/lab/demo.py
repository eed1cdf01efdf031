"""The demo: the paper's figure 2 in two minutes on a laptop, from the images inside the package."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from evenstep.lab import plots, records, usage
from evenstep.lab.data import Arrays, fashion_mnist_subset
from evenstep.lab.methods import METHODS
from evenstep.lab.summary import best_runs, final_loss
from evenstep.lab.train import Epoch
from evenstep.lab.trial import Trial, run

COMPARED = ("sg", "fan-in", "batch-norm", "whitening")
STEPSIZES: Mapping[str, Sequence[float]] = {name: METHODS[name].stepsizes for name in COMPARED}


@dataclass(frozen=True)
class Demo:
    """Train the paper's CNN by four methods on 4,000 images; end with a table and the paper's figure 2."""

    out: Path = Path("runs/demo")
    """Folder for the records and the figure."""
    seed: int = 0
    """Seed of the first weights and of the order of the data."""
    epochs: int = 12
    """Passes over the training images per run."""
    device: str = "cpu"
    """Where to train: cpu, cuda, mps, ..."""


def main(options: Demo, stepsizes: Mapping[str, Sequence[float]] = STEPSIZES, arrays: Arrays | None = None) -> int:
    """Run the demo and report what is finished, even if the user stops it; the exit code."""
    usage.in_range(options.epochs, 1, 10_000, "--epochs")
    usage.in_range(options.seed, 0, 2**63 - 1, "--seed")
    device = usage.usable_device(options.device)
    path = usage.writable_folder(options.out) / "records.jsonl"
    path.unlink(missing_ok=True)
    trials = [Trial(m, lr, options.seed, options.epochs) for m, grid in stepsizes.items() for lr in grid]
    console = Console()
    with one_thread():
        stopped = run_all(trials, arrays or fashion_mnist_subset(), device, path, console)
    if not path.exists():
        console.print("Stopped before the first run was finished: nothing to report.")
        return 130
    if stopped:
        console.print("Stopped: this is from the runs that were finished.")
    report(path, console)
    return 130 if stopped else 0


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch use one CPU thread for a while.

    On batches this small a second thread saves a third of the time at best. On two cores with another torch
    program running, the threads of both wait for each other, and an epoch took 40 times as long. The sums, and
    so the figure, also do not depend on the number of cores then.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def run_all(trials: Sequence[Trial], arrays: Arrays, device: torch.device, path: Path, console: Console) -> bool:
    """Run the trials behind a progress bar, recording each as it ends; True if the user stopped them (Ctrl-C)."""
    columns = (TextColumn("{task.description:<42}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("", total=sum(trial.epochs for trial in trials))
        done = 0
        try:
            for trial in trials:
                record = run(trial, arrays, device, _advance(progress, bar, trial))
                records.append(path, record)
                done += trial.epochs
                progress.update(bar, completed=done)  # a run that diverged has fewer epochs
                progress.console.print(_line(record), highlight=False)
        except KeyboardInterrupt:
            return True
    return False


def _advance(progress: Progress, bar: TaskID, trial: Trial) -> Callable[[Epoch], None]:
    """What to show after each epoch of `trial`."""
    title = f"{METHODS[trial.method].label}, stepsize {trial.lr:g}"
    progress.update(bar, description=title)

    def show(row: Epoch) -> None:
        progress.update(bar, advance=1, description=f"{title}: loss {row['train_loss']:.3f}")

    return show


def _line(record: records.Record) -> str:
    """One finished run in a line."""
    config, last = record["config"], record["metrics"][-1]
    label = f"{METHODS[config['method']].label:<16} stepsize {config['lr']:<6g}"
    if last["diverged"]:
        return f"{label} diverged in epoch {last['epoch']}"
    return f"{label} training loss {last['train_loss']:.3f}   test accuracy {last['test_accuracy']:.1%}"


def report(path: Path, console: Console) -> None:
    """Table and figure from the records in `path`, and the names of the files."""
    found = records.read(path)
    files = [path, *plots.save(plots.plot(found), path.parent, "figure2")]
    console.print(table(found))
    console.print("Written: " + ", ".join(str(file) for file in files), soft_wrap=True, highlight=False)


def table(found: list[records.Record]) -> Table:
    """The best run of each method, a row each."""
    best = best_runs(found)
    result = Table(title="Best stepsize of each method, by the training loss of the last epoch", title_justify="left")
    result.add_column("method", no_wrap=True)
    for heading in ("best stepsize", "training loss", "test accuracy", "dead units", "seconds per epoch"):
        result.add_column(heading, justify="right")
    for name, run_ in best.items():
        rows = run_.record["metrics"]
        result.add_row(
            METHODS[name].label,
            f"{run_.record['config']['lr']:g}{' *' if run_.at_edge else ''}",
            f"{final_loss(run_.record):.3f}",
            f"{rows[-1]['test_accuracy']:.1%}",
            f"{rows[-1]['dead_share']:.1%}",
            f"{sum(row['seconds'] for row in rows) / len(rows):.2f}",
        )
    if any(run_.at_edge for run_ in best.values()):
        result.caption = "* at the edge of the stepsizes tried: a better one may lie beyond"
    return result
