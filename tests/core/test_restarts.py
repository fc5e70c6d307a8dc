"""Restarts by torchrun: ranks meet again, also where the agents of several nodes count restarts differently."""

import os
import subprocess
import sys
import textwrap

import pytest
from free_ports import free_port

SCRIPT = """
import os, sys
from pathlib import Path
from booster_core import launch_from_torch

c = launch_from_torch(verbose=False, timeout_seconds=40)
failed = Path(sys.argv[2])
if c.rank == int(sys.argv[1]) and not failed.exists():
    failed.touch()
    raise RuntimeError("the error of the first attempt")
ranks = c.all_gather_object(c.rank)
os.write(1, f"rank {c.rank} met {ranks} after {os.environ['TORCHELASTIC_RESTART_COUNT']} restarts\\n".encode())
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(SCRIPT))
    return path


def run_agents(commands, folder, **environment):
    """Run torchrun's agents at the same time; return their output."""
    agents = [
        subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *map(str, command)],
            cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for command in commands
    ]  # fmt: skip
    try:
        outputs = [agent.communicate(timeout=200)[0] for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
    assert [agent.returncode for agent in agents] == [0] * len(agents), "\n".join(outputs)
    return outputs


@pytest.mark.slow
@pytest.mark.parametrize(
    ("victim", "monitor"),
    [
        (1, "0"),  # the other node's rank does not fail, so that only one agent counts a restart
        (0, "0"),
        (0, "1"),
        (1, "1"),
    ],
)
def test_two_agents_meet_again_after_a_rank_failed(script, tmp_path, victim, monitor):
    options = [
        "--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}",
        "--rdzv-id=restarts", "--max-restarts=1", "--local-addr=127.0.0.1",
    ]  # fmt: skip
    command = [*options, script, victim, tmp_path / "failed"]
    output = "\n".join(run_agents([command, command], tmp_path, BOOSTER_MONITOR=monitor))
    assert "the error of the first attempt" in output
    for rank in range(2):
        assert f"rank {rank} met [0, 1] after" in output


@pytest.mark.slow
def test_one_agent_with_a_static_rendezvous(script, tmp_path):
    options = ["--nnodes=1", "--nproc-per-node=2", f"--master-port={free_port()}", "--max-restarts=1"]
    (output,) = run_agents([[*options, script, 0, tmp_path / "failed"]], tmp_path)
    for rank in range(2):
        assert f"rank {rank} met [0, 1] after 1 restarts" in output
