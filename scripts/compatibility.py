"""Write docs/compatibility.md from the records of tests that ran, results/compatibility/*.json.

`make compatibility` runs the tests and then this. A record is what `pytest --features FILE` writes.
"""

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
COLUMNS = {
    "EvenStep": "`EvenStep`",
    "Whitened(SGD)": "`Whitened` SGD",
    "Whitened(AdamW)": "`Whitened` AdamW",
    "Whitened(Muon)": "`Whitened` Muon",
    "WhitenedSGD": "`WhitenedSGD`",
    "CanonicalSGD": "`CanonicalSGD`",
    "FanInSGD": "`FanInSGD`",
    "BlockNaturalSGD": "`BlockNaturalSGD`",
}
HEAD = """# What works with what

Made by `make compatibility` from tests that ran: a cell counts the tests that passed for a feature with an optimizer. A
letter stands for tests that were skipped, and why; an empty cell has no test of its own."""


def page(records: dict[str, dict[str, Any]]) -> str:
    """The whole page: a table per record, reasons below."""
    reasons: dict[str, str] = {}
    parts = [HEAD]
    for name, record in records.items():
        parts.append(f"## {name.capitalize()}\n\ntorch {record['torch']}, {record['device']}")
        parts.append(table(record["rows"], reasons))
    parts.append("\n".join(f"- {letter}: {reason}" for reason, letter in reasons.items()))
    return "\n\n".join(parts).rstrip("\n") + "\n"


def table(rows: list[dict[str, Any]], reasons: dict[str, str]) -> str:
    """Features down, optimizers across."""
    cells = {(row["feature"], row["optimizer"]): cell(row, reasons) for row in rows}
    features = dict.fromkeys(row["feature"] for row in rows)
    lines = [["feature", *COLUMNS.values()], ["---"] * (len(COLUMNS) + 1)]
    lines += [[feature, *(cells.get((feature, name), "") for name in COLUMNS)] for feature in features]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def cell(row: dict[str, Any], reasons: dict[str, str]) -> str:
    """How many passed; what failed comes first."""
    if row["failed"]:
        return f"**{row['failed']} failed**"
    letters = " ".join(reasons.setdefault(reason, chr(ord("a") + len(reasons))) for reason in row["reasons"])
    return " ".join(part for part in (str(row["passed"] or ""), letters) if part)


def read(folder: Path) -> dict[str, dict[str, Any]]:
    """The records by name, core first."""
    paths = sorted(folder.glob("*.json"), key=lambda path: (path.stem != "core", path.stem))
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in paths}


if __name__ == "__main__":
    (ROOT / "docs" / "compatibility.md").write_text(page(read(ROOT / "results" / "compatibility")), encoding="utf-8")
