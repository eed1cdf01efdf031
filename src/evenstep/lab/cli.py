"""The command line: `evenstep` or `python -m evenstep`; without arguments it runs the demo.

Whatever cannot be done is told in one line on stderr and ends with code 2, also where the system refuses a file (a full
disk, a folder in its place); Ctrl-C ends with 130.
"""

import contextlib
import difflib
import importlib
import io
import os
import re
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Annotated, Any, Union, get_type_hints

from .commands import COMMANDS
from .usage import UsageError, any_terminal, known_name, of_file

EXTRAS = ("tyro", "rich", "matplotlib", "PIL", "numpy", "jinja2", "optuna")
REWORDED = {
    r"^Error parsing (\S+): invalid literal for int\(\) with base 10: ": r"\1 must be a whole number; got ",
    r"^Error parsing (\S+): could not convert string to float: ": r"\1 must be a number; got ",
    r"^Error parsing (\S+): Could not find valid parse for arguments: ": r"\1 cannot be read from ",
    r"^Missing value for argument '(\S+)'\. Expected .*": r"\1 needs a value",
    r"^Missing from evenstep (.*?): (\S+) (.*) \(required\)$": r"\1 needs \2: \3",
}
DEFAULT = "demo"
DESCRIPTION = f"Experiments with evenstep: optimizers in whitened coordinates. Without arguments: the {DEFAULT}."


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what the arguments ask for, and leave with its exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    any_terminal()
    try:
        code = run(given or [DEFAULT])
        sys.stdout.flush()
    except UsageError as error:
        code = _fail(str(error), 2)
    except BrokenPipeError:  # who read what we print has enough of it; nothing is to be flushed there at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    except OSError as error:
        code = _fail(of_file(error), 2)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in EXTRAS:
            raise
        code = _fail(f'{error.name} is not installed; get what the experiments need: pip install "evenstep[lab]"', 1)
    except KeyboardInterrupt:
        code = _fail("stopped", 130)
    sys.exit(code)


def run(arguments: list[str]) -> int:
    """Run the command that the first argument names; the exit code."""
    name, *rest = arguments
    if name in ("-h", "--help"):
        return overview()
    command = _module(known_name(name, COMMANDS, "command"))
    return command.main(parse(name, command.Options, rest))


def overview() -> int:
    """Print what commands there are."""
    import tyro

    named = tuple(Annotated[_module(name).Options, tyro.conf.subcommand(name)] for name in COMMANDS)
    every: Any = Union[named]  # noqa: UP007
    default = _module(DEFAULT).Options()
    return tyro.cli(every, prog="evenstep", description=DESCRIPTION, args=["--help"], default=default)


def parse(name: str, options: type[Any], arguments: list[str]) -> Any:
    """A command's options from its arguments; a UsageError if they cannot be read."""
    import tyro

    with contextlib.redirect_stderr(io.StringIO()) as told:
        try:
            found, unknown = tyro.cli(options, prog=f"evenstep {name}", args=arguments, return_unknown_args=True)
        except SystemExit as stop:
            if not stop.code:
                raise
            unknown = [
                word for word in arguments if word.startswith("--") and word.partition("=")[0] not in flags(options)
            ]
            if not unknown:
                raise UsageError(f"{plain(told.getvalue())}; see evenstep {name} --help") from None
    if unknown:
        near = difflib.get_close_matches(unknown[0].lstrip("-"), [flag.lstrip("-") for flag in flags(options)], n=1)
        hint = f"did you mean --{near[0]}?" if near else f"see evenstep {name} --help"
        raise UsageError(f"{name} does not know {unknown[0]!r}; {hint}")
    return found


def flags(options: type[Any]) -> list[str]:
    """The flags of a command, with their second names."""
    found = ["--help"]
    for name, hint in get_type_hints(options, include_extras=True).items():
        flag = name.replace("_", "-")
        more = [alias for note in getattr(hint, "__metadata__", ()) for alias in getattr(note, "aliases", None) or ()]
        found += [f"--{flag}", *([f"--no-{flag}"] if hint is bool else []), *more]
    return found


def plain(box: str) -> str:
    """What tyro says inside a box, in one line and in our words."""
    rows = [line.strip(" │|") for line in box.strip().splitlines()[1:]]  # the first is a title
    rules = [k for k, row in enumerate(rows) if not row.strip("─-╰╯+ ")]
    while rules and rules[0] == 0:  # where the terminal is not in UTF-8, a rule follows the title
        rows, rules = rows[1:], [k - 1 for k in rules[1:]]
    text = " ".join(" ".join(rows[: rules[0] if rules else None]).split())
    for pattern, words in REWORDED.items():
        text = re.sub(pattern, words, text)
    return text.rstrip(".")


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"evenstep.lab.commands.{name}")


def _fail(message: str, code: int) -> int:
    """Say in one line what is wrong."""
    print("evenstep: " + " ".join(message.split()), file=sys.stderr)
    return code
