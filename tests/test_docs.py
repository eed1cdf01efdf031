"""The pages of docs/ and README.md: links lead somewhere, Python runs, and no page is too long to read."""

import re
import sys
from pathlib import Path

import pytest

from helpers import module_at

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted([*DOCS.glob("*.md"), *DOCS.glob("guides/*.md"), *DOCS.glob("notebooks/*.md")])
LINKED = [*PAGES, ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "results" / "README.md"]
NOTEBOOKS = [page for page in PAGES if page.parent.name == "notebooks"]
FENCE = re.compile(r"^```(\S*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SETUP = re.compile(r"^<!-- setup[^\n]*\n(.*?)^-->$", re.MULTILINE | re.DOTALL)
PYTHON = re.compile(rf"{SETUP.pattern}|^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```$)?", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"(?:^    .+\n|^\n(?=    ))+", re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s]+)\)")


def name(page):
    return str(page.relative_to(ROOT))


def text_of(page, without=()):
    text = page.read_text(encoding="utf-8")
    for pattern in without:
        text = pattern.sub("", text)
    return text


def anchors(page):
    """The anchors of a page's headings, as GitHub and MyST make them."""
    titles = re.findall(r"^#+ (.*)$", text_of(page, [FENCE]), re.MULTILINE)
    kept = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title) for title in titles)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in kept}


def test_anchors_are_those_of_the_site(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# Who's first?\n\n## The paper's CNN on CIFAR-10 (JPEG)\n\n```sh\n# no heading\n```\n")
    assert anchors(page) == {"whos-first", "the-papers-cnn-on-cifar-10-jpeg"}


@pytest.mark.parametrize("page", LINKED, ids=name)
def test_links_lead_to_files_and_headings_that_exist(page):
    for link in LINK.findall(text_of(page, [FENCE])):
        path, _, anchor = link.partition("#")
        if link.startswith(("http://", "https://")):
            continue
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_a_page_can_be_read_in_one_sitting(page):
    text = re.sub(r"\]\([^)]*\)", "]", text_of(page, [FENCE, SETUP]))
    words = [word for word in text.split() if re.search(r"\w", word)]
    assert len(words) <= (900 if page.parent.name == "guides" else 1500)


@pytest.mark.parametrize("page", [page for page in PAGES if PYTHON.search(text_of(page))], ids=name)
def test_python_blocks_run_and_print_what_they_show(page, monkeypatch, tmp_path, capsys):
    """In order, in one namespace. Hidden `<!-- setup` comments go before; text that follows a block is its output."""
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "__main__"}
    for setup, block, shown in PYTHON.findall(text_of(page)):
        if "optimizer = " in block and hasattr(namespace.get("optimizer"), "detach"):
            namespace["optimizer"].detach()  # the block builds the page's next one
        capsys.readouterr()
        exec(compile(setup or block, name(page), "exec"), namespace)
        assert not shown or capsys.readouterr().out == shown


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_no_python_is_shown_that_does_not_run(page):
    """Python is in blocks that are run here, in cells of notebooks, or begins with >>>, which doctest runs."""
    text = text_of(page, [SETUP])
    blocks = [block for kind, block in FENCE.findall(text) if kind not in ("python", "{code-cell}", "text")]
    for block in [*blocks, *INDENTED.findall(text_of(page, [SETUP, FENCE]))]:
        code = "\n".join(line[4:] if line.startswith("    ") else line for line in block.splitlines()).strip()
        assert code.startswith(">>>") or not is_python(code), code


def is_python(code):
    try:
        compile(code, "block", "exec")
    except SyntaxError:
        return False
    return True


def test_warnings_and_errors_that_are_explained_are_the_librarys_own():
    """Those in quotation marks in the tables of troubleshooting.md; … stands for what differs."""
    files = [path for path in (ROOT / "src" / "evenstep").rglob("*.py") if "lab" not in path.parts]
    source = re.sub(r'"\s+f?"', "", "".join(path.read_text(encoding="utf-8") for path in files))  # strings in pieces
    source = re.sub(r"\{[^{}]*\}", "…", source)
    cells = re.findall(r"^\| [^|]*", text_of(DOCS / "guides/troubleshooting.md"), re.MULTILINE)
    quotes = re.findall(r'"([^"]+)"', "".join(cells))
    assert len(quotes) > 15
    for quote in quotes:
        assert quote.removesuffix(": …") in source, quote


def test_the_picture_of_the_readme_is_what_the_records_give(tmp_path):
    """The same labels, and as many points."""
    pytest.importorskip("matplotlib")
    draw = module_at(ROOT / "scripts" / "draw_rules.py").main
    made, kept = draw(ROOT / "results" / "rules.jsonl", tmp_path / "rules.svg"), DOCS / "figures" / "rules.svg"
    words, points = (r"<text[^>]*>([^<]*)</text>", "<use ")
    for pattern in (words, points):
        assert re.findall(pattern, made.read_text()) == re.findall(pattern, kept.read_text())


@pytest.mark.slow
@pytest.mark.parametrize("page", NOTEBOOKS, ids=name)
def test_notebooks_run(page, monkeypatch, capsys):
    pytest.importorskip("matplotlib").use("Agg")
    monkeypatch.setattr(sys, "path", [str(page.parent), *sys.path])
    module_at(page.parent / "cells.py").run_page(page)
    assert "loss" in capsys.readouterr().out


def test_every_page_is_on_the_site():
    trees = [block for kind, block in FENCE.findall(text_of(DOCS / "index.md")) if kind == "{toctree}"]
    listed = re.findall(r"^[a-z/-]+$", "\n".join(trees), re.MULTILINE)
    assert {*listed, "index"} == {str(page.relative_to(DOCS).with_suffix("")) for page in PAGES}
