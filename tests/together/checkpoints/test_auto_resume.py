"""Runs that are ended: by a kill in the middle, after which torchrun starts them again, or by a signal to one rank."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from forked_scripts import torchrun_variables
from ranked import on_ranks
from reference_plugins import ReferencePlugin

from booster_core import Booster
from booster_runtime import StopSignal

EXAMPLE = Path(__file__).parents[3] / "examples" / "resume_training.py"


@pytest.mark.slow
def test_a_killed_run_resumes_by_itself_and_ends_alike(scripts, tmp_path):
    arguments = ("--plugin", "zero", "--steps", "40", "--root")
    calm = scripts.run(EXAMPLE, [[*arguments, tmp_path / "calm"]] * 2, torchrun_variables(2))
    assert calm.codes == [0, 0], calm.output
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=1", "--standalone"]
    command += [str(EXAMPLE), *arguments, str(tmp_path / "killed"), "--crash-at", "23"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-5000:]
    assert (tmp_path / "killed" / "crashed").exists()
    assert "resumed after step" in done.stdout
    losses = [json.loads((tmp_path / name / "losses.json").read_text()) for name in ("calm", "killed")]
    assert losses[0] == losses[1]


@on_ranks(2)
def test_a_signal_to_one_rank_ends_the_loop_of_all_after_the_same_step():
    steps = []
    for step in StopSignal(Booster("cpu", plugin=ReferencePlugin())).until(range(10)):
        steps.append(step)
        if (dist.get_rank(), step) == (1, 3):
            os.kill(os.getpid(), signal.SIGTERM)
    assert steps == [0, 1, 2, 3]
