"""Records of the bench as text, and as tables for the docs."""

from collections.abc import Mapping, Sequence
from typing import Any

from . import usage
from .records import Record


def title(config: Mapping[str, Any]) -> str:
    """What is timed, in words."""
    sizes = [f"{k} {config[k]}" for k in ("width", "depth", "batch") if config.get(k) is not None]
    words = {"autocast": "bf16", "half": "bf16 weights", "channels_last": "channels_last"}
    how = [word for key, word in words.items() if config.get(key)]
    return ", ".join([config["model"], *sizes, "compiled" if config["compiled"] else "eager", *how])


def table(record: Record) -> str:
    """The rows as text."""
    lines = [f"{title(record['config'])}, {record['environment']['device']}"]
    for row in record["metrics"]:
        state = row["state_per_parameter"]
        lines.append(
            f"  {row['contender']:15} {1e3 * row['seconds']:9.3f} ms  ratio {row['ratio']:.3f} "
            f"({row['ratio_low']:.3f} to {row['ratio_high']:.3f})"
            + (f"  state {state:.4f}/parameter" if state is not None else "")
            + (f"  step memory {row['step_memory'] / 2**20:.0f} MiB" if row["step_memory"] else "")
        )
    return "\n".join(lines)


def markdown(found: Sequence[Record]) -> str:
    """Records as a table for the docs: a row for each comparison, a column for each contender."""
    names = list(dict.fromkeys(row["contender"] for record in found for row in record["metrics"][1:]))
    measures = list(dict.fromkeys(record["metrics"][0]["contender"] for record in found))
    if len(measures) > 1:
        raise usage.UsageError(f"these records are measured by {' and '.join(measures)}; a table takes one of them")
    first = measures[0]
    lines = [f"| | {first}, ms | " + " | ".join(names) + " |", "|" + " --- |" * (len(names) + 2)]
    for record in found:
        rows = {row["contender"]: row for row in record["metrics"]}
        cells = [
            f"{r['ratio']:.3f} ({r['ratio_low']:.3f} to {r['ratio_high']:.3f})" if (r := rows.get(name)) else ""
            for name in names
        ]
        cells = [title(record["config"]), f"{1e3 * rows[first]['seconds']:.2f}", *cells]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
