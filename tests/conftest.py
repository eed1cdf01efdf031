"""One thread, the same random numbers at every run, hypothesis without deadlines, and a record of features.

`pytest --features FILE` writes how the tests marked `feature("…")` went, by feature and optimizer: the records that
docs/compatibility.md is made from.
"""

import json
import platform
import zlib
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import evenstep

TESTS = Path(__file__).parent
EXTRAS = ["hypothesis", "expecttest", "matplotlib", "PIL", "numpy", "jinja2", "optuna"]
MISSING = [name for name in EXTRAS if find_spec(name) is None]
collect_ignore = ["integrations"]  # needs packages of its own: run by `make test-integrations`
if MISSING:  # a machine lent for its GPU has few packages: collect files with GPU tests that import none of these
    texts = {path.name: path.read_text(encoding="utf-8") for path in TESTS.glob("test_*.py")}
    imports = [f"{word} {name}" for name in MISSING for word in ("import", "from")]
    on_gpu = {name for name, text in texts.items() if "mark.gpu" in text or "CPU_AND_GPU" in text}
    collect_ignore += [f for f, text in texts.items() if f not in on_gpu or any(i in text for i in imports)]
torch.set_num_threads(1)
pytest.register_assert_rewrite("helpers", "lab_helpers")

if "hypothesis" not in MISSING:
    from hypothesis import HealthCheck, settings

    settings.register_profile(
        "evenstep",
        deadline=None,
        derandomize=True,
        max_examples=30,
        suppress_health_check=[HealthCheck.too_slow],
    )
    settings.load_profile("evenstep")


def pytest_configure(config):
    """Make warnings attributed to a module of tests/ errors; where extras are missing, skip the doctests they need."""
    names = "|".join(sorted({path.stem for path in TESTS.rglob("*.py")}))
    config.addinivalue_line("filterwarnings", f"error:::({names})$")
    config.option.doctest_ignore_import_errors |= bool(MISSING)


def pytest_report_header():
    """Say when tests are left out."""
    left_out = len(collect_ignore) - 1
    return f"{', '.join(MISSING)} not installed: {left_out} test files are not collected" if MISSING else None


@pytest.fixture(autouse=True)
def seed(request):
    """A seed for each test, from its name: fresh numbers for each, the same ones at each run."""
    torch.manual_seed(zlib.crc32(request.node.nodeid.encode()))


def pytest_addoption(parser):
    parser.addoption("--features", metavar="FILE", help="write a record of the tests marked feature(…) to FILE")


def pytest_collection_modifyitems(items):
    """Say of each marked test which feature of which optimizer it is about; the report carries it, also under xdist."""
    for item in items:
        for mark in item.iter_markers("feature"):
            params = item.callspec.params if hasattr(item, "callspec") else {}
            item.user_properties.append(("feature", [mark.args[0], optimizer_of(params)]))


def optimizer_of(params):
    """The column of a test, from what it is parametrized by: a case, a row, a class; UnitStep if by none of them."""
    row, case = params.get("row"), params.get("case")
    cls = params.get("cls") or getattr(row, "optim_cls", None) or getattr(case, "cls", evenstep.UnitStep)
    base = case.keywords.get("base") if case is not None else None
    name = next(c.__name__ for c in cls.__mro__ if c.__module__.startswith("evenstep."))
    rule = base.__name__ if base is not None else cls.__name__.partition("WhitenedBy")[2]
    return f"{name}({rule})" if rule else name


outcomes: dict[tuple[str, str], list[tuple[str, str]]] = {}


def pytest_runtest_logreport(report):
    """Collect outcomes; a skipped test says why."""
    for key, value in report.user_properties:
        if key == "feature" and (report.when == "call" or report.outcome != "passed"):
            reason = getattr(report, "wasxfail", "") or (
                report.skipped and report.longrepr[2].removeprefix("Skipped: ")
            )
            outcomes.setdefault(tuple(value), []).append((report.outcome, reason or ""))


def pytest_sessionfinish(session):
    """Write the record; workers of xdist send their reports to the one that has the option."""
    path = session.config.getoption("--features")
    if path is None or hasattr(session.config, "workerinput"):
        return
    rows = [
        {
            "feature": feature,
            "optimizer": optimizer,
            **{how: sum(o == how for o, _ in found) for how in ("passed", "failed", "skipped")},
            "reasons": sorted({reason for _, reason in found if reason}),
        }
        for (feature, optimizer), found in sorted(outcomes.items())
    ]
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine() + " CPU"
    head = json.dumps({"torch": torch.__version__, "device": device})[:-1]
    lines = ",\n".join(json.dumps(row) for row in rows)
    Path(path).write_text(f'{head}, "rows": [\n{lines}\n]}}\n', encoding="utf-8")
