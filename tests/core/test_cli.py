import json
import re
import subprocess
import sys

from click.testing import CliRunner

import booster_core
from booster_core.cli import main


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
    for verb, summary in {"plugins": "List the installed plugins", "env": "Print what", "inspect": "Print"}.items():
        assert f"  {verb} " in output
        assert summary in output


def test_the_command_runs_as_a_module():
    done = subprocess.run([sys.executable, "-m", "booster_core"], check=False, capture_output=True, text=True)
    assert (done.stdout + done.stderr).startswith("Usage: booster [OPTIONS]")


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
    return install("greet", files=files, group="booster.commands", **{"module": "booster_greet.cli:command", **more})


def test_another_distribution_brings_a_verb(install):
    install_verb(install)
    assert run("greet", "Ada").output == "hello Ada\n"


def test_help_lists_a_verb_that_cannot_be_imported_and_a_call_tells_its_distribution(install):
    package = install_verb(install, "1 / 0")
    assert re.search(r"greet +Say hello to the world\.\n", run("--help").output)
    assert package not in sys.modules
    result = run("greet", "Ada")
    assert result.exit_code == 1
    assert (
        "Verb 'greet' (booster-greet 1.2) could not be imported: ZeroDivisionError: division by zero" in result.output
    )


def test_a_verb_whose_module_is_gone_is_told_in_the_listing(install):
    install_verb(install, module="booster_greet.gone:command")
    assert "Cannot be loaded: No module named 'booster_greet.gone'" in " ".join(run("--help").output.split())


def test_a_verb_without_a_command_is_told(install):
    install("greet", files={"cli.py": "command = 1"}, group="booster.commands", module="booster_greet.cli:command")
    result = run("greet")
    assert result.exit_code == 1
    assert "Verb 'greet' (booster-greet 1.2) is no click command: 'booster_greet.cli:command'." in result.output


def test_a_verb_that_two_distributions_bring_is_refused(install):
    for distribution in ("booster-greet", "acme-greet"):
        install_verb(install, distribution=distribution)
    result = run("greet", "Ada")
    assert result.exit_code == 1
    assert "Several distributions bring it: " in result.output
    assert "Uninstall all but one." in run("--help").output


def test_a_verb_of_core_is_not_replaced(install):
    install("plugins", files={"cli.py": VERB}, group="booster.commands", module="booster_plugins.cli:command")
    result = run("plugins")
    assert result.exit_code == 1
    assert "hello" not in result.output
    assert "Several distributions bring it: " in result.output


def test_plugins_lists_each_with_its_distribution_and_the_problem(install):
    install("acme")
    install("newer", requires=["booster-core>=9.3,<9.4"])
    result = run("plugins")
    assert result.exit_code == 0
    assert result.output.splitlines()[0].split() == ["NAME", "DISTRIBUTION", "VERSION", "PROBLEM"]
    rows = {line.split()[0]: line for line in result.output.splitlines()}
    assert rows["acme"].split() == ["acme", "booster-acme", "1.2", "-"]
    assert rows["newer"].endswith(f"needs booster-core>=9.3,<9.4, installed {booster_core.__version__}")


def test_plugins_load_shows_classes_and_capabilities_and_fails_on_a_broken_plugin(install):
    install("acme", body="capabilities = frozenset(c for c in Capability if c.value == 'cpu')")
    install("broken", files={"plugin.py": "raise ValueError('bad day')"})
    result = run("plugins", "--load")
    assert result.exit_code == 1
    rows = {line.split()[0]: line for line in result.output.splitlines()}
    assert rows["acme"].split() == ["acme", "booster-acme", "1.2", "AcmePlugin", "cpu", "-"]
    assert rows["broken"].endswith("could not be imported: ValueError: bad day")


def test_plugins_json_holds_every_field(install):
    install("acme", body="capabilities = frozenset({Capability.CPU, Capability.BF16})")

    def entry(*arguments):
        (found,) = [each for each in json.loads(run("plugins", "--json", *arguments).output) if each["name"] == "acme"]
        return found

    metadata = {
        "name": "acme",
        "distribution": "booster-acme",
        "version": "1.2",
        "entry_point": "booster_acme.hooks",
        "problem": None,
    }
    assert entry() == metadata
    assert entry("--load") == {**metadata, "class": "AcmePlugin", "capabilities": ["bf16", "cpu"]}


def test_env_tells_what_a_bug_report_needs(install, monkeypatch):
    import torch

    install("acme")
    monkeypatch.setenv("MASTER_PORT", "29511")
    report = json.loads(run("env", "--json").output)
    assert report["torch"]["version"] == torch.__version__
    assert report["torch"]["gloo"] is True
    assert report["packages"]["booster-core"] == booster_core.__version__
    assert report["packages"]["booster-acme"] == "1.2"
    assert report["plugins"]["acme"] == "booster-acme 1.2"
    assert report["environment variables"]["MASTER_PORT"] == "29511"
    assert "usable cores" in report["machine"]
    text = run("env").output
    assert f"  version: {torch.__version__}" in text


def test_env_reports_a_torch_that_cannot_be_imported(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    result = run("env")
    assert result.exit_code == 0
    assert "problem: torch cannot be imported" in result.output


def test_importing_core_imports_neither_torch_nor_a_plugin():
    code = "import sys, booster_core; sys.exit(any(n.split('.')[0] in {'torch', 'booster_ddp'} for n in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
