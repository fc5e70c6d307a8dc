"""``booster verify``: the ranks that it starts, what they print, and the exit status."""

import subprocess
import sys
from pathlib import Path

import pytest
import reference_plugins
from click.testing import CliRunner
from forked_scripts import torchrun_variables

from booster_tools.cli.verify import command

SCRIPT = """
import torch
from booster_testing.models import TinyMLP

def build():
    model = TinyMLP()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)

def batch():
    return {"x": torch.ones(4, 8)}

def loss(outputs, batch):
    return outputs.square().mean()
"""
RANK = f"""
import sys
sys.path.append({str(Path(reference_plugins.__file__).parent)!r})
from reference_plugins import ReferencePlugin
from booster_tools.cli import _verify_rank as rank
rank.load = lambda name: ReferencePlugin
sys.exit(rank.main(*sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def verify(tmp_path_factory, scripts):
    """Return a function that runs the ranks of a command under a plugin that is not installed."""
    folder = tmp_path_factory.mktemp("verify")
    script, rank = folder / "train.py", folder / "rank.py"
    script.write_text(SCRIPT)
    rank.write_text(RANK)
    return lambda function, *arguments: scripts.run(
        rank, [[f"{script}:{function}", *arguments]] * 2, torchrun_variables(2)
    )


def test_a_right_plugin_is_verified(verify):
    done = verify("build", "batch", "loss", "reference", "1", "")
    assert done.codes == [0, 0], done.output
    assert done.output.count("plugin 'reference' on 2 rank(s) trains as one process does") == 1


def test_options_and_mistakes_reach_the_plugin_and_the_user(verify):
    done = verify("absent", "batch", "loss", "reference", "1", "", "precision=bf16")
    assert done.codes == [2, 2], done.output
    (line,) = (line for line in done.output.splitlines() if line.startswith("booster verify:"))
    assert "has no function 'absent'" in line
    done = verify("build", "batch", "loss", "reference", "1", "", "precision")
    assert done.codes == [2, 2], done.output
    assert "`--option precision` is not NAME=VALUE" in done.output
    done = verify("build", "batch", "loss", "reference", "1", "", "precision=bf15")
    assert done.codes == [2, 2], done.output
    assert "bf15" in done.output


@pytest.mark.parametrize(("returned", "written", "status"), [(0, 1, 1), (0, 0, 0), (3, None, 3)])
def test_the_command_starts_ranks_and_returns_their_status(returned, written, status, monkeypatch, tmp_path):
    started = []

    def run(arguments, check):
        started.append(arguments)
        if written is not None:
            Path(arguments[7]).write_text(str(written))
        return subprocess.CompletedProcess(arguments, returned)

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    given = ["train.py:build", "--plugin", "zero", "--option", "stage=2", "--nproc", "4", "--precision", "bf16"]
    assert CliRunner().invoke(command, given).exit_code == status
    ((program, *arguments),) = started
    assert program == sys.executable
    assert arguments[:4] == ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
    rank = "booster_tools.cli._verify_rank"
    assert arguments[4:6] == ["-m", rank]
    assert arguments[7:] == ["train.py:build", "batch", "", "zero", "2", "bf16", "stage=2"]


def test_a_missing_file_is_told_before_ranks_start(monkeypatch, tmp_path):
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("started"))
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(command, ["train.py:build", "--plugin", "zero"])
    assert done.exit_code == 2
    assert "No file 'train.py', of 'train.py:build'" in done.output
