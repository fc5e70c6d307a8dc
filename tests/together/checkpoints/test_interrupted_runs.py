"""Runs that are killed, or stopped by SIGTERM, end with the losses of a run that nothing disturbed, bit for bit."""

import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
from forked_scripts import torchrun_variables

SCRIPT = Path(__file__).parent / "train_and_die.py"


STEPS = 200


def train_by_torchrun(root, *kills):
    root.mkdir()
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node=2", f"--max-restarts={len(kills)}", "--standalone"]
    command = [sys.executable, *torchrun, str(SCRIPT), "zero", str(root), str(STEPS), "5", *kills]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-5000:]


def losses_of(root):
    """Return each step's losses; a step that was repeated after a kill has several."""
    found = {}
    for line in (root / "losses").read_text().splitlines():
        step, loss = line.split()
        found.setdefault(int(step), set()).add(loss)
    return found


@pytest.mark.slow
def test_ten_kills_change_no_loss(tmp_path):
    train_by_torchrun(tmp_path / "calm")
    draw = random.Random(0)
    kills = [f"{step}:{draw.randrange(2)}" for step in sorted(draw.sample(range(2, STEPS), 10))]
    train_by_torchrun(tmp_path / "killed", *kills)
    assert len(list((tmp_path / "killed").glob("killed-*"))) == 10
    expected = losses_of(tmp_path / "calm")
    assert sorted(expected) == list(range(1, STEPS + 1))
    assert losses_of(tmp_path / "killed") == expected


@pytest.fixture
def train(scripts):
    """Return a function that runs the script on two ranks, without torchrun, and returns its output."""

    def run(root, steps, *kills, save_every=1000):
        root.mkdir(exist_ok=True)
        done = scripts.run(SCRIPT, [["zero", root, steps, save_every, *kills]] * 2, torchrun_variables(2))
        assert done.codes == [0, 0], done.output
        return done.output

    return run


def test_sigterm_on_one_rank_saves_and_a_resumed_run_ends_alike(train, tmp_path):
    train(tmp_path / "calm", 40)
    output = train(tmp_path / "stopped", 40, "17:1:stop")
    assert re.search(r"stopped and saved after step 1[78]\n", output), output
    assert max(losses_of(tmp_path / "stopped")) in {17, 18}
    train(tmp_path / "stopped", 40)
    assert losses_of(tmp_path / "stopped") == losses_of(tmp_path / "calm")
