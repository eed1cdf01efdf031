"""`evenstep demo`: the paper's figure 2 in two minutes on a laptop, from the images in the package."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from .. import usage
from ..methods import METHODS
from ..trial import Trial
from ..user_task import Data
from . import shared

COMPARED = ("sg", "fan-in", "batch-norm", "whitening", "unitstep", "adam")
STEPSIZES: Mapping[str, Sequence[float]] = {name: METHODS[name].stepsizes for name in COMPARED}


@dataclass(frozen=True)
class Options:
    """Train the paper's CNN by six methods, four stepsizes each, in minutes; end with a table and a report."""

    out: Annotated[Path, "Folder for the records, the report and the figures."] = Path("runs/demo")
    seed: Annotated[int, "Seed of the first weights and of the order of the data."] = 0
    epochs: Annotated[int, "Passes over the training images per run."] = 7
    data: Annotated[str, "`fashion` for the images in the package, or a path to other images."] = "fashion"
    device: Annotated[str, "Where to train: cpu, cuda, mps, ..."] = "cpu"


def main(options: Options, stepsizes: Mapping[str, Sequence[float]] = STEPSIZES, arrays: Data | None = None) -> int:
    """Run the demo and report the finished runs, even if the user stops it; the exit code."""
    from .. import running, sweep

    usage.in_range(options.epochs, 1, 10_000, "--epochs")
    seed = usage.in_range(options.seed, 0, 2**63 - 1, "--seed")
    device = usage.usable_device(options.device)
    arrays = shared.load(shared.Setting(data=options.data), images=True) if arrays is None else arrays
    path = usage.writable_folder(options.out) / "records.jsonl"
    grid = [(method, lr) for method, rates in stepsizes.items() for lr in rates]
    trials = [shared.fitted(Trial(method, lr, seed, options.epochs), arrays) for method, lr in grid]
    with running.one_thread():
        stopped = running.run_trials(trials, arrays, path, device)
    if finished := sweep.recorded(trials, arrays, path):
        with running.optional("figure 2"):
            from .. import drawing, plots

            figure = plots.figure2(finished)
            files = [drawing.save(figure, path.parent / f"figure2.{ending}") for ending in ("png", "svg")]
            print(f"Figure 2: {', '.join(map(str, files))}")
    return running.conclude(path, stopped)
