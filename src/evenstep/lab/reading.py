"""Records from files that anyone may have written: what is no record is reported, and nothing here is believed."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import records
from .records import Record

COLUMNS = ("train_loss", "test_loss", "test_accuracy", "dead_share", "seconds", "steps")
LONGEST = 1000  # characters of a text that is shown


@dataclass
class Reading:
    """What a folder holds: runs of a method at a stepsize, other records by file, and lines that are no records."""

    runs: list[Record] = field(default_factory=list)
    others: dict[str, int] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)


def read(folder: Path) -> Reading:
    """Every record of every *.jsonl file below `folder`, in the order of their names."""
    found = Reading()
    for path in sorted(folder.rglob("*.jsonl")):
        name = path.relative_to(folder).as_posix()
        try:
            read_file(path, name, found)
        except OSError as error:  # a folder, a link to nothing, a file of someone else's
            found.faults.append(clean(f"{name}: cannot be read ({error.strerror or error})"))
    return found


def read_file(path: Path, name: str, found: Reading) -> None:
    """Add what a file holds to `found`; `name` is what messages call it."""
    with path.open("rb") as file:
        for number, line in records.lines(file):
            try:
                record = clean(records.parse(line))
                if is_run(record):
                    found.runs.append(record)
                else:
                    found.others[name] = found.others.get(name, 0) + 1
            except (ValueError, RecursionError) as error:
                found.faults.append(clean(f"{name}, line {number}: not a record: {error}"))


def is_run(record: dict[str, Any]) -> bool:
    """Whether a record is of one method at one stepsize, with a training loss (or null) for each epoch."""
    config, rows = record.get("config"), record.get("metrics")
    if not isinstance(config, dict) or not isinstance(config.get("method"), str):
        return False
    if not _is_number(config.get("lr")) or config["lr"] <= 0 or isinstance(record.get("seed"), dict | list):
        return False
    if not isinstance(config.get("options", {}), dict | None) or not isinstance(rows, list) or not rows:
        return False
    return all(isinstance(row, dict) and "train_loss" in row and all(map(_fits, map(row.get, COLUMNS))) for row in rows)


def clean(value: Any) -> Any:
    """A value from a file with texts made printable and of bounded length, and numbers that are not finite as None."""
    if isinstance(value, dict):
        return {clean(str(key)): clean(item) for key, item in value.items()}
    if isinstance(value, list):
        return [clean(item) for item in value]
    if isinstance(value, str):
        text = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in value[: LONGEST + 1])
        return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value if abs(value) <= 1e300 else None
    return value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _fits(value: Any) -> bool:
    """Whether a column may hold `value`."""
    return value is None or _is_number(value)
