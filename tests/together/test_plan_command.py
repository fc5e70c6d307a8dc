"""``booster plan``: what it prints, and its exit status."""

import json
import os
import signal
import sys

import pytest
import torch
from command_runs import command_runner
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from booster_core.errors import ConfigError
from booster_tools import TrainingFunctions
from booster_tools.cli.plan import command
from booster_tools.planning import Candidate, Devices, plan

SCRIPT = """
import torch

def build():
    model = torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 256))
    return model, torch.optim.AdamW(model.parameters())

def batch():
    return torch.zeros(64, 256)

def loss(outputs, batch):
    return outputs.square().mean()
"""
SIZES = ["--devices", "64", "--memory"]


@pytest.fixture
def run(tmp_path, monkeypatch):
    path = tmp_path / "script_to_plan.py"
    path.write_text(SCRIPT)
    monkeypatch.syspath_prepend(tmp_path)
    runner = command_runner()
    return lambda *options, function="build": runner.invoke(command, [f"{path}:{function}", "--loss", "loss", *options])


def test_the_setting_that_fits_is_printed_as_code(run):
    # Parameters, gradients and state take 8 MiB under ddp; sharded, an eighth of this and the gathered parameters.
    done = run(*SIZES, "7MiB", "--plugin", "ddp", "--plugin", "fsdp")
    assert done.exit_code == 0, done.output
    rows = [line.split() for line in done.stdout.splitlines()]
    assert [row[0] for row in rows if row and row[-1].startswith("ddp(")] == ["no", "no"]
    assert "booster = Booster(plugin=" in done.stdout.splitlines()[-1]
    told = [line.split(maxsplit=1) for line in done.stderr.splitlines() if line[:1].isdigit()]
    assert [count for count, _ in told] == ["1/4", "2/4", "3/4", "4/4"]
    assert "ddp()" in [setting for _, setting in told]


def test_a_model_of_transformers_is_planned_by_its_folder(tmp_path):
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_hidden_layers": 2}
    LlamaConfig(vocab_size=128, tie_word_embeddings=False, **sizes).save_pretrained(tmp_path)
    options = ["--model", str(tmp_path), "--length", "512", "--samples", "8", "--devices", "4", "--memory"]
    runner = command_runner()

    def row(*more):
        done = runner.invoke(command, [*options, "1GiB", "--plugin", "ddp", *more])
        assert done.exit_code == 0, done.output
        return next(line.split() for line in done.stdout.splitlines() if line.endswith("ddp()"))

    model = LlamaForCausalLM(LlamaConfig.from_pretrained(tmp_path))
    held = 4 * sum(each.numel() for each in model.parameters())
    whole = row()
    assert float(whole[3]) == pytest.approx(held / 2**20, rel=0.02)  # parameters, in MiB
    assert float(row("--recompute")[1]) < float(whole[1])
    none = runner.invoke(command, ["--model", str(tmp_path / "absent"), "--devices", "4", "--memory", "1GiB"])
    assert none.exit_code == 2
    assert "transformers finds no configuration of" in none.stderr
    assert "Name either FILE:FUNCTION or a model" in runner.invoke(command, [*SIZES, "1GiB"]).stderr


def test_the_best_setting_is_printed_for_booster_run(run):
    done = run(*SIZES, "1GiB", "--plugin", "zero", "--option", "stage=2", "--precision", "bf16", "--json")
    assert json.loads(done.stdout) == {"plugin": "zero", "options": {"stage": 2}, "precision": "bf16"}
    assert "zero(stage=2)" in done.stderr, "the table"
    assert "is an argument of one plugin" in run(*SIZES, "1GiB", "--option", "stage=2").stderr


@pytest.mark.skipif(sys.platform != "linux", reason="torchft has wheels for Linux alone")
def test_a_plugin_that_waits_for_other_launches_is_refused_at_once(run, capfd):
    done = run(*SIZES, "1GiB", "--plugin", "ft", "--plugin", "ddp")
    assert done.exit_code == 0
    assert "not planned: ft(): Plugin 'ft' waits for the ranks of other launches" in done.stdout
    assert "Use its inner plugin 'ddp'." in done.stdout
    assert "Warning" not in capfd.readouterr().err, "torch's, of the group of a plan"


def test_plans_side_by_side_are_those_made_one_after_the_other():
    def made(num_processes):
        devices = Devices(number=2, memory_bytes=2**30)
        found = plan(_functions(_mlp), devices, plugins=["ddp", "zero"], num_processes=num_processes)
        return [
            (each.candidate, each.problem, each.prediction and each.prediction.peak_bytes, each.step_seconds)
            for each in found.settings
        ]

    assert made(3) == made(1)


def test_a_process_that_is_killed_is_told():
    def build():
        os.kill(os.getpid(), signal.SIGKILL)

    devices = Devices(number=4, memory_bytes=2**30)
    with pytest.raises(ConfigError, match="A process that made plans was ended"):
        plan(_functions(build), devices, plugins=["ddp"], num_processes=2)


def _mlp():
    model = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256))
    return model, torch.optim.AdamW(model.parameters())


def _functions(build):
    return TrainingFunctions(build, lambda: torch.zeros(64, 256), lambda outputs, _: outputs.square().mean())


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
        return made, torch.optim.AdamW(made.parameters())

    devices = Devices(number=4, memory_bytes=2**30)
    found = plan(_functions(build), devices, settings=[Candidate(name="zero", options=options)])
    assert found.best is None
    assert message in found.settings[0].problem
