"""How often the host waits for the device in a step: not once, so that it prepares work while the device computes.

Under fp16's loss scale it is once, because the host must know whether to skip the step.
"""

import pytest
from device_smoke import Case
from host_waits import CASES, waits_of
from simulated_device import NAME, run_on_devices


@pytest.mark.parametrize("name", CASES)
def test_the_host_does_not_wait_for_the_device_in_a_step(name, simulated_device):
    limits = {"timeout_seconds": 240.0, "group_timeout_seconds": 120.0}
    for found, seen in run_on_devices(waits_of, CASES[name].world_size, simulated_device, CASES[name], NAME, **limits):
        assert found == []
        assert seen == 3, "what is looked for is found"


@pytest.mark.parametrize("name", ["fsdp", "zero 2, overlapped", "gemini"])
def test_the_host_waits_once_in_a_step_of_fp16(name, simulated_device):
    limits = {"timeout_seconds": 240.0, "group_timeout_seconds": 120.0}
    case = CASES[name]
    for found, seen in run_on_devices(waits_of, case.world_size, simulated_device, case, NAME, "fp16", **limits):
        assert len(found) == 2, "two steps were looked at"
        assert all("any_raised" in each or "loss_scaler.py" in each for each in found), found
        assert seen == 3, "what is looked for is found"


@pytest.mark.parametrize(
    "case",
    [
        Case("zero", {"bucket_bytes": 1 << 13, "offload": "cpu"}),
        Case("gemini", {"min_chunk_bytes": 1 << 13, "offload_param_frac": 1.0, "offload_optim_frac": 1.0}),
    ],
    ids=lambda case: case.plugin,
)
def test_clipping_on_the_host_reads_the_norm_once_a_step(case, simulated_device):
    ((found, _),) = run_on_devices(waits_of, 1, simulated_device, case, NAME, timeout_seconds=240.0)
    reads = [each for each in found if not each.startswith("synchronize")]
    assert len(reads) == 2, "two steps were looked at"
