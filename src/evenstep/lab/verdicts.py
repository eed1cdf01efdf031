"""What came of the paper's claims, kept in a file beside the records so that a report can show it."""

import base64
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType

from .reading import clean
from .records import Record

FILE = "verdicts.json"
WORDS = {True: "held", False: "did not hold", None: "undecided"}
LARGEST = 4_000_000  # bytes of a figure that a page takes in


@dataclass(frozen=True)
class Verdict:
    """One claim: where the paper makes it, what it says, whether it held here (None: cannot be said), what came out."""

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
    """Keep the verdicts in the folder."""
    (folder / FILE).write_text(json.dumps([asdict(v) for v in found], indent=1) + "\n", encoding="utf-8")


def read(folder: Path) -> list[Verdict]:
    """The verdicts kept in the folder; none where the file is missing or holds something else."""
    return _read(folder / FILE) or []


def faults(folder: Path) -> list[str]:
    """What there is to say of a file that holds something else."""
    return [f"{FILE}: not a list of verdicts"] if _read(folder / FILE) is None else []


def _read(path: Path) -> list[Verdict] | None:
    """The verdicts in a file, none where it is missing; None if it holds something else."""
    try:
        rows = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
        found = [Verdict(**clean(row)) for row in rows]
    except (ValueError, TypeError, OSError, RecursionError):
        return None
    return found if all(map(_proper, found)) else None


def _proper(verdict: Verdict) -> bool:
    """Whether a verdict from a file has the types it should."""
    texts = (verdict.experiment, verdict.section, verdict.claim, verdict.text)
    return all(isinstance(text, str) for text in texts) and isinstance(verdict.held, bool | None)


def figure(folder: Path, experiment: str) -> str | None:
    """The experiment's figure as an address that holds all of it; None if there is none."""
    path = folder / "figures" / f"{Path(experiment).name}.svg"
    if not path.is_file() or path.stat().st_size > LARGEST:
        return None
    return "data:image/svg+xml;base64," + base64.b64encode(path.read_bytes()).decode()
