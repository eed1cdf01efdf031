"""Tables of the docs, from records alone.

    python scripts/tables.py results/cifar-cnn.jsonl [more files] [--all]

One row per method and settings, at the stepsize with the lowest training loss of the last epoch (mean over seeds);
`--all` shows every stepsize. A run that ended above the loss it began with diverged.
"""

import argparse
import math
import statistics
from collections import defaultdict
from pathlib import Path

from evenstep.lab import records, summary

COLUMNS = ["method", "settings", "stepsize", "seeds", "training loss", "test accuracy", "dead units"]


def spread(values: list[float | None], digits: int) -> str:
    """Mean, and standard deviation where there are several seeds; a run that diverged makes it so."""
    if any(v is None or math.isinf(v) for v in values):
        return "diverged"
    text = f"{statistics.fmean(values):.{digits}f}"
    return f"{text} ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else text


def rows(found: list[records.Record], every: bool) -> list[list[str]]:
    """The table's rows, best loss first; a trial recorded twice counts once, the newest."""
    table, l0 = [], summary.initial_loss(found)
    for series in summary.series(found):
        options = ", ".join(f"{k}={v}" for k, v in series.options.items()) or "defaults"
        for lr in series.runs if every else [summary.best_stepsize(series.runs, l0)]:
            losses = [summary.end(run, l0) for run in series.runs[lr]]
            last = [run["metrics"][-1] for run in series.runs[lr]]
            accuracies, dead = [row["test_accuracy"] for row in last], [100 * row["dead_share"] for row in last]
            numbers = [spread(losses, 3), spread(accuracies, 3), spread(dead, 1) + " %"]
            table.append((statistics.fmean(losses), [series.method, options, f"{lr:g}", str(len(last)), *numbers]))
    return [cells for _, cells in (table if every else sorted(table, key=lambda row: row[0]))]


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
