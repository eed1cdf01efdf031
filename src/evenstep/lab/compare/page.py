"""The verdict page, made from records alone."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .. import usage
from .formatting import NOTHING, difference, number, scale, spread, table
from .jobs import of_race
from .methods import METHODS
from .protocol import FACTOR, JUDGING, Pair, results
from .scores import verdict
from .tasks import RACE
from .verdicts import DEFAULT, Verdicts

COMMAND = "evenstep compare --data DIR --out FILE"
FIGURE = "comparison.svg"
AHEAD = ("adamw", "muon", "muon-conv", "normuon", "soap")


def write(path: Path, records: Sequence[dict[str, Any]], files: Sequence[Path]) -> Path:
    """Write the page, and its figure into figures/ beside it; the path."""
    names = dict.fromkeys((job.task, job.method.partition(",")[0]) for job in of_race(records))
    pairs: list[Pair] = [(task, method) for task in RACE for method in METHODS if (task, method) in names]
    if not pairs:
        raise usage.UsageError("--table: these records name no task and method of the race as it is today")
    found = Verdicts(results(records, pairs))
    usage.writable_folder(path.parent / "figures", "--page")
    path.write_text(text(found, records, files), encoding="utf-8")
    if len(found.common) > 1:
        draw(found, path.parent / "figures" / FIGURE)
    return path


def text(found: Verdicts, records: Sequence[dict[str, Any]], files: Sequence[Path]) -> str:
    """The page."""
    devices = sorted({r["environment"]["device"] for r in records if "environment" in r})
    commits = sorted({str(r.get("commit"))[:12] for r in records})
    made = f"evenstep compare --table {' '.join(file.as_posix() for file in files)}"
    parts = [
        "# Which optimizer is best, and which is easy to tune",
        f"Made by `{made}` from {len(records)} records of `{COMMAND}` ({', '.join(devices)}; commit "
        f"{', '.join(commits)}). [compare.md](compare.md) has the protocol, the tasks and the methods.",
        *goals(found),
        "## Held out",
        "On the test split, at the stepsize that the validation split chose (`EvenStep`, default: at its untouched "
        f"default): mean ± standard error of {len(JUDGING)} seeds. Accuracy in per cent, or loss (↓). Best in bold. "
        "EvenStep's rule was designed on the tasks with *, and on others like those with °.",
        held_out(found, found.common),
        "Ahead by, paired by seed: `EvenStep` at its default less each rival at its chosen stepsize. Bold: ahead by "
        "more than one standard error.",
        ahead(found, [name for name in AHEAD if name in found.methods]),
        f"`{made}`",
    ]
    if others := [name for name in found.tuned if name not in found.common]:
        tasks = [task for task in found.tasks if any((task, name) in found.results for name in others)]
        parts += ["Methods that run on some tasks:", held_out(found, others, tasks), f"`{made}`"]
    if rows := own_settings(found):
        parts += ["Rivals at the settings that their authors recommend:", table(["task", "setting", "held out"], rows)]
    if len(found.common) > 1:
        parts += [
            "## Over all tasks",
            f"![Performance profile](figures/{FIGURE})",
            "The share of tasks on which a method's loss or share of wrong answers is within a factor of the best.",
            f"`{made}`",
        ]
    parts += [
        "## Easy to tune",
        "Decades of stepsizes within 5 % (1 %) of a method's own best on the validation split, one seed; > where the "
        "grid ended first.",
        widths(found),
        "Over its tasks: how often the usual lr is within 1 % of the best; how many runs of the grid diverged; and the "
        "expected best of k of the five stepsizes drawn at random, as loss or share of wrong answers over that of the "
        "best (geometric mean).",
        ease(found),
        f"`{made}`",
        "## Seconds",
        "Seconds to the target (steps): the validation metric that tuned AdamW ends with, at its worst seed. Mean of "
        "the seeds' steps, ∞ if one misses it, times the seconds of a step that is alone on the device.",
        seconds(found),
        "Milliseconds of a step, batch included (memory beyond data in MiB):",
        costs(found),
        f"`{made}`",
        "## Where EvenStep loses",
        "Tuned rivals that are ahead of `EvenStep` at its default by more than one standard error. "
        "[research-log.md](research-log.md) has what is known of the reasons.",
        losses(found),
    ]
    if found.errors:
        parts += ["## What could not be run", "\n".join(f"- {t}, {m}: {why}" for (t, m), why in found.errors.items())]
    if widened := found.widened():
        lines = [f"- {t}, {m}: {', '.join(f'{lr:g}' for lr in rates)}" for (t, m), rates in widened.items()]
        parts += ["## Widened grids", f"Stepsizes beyond the five, in steps of {FACTOR:g}:", "\n".join(lines)]
    return "\n\n".join(part for part in parts if part) + "\n"


def goals(found: Verdicts) -> list[str]:
    """What the race was held for, each as a count."""
    lines = [
        (f"at its default ahead of tuned {label(name)}", found.ahead_of(name, default=True), aim)
        for name, aim in (("adamw", 10), ("muon", 8), ("muon-conv", None), ("normuon", 8))
    ]
    lines += [
        ("tuned, first or within one standard error of the first", found.first(), 9),
        ("at its default within 1 % of its own best", found.near_best(), 10),
        ("wider (5 %) than every rival", found.widest(), 9),
        ("fewer seconds to the target than Muon", found.faster_than("muon"), 8),
        ("fewer seconds to the target than SOAP", found.faster_than("soap"), 8),
    ]
    rows = [
        [what, f"{sum(outcomes)} of {len(outcomes)}", NOTHING if aim is None else f"{aim} of {len(RACE)}"]
        for what, outcomes, aim in lines
        if outcomes
    ]
    return ["`EvenStep` on how many tasks:", table(["", "found", "goal"], rows)] if rows else []


def label(name: str) -> str:
    """A method's name for people."""
    return "EvenStep, default" if name == DEFAULT else METHODS[name].label


