"""Every case of the report on devices, on the simulated accelerator, where times and sizes mean nothing."""

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch.distributed as dist
from simulated_device import BACKEND, NAME, run_on_devices

from booster_testing import RankError

ROOT = Path(__file__).parents[3]
PLACES = [str(ROOT / "tests" / "shared"), str(ROOT / "benchmarks")]
sys.path.append(PLACES[1])  # of cases that measure speed

from device_runs.cases import CannotRun, Setting, all_cases  # noqa: E402

DEFAULT = {"host waits, fp32": 2, "host waits, fp16": 2, "host waits, offload": 1}
"""Cases of the default run, and their number of ranks: that of the others is theirs."""
SHARED = ("pipeline, fp32, 2 ranks", "fsdp, bf16, 2 ranks", "tensor parallel, pipeline, fp32, 4 ranks")
"""Cases whose ranks talk over the staged backend, as where they share a card. The first is in the default run."""


def run_case(name, library, folder):
    case = all_cases()[name]
    setting = Setting(NAME, BACKEND, dist.get_rank(), dist.get_world_size(), folder, library)
    with warnings.catch_warnings():
        warnings.simplefilter("default")  # as in the report: a user's streams make torch warn
        case.function(setting, **case.options)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in DEFAULT else pytest.mark.slow) for name in all_cases()]
)
def test_case_passes(name, simulated_device, tmp_path):
    case = all_cases()[name]
    if case.only_on not in ("", NAME):
        pytest.skip(f"needs a {case.only_on} device")
    ranks, limits = DEFAULT.get(name, case.ranks), {"timeout_seconds": 600.0, "group_timeout_seconds": 60.0}
    try:
        run_on_devices(run_case, ranks, simulated_device, name, simulated_device, tmp_path, **limits)
    except RankError as error:
        reasons = [each for each in error.exceptions.values() if isinstance(each, CannotRun)]
        if not reasons:
            raise
        pytest.skip(str(reasons[0]))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == SHARED[0] else pytest.mark.slow) for name in SHARED]
)
def test_report_of_ranks_that_share_a_device(name, simulated_device, tmp_path):
    done = call("--simulated", simulated_device, "--into", str(tmp_path), name)
    report = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    (case,) = report["cases"]
    assert case["backend"].endswith("staged")
    assert case["status"] == "passed", case["detail"]
    assert done.returncode == 0, done.stderr


def test_without_a_device_nothing_is_measured(tmp_path):
    assert call("--into", str(tmp_path), CUDA_VISIBLE_DEVICES="").stdout == "no GPU: nothing measured\n"
    assert not any(tmp_path.iterdir())


def call(*arguments, **variables):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(PLACES), **variables}
    command = [sys.executable, "-m", "device_runs", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
