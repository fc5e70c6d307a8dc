"""Typical user scripts under each plugin: results equal those of plain PyTorch, or an error is raised.

Most run on reused ranks, where only the launch is replaced by the existing process group. Some are started as
a user starts them.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from matrix import matrix
from named_plugins import make_model, samples
from run_script import run_script

from booster_testing import run_on_ranks
from booster_testing.compare import assert_same_tensors, tolerance_for

HERE = Path(__file__).parent
SHARED = HERE.parents[1] / "shared"
TWO_RANKS = ["ddp", "fsdp", "zero", "gemini", "hybrid-tp"]
REPLICAS = {"hybrid-tp": 1, "hybrid-pp": 1}
"""Data parallel size on two ranks, for plugins where it is not 2."""


def run(script, plugin, out):
    """Run a script on a rank with an existing process group; return the error that ends it."""
    return run_script(HERE / f"{script}.py", plugin, out)


def trained_by_torch(global_batch):
    """Return the parameters after three steps of plain PyTorch with a number of samples in each."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for tokens in samples()[: 3 * global_batch].split(global_batch):
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def assert_trained(folder, global_batch):
    loaded = type(make_model()).from_pretrained(folder)
    assert_same_tensors(loaded.state_dict(), trained_by_torch(global_batch), tolerance_for(torch.float32))


@pytest.fixture(autouse=True)
def _leave_nothing_behind(monkeypatch, tmp_path):
    """Prevent transformers from leaving loading threads, and torch from setting an environment variable permanently."""
    monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "1")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))


@matrix(["same_batch-zero"], script=["save_pretrained", "same_batch"], plugin=TWO_RANKS)
def test_two_ranks_equal_plain_torch(script, plugin, tmp_path):
    out = tmp_path / "out"
    assert run_on_ranks(run, 2, script, plugin, str(out)) == [None, None]
    replicas = 1 if script == "same_batch" else REPLICAS.get(plugin, 2)
    assert_trained(out, 2 * replicas)


def test_pipeline_equals_plain_torch(tmp_path):
    out = tmp_path / "out"
    assert run_on_ranks(run, 2, "pipeline", "hybrid-pp", str(out)) == [None, None]
    assert_trained(out, 2)


@pytest.mark.parametrize("plugin", ["single", "ddp"])
def test_late_optimizer_equals_plain_torch(plugin, tmp_path):
    out = tmp_path / "out"
    world_size = 1 if plugin == "single" else 2
    assert run_on_ranks(run, world_size, "late_optimizer", plugin, str(out)) == [None] * world_size
    assert_trained(out, 2 * world_size)


def start(script, plugin, out, *launcher):
    path = os.pathsep.join([str(SHARED), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, *launcher, str(HERE / f"{script}.py"), plugin, str(out)],
        check=False, capture_output=True, text=True, timeout=240, stdin=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def test_plain_script_started_by_python(tmp_path):
    done = start("save_pretrained", "single", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert_trained(tmp_path / "out", 2)


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


@pytest.mark.slow  # the first example of the README starts in this way by default
@pytest.mark.parametrize("plugin", [*TWO_RANKS, "hybrid-pp"])
def test_script_started_by_torchrun(plugin, tmp_path):
    script = "pipeline" if plugin == "hybrid-pp" else "save_pretrained"
    done = start(script, plugin, tmp_path / "out", *TORCHRUN)
    assert done.returncode == 0, done.stderr
    assert_trained(tmp_path / "out", 2 * REPLICAS.get(plugin, 2))
