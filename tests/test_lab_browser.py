"""The report in a real browser: it loads in silence, draws, answers to mouse, keys and buttons, and fits a phone."""

import math

import pytest

from chromium import Browser, find
from evenstep.lab import comparison, report
from evenstep.lab.records import append
from made_up import record

pytestmark = pytest.mark.browser
METHODS = {"sg": (0.9, 0.5), "unitstep": (0.7, 0.2), "whitening": (0.8, 0.3), "adam": (1.0, 0.6)}
HOSTILE = "</script><img src=x onerror=document.title=1>"


def runs():
    """Three stepsizes, three seeds; the largest stepsize diverges for SG and Adam."""
    return [
        record(method, lr, [2.0, middle + shift + wiggle, None if lost else last + shift + wiggle], seed, data=data,
               accuracy=0.5 + 0.01 * seed)
        for data in ("CIFAR-10", HOSTILE)
        for method, (middle, last) in METHODS.items()
        for lr, shift in ((0.01, 0.3), (0.1, 0.0), (1.0, 0.2))
        for seed, wiggle in enumerate((0.0, 0.01, 0.02))
        for lost in [lr == 1.0 and method in ("sg", "adam")]
    ]  # fmt: skip


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    if find() is None:
        pytest.fail("chromium is not installed; get it: apt-get install chromium")
    opened = Browser(tmp_path_factory.mktemp("profile"))
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    for run in runs():
        append(folder / "records.jsonl", run)
    return report.write(folder).as_uri()


@pytest.fixture
def page(browser, address):
    browser.open(address)
    browser.run("localStorage.clear()")
    browser.open(address)
    browser.complaints.clear()
    browser.requests.clear()
    browser.open(address)
    return browser


def centre(page, selector, number=0):
    """Where the middle of an element is, once it is in sight."""
    return page.run(f"""(() => {{
        const element = document.querySelectorAll({selector!r})[{number}];
        element.scrollIntoView({{ block: "center" }});
        const box = element.getBoundingClientRect();
        return [box.x + box.width / 2, box.y + box.height / 2];
    }})()""")


def texts(page, selector):
    return page.run(f"[...document.querySelectorAll({selector!r})].map(e => e.textContent.trim())")


CURVES, STEPSIZES = "#comparison-1 [data-chart=curves]", "#comparison-1 [data-chart=stepsizes]"
TIP = f"{CURVES} .tip:not([hidden])"


def test_it_loads_without_a_complaint_and_asks_nobody(page, address):
    assert page.complaints == [] and page.requests == [address]
    assert page.run("document.title") != "1" and page.run("document.images.length") == 0


def test_curves_and_stepsizes_are_drawn(page):
    assert page.run(f"document.querySelectorAll('{CURVES} .line').length") == len(METHODS)
    assert page.run(f"document.querySelectorAll('{CURVES} .band').length") == len(METHODS)
    assert page.run(f"document.querySelectorAll('{STEPSIZES} .line').length") == len(METHODS)
    assert page.run(f"document.querySelectorAll('{STEPSIZES} .cross').length") == 2
    box = page.run(f"(r => [r.width, r.height])(document.querySelector('{CURVES} .line').getBoundingClientRect())")
    assert box[0] > 200 and box[1] > 30
    assert "NaN" not in page.run(f"document.querySelector('{CURVES} svg').outerHTML")
    ticks = texts(page, f"{CURVES} svg text")
    assert {"1", "2", "3", "epoch"} <= set(ticks)


def test_pointing_at_a_curve_shows_its_value(page):
    page.point_at(*centre(page, f"{CURVES} [data-series='0'] .mark", 2))
    shown = page.run(f"document.querySelector('{TIP}').textContent")
    assert shown.startswith("Epoch 3") and "UnitStep, 0.10.210" in shown  # the mean of 0.20, 0.21 and 0.22
    page.point_at(2, 2)
    assert page.run(f"document.querySelector('{TIP}')") is None


def test_pointing_at_a_stepsize_shows_its_seeds(page):
    page.point_at(*centre(page, f"{STEPSIZES} [data-series='0'] .mark", 1))
    shown = page.run(f"document.querySelector('{STEPSIZES} .tip').textContent")
    for text in ("UnitStep, stepsize 0.1", "training loss, mean0.210", "seed 20.220", "test accuracy51.0%"):
        assert text in shown
    page.point_at(*centre(page, f"{STEPSIZES} .cross"))
    assert "seed 1diverged" in page.run(f"document.querySelector('{STEPSIZES} .tip').textContent")


