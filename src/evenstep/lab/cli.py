"""The command line: `evenstep` or `python -m evenstep`; without arguments it runs the demo."""

import sys
from collections.abc import Sequence

EXTRAS = ("tyro", "rich", "matplotlib", "PIL", "numpy", "jinja2")


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line and run it; leave with 2 and one line if something asked for cannot be done."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        code = _run(given or ["demo"])
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in EXTRAS:
            raise
        code = _fail(f'{error.name} is not installed; get what the experiments need: pip install "evenstep[lab]"', 1)
    except KeyboardInterrupt:
        code = _fail("stopped", 130)
    sys.exit(code)


def _run(arguments: list[str]) -> int:
    """Run the command that `arguments` name; the exit code."""
    import tyro

    from evenstep.lab import demo, usage

    options = tyro.extras.subcommand_cli_from_dict(
        {"demo": demo.Demo},
        prog="evenstep",
        description="Experiments with evenstep. Without arguments: the demo.",
        args=arguments,
    )
    try:
        return demo.main(options)
    except usage.UsageError as error:
        return _fail(str(error), 2)


def _fail(message: str, code: int) -> int:
    """Say in one line what is wrong."""
    print(f"evenstep: {message}", file=sys.stderr)
    return code
