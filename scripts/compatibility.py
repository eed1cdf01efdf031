"""Write docs/compatibility.md from the records of tests that ran, results/compatibility/*.json.

`make compatibility` runs the tests and then this, `make compatibility-gpu` those that need a GPU. A record is what
`pytest --features FILE` writes.
"""

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
COLUMNS = {
    "EvenStep": "`EvenStep`",
    "UnitStep": "`UnitStep`",
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
SECTIONS = {
    "core": ("Core", "make compatibility"),
    "integrations": ("Trainers and libraries", "make compatibility"),
    "gpu": ("On a GPU", "make compatibility-gpu"),
}


def page(records: dict[str, dict[str, Any]]) -> str:
    """The whole page: a table per record, or a word where there is none; reasons below."""
    reasons: dict[str, str] = {}
    parts = [HEAD]
    for name, (title, command) in SECTIONS.items():
        if name in records:
            record = records[name]
            parts.append(f"## {title}\n\ntorch {record['torch']}, {record['device']} (`{command}`)")
            parts.append(table(record["rows"], reasons))
        else:
            parts.append(f"## {title}\n\nNot recorded: `{command}` has not been run.")
    if reasons:
        parts.append("## Skipped, and why\n\n" + "\n".join(f"- {why[1]}: {why[0]}" for why in reasons.items()))
    return "\n\n".join(parts).rstrip("\n") + "\n"


def table(rows: list[dict[str, Any]], reasons: dict[str, str]) -> str:
    """Features down, optimizers across: those that the record has."""
    columns = {name: title for name, title in COLUMNS.items() if any(row["optimizer"] == name for row in rows)}
    cells = {(row["feature"], row["optimizer"]): cell(row, reasons) for row in rows}
    features = dict.fromkeys(row["feature"] for row in rows)
    lines = [["feature", *columns.values()], ["---"] * (len(columns) + 1)]
    lines += [[feature, *(cells.get((feature, name), "") for name in columns)] for feature in features]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def cell(row: dict[str, Any], reasons: dict[str, str]) -> str:
    """How many passed; what failed comes first."""
    if row["failed"]:
        return f"**{row['failed']} failed**"
    letters = " ".join(reasons.setdefault(reason, chr(ord("a") + len(reasons))) for reason in row["reasons"])
    return " ".join(part for part in (str(row["passed"] or ""), letters) if part)


def read(folder: Path) -> dict[str, dict[str, Any]]:
    """The records that are there, by the name of their section."""
    paths = {name: folder / f"{name}.json" for name in SECTIONS}
    return {name: json.loads(path.read_text(encoding="utf-8")) for name, path in paths.items() if path.exists()}


if __name__ == "__main__":
    (ROOT / "docs" / "compatibility.md").write_text(page(read(ROOT / "results" / "compatibility")), encoding="utf-8")
