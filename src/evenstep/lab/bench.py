"""Time and memory of training steps on one network, all contenders interleaved in one process.

`evenstep bench` runs it; `python -m evenstep.lab.bench` takes the same options and needs torch alone.
"""

import ctypes
import gc
import importlib
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._pytree import tree_leaves

import evenstep

from . import bench_contenders, records
from .bench_contenders import CONTENDERS
from .bench_models import SUBJECTS
from .reading import Record

BURST = 0.3  # seconds of consecutive steps in one measurement on a GPU: in training the host runs ahead of the device
WARM_UP = 5  # steps before anything is timed: compilers run, kernels are built, memory is allocated
OLD = "@before"  # suffix of a contender that is built from the package of `--against`


@dataclass(frozen=True)
class Setting:
    """One comparison: a network, how it runs, and the contenders; `against` holds another version of the package."""

    model: str
    contenders: tuple[str, ...]
    device: str = "cpu"
    batch: int | None = None
    rounds: int = 30
    compiled: bool = False
    autocast: bool = False
    channels_last: bool = False
    threads: int = 0
    width: int | None = None
    depth: int | None = None
    seed: int = 0
    half: bool = False
    against: Path | None = None

    def taking_part(self) -> list[str]:
        """The contenders that this network can have, each once; those of the other version follow the current ones."""
        names = [n for n in dict.fromkeys(self.contenders) if n != "batch-norm" or SUBJECTS[self.model].norm]
        return names + [name + OLD for name in names if self.against is not None and CONTENDERS[name].packaged]

    def config(self) -> dict[str, Any]:
        """This setting for a record; the other version is named by its commit, not by its folder.

        EVENSTEP_AGAINST_COMMIT names it where its files came without their history.
        """
        against = None
        if self.against is not None:
            against = records.commit(self.against.resolve().parent, "EVENSTEP_AGAINST_COMMIT") or "unknown"
        return {"bench": True, **asdict(self), "against": against}


class Training:
    """A network with its optimizer, ready to take steps on one batch."""

    def __init__(self, name: str, setting: Setting, x: Tensor, y: Tensor) -> None:
        self.name, self.x, self.y, self.mixed = name, x, y, setting.autocast
        known, _, old = name.partition("@")
        package = bench_contenders.load(setting.against) if old and setting.against else evenstep
        sizes = {"width": setting.width, "depth": setting.depth, "norm": True if known == "batch-norm" else None}
        torch.manual_seed(setting.seed)
        with torch.device(setting.device):
            model = SUBJECTS[setting.model].build(**{key: size for key, size in sizes.items() if size is not None})
        self.model = _arranged(model, setting)
        if setting.compiled:
            importlib.import_module("torch._dynamo")  # before our optimizers, which make it tell hooked modules apart
            torch._dynamo.config.recompile_limit = 64  # every contender's network runs through the same code
            torch._dynamo.config.fail_on_recompile_limit_hit = True  # instead of continuing without compiled code
        self.optimizer = CONTENDERS[known].build(package, self.model)
        self.call = torch.compile(self.model) if setting.compiled else self.model

    def step(self) -> None:
        """One training step."""
        self.optimizer.zero_grad()
        with torch.autocast(self.x.device.type, torch.bfloat16) if self.mixed else nullcontext():
            output = self.call(self.x)
            loss = functional.cross_entropy(output.flatten(0, -2).float(), self.y.flatten())
        loss.backward()
        self.optimizer.step()

    def warm_up(self, steps: int) -> int | None:
        """Take untimed steps; on a GPU, the peak memory of one more step beyond what is allocated between steps."""
        with warnings.catch_warnings():  # an optimizer that sees no inputs does less work than the one to be timed
            warnings.filterwarnings("error", message=".*saw no input")
            for _ in range(steps):
                self.step()
        if not self.x.is_cuda:
            return None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        self.step()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    def state_floats(self) -> float:
        """Floats of optimizer state per parameter beyond momentum."""
        states = [s for part in getattr(self.optimizer, "parts", [self.optimizer]) for s in part.state.values()]
        kept = [[value for key, value in state.items() if key != "momentum_buffer"] for state in states]
        floats = sum(value.numel() for value in tree_leaves(kept) if isinstance(value, Tensor))
        return floats / sum(p.numel() for p in self.model.parameters())


