"""Run a notebook: a Markdown page whose ```{code-cell} blocks share one namespace, in order, as in Jupyter.

python docs/notebooks/cells.py PAGE.md     prints what each cell shows
"""

import ast
import contextlib
import io
import re
import sys
from pathlib import Path
from typing import Any

import torch

CELL = re.compile(r"^```\{code-cell\}[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def run(code: str, namespace: dict[str, Any]) -> str:
    """Run one cell; what it prints, then its last expression unless that is None or ends with a semicolon."""
    body = ast.parse(code).body
    last = ast.Expression(body.pop().value) if body and isinstance(body[-1], ast.Expr) else None
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        exec(compile(ast.Module(body, []), "<cell>", "exec"), namespace)
        value = eval(compile(last, "<cell>", "eval"), namespace) if last else None
        if value is not None and not code.rstrip().endswith(";"):
            print(value)
    return shown.getvalue()


def fresh() -> dict[str, Any]:
    """The namespace of a page; networks this small are fastest on one thread."""
    torch.set_num_threads(1)
    return {"__name__": "__main__"}


def run_page(page: Path) -> dict[str, Any]:
    """Run all cells of a page, print what they show, and return the namespace that they leave."""
    namespace = fresh()
    for code in CELL.findall(page.read_text(encoding="utf-8")):
        print(run(code, namespace), end="")
    return namespace


if __name__ == "__main__":
    run_page(Path(sys.argv[1]))
