"""Step time and memory of optimizers on one network: interleaved in one run, as ratios to SGD.

Needs torch alone; `evenstep bench` and `python -m evenstep.lab.bench` run it.
"""

import argparse
import ctypes
import gc
import importlib
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from torch.utils._pytree import tree_leaves

from . import bench_goals, records, usage
from .bench_contenders import CONTENDERS, ELSEWHERE, NEEDS, peer
from .bench_models import SUBJECTS
from .bench_tables import markdown, table


@dataclass(frozen=True)
class Setting:
    """One comparison."""

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


class Contender:
    """A network, its optimizer and its data, ready to make steps."""

    def __init__(self, name: str, setting: Setting) -> None:
        torch.manual_seed(setting.seed)
        subject, device = SUBJECTS[setting.model], torch.device(setting.device)
        self.name, self.device, self.autocast = name, device, setting.autocast
        size = {k: v for k, v in (("width", setting.width), ("depth", setting.depth)) if v is not None}
        model = subject.build(**size, **({"norm": True} if name == "batch-norm" else {}))
        layout = torch.channels_last if setting.channels_last else torch.contiguous_format
        dtype = torch.bfloat16 if setting.half else torch.float32
        self.model = model.to(device, dtype).to(memory_format=layout)  # type: ignore[call-overload]
        self.x, self.y = subject.batch(setting.batch, setting.width, device)
        if self.x.is_floating_point():
            self.x = self.x.to(dtype)
        if setting.channels_last:
            self.x = self.x.to(memory_format=layout)
        if setting.compiled:
            importlib.import_module("torch._dynamo")  # now: our optimizers let it tell modules with hooks from others
        self.optimizer = CONTENDERS[name](self.model)
        self.call = torch.compile(self.model) if setting.compiled else self.model

    def step(self) -> None:
        """One training step."""
        self.optimizer.zero_grad()
        mixed = torch.autocast(self.device.type, torch.bfloat16) if self.autocast else nullcontext()
        with mixed:
            output = self.call(self.x)
            loss = functional.cross_entropy(output.flatten(0, -2).float(), self.y.flatten())
        loss.backward()
        self.optimizer.step()

    def state_floats(self) -> float | None:
        """Floats of optimizer state per parameter, beyond momentum; None for those that keep theirs elsewhere."""
        if self.name in ELSEWHERE:
            return None
        states = getattr(self.optimizer, "parts", [self.optimizer])
        kept = [[v for k, v in s.items() if k != "momentum_buffer"] for part in states for s in part.state.values()]
        sizes = [v.numel() for v in tree_leaves(kept) if isinstance(v, torch.Tensor)]
        return sum(sizes) / sum(p.numel() for p in self.model.parameters())


MODELS = ("paper-cnn", "paper-cnn-4")
BURST = 0.6  # seconds of steps in a row on a GPU, nobody waiting: in training the host runs ahead of the device


def timed(device: torch.device, step: Callable[[], None], burst: int) -> float:
    """Seconds of a step, on the device's own clock; of a GPU the mean of `burst` in a row."""
    if device.type == "cuda":
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(burst):
            step()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3 / burst
    begin = time.perf_counter()
    step()
    return time.perf_counter() - begin


