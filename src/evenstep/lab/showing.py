"""What a command leaves on the screen when its runs are done: a table of the best, and where the report is."""

from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from . import labels, reading, report, tables
from .comparison import Comparison, comparisons


def conclude(path: Path, console: Console, stopped: bool) -> int:
    """Show and report what the file of records has, also when the user stopped the runs; the exit code."""
    found = reading.Reading()
    if path.exists():
        reading.read_file(path, path.name, found)
    if not found.runs:
        why = "Stopped before the first run was finished" if stopped else "No run is finished"
        console.print(f"{why}: nothing to report.")
        return 130 if stopped else 1
    if stopped:
        console.print("Stopped: this is from the runs that are finished; the same command goes on with the others.")
    for compared in comparisons(found.runs):
        console.print(best(compared))
    console.print(f"Records: {path}", soft_wrap=True, highlight=False, markup=False)
    console.print(f"Report: {report.write(path.parent)}", soft_wrap=True, highlight=False, markup=False)
    return 130 if stopped else 0


def best(compared: Comparison) -> Table:
    """The best stepsize of each method, a row each."""
    shown = tables.tuned(compared)
    result = Table(title=Text(f"{shown.title}: {compared.title}"), title_justify="left", caption=Text(shown.note))
    result.add_column("method", no_wrap=True)
    for heading in shown.columns:
        result.add_column(heading, justify="right")
    for series, cells in zip(compared.series, shown.rows, strict=True):
        result.add_row(Text(labels.series_label(series)), *(Text(cell.text) for cell in cells))
    return result