def test_keys_move_from_value_to_value(page):
    page.run(f"document.querySelector('{CURVES} svg').focus()")
    seen = []
    for key in ("ArrowRight", "ArrowRight", "ArrowRight", "ArrowDown", "Home"):
        page.press(key)
        seen.append(page.run(f"document.querySelector('{CURVES} [aria-live]').textContent"))
    assert [text.partition(";")[0] for text in seen] == ["Epoch 1", "Epoch 2", "Epoch 3", "Epoch 3", "Epoch 1"]
    current = page.run(f"document.querySelector('{CURVES} .tip .current').textContent")
    assert current.startswith("WhitenedSGD")
    page.press("Escape")
    assert page.run(f"document.querySelector('{TIP}')") is None


def test_the_legend_hides_and_shows(page):
    first = "document.querySelector('#comparison-1 .legend button')"
    for pressed, drawn in (("false", 3), ("true", 4)):
        page.run(f"{first}.click()")
        assert page.run(f"{first}.getAttribute('aria-pressed')") == pressed
        assert page.run(f"document.querySelectorAll('{CURVES} .line').length") == drawn
        assert page.run(f"document.querySelectorAll('{STEPSIZES} .line').length") == drawn
    assert page.run("document.querySelectorAll('#comparison-2 [data-chart=curves] .line').length") == 4


def test_accuracy_and_every_stepsize_can_be_chosen(page):
    page.run(f"document.querySelector('{CURVES} input[value=accuracy]').click()")
    assert "test accuracy" in texts(page, f"{CURVES} svg text")
    page.run(f"document.querySelector('{CURVES} input[type=checkbox]').click()")
    assert page.run(f"document.querySelectorAll('{CURVES} .line').length") == 3 * len(METHODS)


def test_the_theme_follows_the_system_and_the_button(page, address):
    ground = "getComputedStyle(document.body).backgroundColor"
    light = page.run(ground)
    page.run("document.getElementById('theme').click()")
    dark = page.run(ground)
    assert light == "rgb(255, 255, 255)" and dark != light
    page.open(address)
    assert page.run(ground) == dark  # remembered
    page.run("localStorage.clear()")
    page.open(address, dark=True)
    assert page.run(ground) == dark
    page.run("document.getElementById('theme').click()")
    assert page.run(ground) == light and page.complaints == []


def test_tables_sort_by_a_column(page):
    head = "document.querySelectorAll('#comparison-1 [data-table=best] thead button')[2]"
    column = "#comparison-1 [data-table=best] tbody tr td:nth-child(3)"
    page.run(f"{head}.click()")
    ascending = texts(page, column)
    page.run(f"{head}.click()")
    assert ascending == sorted(ascending) and texts(page, column) == ascending[::-1]
    assert page.run(f"{head}.parentNode.getAttribute('aria-sort')") == "descending"


@pytest.mark.parametrize("target", [0.3, 0.75, 0.95, 0.001])
def test_times_follow_the_target_as_python_has_them(page, target):
    page.run(f"""(input => {{ input.value = {target}; input.dispatchEvent(new Event("input")); }})(
        document.querySelector('#comparison-1 [data-table=target] input'))""")
    shown = page.run("""[...document.querySelectorAll('#comparison-1 [data-table=target] tbody tr')].map(
        row => [...row.cells].map(cell => cell.textContent.trim()))""")
    mine = [run for run in runs() if run["config"]["data"] == "CIFAR-10"]
    found = comparison.comparisons(mine)[0]
    expected = [comparison.summarize(s, found.l0, target).reach for s in found.series]
    for (_, epochs, steps, seconds), reach in zip(shown, expected, strict=True):
        if math.isinf(reach.epochs):
            assert (epochs, steps, seconds) == ("∞", "∞", "∞")
        else:
            assert (epochs, steps, seconds) == (f"{reach.epochs:.0f}", f"{reach.steps:.0f}", f"{reach.seconds:.1f}")


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [320, 375, 768, 1280])
def test_nothing_sticks_out_at_any_width(page, address, width, dark):
    page.open(address, width=width, height=800, dark=dark)
    assert page.run("document.documentElement.scrollWidth") <= width
    drawn = page.run(f"document.querySelector('{CURVES} svg').getBoundingClientRect().width")
    assert width / 4 < drawn <= width and page.complaints == []
