from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest
from click.testing import CliRunner

from booster_runtime.cli.completion import SHELLS, command

_BOOSTER = "import sys; from booster_core.cli import main; sys.argv = ['booster']; main(prog_name='booster')"


@pytest.mark.parametrize("shell", SHELLS)
def test_completion_is_printed_for_each_shell(shell):
    result = CliRunner().invoke(command, [shell])
    assert result.exit_code == 0
    assert f"_BOOSTER_COMPLETE={shell}_complete" in result.output


def test_other_shells_are_refused():
    result = CliRunner().invoke(command, ["csh"])
    assert result.exit_code == 2
    assert "'csh' is not one of 'bash', 'zsh', 'fish'" in result.output


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash to read the script")
def test_bash_reads_the_script():
    script = CliRunner().invoke(command, ["bash"]).output
    done = subprocess.run(["bash", "-c", f"{script}\ncomplete -p booster"], check=False, capture_output=True, text=True)
    assert done.stdout.strip() == "complete -o nosort -F _booster_completion booster", done.stderr


def test_verbs_are_completed():
    asked = {"_BOOSTER_COMPLETE": "bash_complete", "COMP_WORDS": "booster pl", "COMP_CWORD": "1"}
    done = subprocess.run(
        [sys.executable, "-c", _BOOSTER], check=True, capture_output=True, text=True, env={**os.environ, **asked}
    )
    assert {"plain,plan", "plain,plot", "plain,plugins"} <= set(done.stdout.split())
