"""docs/compatibility.md says what the records say, and the records say that all is well."""

import json
from pathlib import Path

from helpers import module_at

ROOT = Path(__file__).parent.parent
compatibility = module_at(ROOT / "scripts" / "compatibility.py")


def test_the_page_is_made_from_the_records():
    records = compatibility.read(ROOT / "results" / "compatibility")
    assert records
    assert (ROOT / "docs" / "compatibility.md").read_text(encoding="utf-8") == compatibility.page(records)
    for record in records.values():
        assert not any(row["failed"] for row in record["rows"])
        assert {row["optimizer"] for row in record["rows"]} <= set(compatibility.COLUMNS)


def test_a_record_that_is_missing_is_named_and_a_cell_counts_and_explains(tmp_path):
    rows = [{"feature": "DDP", "optimizer": "UnitStep", "passed": 2, "failed": 0, "skipped": 0, "reasons": []}]
    (tmp_path / "core.json").write_text(json.dumps({"torch": "2.9", "device": "CPU", "rows": rows}), encoding="utf-8")
    page = compatibility.page(compatibility.read(tmp_path))
    assert "| DDP | 2 |" in page
    assert "## On a GPU\n\nNot recorded: `make compatibility-gpu` has not been run." in page
    cases = {(3, 0): "3", (3, 1): "**1 failed**", (1, 0, "late", "later"): "1 a b", (0, 0, "late"): "a"}
    for (passed, failed, *reasons), expected in cases.items():
        assert compatibility.cell({"passed": passed, "failed": failed, "reasons": reasons}, {}) == expected
