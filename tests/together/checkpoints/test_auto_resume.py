"""The example that resumes by itself, under torchrun, killed once in the middle."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from forked_scripts import torchrun_variables

EXAMPLE = Path(__file__).parents[3] / "examples" / "resume_training.py"


ARGUMENTS = ("--plugin", "ddp", "--steps", "40", "--root")


def run_by_torchrun(root, *options):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=1", "--standalone"]
    command += [str(EXAMPLE), *ARGUMENTS, str(root), *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-5000:]
    return done.stdout


def losses_of(root):
    return json.loads((root / "losses.json").read_text())


@pytest.mark.slow
def test_a_killed_run_resumes_by_itself_and_ends_alike(scripts, tmp_path):
    calm = scripts.run(EXAMPLE, [[*ARGUMENTS, tmp_path / "calm"]] * 2, torchrun_variables(2))
    assert calm.codes == [0, 0], calm.output
    output = run_by_torchrun(tmp_path / "killed", "--crash-at", "23")
    assert (tmp_path / "killed" / "crashed").exists()
    assert "resumed after step" in output
    assert losses_of(tmp_path / "killed") == losses_of(tmp_path / "calm")
