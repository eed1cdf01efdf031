"""`evenstep report`: one page from the records of a folder."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from .. import usage


@dataclass(frozen=True)
class Options:
    """Write report.html, one page that opens offline, and plain SVG figures from the records in a folder."""

    folder: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="FOLDER")]
    """Folder with *.jsonl records; the report is written there."""
    tensorboard: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """Also write every run's curves there for TensorBoard."""


def main(options: Options) -> int:
    """Write the report; lines that are no records are told on stderr; the exit code."""
    import sys

    from .. import reading, report

    folder = options.folder
    if not folder.is_dir():
        raise usage.UsageError(f"{folder} is not a folder; give one with *.jsonl records, such as runs/demo")
    found = reading.read(folder)
    if not (found.runs or found.others or found.faults):
        raise usage.UsageError(
            f"{folder} has no *.jsonl records; run evenstep demo or evenstep sweep --out {folder} first"
        )
    usage.writable_folder(folder)
    for fault in found.faults:
        print(f"evenstep: {fault}", file=sys.stderr)
    if options.tensorboard is not None:
        from .. import tensorboard

        tensorboard.export(found.runs, usage.writable_folder(options.tensorboard, "--tensorboard"))
        print(f"For TensorBoard: {options.tensorboard}")
    print(f"Report: {report.write(folder, found)}")
    return 0
