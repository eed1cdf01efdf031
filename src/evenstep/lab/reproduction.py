"""docs/reproduction.md, its details and figures, from records alone: every claim of the paper, and whether it held.

python -m evenstep.lab.reproduction results/reproduction docs
"""

import sys
from pathlib import Path
from types import ModuleType

from .experiments import EXPERIMENTS
from .experiments.session import QUICK_IMAGES, kept
from .labels import markdown_table
from .reading import Record
from .usage import UsageError, writable_folder

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
DETAILS = """# The reproduction in detail

Settings, figures and numbers of the experiments behind [the verdicts](reproduction.md), from the same records.

"""
COMMAND = """[reproduction-details.md](reproduction-details.md) has settings, figures and numbers. Commands in full:
`python -m evenstep.lab.reproduce NAME --data DIR --device cuda --out {source}`.
"""


def write(source: Path, target: Path, found: dict[str, list[Record]] | None = None) -> list[Path]:
    """Write the pages `target`/reproduction.md and reproduction-details.md, and their figures; the files written.

    They are made from the records in `source`, or from `found`, those of each experiment, if those have been read.
    """
    from . import drawing

    if found is None:
        found = {name: records for name in EXPERIMENTS if (records := kept(name, source))}
    if not found:
        raise UsageError(f"{source}: no records of {', '.join(EXPERIMENTS)} there; run evenstep.lab.reproduce first")
    figures = writable_folder(target / "figures")
    files = [target / "reproduction.md", target / "reproduction-details.md"]
    for name, records in found.items():
        files.append(figures / f"{name}.svg")
        drawing.save(EXPERIMENTS[name].plot(records), files[-1], outlines=False)
    files[0].write_text(page(found, source, target), encoding="utf-8")
    files[1].write_text(details(found), encoding="utf-8")
    return files


def page(found: dict[str, list[Record]], source: Path, target: Path) -> str:
    """The claims of the paper, judged."""
    claims = [["where", "the paper claims", "", "what came out", "command"]]
    for name, records in found.items():
        for claim in EXPERIMENTS[name].CLAIMS:
            verdict = claim.judge(records)
            word = verdict.word if verdict.held is None else f"**{verdict.word}**"
            claims.append([claim.section, claim.text, word, verdict.text, f"`reproduce {name}`"])
    missing = [name for name in EXPERIMENTS if name not in found]
    parts = [head(found, source, target), markdown_table(claims) + "\n"]
    parts += [f"Not run yet: {', '.join(missing)}.\n"] if missing else []
    return "\n".join([*parts, COMMAND.format(source=source)])


def details(found: dict[str, list[Record]]) -> str:
    """How each experiment was run, with its figure and numbers."""
    return DETAILS + "\n".join(section(name, EXPERIMENTS[name], records) for name, records in found.items())


def head(found: dict[str, list[Record]], source: Path, target: Path) -> str:
    """The introduction: the source of the page, devices, versions, data."""
    everything = [record for records in found.values() for record in records]
    data, devices, torch = (
        "; ".join(sorted(set(values)))
        for values in (
            (r["config"]["data"] for r in everything if "data" in r["config"]),
            (r["environment"]["device"] for r in everything),
            (r["environment"]["torch"] for r in everything),
        )
    )
    text = HEAD + QUICK if f"{QUICK_IMAGES:,} of" in data else HEAD
    return text.format(source=source, target=target, devices=devices, torch=torch, data=f", on {data}" if data else "")


def section(name: str, experiment: ModuleType, records: list[Record]) -> str:
    """One experiment: how it was run, its figure, its numbers."""
    title = (experiment.__doc__ or name).splitlines()[0].rstrip(".")
    commits = sorted({r["commit"] or "unknown" for r in records})
    return "\n".join([
        f"## {title}\n",
        f"{experiment.SETTING}\n",
        f"![{title}](figures/{name}.svg)\n",
        markdown_table(experiment.table(records)) + "\n",
        f"{len(records)} records, commit {', '.join(c[:12] for c in commits)}.\n",
    ])  # fmt: skip


if __name__ == "__main__":
    source, target = map(Path, sys.argv[1:])
    print(*write(source, target), sep="\n")
