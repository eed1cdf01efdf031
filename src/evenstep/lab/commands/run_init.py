"""`evenstep init`: a commented file with a network and data, to change into yours."""

from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Annotated

from .. import usage

KINDS = ("images", "text", "tables")


@dataclass(frozen=True)
class Options:
    """Write a commented file with model() and batches(train) for images, text or tables, which sweep and tune take."""

    kind: Annotated[str | None, f"What the data are: {', '.join(KINDS)} (default: images).", "KIND", "?"] = None
    out: Annotated[Path, "The file to write."] = Path("my.py")


def main(options: Options) -> int:
    """Write the file, unless there is one, and say what to do with it; the exit code."""
    kind, path = usage.known_name(options.kind or "images", KINDS, "kind of data"), options.out
    if path.suffix != ".py":
        raise usage.UsageError(f"--out {path} should be a Python file, such as my.py")
    text = resources.files("evenstep.lab").joinpath("assets", "init", f"{kind}.py").read_text(encoding="utf-8")
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text.replace("FILE", path.name))
    except FileExistsError:
        raise usage.UsageError(f"{path} is there already, and stays as it is; choose another --out") from None
    print(
        f"Wrote {path}: a network and {kind} that train as they are. Change them into yours, then\n\n"
        f"    evenstep doctor {path}             what EvenStep does with your network, and its cost\n"
        f"    evenstep tune {path} --minutes 5   the lr for it\n"
        f"    evenstep sweep {path} --methods EvenStep AdamW"
    )
    return 0