def _arranged(value: Any, setting: Setting) -> Any:
    """A network or images in the dtype and memory layout of the setting."""
    dtype = torch.bfloat16 if setting.half else torch.float32
    layout = torch.channels_last if setting.channels_last else torch.preserve_format
    return value.to(dtype=dtype, memory_format=layout)


def batch(setting: Setting) -> tuple[Tensor, Tensor]:
    """The inputs and targets that all contenders train on."""
    torch.manual_seed(setting.seed)
    x, y = SUBJECTS[setting.model].batch(setting.batch, setting.width, torch.device(setting.device))
    return (_arranged(x, setting) if x.is_floating_point() else x), y


def seconds_per_step(step: Callable[[], None], device: torch.device, burst: int) -> float:
    """Mean time of `burst` consecutive steps."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    wait()
    begin = time.perf_counter()
    for _ in range(burst):
        step()
    wait()
    return (time.perf_counter() - begin) / burst


def keep_freed_memory() -> None:
    """Let glibc keep freed memory instead of returning it to the system.

    Returned memory is faulted in again during later steps, of any contender: a third of a small network's step.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        trim, mmap = -1, -3  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD
        mallopt(trim, 2**30)
        mallopt(mmap, 2**25)


def run(setting: Setting, on_round: Callable[[int], None] = lambda _: None, warm_up: int = WARM_UP) -> Record:
    """The record of one comparison: a row per contender."""
    device = torch.device(setting.device)
    if setting.threads:
        torch.set_num_threads(setting.threads)
    if device.type == "cpu":
        keep_freed_memory()
    rows = measure(setting, device, on_round, warm_up)
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    if setting.compiled:
        torch._dynamo.reset()
    return records.make(setting.config(), setting.seed, rows, device)


def measure(
    setting: Setting, device: torch.device, on_round: Callable[[int], None], warm_up: int
) -> list[dict[str, Any]]:
    """Build all contenders, warm them up, and time them round by round."""
    data = batch(setting)
    trainings = {name: Training(name, setting, *data) for name in setting.taking_part()}
    if not trainings:
        raise ValueError(f"{setting.model} cannot have batch-norm; add a contender, such as sgd")
    memory = {name: training.warm_up(warm_up) for name, training in trainings.items()}
    first = next(iter(trainings.values())).step
    burst = max(3, round(BURST / seconds_per_step(first, device, 3))) if device.type == "cuda" else 1
    times: dict[str, list[float]] = {name: [] for name in trainings}
    for k in range(setting.rounds):
        for name in trainings if k % 2 else reversed(trainings):  # so that no one always follows the same one
            times[name].append(seconds_per_step(trainings[name].step, device, burst))
        on_round(k)
    return [
        row(name, times) | {"step_memory": memory[name], "state_per_parameter": training.state_floats()}
        for name, training in trainings.items()
    ]


def row(name: str, times: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """A contender's median time, and medians and quartiles of its ratios per round: to its base, to its old version."""
    base = CONTENDERS[name.partition("@")[0]].base
    base = base if base in times else next(iter(times))
    low, middle, high = quartiles(times[name], times[base])
    found = {
        "contender": name,
        "base": base,
        "seconds": statistics.median(times[name]),
        "ratio": middle,
        "ratio_low": low,
        "ratio_high": high,
        "seconds_of_rounds": [float(f"{seconds:.6g}") for seconds in times[name]],
    }
    return found | ({"new_over_old": quartiles(times[name], times[name + OLD])} if name + OLD in times else {})


def quartiles(times: Sequence[float], base: Sequence[float]) -> list[float]:
    """The quartiles of the ratios of two contenders, round by round.

    >>> quartiles([2.0, 4.0, 6.0], [2.0, 2.0, 2.0])
    [1.0, 2.0, 3.0]
    """
    return statistics.quantiles([a / b for a, b in zip(times, base, strict=True)], n=4)


if __name__ == "__main__":
    from .cli import main

    main(["bench", *sys.argv[1:]])
