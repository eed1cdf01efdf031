"""docs/reproduction.md and its figures, from records alone: every claim of the paper, and whether it held.

python -m evenstep.lab.reproduction results/reproduction docs
"""

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType

from .experiments import EXPERIMENTS
from .experiments.session import QUICK_IMAGES, kept
from .records import Record
from .usage import UsageError, of_file, writable_folder

HEAD = """# The paper, reproduced

What "Diagonal Rescaling For Neural Networks" claims and what came out here. This page is made from the records in
`{source}` by `python -m evenstep.lab.reproduction {source} {target}`; nothing on it is written by hand. Losses are
means ± standard deviations over seeds at the best stepsize of a grid, which the first seed picked. "Held" means: for
every seed. "Undecided": the seeds overlap, or it was not measured.

Made on {devices}, with torch {torch}{data}.
"""
QUICK = """
**Quick runs**: they show that everything runs, and nothing else. The settings named below are those of full runs.
"""
COMMAND = """Commands in full: `python -m evenstep.lab.reproduce NAME --data DIR --device cuda --out {source}`.
"""
WORDS = {True: "**held**", False: "**did not hold**", None: "undecided"}


def write(source: Path, target: Path, names: Iterable[str] = tuple(EXPERIMENTS)) -> list[Path]:
    """Write the page `target`/reproduction.md and its figures from the records in `source`; the files written.

    The page shows those of the experiments `names` that have records.
    """
    from . import drawing

    found = {name: kept(name, source) for name in names}
    found = {name: records for name, records in found.items() if records}
    if not found:
        raise UsageError(f"{source}: no records of {', '.join(EXPERIMENTS)} there; run evenstep.lab.reproduce first")
    figures = writable_folder(target / "figures")
    files = [target / "reproduction.md"]
    for name, records in found.items():
        files.append(figures / f"{name}.svg")
        drawing.save(EXPERIMENTS[name].plot(records), files[-1], outlines=False)
    files[0].write_text(page(found, source, target), encoding="utf-8")
    return files


def page(found: dict[str, list[Record]], source: Path, target: Path) -> str:
    """The whole page."""
    claims = [["where", "the paper claims", "", "what came out", "command"]]
    for name, records in found.items():
        for claim in EXPERIMENTS[name].CLAIMS:
            held, text = claim.judge(records)
            claims.append([claim.section, claim.text, WORDS[held], text, f"`reproduce {name}`"])
    missing = [name for name in EXPERIMENTS if name not in found]
    parts = [head(found, source, target), markdown(claims)]
    parts += [f"Not run yet: {', '.join(missing)}.\n"] if missing else []
    parts += [COMMAND.format(source=source)]
    parts += [section(name, EXPERIMENTS[name], records) for name, records in found.items()]
    return "\n".join(parts)


def head(found: dict[str, list[Record]], source: Path, target: Path) -> str:
    """The introduction: the source of the page, devices, versions, data."""
    everything = [record for records in found.values() for record in records]
    data = listed(r["config"]["data"] for r in everything if "data" in r["config"])
    return (HEAD + QUICK if f"{QUICK_IMAGES:,} of" in data else HEAD).format(
        source=source,
        target=target,
        devices=listed(r["environment"]["device"] for r in everything),
        torch=listed(r["environment"]["torch"] for r in everything),
        data=f", on {data}" if data else "",
    )


def listed(values: Iterable[str]) -> str:
    """Each value once, in order."""
    return "; ".join(sorted(set(values)))


def section(name: str, experiment: ModuleType, records: list[Record]) -> str:
    """One experiment: how it was run, its figure, its numbers."""
    title = (experiment.__doc__ or name).splitlines()[0].rstrip(".")
    commits = sorted({r["commit"] or "unknown" for r in records})
    return "\n".join([
        f"## {title}\n",
        f"{experiment.SETTING}\n",
        f"![{title}](figures/{name}.svg)\n",
        markdown(experiment.table(records)),
        f"{len(records)} records, commit {', '.join(c[:12] for c in commits)}.\n",
    ])  # fmt: skip


def markdown(rows: list[list[str]]) -> str:
    """A table with the first row as its head."""
    first, *rest = [[cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows]
    lines = [first, ["---"] * len(first), *rest]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="folder of records: the --out of reproduce")
    parser.add_argument("target", type=Path, help="folder for reproduction.md and figures/")
    options = parser.parse_args(arguments)
    try:
        files = write(options.source, options.target)
    except (UsageError, OSError) as error:
        print(f"reproduction: {of_file(error) if isinstance(error, OSError) else error}", file=sys.stderr)
        return 2
    print("\n".join(map(str, files)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
