"""``booster run``: what it starts, and what a script's ``Booster()`` takes from it."""

import json
import logging
import os
import subprocess
import sys

import pytest
from click.testing import CliRunner

from booster_core import Booster
from booster_core.cli import main
from booster_core.errors import ConfigError
from booster_core.run_settings import RunSettings, option_value

SLURM = {"SLURM_JOB_ID": "123", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "gpu[03-04]", "SLURM_JOB_NUM_NODES": "2"}
BODY = "def __init__(self, stage=1, precision=None):\n        self.stage, self.precision = stage, precision"


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Return a function that runs the command and returns the arguments and settings that Python would get."""
    script = tmp_path / "train.py"
    script.write_text("")
    started = []
    monkeypatch.setattr(os, "execve", lambda _, arguments, variables: started.append((arguments, variables)))
    monkeypatch.chdir(tmp_path)

    def run(*arguments, **variables):
        started.clear()
        result = CliRunner(env=variables).invoke(main, ["run", *arguments])
        if not started:
            return result.exit_code, " ".join(result.output.split())
        ((command, environment),) = started
        assert command[0] == sys.executable
        return command[1:], json.loads(environment.get("BOOSTER_SETTINGS", "{}"))

    return run


def test_torchrun_is_started_with_the_script_and_its_arguments(start):
    arguments = ["--nproc", "8", "--plugin", "zero", "--option", "stage=2", "--precision", "bf16"]
    command, settings = start("train.py", *arguments, "--lr", "3e-4", "--", "--plugin", "mine")
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=8"]
    assert command == [*torchrun, "train.py", "--lr", "3e-4", "--plugin", "mine"]
    assert settings == {"plugin": "zero", "options": {"stage": 2}, "precision": "bf16"}
    assert start("train.py", "--nproc", "2") == ([*torchrun[:-1], "--nproc-per-node=2", "train.py"], {})
    command, _ = start("train.py", "--nproc", "8", "--max-restarts", "3")
    assert command == [*torchrun, "--max-restarts=3", "train.py"]


def test_groups_are_of_another_distribution(start, monkeypatch):
    from booster_core.cli import run

    monkeypatch.setattr(run, "_LAUNCHERS", "booster.no_launchers")
    code, output = start("train.py", "--groups", "2")
    assert code == 2
    assert "`--groups` needs booster-ft. Run `pip install booster-ft`" in output


def test_settings_of_a_file_are_defaults(start, tmp_path):
    toml = 'plugin = "zero"\nprecision = "bf16"\nnproc = 4\nhosts = ["a", "b"]\n[options]\nstage = 2\nunused = "skip"\n'
    (tmp_path / "run.toml").write_text(toml)
    command, settings = start("train.py", "--settings", "run.toml", "--option", "stage=1", "--precision", "fp32")
    assert "--nproc-per-node=4" in command
    assert "--rdzv-endpoint=a" in command
    assert settings == {"plugin": "zero", "options": {"stage": 1, "unused": "skip"}, "precision": "fp32"}
    _, settings = start("train.py", "--settings", "run.toml", "--plugin", "ddp")
    assert settings == {"plugin": "ddp", "precision": "bf16"}
    (tmp_path / "run.json").write_text(RunSettings(plugin="zero", options={"stage": 2}).to_json())
    assert start("train.py", "--settings", "run.json")[1] == {"plugin": "zero", "options": {"stage": 2}}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            "plugins = 'zero'",
            "no settings named 'plugins'; it can have: groups, hosts, join_timeout, max_restarts,",
        ),
        ("plugin = ", "can't be read as TOML"),
        ("precision = 'bf15'", "'bf15' is not one of"),
        ("nproc = 0", "0 is not in the range"),
        ("[options]\nstage = 2", "`stage=2` are options of a plugin, and none is named"),
        ("plugin = 'zero'\noptions = 2", "`options=2` of a run's settings is no table"),
    ],
)
def test_a_wrong_file_is_refused(start, tmp_path, text, problem):
    (tmp_path / "run.toml").write_text(text)
    code, output = start("train.py", "--settings", "run.toml")
    assert code == 2
    assert problem in output


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--lr", "3", "train.py"], "No file '--lr'. The script comes before its own arguments."),
        (["train.py", "--option", "stage=2"], "`stage=2` are options of a plugin, and none is named"),
        (["train.py", "--plugin", "zero", "--option", "stage"], "`--option stage` is not NAME=VALUE"),
        (["train.py", "--settings", "absent.toml"], "'absent.toml' can't be read as TOML"),
        (["train.py", "--min-replicas", "2"], "are of replica groups. Say how many, by `--groups`"),
        (["train.py", "--groups", "2", "--hosts", "a,b"], "starts groups on this host"),
    ],
)
def test_wrong_arguments_are_refused(start, arguments, problem):
    code, output = start(*arguments)
    assert code == 2
    assert problem in output


def test_hosts_and_slurm_nodes_meet_at_the_first(start):
    several, _ = start("train.py", "--nproc", "2", "--hosts", "a:2345,b,c")
    assert several[2:6] == ["--nnodes=3", "--rdzv-backend=c10d", "--rdzv-endpoint=a:2345", "--rdzv-id=booster"]
    nodes = {**SLURM, "SLURM_STEP_NUM_NODES": "2"}
    several, _ = start("train.py", "--nproc", "2", **nodes, SLURM_STEP_NUM_TASKS="2")
    assert several[2:6] == ["--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=gpu03:15123", "--rdzv-id=123.0"]
    each_rank, settings = start("train.py", "--plugin", "ddp", **nodes, SLURM_STEP_NUM_TASKS="16")
    assert (each_rank, settings) == (["train.py"], {"plugin": "ddp"})
    code, output = start("train.py", "--nproc", "2", **nodes, SLURM_STEP_NUM_TASKS="16")
    assert code == 2
    assert "srun started 16 tasks on 2 node(s), which are the ranks. Leave out `--nproc`" in output
    code, output = start("train.py", "--nproc", "2", **SLURM)
    assert code == 2
    assert "This job has 2 nodes, of which only this one would be used" in output


@pytest.mark.parametrize(
    ("text", "value"),
    [("a=2", 2), ("a=[1, 2]", [1, 2]), ("a=true", True), ("a=False", False), ("a=None", None), ("a=x=y", "x=y")],
)
def test_options_are_literals_or_strings(text, value):
    assert option_value(text) == ("a", value)


def test_a_booster_that_passes_nothing_takes_the_settings(install, monkeypatch):
    install(body=BODY)
    chosen = RunSettings(plugin="acme", options={"stage": 2}, precision="fp32")
    monkeypatch.setenv("BOOSTER_SETTINGS", chosen.to_json())
    booster = Booster(device="cpu")
    assert (booster.plugin.name, booster.plugin.stage, booster.precision.name) == ("acme", 2, "fp32")
    assert not booster.precision.follows_model
    monkeypatch.setenv("BOOSTER_SETTINGS", RunSettings(plugin="acme", options={"stages": 2}).to_json())
    with pytest.raises(ConfigError, match=r"'acme' has no option 'stages', .* Its options: stage, precision\."):
        Booster()


def test_what_the_script_passes_wins_with_a_warning(install, monkeypatch, caplog):
    install(body="capabilities = frozenset({Capability.CPU, Capability.FP32, Capability.BF16})\n    " + BODY)
    monkeypatch.setenv("BOOSTER_SETTINGS", RunSettings(plugin="zero", precision="bf16").to_json())
    with caplog.at_level(logging.WARNING, "booster"):
        booster = Booster(plugin="acme")
        assert (booster.plugin.stage, booster.precision.name) == (1, "bf16")
        (record,) = caplog.records
        assert "passes plugin 'acme' to Booster, and `--plugin zero` of `booster run` and" in record.getMessage()
        caplog.clear()
        assert Booster(None, "fp32", "acme").precision.name == "fp32"
        assert "precision 'fp32', and `--precision bf16` of `booster run` has no effect" in caplog.text


def test_settings_that_nobody_can_read_are_refused(monkeypatch):
    for text in ("zero", '{"plugins": "zero"}', "[]", '{"plugin": 3}'):
        monkeypatch.setenv("BOOSTER_SETTINGS", text)
        with pytest.raises(ConfigError, match=r"BOOSTER_SETTINGS=.* is no settings of a run|`plugin=3` of a run's"):
            Booster()
    with pytest.raises(ConfigError, match="can't be passed to a script"):
        RunSettings(plugin="zero", options={"split_batch": print}).to_json()


def test_ranks_of_a_started_script_take_the_settings(tmp_path):
    script = tmp_path / "train.py"
    # In one write: under PYTHONUNBUFFERED, print writes each of its arguments and the end of the line apart.
    line = "' '.join([os.environ['RANK'], os.environ['BOOSTER_SETTINGS'], *sys.argv[1:]]) + '\\n'"
    script.write_text(f"import os, sys; sys.stdout.write({line})")
    command = [sys.executable, "-c", "from booster_core.cli import main; main()", "run"]
    done = subprocess.run(
        [*command, str(script), "--nproc", "2", "--precision", "bf16", "--lr", "1"],
        check=True, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert sorted(done.stdout.splitlines()) == [f'{rank} {{"precision": "bf16"}} --lr 1' for rank in range(2)]
