"""Runs that are killed, or stopped by SIGTERM, end with the losses of a run that nothing disturbed, bit for bit."""

import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from forked_scripts import torchrun_variables

SCRIPT = Path(__file__).parent / "train_and_die.py"


def start(root, steps, *kills, plugin="zero", max_restarts=0, save_every=5):
    root.mkdir(exist_ok=True)
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node=2", f"--max-restarts={max_restarts}", "--standalone"]
    return subprocess.Popen(
        [sys.executable, *torchrun, str(SCRIPT), plugin, str(root), str(steps), str(save_every), *kills],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, text=True,
    )  # fmt: skip


def finish(process, timeout=300):
    try:
        output, _ = process.communicate(timeout=timeout)
    finally:
        process.kill()
    return output


def losses_of(root):
    """Return each step's losses; a step that was repeated after a kill has several."""
    found = {}
    for line in (root / "losses").read_text().splitlines():
        step, loss = line.split()
        found.setdefault(int(step), set()).add(loss)
    return found


@pytest.mark.slow
def test_ten_kills_change_no_loss(tmp_path):
    steps = 200
    calm = start(tmp_path / "calm", steps)
    output = finish(calm)
    assert calm.returncode == 0, output[-5000:]
    draw = random.Random(0)
    kills = [f"{step}:{draw.randrange(2)}" for step in sorted(draw.sample(range(2, steps), 10))]
    killed = start(tmp_path / "killed", steps, *kills, max_restarts=10)
    output = finish(killed, timeout=900)
    assert killed.returncode == 0, output[-5000:]
    assert len(list((tmp_path / "killed").glob("killed-*"))) == 10
    expected = losses_of(tmp_path / "calm")
    assert sorted(expected) == list(range(1, steps + 1))
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


@pytest.mark.slow  # three starts of torchrun; the test above sends the signal itself
def test_sigterm_to_torchrun_saves_and_a_resumed_run_ends_alike(tmp_path):
    steps = 60
    calm = start(tmp_path / "calm", steps)
    output = finish(calm)
    assert calm.returncode == 0, output[-5000:]
    root = tmp_path / "stopped"
    root.mkdir()
    (root / "slow").touch()
    stopped = start(root, steps, save_every=1000)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not (root / "losses").exists():
        time.sleep(0.05)
    stopped.send_signal(signal.SIGTERM)  # torchrun sends it to the ranks
    output = finish(stopped)
    assert "stopped and saved after step" in output
    (root / "slow").unlink()
    assert 0 < max(losses_of(root)) < steps
    resumed = start(root, steps, save_every=1000)
    output = finish(resumed)
    assert resumed.returncode == 0, output[-5000:]
    assert losses_of(root) == losses_of(tmp_path / "calm")
