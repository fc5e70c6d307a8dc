"""Every case of the report on devices, on the simulated accelerator, where times and sizes mean nothing.

Several ranks talk over the staged backend, as where they share a card.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from device_runs.cases import all_cases

DEFAULT = {"pipeline, fp32, 2 ranks"}
"""One, as a case starts processes of its own; each subject has tests in this folder."""
ROOT = Path(__file__).parents[3]
sys.path.append(str(ROOT / "benchmarks"))  # of cases that measure speed
PLACES = os.pathsep.join([str(ROOT / "tests" / "shared"), str(ROOT / "benchmarks")])


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in DEFAULT else pytest.mark.slow) for name in all_cases()]
)
def test_case_passes(name, simulated_device, tmp_path):
    command = [sys.executable, "-m", "device_runs", "--simulated", simulated_device, "--staged"]
    command += ["--into", str(tmp_path), name]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": PLACES}, capture_output=True, text=True, timeout=600, check=False
    )
    report = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    case = next(case for case in report["cases"] if case["name"] == name)
    if case["status"] == "left out":
        pytest.skip(case["detail"])
    assert case["status"] == "passed", case["detail"]
    assert done.returncode == 0, done.stderr


def test_without_a_device_nothing_is_measured(tmp_path):
    environment = {**os.environ, "PYTHONPATH": PLACES, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "device_runs", "--into", str(tmp_path)]
    printed = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True).stdout
    assert printed == "no GPU: nothing measured\n"
    assert not any(tmp_path.iterdir())
