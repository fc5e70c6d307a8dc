"""``booster verify-plugin``: what it prints, and its exit status."""

import pytest

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
    return lambda *arguments: scripts.run(command, [["verify-plugin", *arguments]])


def test_a_right_plugin_is_verified(script, verify):
    done = verify(f"{script}:build", "--plugin", "zero", "--option", "stage=2", "--steps", "1")
    assert done.codes == [0], done.output
    assert "plugin 'zero' on 2 rank(s) trains as one process does" in done.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([":unrepeatable", "--plugin", "ddp"], "`build` makes other weights each time: 'lm_head.weight'"),
        ([":build", "--plugin", "zerp"], "Did you mean 'zero'?"),
        ([":absent", "--plugin", "ddp"], "has no function 'absent'"),
        ([":build", "--plugin", "zero", "--option", "stage"], "`--option stage` is not NAME=VALUE"),
    ],
    ids=["unrepeatable", "plugin", "function", "option"],
)
def test_a_mistake_is_told_in_one_line(script, verify, arguments, message):
    done = verify(f"{script}{arguments[0]}", *arguments[1:])
    assert done.codes[0]
    assert message in done.output
