"""``booster plan``: what it prints, and its exit status."""

import pytest
import torch
from click.testing import CliRunner
from torch import nn

from booster_runtime.cli.plan import command
from booster_runtime.planning import Candidate, Devices, plan

SCRIPT = """
import torch

def build():
    model = torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 256))
    return model, torch.optim.AdamW(model.parameters()), lambda outputs, batch: outputs.square().mean()

def batch():
    return torch.zeros(64, 256)
"""
SIZES = ["--devices", "64", "--memory"]


@pytest.fixture
def run(tmp_path, monkeypatch):
    path = tmp_path / "script_to_plan.py"
    path.write_text(SCRIPT)
    monkeypatch.syspath_prepend(tmp_path)
    return lambda *options, function="build": CliRunner().invoke(command, [f"{path}:{function}", *options])


def test_the_setting_that_fits_is_printed_as_code(run):
    # Parameters, gradients and state take 8 MiB under ddp; sharded, an eighth of this and the gathered parameters.
    done = run(*SIZES, "7MiB", "--plugin", "ddp", "--plugin", "fsdp")
    assert done.exit_code == 0, done.output
    rows = [line.split() for line in done.stdout.splitlines()]
    assert [row[0] for row in rows if row and row[-1].startswith("ddp(")] == ["no", "no"]
    assert "booster = Booster(plugin=" in done.stdout.splitlines()[-1]
    assert "1/4 ddp()" in done.stderr


def test_nothing_that_fits_is_an_exit_status(run):
    done = run(*SIZES, "1MiB", "--plugin", "zero")
    assert (done.exit_code, "No setting fits." in done.stdout) == (1, True)


class _Dropping(nn.Linear):
    def forward(self, x):
        y = super().forward(x)
        return y[y > 0]


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (lambda: _Dropping(256, 1024), {}, "can't be known without computing it"),
        (lambda: nn.Linear(256, 1024), {"stage": 3}, "stage=3"),
        (lambda: nn.Linear(256, 1024), {"offload": "cpu"}, "Plugin 'zero' with `offload='cpu'` can't be planned"),
    ],
)
def test_what_cannot_be_planned_says_why(model, options, message):
    def build():
        made = model()
        return made, torch.optim.AdamW(made.parameters()), lambda outputs, batch: outputs.sum()

    devices = Devices(number=4, memory_bytes=2**30)
    found = plan(build, lambda: torch.zeros(64, 256), devices, settings=[Candidate(name="zero", options=options)])
    assert found.best is None
    assert message in found.settings[0].problem
