"""Records from files of unknown origin: malformed lines are reported, no value is trusted, old names become today's."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Record = dict[str, Any]

FORMAT = 2  # a record says it as `format`; records of version 0.1 do not
COLUMNS = ("train_loss", "test_loss", "test_accuracy", "dead_share", "seconds", "steps")
LONGEST = 1000  # characters of a text


@dataclass
class Reading:
    """Runs of a method at a stepsize, the number of other records by file, and messages about malformed lines."""

    runs: list[Record] = field(default_factory=list)
    others: dict[str, int] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)


def read(path: Path) -> Reading:
    """Every record of a file, or of every *.jsonl file below a folder, in the order of their names."""
    found = Reading()
    for file in [path] if path.is_file() else sorted(path.rglob("*.jsonl")):
        name = path.name if file == path else file.relative_to(path).as_posix()
        try:
            read_file(file, name, found)
        except OSError as error:  # a folder of that name, a broken link, a file without permission
            found.faults.append(clean(f"{name}: cannot be read ({error.strerror or error})"))
    return found


def read_file(path: Path, name: str, found: Reading) -> None:
    """Add the records of a file to `found`; messages call the file `name`."""
    with path.open("rb") as file:
        for number, line in lines(file):
            try:
                record = clean(parse(line))
                if is_run(record):
                    found.runs.append(record)
                else:
                    found.others[name] = found.others.get(name, 0) + 1
            except (ValueError, RecursionError) as error:
                found.faults.append(clean(f"{name}, line {number}: not a record: {error}"))


def lines(file: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
    """The numbered lines of a binary file that are not blank; only a line feed ends a line."""
    return ((number, line) for number, line in enumerate(file, start=1) if line.strip())


def parse(line: bytes) -> Record:
    """The record in a line; a ValueError if it is not UTF-8, not JSON, or has no configuration.

    In records of version 0.1, EvenStep is the method that is called UnitStep today.

    >>> parse(b'{"config": {"method": "evenstep", "name": "then EvenStep"}}')
    {'config': {'method': 'unitstep', 'name': 'then UnitStep'}}
    """
    text = line.decode("utf-8")
    try:
        record = json.loads(text)
        if not isinstance(record, dict) or not isinstance(record.get("config"), dict):
            raise ValueError("no configuration in it")
        if "format" not in record and "study" not in record["config"]:  # scripts' studies use today's names
            record = json.loads(text.replace('"evenstep"', '"unitstep"').replace("EvenStep", "UnitStep"))
    except RecursionError as error:
        raise ValueError(str(error)) from error
    return record


def is_run(record: dict[str, Any]) -> bool:
    """Whether a record is of one method at one stepsize, with a training loss (or null) for each epoch."""
    config, rows = record.get("config"), record.get("metrics")
    if not isinstance(config, dict) or not isinstance(config.get("method"), str):
        return False
    if not _is_number(config.get("lr")) or config["lr"] <= 0 or isinstance(record.get("seed"), dict | list):
        return False
    if not isinstance(config.get("options", {}), dict | None) or not isinstance(rows, list) or not rows:
        return False
    return all(map(_is_row, rows))


def _is_row(row: Any) -> bool:
    """Whether this is an epoch of a run: its columns hold numbers or nothing."""
    if not isinstance(row, dict) or "train_loss" not in row:
        return False
    return all(value is None or _is_number(value) for value in map(row.get, COLUMNS))


def clean(value: Any) -> Any:
    """A value with texts made printable and of bounded length, and numbers that are not finite as None."""
    if isinstance(value, dict):
        return {clean(str(key)): clean(item) for key, item in value.items()}
    if isinstance(value, list):
        return [clean(item) for item in value]
    if isinstance(value, str):
        text = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in value[: LONGEST + 1])
        return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"
    if _is_number(value):
        return value if abs(value) <= 1e300 else None
    return value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
