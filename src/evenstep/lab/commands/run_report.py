"""`evenstep report`: one page from the records of a folder."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from .. import usage


@dataclass(frozen=True)
class Options:
    """Write report.html, one page that opens offline, and plain SVG figures from the records in a folder."""

    folder: Annotated[Path, "Folder with *.jsonl records; with --markdown also a single file.", "FOLDER"]
    markdown: Annotated[bool, "Write nothing: print the tables of every comparison as Markdown."] = False


def main(options: Options) -> int:
    """Write the report, or print its tables; malformed lines are named on stderr; the exit code."""
    from .. import reading

    folder = options.folder
    if not (folder.is_dir() or (options.markdown and folder.is_file())):
        raise usage.UsageError(f"{folder} is not a folder; give one with *.jsonl records, such as runs/demo")
    found = reading.read(folder)
    if not (found.runs or found.others or found.faults):
        raise usage.UsageError(
            f"{folder} has no *.jsonl records; run evenstep demo or evenstep sweep --out {folder} first"
        )
    for fault in found.faults:
        print(f"evenstep: {fault}", file=sys.stderr)
    if options.markdown:
        from .. import comparison, tables

        print("\n\n".join(map(tables.markdown, comparison.comparisons(found.runs))))
        return 0
    usage.writable_folder(folder)
    from .. import report

    print(f"Report: {report.write(folder, found)}")
    return 0
