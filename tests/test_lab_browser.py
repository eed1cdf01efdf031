"""The report in Chromium, on a desktop and a phone, light and dark: it fits, is readable and runs nothing."""

import html
import json
import re
import shutil
import subprocess

import pytest

from evenstep.lab import records, report
from evenstep.lab.methods import METHODS
from lab_helpers import call, record

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed; get it: apt-get install chromium"),
]
HOSTILE = "<img src=x onerror=document.title=1>" + "unbroken" * 40
FRAME = """<!doctype html><iframe src="report.html" width="{width}" height="2000"></iframe><pre></pre><script>
function ground(element) {{
    const colour = getComputedStyle(element).backgroundColor;
    return colour === "rgba(0, 0, 0, 0)" && element.parentElement ? ground(element.parentElement) : colour;
}}
onload = () => {{
    const page = document.querySelector("iframe").contentDocument, root = page.documentElement;
    const texts = [...page.querySelectorAll("body *")].filter(e => [...e.childNodes].some(
        n => n.nodeType === Node.TEXT_NODE && n.textContent.trim()));
    document.querySelector("pre").textContent = JSON.stringify({{
        title: page.title, over: root.scrollWidth - root.clientWidth, ground: ground(page.body),
        figures: [...page.images].map(i => i.clientWidth / i.naturalWidth),
        texts: texts.map(e => [e.textContent.trim(), getComputedStyle(e).color, ground(e)]),
        letters: Math.min(...texts.map(e => parseFloat(getComputedStyle(e).fontSize))),
    }});
}};
</script>"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A report with a figure of the paper, every method, runs that diverged, and names that are no names."""
    out = tmp_path_factory.mktemp("report")
    assert call("reproduce", "fig1", "--quick", "--out", out) == 0
    for data in ("CIFAR-10", HOSTILE):
        for method in (*METHODS, HOSTILE):
            for lr, loss in ((0.01, 1.3), (0.1, 0.5), (1.0, None)):
                records.append(out / "records.jsonl", record(method, lr, [2.0, loss], data=data))
    report.write(out)
    return out


def chromium(*words):
    """What Chromium printed, and what the page complained of in its console."""
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def light(colour):
    """The luminance of a colour such as rgb(0, 105, 180), as contrast counts it: 0.05 to 1.05."""
    parts = [float(part) / 255 for part in re.findall(r"[\d.]+", colour)[:3]]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2] + 0.05


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_the_report_fits_and_is_readable(width, dark, folder):
    frame = folder / f"{width}-{dark}.html"
    frame.write_text(FRAME.format(width=width), encoding="utf-8")
    words = ["--allow-file-access-from-files", *["--force-dark-mode"] * dark, "--dump-dom", frame.as_uri()]
    shown, complaints = chromium(*words)
    found = json.loads(html.unescape(shown.partition("<pre>")[2].partition("</pre>")[0]))
    assert complaints == [] and found["title"].endswith("evenstep report")
    assert found["over"] == 0, "the page scrolls sideways"
    assert (light(found["ground"]) < 0.1) == dark
    assert len(found["figures"]) == 7 and min(found["figures"]) > 0.5 and found["letters"] >= 11
    for text, colour, ground in found["texts"]:
        low, high = sorted(map(light, (colour, ground)))
        assert high / low >= 4.5, (text, colour, ground)
