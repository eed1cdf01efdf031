"""Verdicts on the paper's claims, kept in a file beside the records so that a report can show them."""

import base64
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from .reading import clean
from .records import Record

FILE = "verdicts.json"
WORDS = {True: "held", False: "did not hold", None: "undecided"}
LARGEST = 4_000_000  # bytes of a figure that is embedded in a page


@dataclass(frozen=True)
class Verdict:
    """One claim of the paper: its section and words, whether it held here (None: undecided), and the numbers."""

    experiment: str
    section: str
    claim: str
    held: bool | None
    text: str

    @property
    def word(self) -> str:
        """Whether it held, for readers."""
        return WORDS[self.held]


def judge(name: str, experiment: ModuleType, records: list[Record]) -> list[Verdict]:
    """The verdicts on all claims of an experiment."""
    return [Verdict(name, c.section, c.text, *c.judge(records)) for c in experiment.CLAIMS]


def write(folder: Path, found: Sequence[Verdict]) -> None:
    """Write the verdicts into the folder."""
    (folder / FILE).write_text(json.dumps([asdict(v) for v in found], indent=1) + "\n", encoding="utf-8")


def read(folder: Path) -> list[Verdict]:
    """The verdicts in the folder; none if the file is missing or damaged."""
    return _read(folder / FILE) or []


def faults(folder: Path) -> list[str]:
    """A line about a file that holds something else."""
    return [f"{FILE}: not a list of verdicts"] if _read(folder / FILE) is None else []


def by_experiment(folder: Path) -> list[dict[str, Any]]:
    """Each experiment with verdicts: its name, its figure and its verdicts, for the page's template."""
    found = read(folder)
    names = dict.fromkeys(v.experiment for v in found)
    return [
        {"name": name, "figure": figure(folder, name), "verdicts": [v for v in found if v.experiment == name]}
        for name in names
    ]


def _read(path: Path) -> list[Verdict] | None:
    """The verdicts in a file, none if it is missing; None if it holds something else."""
    try:
        rows = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
        found = [Verdict(**clean(row)) for row in rows]
    except (ValueError, TypeError, OSError, RecursionError):
        return None
    return found if all(map(_proper, found)) else None


def _proper(verdict: Verdict) -> bool:
    """Whether the fields of a verdict from a file have their types."""
    texts = (verdict.experiment, verdict.section, verdict.claim, verdict.text)
    return all(isinstance(text, str) for text in texts) and isinstance(verdict.held, bool | None)


def figure(folder: Path, experiment: str) -> str | None:
    """The experiment's figure as a data address; None if there is none."""
    path = folder / "figures" / f"{Path(experiment).name}.svg"
    if not path.is_file() or path.stat().st_size > LARGEST:
        return None
    return "data:image/svg+xml;base64," + base64.b64encode(path.read_bytes()).decode()
