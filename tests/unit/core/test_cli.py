from __future__ import annotations

import json
import re
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
        "\nprint(sorted(name for name in sys.modules if name.startswith('booster_core.cli.') and '._' not in name)"
        ", 'torch' in sys.modules)"
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


VERB = """\
\"\"\"Say hello to the world.

More of it.
\"\"\"
import click

@click.command()
@click.argument("name")
def command(*, name):
    click.echo(f"hello {name}")
"""


def install_verb(install, init="", **more):
    files = {"__init__.py": init, "cli.py": VERB}
    return install("greet", files=files, group="booster.commands", **{"module": "booster_greet.cli", **more})


def test_another_distribution_brings_a_verb(install):
    install_verb(install)
    assert run("greet", "Ada").output == "hello Ada\n"
    assert re.search(r"greet +Say hello to the world\.\n", run("--help").output)


def test_help_lists_a_verb_without_importing_its_package(install):
    package = install_verb(install, "1 / 0")
    assert re.search(r"greet +Say hello to the world\.\n", run("--help").output)
    assert package not in sys.modules


def test_a_verb_that_cannot_be_imported_is_told_by_its_distribution(install):
    install_verb(install, "1 / 0")
    result = run("greet", "Ada")
    assert result.exit_code == 1
    assert (
        "Verb 'greet' (booster-greet 1.2) could not be imported: ZeroDivisionError: division by zero" in result.output
    )


def test_a_verb_whose_module_is_gone_is_told_in_the_listing(install):
    install_verb(install, module="booster_greet.gone")
    assert "Cannot be loaded: No module named 'booster_greet.gone'" in " ".join(run("--help").output.split())


def test_a_verb_without_a_command_is_told(install):
    install("greet", files={"cli.py": '"""Say nothing."""'}, group="booster.commands", module="booster_greet.cli")
    result = run("greet")
    assert result.exit_code == 1
    assert "has no click command named `command` in its module 'booster_greet.cli'" in result.output


def test_a_verb_that_two_distributions_bring_is_refused(install):
    for distribution in ("booster-greet", "acme-greet"):
        install_verb(install, distribution=distribution)
    result = run("greet", "Ada")
    assert result.exit_code == 1
    assert "Several distributions bring it: " in result.output
    assert "Uninstall all but one." in run("--help").output


def test_a_verb_of_core_is_not_replaced(install):
    install("plugins", files={"cli.py": VERB}, group="booster.commands", module="booster_plugins.cli")
    assert "hello" not in run("plugins").output
    assert "List the installed plugins" in run("--help").output


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
