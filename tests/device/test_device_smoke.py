"""What tests/gpu runs on CUDA devices, on the simulated accelerator."""

import pytest
from device_smoke import CASES, train
from simulated_device import run_on_devices

DEFAULT = {("fsdp", "fp32"), ("pipeline", "fp32")}


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        pytest.param(name, precision, marks=[] if (name, precision) in DEFAULT else pytest.mark.slow)
        for name in CASES
        for precision in ("fp32", "bf16")
    ],
)
def test_training_on_devices_equals_one_device(name, precision, simulated_device, tmp_path):
    case = CASES[name]
    settings = {"timeout_seconds": 240.0, "group_timeout_seconds": 120.0}
    run_on_devices(train, case.world_size, simulated_device, case, "simulated", precision, str(tmp_path), **settings)
