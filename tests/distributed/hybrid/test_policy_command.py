"""``booster policy``: what it prints, and its exit status."""

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

def lonely():
    model = torch.nn.Linear(3, 3)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)

def rows():
    return (torch.ones(2, 3),)
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    path = tmp_path_factory.mktemp("policy") / "train.py"
    path.write_text(SCRIPT)
    return path


@pytest.fixture
def propose(scripts, tmp_path):
    """Return a function that runs the command."""
    command = tmp_path / "command.py"
    command.write_text("from booster_hybrid.cli.policy import command; command()")
    return lambda *arguments: scripts.run(command, [[*arguments]])


def test_a_policy_is_printed_written_and_verified(script, propose, tmp_path):
    written = tmp_path / "policy.py"
    done = propose(f"{script}:build", "--out", str(written))
    assert done.codes == [0], done.output
    assert 'ModuleRule("model.layers.*.self_attn.q_proj", Style.COLUMN, units="num_attention_heads"' in done.output
    assert "plugin 'hybrid' on 2 rank(s) trains as one process does" in done.output
    assert written.read_text() in done.output


@pytest.mark.parametrize(
    ("function", "batch", "message"),
    [
        ("lonely", "rows", "No linear layers of Linear could be split"),
        ("absent", "batch", "has no function 'absent'"),
        ("build", "none", "has no function 'none'"),
    ],
)
def test_what_cannot_be_proposed_fails_the_command(script, propose, function, batch, message):
    done = propose(f"{script}:{function}", "--batch", batch)
    assert done.codes == [2]
    assert message in done.output
