"""Every plugin on CUDA devices with NCCL: five minutes on two GPUs, by ``nox -s gpu``."""

import pytest
from device_smoke import CASES, train

from booster_testing import run_on_ranks


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.gpu(case.world_size)) for name, case in CASES.items()]
)
def test_training_on_gpus_equals_one_gpu(name, precision, tmp_path):
    case = CASES[name]
    settings = {"backend": "cpu:gloo,cuda:nccl", "timeout_seconds": 240.0, "group_timeout_seconds": 120.0}
    run_on_ranks(train, case.world_size, case, "cuda", precision, str(tmp_path), **settings)
