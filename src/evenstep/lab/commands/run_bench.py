"""`evenstep bench`: time and memory of training steps, ours against torch's."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from .. import bench, bench_goals, display, records, usage
from ..bench_contenders import CONTENDERS, package_in
from ..bench_models import SUBJECTS

DEFAULT_MODELS = ("paper-cnn", "paper-cnn-4")
DEFAULT_CONTENDERS = ("sgd", "batch-norm", "whitened-sgd", "unitstep")


@dataclass(frozen=True)
class Options:
    """Time training steps of several optimizers on the same network, interleaved in one process, as ratios."""

    suite: str | None = None
    """Run all rows of a suite, gpu or cpu, with its own networks, contenders and settings; --model, --contenders and
    --rounds restrict or replace them."""
    goals: bool = False
    """Compare with the goals of the suite (of --device, if no --suite is given); exit code 1 if one fails."""
    against: Path | None = None
    """The src folder of another checkout: its optimizers are timed in the same rounds, and ratios new / old printed."""
    model: tuple[str, ...] = ()
    """Networks: paper-cnn and paper-cnn-4 (the default), alexnet, resnet50, vit-b16, gpt2-small,
    gpt-tiny, mlp."""
    contenders: tuple[str, ...] = ()
    """Optimizers: sgd, batch-norm (SGD with it), whitened-sgd, unitstep (these are the default), whitened-adamw,
    adamw-fused, muon. whitened-adamw is divided by adamw-fused where that takes part, the others by sgd, or else by the
    first."""
    device: str = "cpu"
    """Where to train: cpu, cuda, ..."""
    batch: tuple[int, ...] = ()
    """Batch sizes; without any, each network's usual one."""
    rounds: int | None = None
    """Measurements of each contender; 50 unless the suite has its own number."""
    compiled: bool = False
    """Compile the networks."""
    autocast: bool = False
    """Compute in bfloat16 where autocast does."""
    half: bool = False
    """Keep the networks themselves in bfloat16."""
    channels_last: bool = False
    """Lay images out with channels last."""
    sweep: bool = False
    """Measure how the cost grows with width, batch and depth of a dense network, beside the networks of --model."""
    seed: int = 0
    """Seed of weights and data."""
    threads: int = 0
    """CPU threads; 0 leaves them as they are."""
    records: Path = Path("runs/bench.jsonl")
    """File to which records are appended."""
    table: Path | None = None
    """Time nothing: print the records of this file as a table for the docs, or with --goals beside their goals."""


def main(options: Options) -> int:
    """Time, or read, what is asked for; each record is printed and kept as soon as it is made. The exit code."""
    if options.table is not None:
        found = recorded(options.table)
        if options.goals:
            return judged(found)
        print(bench_goals.table(found))
        return 0
    wanted = settings(options)
    usage.writable_folder(options.records.parent, "--records")
    found = measured(wanted, options.records)
    print(f"Records: {options.records}")
    code = judged(found) if options.goals else 0
    return code or int(len(found) < len(wanted))


def measured(wanted: Sequence[bench.Setting], path: Path) -> list[records.Record]:
    """Run the comparisons; each record is kept and printed at once, and a failed one does not end the others."""
    found = []
    with display.bar(sum(s.rounds for s in wanted)) as bar:
        for setting in wanted:
            bar.show(setting.model)
            try:
                found.append(records.append(path, bench.run(setting, lambda _: bar.advance())))
            except (RuntimeError, ValueError, Warning) as error:  # no memory, not compiled, or it saw no inputs
                bar.advance(f"{bench_goals.title(vars(setting))}: failed: {usage.first_line(error)}", by=0)
            else:
                bar.advance(bench_goals.text(found[-1]), by=0)
    return found


def recorded(path: Path) -> list[records.Record]:
    """The records of bench in a file; a UsageError if there are none."""
    found = [r for r in records.read(path) if r["config"].get("bench") is True] if path.is_file() else []
    if not found:
        raise usage.UsageError(f"--table {path}: no record of bench there; give a file that --records wrote")
    for row in (row for record in found for row in record["metrics"] if row["contender"] == "evenstep"):
        row["contender"] = "unitstep"  # UnitStep was called EvenStep in version 0.1
    return found


def judged(found: Sequence[records.Record]) -> int:
    """Print the records' goals; the exit code, 1 if one fails."""
    rows = bench_goals.verdicts(found)
    if not rows:
        raise usage.UsageError("none of these records is of what has a goal; --goals without --table makes such")
    print(bench_goals.goals_table(rows))
    return int(any(row.missed for row in rows))


def settings(options: Options) -> list[bench.Setting]:
    """The comparisons that are asked for, if all of them can be made."""
    for name in options.model:
        usage.known_name(name, SUBJECTS, "network")
    for name in options.contenders:
        usage.known_name(name, CONTENDERS, "contender")
    for size in options.batch:
        usage.in_range(size, 1, 1_000_000, "--batch")
    if options.rounds is not None:
        usage.in_range(options.rounds, 2, 100_000, "--rounds")
    usage.in_range(options.threads, 0, 1024, "--threads")
    usage.in_range(options.seed, 0, 2**63 - 1, "--seed")
    if options.against is not None:
        package_in(options.against)
    found = of_suite(options) if options.suite or options.goals else of_options(options)
    for device in {setting.device for setting in found}:
        usage.usable_device(device)
    return found


def of_suite(options: Options) -> list[bench.Setting]:
    """The rows of a suite, those of `--model` if that is given."""
    own = ("batch", "compiled", "autocast", "half", "channels_last", "sweep")
    if given := [f"--{name.replace('_', '-')}" for name in own if getattr(options, name)]:
        raise usage.UsageError(f"a suite has its own settings; leave out {', '.join(given)}")
    of_device = "gpu" if options.device.startswith("cuda") else "cpu"
    name = usage.known_name(options.suite or of_device, bench_goals.SUITES, "suite")
    rows = [row for row, _ in bench_goals.SUITES[name] if not options.model or row.model in options.model]
    if not rows:
        raise usage.UsageError(f"suite {name} has no row with --model {' '.join(options.model)}")
    changes = {key: getattr(options, key) for key in ("rounds", "threads", "contenders", "seed", "against")}
    return [replace(row, **{key: value for key, value in changes.items() if value}) for row in rows]


def of_options(options: Options) -> list[bench.Setting]:
    """Every network at every batch size; with `--sweep` dense networks of many sizes besides."""
    names = ("device", "compiled", "autocast", "half", "channels_last", "threads", "seed", "against")
    shared = {name: getattr(options, name) for name in names}
    contenders, rounds = options.contenders or DEFAULT_CONTENDERS, options.rounds or 50
    base = bench.Setting("mlp", contenders, rounds=rounds, **shared)
    models = options.model or (() if options.sweep else DEFAULT_MODELS)
    found = [replace(base, model=model, batch=batch) for model in models for batch in options.batch or (None,)]
    return found + (growth(base) if options.sweep else [])


def growth(base: bench.Setting) -> list[bench.Setting]:
    """The dense network in sizes of which one at a time varies; larger on a GPU, where small ones time the host."""
    large = base.device.startswith("cuda")
    net = replace(base, width=4096, batch=4096) if large else base
    found = [replace(net, width=width) for width in ((1024, 4096, 8192) if large else (64, 256, 1024))]
    found += [replace(net, batch=batch) for batch in ((512, 2048, 8192) if large else (32, 128, 512, 2048))]
    return found + [replace(net, depth=depth) for depth in (2, 8, 32)]
