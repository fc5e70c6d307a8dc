"""Fixtures of the tests on the simulated accelerator."""

from functools import partial

import pytest
from simulated_device import load


@pytest.fixture
def on_device(request, simulated_device):
    """Let the ranks of a class of the conformance kit load the device before they open their process group."""
    request.cls.prepare = partial(load, simulated_device)
