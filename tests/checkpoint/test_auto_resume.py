"""The example that resumes by itself, under torchrun, killed once in the middle."""

import json
import os
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "resume_training.py"


def run(root, *options):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=1", "--standalone"]
    command += [str(EXAMPLE), "--plugin", "ddp", "--steps", "40", "--root", str(root), *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-5000:]
    return json.loads((root / "losses.json").read_text()), done.stdout


def test_a_killed_run_resumes_by_itself_and_ends_alike(tmp_path):
    expected, _ = run(tmp_path / "calm")
    losses, output = run(tmp_path / "killed", "--crash-at", "23")
    assert (tmp_path / "killed" / "crashed").exists()
    assert "resumed after step" in output
    assert losses == expected
