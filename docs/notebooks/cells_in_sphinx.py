"""Sphinx runs the cells of notebooks as it builds the site, and shows what they print and draw."""

import io
from typing import Any

import matplotlib
from cells import fresh, run
from docutils import nodes
from sphinx.util.docutils import SphinxDirective

matplotlib.use("Agg")
import matplotlib.pyplot as plt


class CodeCell(SphinxDirective):
    """A code block, run in the page's namespace, followed by its output and its figures."""

    has_content = True
    optional_arguments = 1

    def run(self) -> list[nodes.Node]:
        """The nodes of the cell; an error in it ends the build."""
        namespace: dict[str, Any] = self.env.temp_data.setdefault("cells", fresh())
        code = "\n".join(self.content)
        found: list[nodes.Node] = [nodes.literal_block(code, code, language="python")]
        if output := run(code, namespace):
            found.append(nodes.literal_block(output, output, language="text", classes=["output"]))
        for number in plt.get_fignums():
            svg = io.StringIO()
            plt.figure(number).savefig(svg, format="svg", bbox_inches="tight")
            picture = svg.getvalue()
            found.append(nodes.raw("", picture[picture.index("<svg") :], format="html", classes=["figure"]))
        plt.close("all")
        return found


def setup(app: Any) -> dict[str, bool]:
    """Register the directive."""
    app.add_directive("code-cell", CodeCell)
    return {"parallel_read_safe": True}
