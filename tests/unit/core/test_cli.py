from __future__ import annotations

import json
import subprocess
import sys

import pytest
from click.testing import CliRunner

import booster_core
from booster_core.cli import main
from booster_core.cli.doctor import run_checks


def run(*arguments):
    return CliRunner().invoke(main, arguments)


def test_help_lists_every_verb_with_its_summary_and_imports_none():
    code = "import sys; from booster_core.cli import main; main(['--help'], standalone_mode=False)"
    code += (
        "\nprint(sorted(name for name in sys.modules if name.startswith('booster_core.cli.')), 'torch' in sys.modules)"
    )
    output = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert output.endswith("[] False\n")
    for verb, summary in {"plugins": "List the installed plugins", "env": "Print what", "doctor": "Try out"}.items():
        assert f"  {verb} " in output
        assert summary in output


def test_an_unknown_verb_is_refused():
    result = run("plugin")
    assert result.exit_code == 2
    assert "No such command 'plugin'" in result.output


def test_plugins_lists_each_with_its_capabilities_or_the_cause(install):
    install("acme", body="capabilities = frozenset({Capability.CPU, Capability.BF16})")
    install("broken", files={"hooks.py": "def broken(:"})
    install("dynamic", files={"hooks.py": "import booster_core"})
    install("soon", body="available = False")
    result = run("plugins")
    assert result.exit_code == 0
    rows = {line.split()[0]: line for line in result.output.splitlines()}
    assert rows["acme"].split(maxsplit=4)[1:] == [
        "AcmePlugin", "booster-acme", "1.2", "bf16, cpu",
    ]  # fmt: skip
    assert "cannot be loaded: SyntaxError" in rows["broken"]
    assert rows["dynamic"].endswith("?")
    assert "not available yet" in rows["soon"]


def test_plugins_does_not_import_torch():
    code = "import sys; from booster_core.cli import main; main(['plugins'], standalone_mode=False)"
    code += "; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, capture_output=True).returncode == 0


def test_plugins_load_finds_what_the_source_does_not_show_and_fails_on_a_broken_one(install):
    install("acme", body="capabilities = frozenset(c for c in Capability if c.value == 'cpu')")
    install("broken", files={"plugin.py": "raise ValueError('bad day')"})
    result = run("plugins", "--load")
    assert result.exit_code == 1
    rows = {line.split()[0]: line for line in result.output.splitlines()}
    assert rows["acme"].split()[-1] == "cpu"
    assert rows["broken"].endswith("could not be imported: ValueError: bad day")


def test_plugins_json_holds_every_field(install):
    install("acme", body="capabilities = frozenset({Capability.CPU, Capability.BF16})")
    (entry,) = [entry for entry in json.loads(run("plugins", "--json").output) if entry["name"] == "acme"]
    assert entry == {
        "name": "acme",
        "distribution": "booster-acme",
        "version": "1.2",
        "entry_point": "booster_acme.hooks",
        "class_name": "AcmePlugin",
        "capabilities": ["bf16", "cpu"],
        "available": True,
        "problem": None,
    }


def test_env_tells_what_a_bug_report_needs(install, monkeypatch):
    import torch

    install("acme")
    monkeypatch.setenv("MASTER_PORT", "29511")
    report = json.loads(run("env", "--json").output)
    assert report["torch"]["version"] == torch.__version__
    assert report["torch"]["gloo"] is True
    assert report["packages"]["booster-core"] == booster_core.__version__
    assert report["packages"]["booster-acme"] == "1.2"
    assert report["plugins"]["acme"] == "available"
    assert report["environment variables"]["MASTER_PORT"] == "29511"
    assert "usable cores" in report["machine"]
    text = run("env").output
    assert f"  version: {torch.__version__}" in text


def test_env_reports_a_torch_that_cannot_be_imported(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    result = run("env")
    assert result.exit_code == 0
    assert "problem: torch cannot be imported" in result.output


def test_doctor_finds_a_healthy_machine_healthy():
    result = run("doctor", "--backend", "gloo")
    assert result.exit_code == 0, result.output
    assert "FAIL" not in result.output
    for name in ("all_reduce float32", "all_gather bfloat16", "isend_irecv bfloat16", "write one file together"):
        assert f"  ok    {name}\n" in result.output


def test_doctor_ends_what_hangs_and_names_it():
    problems = run_checks("gloo", timeout_seconds=0.01)
    assert list(problems) == ["start"] or any("did not return within 0.01 s" in str(text) for text in problems.values())
    assert any(problems.values())


def test_doctor_fails_where_a_backend_is_missing():
    import torch.distributed as dist

    if dist.is_nccl_available():
        pytest.skip("this torch has nccl, whose absence is what is tested")
    result = run("doctor", "--backend", "nccl")
    assert result.exit_code == 1
    assert "FAIL" in result.output


@pytest.mark.parametrize("name", booster_core.__all__)
def test_every_public_name_can_be_imported(name):
    assert callable(getattr(booster_core, name))


def test_importing_core_imports_neither_torch_nor_a_plugin():
    code = "import sys, booster_core; sys.exit(any(n.split('.')[0] in {'torch', 'booster_ddp'} for n in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_an_unknown_public_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'booster_core' has no attribute 'Bouster'"):
        booster_core.Bouster  # noqa: B018 - looking it up is what raises


def test_dir_lists_public_names_that_are_not_imported_yet():
    assert {*booster_core.__all__, "__version__"} <= set(dir(booster_core))
