"""How often the host waits for the device in a step: not once, so that it prepares work while the device computes."""

import pytest
from host_waits import CASES, waits_of
from simulated_device import NAME, run_on_devices


@pytest.mark.parametrize("name", CASES)
def test_the_host_does_not_wait_for_the_device_in_a_step(name, simulated_device):
    limits = {"timeout_seconds": 240.0, "group_timeout_seconds": 120.0}
    for found, seen in run_on_devices(waits_of, CASES[name].world_size, simulated_device, CASES[name], NAME, **limits):
        assert found == []
        assert seen == 3, "what is looked for is found"
