"""The example of replica groups: a group dies, comes back, and ends with the parameters of the others."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

EXAMPLE = Path(__file__).parents[3] / "examples" / "fault_tolerant.py"


@pytest.mark.slow
def test_a_group_dies_and_comes_back(tmp_path):
    out = tmp_path / "out"
    main = [sys.executable, "-c", "from booster_core.cli import main; main()"]
    done = subprocess.run(
        [*main, "run", "--groups", "2", str(EXAMPLE), "--kill", "1", "--steps", "150", "--out", out],
        check=False, capture_output=True, text=True, timeout=600, cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "RUST_LOG": "error"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (out / "killed").exists()
    seen = {group: re.findall(rf"group {group}: step (\d+), (\d) group", done.stdout) for group in "01"}
    steps = [int(step) for step, _ in seen["1"]]
    assert steps == sorted(set(steps)), "it goes on where the other one is"
    assert steps[-1] == 150
    assert "exitcode: -9" in done.stderr
    assert seen["0"][-1][1] == "2", "it came back"
    ours, theirs = (load_file(next((out / f"group{each}").glob("*.safetensors"))) for each in range(2))
    assert all(values.equal(theirs[name]) for name, values in ours.items())
