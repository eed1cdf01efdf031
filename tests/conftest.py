"""One thread, the same random numbers at every run, and hypothesis without deadlines."""

import zlib

import pytest
import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)
settings.register_profile(
    "evenstep",
    deadline=None,
    derandomize=True,
    max_examples=30,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("evenstep")


@pytest.fixture(autouse=True)
def seed(request):
    """A seed for each test, from its name: fresh numbers for each, the same ones at each run."""
    torch.manual_seed(zlib.crc32(request.node.nodeid.encode()))