def steady_heap() -> None:
    """Let glibc keep what is freed: memory that it gives back is faulted in again in the steps of whoever comes next.

    Whom that hits goes by small allocations at the end of the heap; it can be a third of a small network's step.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        trim, mmap = -1, -3  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD
        mallopt(trim, 2**30)
        mallopt(mmap, 2**25)


def run(setting: Setting, on_round: Callable[[int], None] | None = None, warm_up: int = 5) -> records.Record:
    """The record of one comparison: per contender median seconds, ratio to the first with its spread, memory."""
    if setting.threads:
        torch.set_num_threads(setting.threads)
    if torch.device(setting.device).type == "cpu":
        steady_heap()
    contenders = [Contender(name, setting) for name in taking_part(setting)]
    device = contenders[0].device
    memory = {}
    for c in contenders:
        for _ in range(warm_up):
            c.step()
        if device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            c.step()
            torch.cuda.synchronize()
            memory[c.name] = torch.cuda.max_memory_allocated() - before
    burst = max(3, round(BURST / timed(device, contenders[0].step, 3))) if device.type == "cuda" else 1
    times: dict[str, list[float]] = {c.name: [] for c in contenders}
    for k in range(setting.rounds):
        for c in contenders if k % 2 else reversed(contenders):  # so that no one always follows the same one
            times[c.name].append(timed(device, c.step, burst))
        if on_round is not None:
            on_round(k)
    metrics = [summary(c, times, memory.get(c.name)) for c in contenders]
    del contenders
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    torch._dynamo.reset()
    return records.make({"bench": True, **asdict(setting)}, setting.seed, metrics, device)


def summary(contender: Contender, times: dict[str, list[float]], memory: int | None) -> dict[str, Any]:
    """One row of the table."""
    mine, first = times[contender.name], next(iter(times.values()))
    ratios = [a / b for a, b in zip(mine, first, strict=True)]
    quartiles = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    return {
        "contender": contender.name,
        "seconds": statistics.median(mine),
        "ratio": statistics.median(mine) / statistics.median(first),
        "ratio_low": quartiles[0],
        "ratio_high": quartiles[2],
        "step_memory": memory,
        "state_per_parameter": contender.state_floats(),
    }


def settings(base: Setting, models: Sequence[str], batches: Sequence[int], sweep: bool) -> list[Setting]:
    """The comparisons asked for; with `sweep`, how cost grows with width, batch and depth of dense nets, too."""
    sizes: list[int | None] = [*batches] or [None]
    found = [replace(base, model=model, batch=batch) for model in models for batch in sizes]
    if sweep:
        large = base.device.startswith("cuda")  # where small networks would time the host alone
        net = replace(base, model="mlp", width=4096 if large else None, batch=4096 if large else None)
        found += [replace(net, width=width) for width in ((1024, 4096, 8192) if large else (64, 256, 1024))]
        found += [replace(net, batch=batch) for batch in ((512, 2048, 8192) if large else (32, 128, 512, 2048))]
        found += [replace(net, depth=depth) for depth in (2, 8, 32)]
    return found


def for_goals(base: Setting, models: Sequence[str], batches: Sequence[int], sweep: bool) -> list[Setting]:
    """The comparisons whose costs have goals on the device of `base`."""
    flags = {"--model": tuple(models) != MODELS, "--batch": batches, "--sweep": sweep, "--compiled": base.compiled}
    flags |= {"--autocast": base.autocast, "--half": base.half, "--channels-last": base.channels_last}
    if given := [flag for flag, on in flags.items() if on]:
        raise usage.UsageError(f"--goals says itself what is timed and how; leave out {', '.join(given)}")
    kind = base.device.partition(":")[0]
    usage.known_name(kind, bench_goals.GOALS, "device with goals")
    return [replace(base, contenders=bench_goals.CONTENDERS[kind], **goal.how) for goal in bench_goals.GOALS[kind]]


def taking_part(setting: Setting) -> list[str]:
    """The contenders that the network can have, each once."""
    can = SUBJECTS[setting.model].norm
    return [name for name in dict.fromkeys(setting.contenders) if name != "batch-norm" or can]


def checked(
    base: Setting, models: Sequence[str], batches: Sequence[int], sweep: bool, goals: bool = False
) -> list[Setting]:
    """The comparisons asked for, if all of them can be made."""
    for name in models:
        usage.known_name(name, SUBJECTS, "network")
    if not models and not sweep:
        raise usage.UsageError("--model is empty, so there is nothing to run; name a network, or add --sweep")
    for name in usage.some(base.contenders, "--contenders"):
        usage.known_name(name, CONTENDERS, "contender")
        if name in NEEDS:
            peer(NEEDS[name])
    for batch in batches:
        usage.in_range(batch, 1, 1_000_000, "--batch")
    usage.in_range(base.rounds, 2, 100_000, "--rounds")
    usage.in_range(base.threads, 0, 1024, "--threads")
    usage.in_range(base.seed, 0, 2**63 - 1, "--seed")
    found = (for_goals if goals else settings)(base, models, batches, sweep)
    for setting in found:
        if not (names := taking_part(setting)):
            raise usage.UsageError(f"--model {setting.model} cannot have batch-norm; add a contender, such as sgd")
        if setting.channels_last and len(SUBJECTS[setting.model].shape) != 4:
            raise usage.UsageError(f"--channels-last is for images, and {setting.model} takes none; leave one out")
        if setting.half and setting.autocast:
            raise usage.UsageError("--half leaves nothing to --autocast; leave one out")
        if setting.batch == 1 and "batch-norm" in names:
            raise usage.UsageError("--batch 1 is too small for batch-norm, which needs 2; leave one out")
    usage.usable_device(base.device)
    return found


def left_out(found: Sequence[Setting]) -> list[str]:
    """A line for each network that cannot have all contenders."""
    lines = []
    for setting in {s.model: s for s in found}.values():
        names = taking_part(setting)
        missing = [name for name in setting.contenders if name not in names]
        if missing:
            line = f"{setting.model} cannot have {', '.join(dict.fromkeys(missing))}, which is left out"
            first = f"; its times are measured by {names[0]}" if names[0] != setting.contenders[0] else ""
            lines.append(line + first)
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """Without rich and tyro, for machines that have torch alone; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    networks, optimizers = f"any of {', '.join(SUBJECTS)}", f"any of {', '.join(CONTENDERS)}"
    parser.add_argument("--model", nargs="*", default=[*MODELS], help=networks)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--contenders", nargs="*", default=["sgd", "whitened-sgd", "evenstep"], help=optimizers)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch", type=int, nargs="*", default=[])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--autocast", action="store_true")
    parser.add_argument("--half", action="store_true", help="keep the networks themselves in bfloat16")
    parser.add_argument("--channels-last", action="store_true")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--goals", action="store_true", help="time what has a goal, and say whether it is met")
    parser.add_argument("--out", type=Path, help="file to add the records to")
    parser.add_argument("--table", type=Path, help="no run: the records of this file as a table for the docs")
    args = parser.parse_args(arguments)
    try:
        return show(args.table, args.goals) if args.table is not None else compare(args)
    except usage.UsageError as error:
        parser.exit(2, f"bench: {error}\n")


