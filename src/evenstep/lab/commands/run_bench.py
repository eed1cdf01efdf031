"""`evenstep bench`: time and memory of training steps, ours against torch's."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from .. import bench, bench_goals, display, records, usage
from ..bench_contenders import CONTENDERS, package_in
from ..bench_models import SUBJECTS
from ..reading import Record

DEFAULT_MODELS = ("paper-cnn", "paper-cnn-4")
DEFAULT_CONTENDERS = ("sgd", "batch-norm", "whitened-sgd", "unitstep")


@dataclass(frozen=True)
class Options:
    """Time training steps of several optimizers on the same network, interleaved in one process, as ratios."""

    suite: Annotated[str | None, "Run a suite, gpu or cpu; --model, --contenders, --rounds change it."] = None
    goals: Annotated[bool, "Compare with the goals of the suite (or of --device); exit code 1 if one fails."] = False
    against: Annotated[Path | None, "The src folder of another checkout, to be timed in the same rounds."] = None
    model: Annotated[tuple[str, ...], f"Networks, of {', '.join(SUBJECTS)} (default: {' '.join(DEFAULT_MODELS)})."] = ()
    contenders: Annotated[tuple[str, ...], f"Optimizers, of {', '.join(CONTENDERS)}."] = ()
    device: Annotated[str, "Where to train: cpu, cuda, ..."] = "cpu"
    batch: Annotated[tuple[int, ...], "Batch sizes; without any, each network's usual one."] = ()
    rounds: Annotated[int | None, "Measurements of each contender; 50 unless the suite has its own number."] = None
    compiled: Annotated[bool, "Compile the networks."] = False
    autocast: Annotated[bool, "Compute in bfloat16 where autocast does."] = False
    half: Annotated[bool, "Keep the networks themselves in bfloat16."] = False
    channels_last: Annotated[bool, "Lay images out with channels last."] = False
    sweep: Annotated[bool, "Measure how the cost grows with the size of a dense network, too."] = False
    seed: Annotated[int, "Seed of weights and data."] = 0
    threads: Annotated[int, "CPU threads; 0 leaves them as they are."] = 0
    records: Annotated[Path, "File to which records are appended."] = Path("runs/bench.jsonl")
    table: Annotated[Path | None, "Time nothing: print this file's records as a table, or by --goals."] = None


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


def measured(wanted: Sequence[bench.Setting], path: Path) -> list[Record]:
    """Run the comparisons; each record is kept and printed at once, and a failed one does not end the others."""
    found = []
    with display.Bar(sum(s.rounds for s in wanted)) as bar:
        for setting in wanted:
            bar.say(setting.model, keep=False)
            try:
                found.append(records.append(path, bench.run(setting, lambda _: bar.advance())))
            except (RuntimeError, ValueError, Warning) as error:  # no memory, not compiled, or it saw no inputs
                bar.advance(f"{bench_goals.title(vars(setting))}: failed: {usage.first_line(error)}", by=0)
            else:
                bar.advance(bench_goals.text(found[-1]), by=0)
    return found


def recorded(path: Path) -> list[Record]:
    """The records of bench in a file; a UsageError if there are none."""
    found = [r for r in records.read(path) if r["config"].get("bench") is True] if path.is_file() else []
    if not found:
        raise usage.UsageError(f"--table {path}: no record of bench there; give a file that --records wrote")
    return found


def judged(found: Sequence[Record]) -> int:
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
