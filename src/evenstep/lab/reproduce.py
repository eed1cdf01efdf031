"""The paper's experiments, one after the other, within a budget of time; needs torch, numpy and pillow alone.

    python -m evenstep.lab.reproduce all --data DIR --out OUT --device cuda --budget 500

Records go to OUT/<experiment>.jsonl as runs end. Run it again to go on where it stopped: finished runs are kept.
"""

import argparse
import difflib
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from . import usage
from .experiments import EXPERIMENTS, Options, Verdict
from .experiments.common import kept, silent
from .records import Record


class OutOfTime(Exception):
    """The budget does not allow another piece of work."""


Show = Callable[[str, int, int], None]
"""Shows what is under way, and how many of how many runs are done."""


class Clock:
    """Progress that stops an experiment when its next piece of work is not likely to end within the budget.

    A piece is taken to last as long as it says (times how much longer one has lasted than it said), or else as long as
    the longest one that did not say. The first one always starts.
    """

    def __init__(self, budget_s: float | None, show: Show) -> None:
        self.budget_s, self.show = budget_s, show
        self.start = self.last = time.perf_counter()
        self.said: float | None = None
        self.begun, self.longest, self.slower = False, 0.0, 1.0

    def __call__(self, what: str, done: int, total: int, seconds: float | None = None) -> None:
        """Between two pieces of work; with a `total` of 0 none of them begins now."""
        now = time.perf_counter()
        taken, self.last = now - self.last, now
        if self.said is None:
            self.longest = max(self.longest, taken)
        elif self.said > 0:
            self.slower = max(self.slower, taken / self.said)
        self.said = seconds if total else 0.0
        expected = self.longest if seconds is None else self.slower * seconds
        if self.begun and self.budget_s is not None and now - self.start + expected > self.budget_s:
            raise OutOfTime
        self.begun |= total > 0
        self.show(what, done, total)


def chosen(names: Sequence[str]) -> list[str]:
    """The experiments named, in the order of the registry; "all" names all of them."""
    for name in names:
        if name not in EXPERIMENTS and name != "all":
            near = difflib.get_close_matches(name, [*EXPERIMENTS, "all"], n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise usage.UsageError(f"no experiment {name!r}; {hint}known: {', '.join(EXPERIMENTS)}, all")
    return [name for name in EXPERIMENTS if name in names or "all" in names]


def reproduce(
    names: Sequence[str],
    options: Options,
    out: Path,
    device: torch.device | str = "cpu",
    budget_s: float | None = None,
    show: Show = silent,
    warn: Callable[[str], None] = warnings.warn,
) -> list[str]:
    """Run the experiments into `out`; the names of those that the budget left unfinished.

    A file of theirs that is damaged, or holds something else, is refused before anything runs; `warn` gets one line
    if one had to be mended.
    """
    wanted, clock = chosen(names), Clock(budget_s, show)
    usage.writable_folder(out)
    for name in wanted:
        kept(name, out, warn)
    for number, name in enumerate(wanted):
        try:
            clock(name, 0, 0)
            EXPERIMENTS[name].run(options, out / f"{name}.jsonl", device, clock)
        except OutOfTime:
            return wanted[number:]
    return []


def everything(out: Path, warn: Callable[[str], None] = warnings.warn) -> dict[str, list[Record]]:
    """The records of every experiment that has some in `out`; `warn` is told of files that cannot be taken in."""
    found: dict[str, list[Record]] = {}
    for name in EXPERIMENTS:
        try:
            found[name] = kept(name, out, warn)
        except usage.UsageError as error:
            warn(f"{name} is left out: {error}")
        except OSError as error:
            warn(f"{name} is left out: {usage.of_file(error)}")
    return {name: records for name, records in found.items() if records}


def verdicts(out: Path, warn: Callable[[str], None] = warnings.warn) -> dict[str, Verdict]:
    """What came out of every experiment that has records in `out`."""
    return {name: EXPERIMENTS[name].verdict(records) for name, records in everything(out, warn).items()}


def fast_cuda() -> None:
    """Let a GPU multiply in TF32 and look for its fastest convolutions."""
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.benchmark = True


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; 0 if all is done, 3 if the budget ended first, 2 if something asked for cannot be done."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiments", nargs="+", help=f"some of {', '.join(EXPERIMENTS)}, or all")
    parser.add_argument("--data", help="CIFAR-10, or a folder with it and an ImageFolder; default: the shipped images")
    parser.add_argument("--data-name", help='what figures call an altered CIFAR-10: "CIFAR-10 (JPEG)"')
    parser.add_argument("--out", type=Path, default=Path("runs/reproduction"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--budget", type=float, help="seconds; no work is begun that would likely end after them")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="a few shipped images: shows that it runs, no more")
    given = parser.parse_args(arguments)
    options = Options(given.quick, given.data, given.data_name, given.seed)
    try:
        usage.in_range(given.seed, 0, 2**63 - 1, "--seed")
        usage.budget(given.budget)
        device = usage.usable_device(given.device)
        if device.type == "cuda":
            fast_cuda()
        left = reproduce(given.experiments, options, given.out, device, given.budget, shown(), said)
        judged = verdicts(given.out, said)
    except usage.UsageError as error:
        said(str(error))
        return 2
    except OSError as error:
        said(usage.of_file(error))
        return 2
    except KeyboardInterrupt:
        print("stopped; run it again to go on", file=sys.stderr)
        return 130
    for name, (held, text) in judged.items():
        print(f"{name}: {'undecided' if held is None else 'held' if held else 'did not hold'}. {text}")
    if left:
        print(f"out of budget; run it again for the rest of {', '.join(left)}")
    return 3 if left else 0


def said(message: str) -> None:
    """One line on stderr."""
    print("reproduce: " + " ".join(message.split()), file=sys.stderr)


def shown() -> Show:
    """Lines with the seconds since the start."""
    start = time.perf_counter()

    def line(what: str, done: int, total: int) -> None:
        counted = f"  {done} of {total}" if total else ""
        print(f"{time.perf_counter() - start:7.1f} s  {what}{counted}", flush=True)

    return line


if __name__ == "__main__":
    sys.exit(main())
