"""`report.html`: one self-contained page from a folder of records, with its figures beside it.

The page opens offline: its styles and figures are inside, and a content policy lets no script run. All text from
records is escaped. The same records give the same page.
"""

import base64
import hashlib
from collections.abc import Iterable
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2

from . import drawing, labels, plots, reading, reproduce, rerun, tables, usage
from .comparison import Comparison, comparisons
from .experiments import EXPERIMENTS
from .summary import diverged

PAGE, FIGURES = "report.html", "figures"
MOST_FAULTS = 20
LARGEST = 4_000_000  # bytes of a figure that is embedded in the page


def write(folder: Path, found: reading.Reading | None = None) -> Path:
    """Write the page and its figures for the records in `folder`; the page's path."""
    found = reading.read(folder) if found is None else found
    compared = comparisons(found.runs)
    (folder / FIGURES).mkdir(exist_ok=True)
    files = [save_figures(c, folder / FIGURES, number) for number, c in enumerate(compared, start=1)]
    path = folder / PAGE
    path.write_text(page(folder, compared, files, found), encoding="utf-8", errors="replace")
    return path


def save_figures(found: Comparison, folder: Path, number: int) -> list[Path]:
    """The figures of a comparison as SVG files."""
    draw = {"loss": plots.loss_curves, "accuracy": plots.accuracy_curves, "stepsizes": plots.sensitivity}
    if found.judged_by == "test_loss":
        draw = {"loss": plots.loss_curves, "held-out": plots.held_out_curves, "stepsizes": plots.sensitivity}
    return [drawing.save(plot(found), folder / f"{number}-{kind}.svg") for kind, plot in draw.items()]


def page(folder: Path, compared: list[Comparison], files: list[list[Path]], found: reading.Reading) -> str:
    """The page's HTML."""
    style = _asset("report.css")
    style_hash = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    reproduced, faults = judged(folder)
    faults += found.faults
    template = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    ).from_string(_asset("report.html.j2"))
    return template.render(
        name=folder.resolve().name,
        style=style,
        policy=f"default-src 'none'; img-src data:; style-src 'sha256-{style_hash}'",
        experiments=reproduced,
        comparisons=[view(c, f) for c, f in zip(compared, files, strict=True)],
        runs=len(found.runs),
        others=found.others,
        faults=faults[:MOST_FAULTS],
        more_faults=max(0, len(faults) - MOST_FAULTS),
    )


def judged(folder: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Each experiment with records in the folder: its name, figure and verdicts; and what could not be judged."""
    found, faults = reproduce.everything(folder)
    shown = []
    for name, records in found.items():
        try:
            verdicts = [(claim, claim.judge(records)) for claim in EXPERIMENTS[name].CLAIMS]
            shown.append({"name": name, "figure": figure(folder / FIGURES / f"{name}.svg"), "verdicts": verdicts})
        except Exception as error:  # numbers from a file may be anything
            faults.append(f"{name} cannot be judged: {usage.first_line(error)}")
    return shown, faults


def figure(path: Path) -> str | None:
    """A figure as a data address; None if there is none."""
    if not path.is_file() or path.stat().st_size > LARGEST:
        return None
    return "data:image/svg+xml;base64," + base64.b64encode(path.read_bytes()).decode()


def view(found: Comparison, files: list[Path]) -> dict[str, Any]:
    """The template's variables of a comparison."""
    return {
        "title": found.title,
        "facts": facts(found),
        "series": [labels.series_label(s) for s in found.series],
        "tables": tables.all_tables(found),
        "loss": labels.LOSSES[found.judged_by],
        "l0": None if found.l0 is None else labels.number(found.l0),
        "target": found.target and labels.number(found.target),
        "figures": [(path.name, figure(path)) for path in files],
        "provenance": provenance(found),
        "commands": _distinct(run.get("command") for run in found.runs) or rerun.commands(found.series),
    }


def facts(found: Comparison) -> list[str]:
    """The shared setting of a comparison's runs, in a few words each."""
    config, lost = found.runs[0]["config"], sum(diverged(run, found.l0) for run in found.runs)
    options = config.get("model_options")
    words = [
        f"{config['epochs'] * config['steps']:,} steps" if "steps" in config else _count(config.get("epochs"), "epoch"),
        f"batch {config['batch_size']}" if config.get("batch_size") else "",
        " and ".join(labels.augmentations(config.get("augment"))),
        ("linear decay" if config["decay_lr"] else "constant stepsize") if "decay_lr" in config else "",
        f"network: {labels.options_label(options) if isinstance(options, dict) else options}" if options else "",
        _count(len(found.runs), "run") + (f", {lost} diverged" if lost else ""),
    ]
    return [word for word in words if word]


def provenance(found: Comparison) -> list[tuple[str, list[str]]]:
    """Device, versions, commits, seeds and times of the runs."""
    machines = [run["environment"] if isinstance(run.get("environment"), dict) else {} for run in found.runs]
    times = sorted(str(run["time"]) for run in found.runs if run.get("time"))
    rows = [
        ("Device", _distinct(m.get("device") for m in machines)),
        ("torch, Python", _distinct(f"{m['torch']}, {m.get('python', '?')}" for m in machines if m.get("torch"))),
        ("Threads", _distinct(m.get("threads") for m in machines)),
        ("Commit", _distinct(run.get("commit") for run in found.runs)),
        ("Seeds", [", ".join(_distinct(run.get("seed") for run in found.runs))]),
        ("Recorded", [times[0] if times[0] == times[-1] else f"{times[0]} to {times[-1]}"] if times else []),
    ]
    return [(name, values) for name, values in rows if any(values)]


def _distinct(values: Iterable[Any]) -> list[str]:
    """Each value once, as text, in order of appearance, without None."""
    return list(dict.fromkeys(str(value) for value in values if value is not None))


def _count(number: Any, noun: str) -> str:
    return "" if number is None else f"{number} {noun}{'' if number == 1 else 's'}"


def _asset(name: str) -> str:
    return resources.files("evenstep.lab").joinpath("assets", name).read_text(encoding="utf-8")
