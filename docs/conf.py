"""How Sphinx builds the site: `make docs`."""

import inspect
import re
import sys
from pathlib import Path

DOCS = Path(__file__).parent
sys.path[:0] = [str(DOCS.parent / "src"), str(DOCS / "notebooks")]

import evenstep  # noqa: E402

project, author, release = "evenstep", "the evenstep authors", evenstep.__version__
project_copyright = "the evenstep authors; MIT licence"
extensions = ["myst_parser", "sphinx.ext.autodoc", "cells_in_sphinx"]
exclude_patterns = ["_build"]
html_theme, html_title = "furo", "evenstep"
html_theme_options = {"top_of_page_buttons": []}
html_static_path, html_css_files = ["_static"], ["site.css"]
html_copy_source = html_show_sourcelink = False
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]
nitpicky = False
autodoc_member_order, autodoc_typehints = "bysource", "none"
default_role = "code"  # docstrings write names between single backticks


def setup(app):
    """Let docstrings, which are plain text, read well in Sphinx."""
    app.connect("source-read", outside)
    app.connect("autodoc-process-docstring", readable)
    app.connect("autodoc-process-signature", short_signature)


def outside(app, name, source):
    """Let links to Markdown outside docs/, which is no page of the site, download the file; a folder's, its README."""
    text = source[0].replace("](../results)", "](../results/README.md)")
    outer = r"\[`?([^\]`]*)`?\]\((\.\./(?:results/README|CHANGELOG)\.md)\)"
    source[0] = re.sub(outer, r"{download}`\1 <\2>`", text)


def readable(app, what, name, obj, options, lines):
    """Escape what reStructuredText would take for markup, and make a table of the keywords at the end."""
    text = "\n".join(lines)
    body, _, keywords = text.partition("\nKeywords:\n")
    body = re.sub(r"(?<=\w)_(?=[\s,.;:)‖]|$)", r"\\_", body)
    body = re.sub(r"(?m)(?<!:)^(\s*\S.*[^:\n])\n\n(?=    (?!>>>)\S)", r"\1\n\n::\n\n", body)
    rows = re.findall(r"(?m)^ +(\**\w+)(?: \(default (.*?)\))?: (.*)\.$", keywords)
    table = [".. list-table:: Keywords", "   :header-rows: 1", "   :widths: 18 14 68", ""]
    cells_of = [[f"``{word}``", f"``{default}``" if default else "", meaning] for word, default, meaning in rows]
    for cells in [["keyword", "default", "meaning"], *cells_of]:
        table += [f"   {'* ' if k == 0 else '  '}- {cell}" for k, cell in enumerate(cells)]
    lines[:] = [*body.splitlines(), "", *(table if rows else []), ""]


def short_signature(app, what, name, obj, options, signature, returns):
    """Show the arguments that come first; the table has the keywords."""
    if inspect.isclass(obj) and issubclass(obj, evenstep.model.coverage.Coverage):
        return "", None
    if inspect.isclass(obj) and "Keywords:" in (obj.__doc__ or ""):
        first = [p for p in inspect.signature(obj).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
        names = [p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in first]
        return f"({', '.join([*names, '…'])})", None
    return None
