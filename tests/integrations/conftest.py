"""Trainers and libraries, the real ones: `make test-integrations`. Warnings of evenstep are errors, others are not."""

import importlib
from pathlib import Path

import pytest

from cases import OPTIMIZERS

EXAMPLES = Path(__file__).parents[2] / "examples"
COLUMNS = ["unitstep", "whitened", "canonical", "fan-in", "unit", "whitened-sgd", "whitened-adamw", "whitened-muon"]


def pytest_collection_modifyitems(items):
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.integrations)
            item.add_marker(pytest.mark.filterwarnings("ignore"))
            item.add_marker(pytest.mark.filterwarnings("error:::evenstep"))


@pytest.fixture(params=[OPTIMIZERS[name] for name in COLUMNS], ids=COLUMNS)
def case(request):
    """A row of each optimizer."""
    return request.param


@pytest.fixture
def example(request, monkeypatch):
    """The example of a test file, examples/x_example.py for test_x.py; processes that it starts find it, too."""
    monkeypatch.syspath_prepend(EXAMPLES)
    return importlib.import_module(f"{request.path.stem.removeprefix('test_')}_example")
