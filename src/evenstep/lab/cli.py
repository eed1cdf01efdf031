"""The command line: `evenstep` or `python -m evenstep`; without arguments it runs the demo.

A request that cannot be carried out is one line on stderr and exit code 2, also where the system refuses a file. Ctrl-C
ends with 130. A command is a module of `commands`: a frozen dataclass `Options`, whose fields are its arguments, and a
function `main(options)` that returns the exit code.
"""

import argparse
import difflib
import importlib
import inspect
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import MISSING, Field, fields
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn, get_args, get_origin, get_type_hints

from .commands import COMMANDS
from .usage import UsageError, any_terminal, known_name, of_file

EXTRAS = ("matplotlib", "PIL", "numpy", "jinja2", "optuna")
DEFAULT = "demo"
KINDS: dict[type, str] = {int: "a whole number", float: "a number"}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command in the arguments, and leave with its exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    any_terminal()
    with suppress(ValueError):  # not the main thread
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # to be terminated is to be stopped by Ctrl-C
    try:
        code = run(words or [DEFAULT])
        sys.stdout.flush()
    except UsageError as error:
        code = _fail(str(error), 2)
    except BrokenPipeError:  # the reader of our output has closed it: Python must not flush into it at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    except OSError as error:
        code = _fail(of_file(error), 2)
    except ModuleNotFoundError as error:
        code = _fail(missing(error), 1)
    except KeyboardInterrupt:
        code = _fail("stopped", 130)
    sys.exit(code)


def run(arguments: list[str]) -> int:
    """Run the command that the first argument names; its exit code."""
    name, *rest = arguments
    if name in ("-h", "--help"):
        print(overview())
        return 0
    command = _module(known_name(name, COMMANDS, "command"))
    return command.main(parse(name, command.Options, rest))


def overview() -> str:
    """All commands, a line each."""
    texts = {name: inspect.getdoc(_module(name).Options) or "" for name in COMMANDS}
    lines = [f"  {name:<10} {' '.join(text.split())}" for name, text in texts.items()]
    head = f"usage: evenstep [{{{','.join(COMMANDS)}}}] [OPTION ...]   (default: {DEFAULT})"
    return "\n".join([head, "", *lines, "", "evenstep COMMAND --help lists the options of a command."])


def missing(error: ModuleNotFoundError) -> str:
    """How to install the missing package; re-raises what is no optional package."""
    if (error.name or "").partition(".")[0] not in EXTRAS:
        raise error
    return f'{error.name} is not installed; install what the experiments need: pip install "evenstep[lab]"'


def parse(name: str, options: type[Any], arguments: list[str]) -> Any:
    """A command's options from its arguments; a UsageError if they are wrong."""
    parser = parser_of(name, options)
    flags = [flag for action in parser._actions for flag in action.option_strings]
    words = [word.partition("=")[0] for word in arguments]
    unknown = [word for word in words if word.startswith("--") and word not in flags]
    found, more = (None, []) if unknown else parser.parse_known_args(arguments)
    if unknown := unknown or more:
        near = difflib.get_close_matches(unknown[0].lstrip("-"), [flag.lstrip("-") for flag in flags], n=1)
        hint = f"did you mean --{near[0]}?" if near else f"see evenstep {name} --help"
        raise UsageError(f"{name} does not know {unknown[0]!r}; {hint}")
    values = {key: tuple(value) if isinstance(value, list) else value for key, value in vars(found).items()}
    return options(**values)


class _Parser(argparse.ArgumentParser):
    """An argument parser whose errors are UsageErrors."""

    def error(self, message: str) -> NoReturn:
        command = self.prog.removeprefix("evenstep ")
        message = message.removeprefix("argument ").replace(": expected one argument", " needs a value")
        message = message.replace("the following arguments are required:", f"{command} needs")
        raise UsageError(f"{message.replace(': must be', ' must be')}; see {self.prog} --help")


def parser_of(name: str, options: type[Any]) -> argparse.ArgumentParser:
    """The parser of a command: an argument for each field of `options`.

    A field is Annotated with its help, then with further flags (--…) and the name of its value in the help, if any. One
    without a default is positional, and so is one with "?", which may be left out; a tuple takes several values.
    """
    parser = _Parser(prog=f"evenstep {name}", description=inspect.getdoc(options), allow_abbrev=False)
    hints = get_type_hints(options, include_extras=True)
    for field in fields(options):
        kind, text, *more = get_args(hints[field.name])
        metavar = next((word for word in more if not word.startswith("-")), None)
        base = next((k for k in (*get_args(kind), kind) if isinstance(k, type) and k is not type(None)), str)
        settings: dict[str, Any] = {"help": _help(field, text), "metavar": metavar, "type": _reader(base)}
        if get_origin(kind) is tuple:
            settings["nargs"] = "*"
        if field.default is MISSING:
            parser.add_argument(field.name, **settings)
            continue
        if kind is bool:
            settings = {"help": settings["help"], "action": "store_true"}
        if "?" in more:
            parser.add_argument(field.name, nargs="?", default=None, **(settings | {"metavar": more[0]}))
            continue
        flags = [f"--{field.name.replace('_', '-')}", *(word for word in more if word.startswith("-"))]
        parser.add_argument(*flags, default=field.default, dest=field.name, **settings)
    return parser


def _help(field: Field, text: str) -> str:
    """The help of a field with its default, if it has one to show."""
    default = " ".join(map(str, field.default)) if isinstance(field.default, tuple) else field.default
    if field.default is MISSING:
        text += " (required)"
    elif field.default not in (None, False, ()):
        text += f" (default: {default})"
    return text.replace("%", "%%")


def _reader(kind: type) -> Callable[[str], Any]:
    """`kind` with an error in plain words."""

    def read(text: str) -> Any:
        try:
            return kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be {KINDS.get(kind, kind.__name__)}; got {text!r}") from None

    return kind if kind is Path else read


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"evenstep.lab.commands.{COMMANDS[name]}")


def _fail(message: str, code: int) -> int:
    """Say in one line what is wrong."""
    print("evenstep: " + " ".join(message.split()), file=sys.stderr)
    return code
