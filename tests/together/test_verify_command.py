"""``booster verify``: what it prints, and its exit status."""

import pytest
from forked_scripts import torchrun_variables

SCRIPT = """
import torch
from booster_testing.models import tiny_llama

def build():
    model = tiny_llama()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)

def batch():
    tokens = torch.arange(24).view(4, 6) % 16
    return {"input_ids": tokens, "labels": tokens}

def unrepeatable():
    model = tiny_llama()
    torch.nn.init.normal_(model.lm_head.weight, generator=torch.Generator().manual_seed(torch.seed() % 1000))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    path = tmp_path_factory.mktemp("verify") / "train.py"
    path.write_text(SCRIPT)
    return path


@pytest.fixture
def verify(scripts, tmp_path):
    """Return a function that runs the command."""
    command = tmp_path / "command.py"
    command.write_text("from booster_core.cli import main; main()")
    return lambda *arguments: scripts.run(command, [["verify", *arguments]])


@pytest.mark.slow
def test_a_right_plugin_is_verified(script, verify):
    done = verify(f"{script}:build", "--plugin", "zero", "--option", "stage=2", "--steps", "1")
    assert done.codes == [0], done.output
    assert "plugin 'zero' on 2 rank(s) trains as one process does" in done.output


@pytest.mark.slow
def test_a_mistake_is_told_and_fails_the_command(script, verify):
    done = verify(f"{script}:unrepeatable", "--plugin", "ddp")
    assert done.codes != [0]
    assert "`build` makes other weights each time: 'lm_head.weight'" in done.output


@pytest.mark.parametrize(
    ("function", "plugin", "options", "message"),
    [
        ("build", "zerp", [], "Did you mean 'zero'?"),
        pytest.param("absent", "ddp", [], "has no function 'absent'", marks=pytest.mark.slow),
        pytest.param("build", "zero", ["stage"], "`--option stage` is not NAME=VALUE", marks=pytest.mark.slow),
    ],
    ids=["plugin", "function", "option"],
)
def test_a_mistake_is_told_in_one_line(script, scripts, tmp_path, function, plugin, options, message):
    rank = tmp_path / "rank.py"  # what the command starts on each rank, by torchrun
    rank.write_text("import sys\nfrom booster_tools.cli._verify_rank import main\nsys.exit(main(*sys.argv[1:]))\n")
    arguments = [f"{script}:{function}", "batch", "", plugin, "1", "", *options]
    done = scripts.run(rank, [arguments] * 2, torchrun_variables(2))
    assert done.codes == [2, 2], done.output
    (line,) = (line for line in done.output.splitlines() if line.startswith("booster verify:"))
    assert message in line
