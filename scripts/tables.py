"""Tables of the docs, from records alone.

    python scripts/tables.py results/cifar-cnn.jsonl [more files] [--all]

One row per method and settings, at the stepsize with the lowest training loss of the last epoch (mean over seeds);
`--all` shows every stepsize.
"""

import argparse
import statistics
from collections import defaultdict
from pathlib import Path

from evenstep.lab import records

COLUMNS = ["method", "settings", "stepsize", "seeds", "training loss", "test accuracy", "dead units"]


def spread(values: list[float | None], digits: int) -> str:
    """Mean, and standard deviation where there are several seeds; a run that diverged makes it so."""
    if any(v is None for v in values):
        return "diverged"
    mean = statistics.fmean(values)
    if mean > 1e3:
        return "diverged"
    text = f"{mean:.{digits}f}"
    return f"{text} ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else text


def rows(found: list[records.Record], every: bool) -> list[list[str]]:
    """The table's rows, best loss first; a trial recorded twice counts once, the newest."""
    newest = {(name(r), settings(r), r["config"]["lr"], r["seed"]): r for r in found}
    groups: dict[tuple, dict[float, list]] = defaultdict(lambda: defaultdict(list))
    for (method, options, lr, _), record in newest.items():
        groups[method, options][lr].append(record["metrics"][-1])
    table = []
    for (method, options), by_lr in groups.items():
        scored = {lr: loss(last) for lr, last in by_lr.items()}
        for lr in sorted(by_lr) if every else [min(scored, key=scored.get)]:
            table.append((scored[lr], line(method, options, lr, by_lr[lr])))
    return [cells for _, cells in (table if every else sorted(table, key=lambda row: row[0]))]


def loss(last: list[dict]) -> float:
    values = [row["train_loss"] for row in last]
    return float("inf") if None in values else statistics.fmean(values)


def line(method: str, options: str, lr: float, last: list[dict]) -> list[str]:
    column = lambda key: [row[key] for row in last]  # noqa: E731
    return [method, options, f"{lr:g}", str(len(last)), spread(column("train_loss"), 3),
            spread(column("test_accuracy"), 3), spread([100 * d for d in column("dead_share")], 1) + " %"]  # fmt: skip


def name(record: records.Record) -> str:
    return record["config"]["method"]


def settings(record: records.Record) -> str:
    return ", ".join(f"{k}={v}" for k, v in record["config"]["options"].items()) or "defaults"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--all", action="store_true")
    args = parser.parse_args()
    found = [record for path in args.files for record in records.read(path) if "method" in record["config"]]
    if not found:
        parser.error(f"no record of a sweep in {', '.join(map(str, args.files))}")
    kinds: dict[tuple, list] = defaultdict(list)
    for record in found:
        kinds[record["config"]["model"], record["config"]["data"], record["config"]["epochs"]].append(record)
    for (model, data, epochs), same in kinds.items():
        devices = {r["environment"]["device"] for r in same}
        print(f"\n{model}, {data}, {epochs} epochs; {', '.join(sorted(devices))}\n")
        print("| " + " | ".join(COLUMNS) + " |\n|" + " --- |" * len(COLUMNS))
        for cells in rows(same, args.all):
            print("| " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