def show(path: Path, goals: bool) -> int:
    """Print the records of a file as a table for the docs, or what they say of goals; the exit code."""
    found = [r for r in records.read(path) if r["config"].get("bench") is True] if path.is_file() else []
    if not found:
        raise usage.UsageError(f"--table {path}: no record of bench there; give a file that --out wrote")
    if goals:
        return judge(found, print)
    print(markdown(found))
    return 0


def judge(found: Sequence[records.Record], say: Callable[[str], Any]) -> int:
    """Say which goals are met by records; the exit code, 1 if a limit is exceeded."""
    if not (rows := bench_goals.verdicts(found)):
        raise usage.UsageError("none of these records is of what has a goal; --goals without --table makes such")
    say(bench_goals.table(rows))
    return int(any(row.missed for row in rows))


def compare(args: argparse.Namespace) -> int:
    """Time what is asked for; the exit code."""
    base = Setting(
        "", tuple(args.contenders), args.device, None, args.rounds, args.compiled, args.autocast, args.channels_last,
        args.threads, seed=args.seed, half=args.half,
    )  # fmt: skip
    found = checked(base, args.model, args.batch, args.sweep, args.goals)
    if args.out is not None:
        usage.writable_folder(args.out.parent)
    for line in left_out(found):
        print(line)
    made = []
    for setting in found:
        made.append(record := run(setting))
        print(table(record), flush=True)
        if args.out is not None:
            records.append(args.out, record)
    return judge(made, print) if args.goals else 0


if __name__ == "__main__":
    sys.exit(main())