def title(task: str) -> str:
    """A task with its marks."""
    seen = RACE[task].seen
    return task + (" *" if seen.startswith("this") else " °" if seen else "") + ("" if RACE[task].higher else " ↓")


Cell = Callable[[str, str], str]


def by_task(methods: Sequence[str], tasks: Sequence[str], cell: Cell) -> str:
    """Tasks x methods."""
    rows = [[title(task), *(cell(task, name) for name in methods)] for task in tasks]
    return table(["task", *map(label, methods)], rows)


def held_out(found: Verdicts, methods: Sequence[str], tasks: Sequence[str] = ()) -> str:
    """The test metric; the best of a row in bold."""

    def cell(task: str, name: str) -> str:
        if (task, name) in found.errors:
            return "failed"
        shown = spread(list(found.values(task, name).values()), RACE[task].higher)
        return f"**{shown}**" if name == found.best_of_row(task, methods) else shown

    return by_task(methods, tasks or found.tasks, cell)


def ahead(found: Verdicts, rivals: Sequence[str]) -> str:
    """Paired differences of EvenStep at its default to tuned rivals."""

    def cell(task: str, name: str) -> str:
        value, error, _ = found.ahead(task, DEFAULT, name)
        shown = difference(value, error, RACE[task].higher)
        return f"**{shown}**" if verdict(value, error) == "ahead" else shown

    return by_task(rivals, found.tasks, cell)


def own_settings(found: Verdicts) -> list[list[str]]:
    """Rows of what authors recommend, where that was judged."""
    rows = []
    for (task, _), own in found.results.items():
        for method, lr in own.judged:
            if "," in method:
                failed = any("error" in metrics for metrics in own.judged[method, lr].values())
                shown = "failed" if failed else spread(list(own.seeds(method, lr).values()), RACE[task].higher)
                rows.append([title(task), f"{method}, lr {lr:g}", shown])
    return rows


def widths(found: Verdicts) -> str:
    """Decades within 5 % and 1 % of the best."""

    def cell(task: str, name: str) -> str:
        five, one = (found.width(task, name, tolerance) for tolerance in (0.05, 0.01))
        return f"{'>' * five.open}{five.decades:.2f} ({one.decades:.2f})" if five and one else NOTHING

    return by_task(found.tuned, found.tasks, cell)


def ease(found: Verdicts) -> str:
    """Methods with what tuning them takes."""
    rows = []
    for name in found.tuned:
        near, (lost, runs) = found.near_best(name), found.divergence(name)
        best_of = [number(found.best_of(name, k)) for k in (1, 2, 4)]
        rows.append([label(name), f"{sum(near)} of {len(near)}", f"{lost} of {runs}", *best_of])
    return table(["method", "usual lr within 1 %", "diverged", "best of 1", "of 2", "of 4"], rows)


def seconds(found: Verdicts) -> str:
    """Tasks x methods: seconds to the target."""
    rows = []
    for task in found.tasks:
        times = {name: found.time(task, name) for name in found.common}
        best = min((t for t, _ in times.values() if math.isfinite(t)), default=None)
        cells = [number(t) + (f" ({steps:.0f})" if math.isfinite(steps) else "") for t, steps in times.values()]
        bold = [f"**{cell}**" if t == best else cell for cell, (t, _) in zip(cells, times.values(), strict=True)]
        target, (factor, digits) = found.target(task), scale(RACE[task].higher)
        goal = NOTHING if target is None else f"{target * factor:.{digits}f}"
        rows.append([title(task), goal, *bold])
    return table(["task", "target", *map(label, found.common)], rows)


def costs(found: Verdicts) -> str:
    """Milliseconds of a step, and memory."""

    def cell(task: str, name: str) -> str:
        own = found.results.get((task, name))
        measured = own.timed if own else {}
        memory = f" ({measured['memory'] / 2**20:.0f})" if measured.get("memory") else ""
        per_step = measured.get("seconds_per_step")
        return number(1000 * per_step) + memory if per_step else NOTHING

    return by_task(found.tuned, found.tasks, cell)


def losses(found: Verdicts) -> str:
    """Tuned rivals that are ahead of EvenStep at its default by more than a standard error."""
    lines = []
    for task in found.tasks:
        for name in found.tuned:
            if METHODS[name].rival:
                value, error, _ = found.ahead(task, DEFAULT, name)
                if verdict(value, error) == "behind":
                    lines.append(f"- {title(task)}: {label(name)}, by {difference(-value, error, RACE[task].higher)}")
    return "\n".join(lines) or "None."


def draw(found: Verdicts, path: Path) -> None:
    """The performance profile as SVG."""
    from .. import drawing

    figure, (axes,) = drawing.panels(1, width=6.4)
    profiles, widest = found.profile(), 1.5
    for k, (name, ratios) in enumerate(profiles.items()):
        inside = [ratio for ratio in ratios if ratio <= widest]
        shares = [(i + 1) / len(ratios) for i in range(len(inside))]
        begin = [1.0, *inside, widest], [0.0, *shares, shares[-1] if shares else 0.0]
        axes.step(*begin, where="post", color=drawing.COLOURS[k % len(drawing.COLOURS)], label=label(name))
    axes.set_xlim(1, widest)
    axes.set_ylim(0, 1.02)
    axes.set_xlabel("held-out loss or error over the best method's")
    axes.set_ylabel("share of tasks")
    drawing.legend(axes)
    drawing.save(figure, path)
