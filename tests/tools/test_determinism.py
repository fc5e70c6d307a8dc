"""`deterministic` sets what results depend on, and two runs after it have the same bits."""

import os
import random
from pathlib import Path

import numpy as np
import pytest
import reference_plugins
import torch
from forked_scripts import torchrun_variables

from booster_core.errors import ConfigError
from booster_tools import deterministic

SCRIPT = f"""
import sys
sys.path.append({str(Path(reference_plugins.__file__).parent)!r})

import torch
from booster_core import Booster, launch_from_torch
from reference_plugins import ReferencePlugin
from booster_tools import deterministic

coordinator = launch_from_torch(seed=deterministic(int(sys.argv[1])))
assert torch.are_deterministic_algorithms_enabled()
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.5), torch.nn.Linear(16, 1))
booster = Booster(plugin=ReferencePlugin())
model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=0.1))
losses = []
for _ in range(3):
    loss = model(torch.randn(4, 8)).square().mean()
    booster.backward(loss, optimizer)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item().hex())
coordinator.print_on_master(" ".join(losses))
"""


@pytest.fixture
def switches(monkeypatch):
    """Put back what `deterministic` sets."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "to be put back")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    yield monkeypatch
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("switches")
def test_everything_that_results_depend_on_is_set():
    def draws():
        return random.random(), np.random.random_sample(), torch.rand(()).item()  # noqa: NPY002 - what scripts draw from

    def put_values():
        torch.zeros(3).put_(torch.tensor([0, 0]), torch.ones(2))  # which of the two stays depends on timing

    put_values()
    assert deterministic(7) == 7
    first = draws()
    deterministic(7)
    assert draws() == first
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert not torch.backends.cudnn.benchmark
    with pytest.raises(RuntimeError, match="does not have a deterministic implementation"):
        put_values()
    deterministic(7, warn_only=True)
    with pytest.warns(UserWarning, match="does not have a deterministic implementation"):
        put_values()


@pytest.mark.parametrize(
    ("seed", "workspace", "is_started", "message"),
    [
        (-1, None, False, r"`seed=-1` of `deterministic` is not an integer from 0"),
        (True, None, False, r"`seed=True`"),
        (
            1,
            ":4096:2",
            False,
            r"With CUBLAS_WORKSPACE_CONFIG=':4096:2' results vary. Set it to :4096:8 or :16:8, or unset it",
        ),
        (1, None, True, r"CUDA has started.*`export CUBLAS_WORKSPACE_CONFIG=:4096:8`"),
    ],
)
def test_what_comes_too_late_or_contradicts_is_refused(switches, seed, workspace, is_started, message):
    switches.setattr(torch.cuda, "is_initialized", lambda: is_started)
    if workspace is not None:
        switches.setenv("CUBLAS_WORKSPACE_CONFIG", workspace)
    state = torch.get_rng_state()
    with pytest.raises(ConfigError, match=message):
        deterministic(seed)
    assert os.environ.get("CUBLAS_WORKSPACE_CONFIG") == workspace
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.equal(torch.get_rng_state(), state)


def test_a_workspace_that_the_user_set_is_kept_and_may_be_late(switches):
    switches.setattr(torch.cuda, "is_initialized", lambda: True)
    switches.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    deterministic()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"


def test_runs_of_one_seed_have_the_same_bits(scripts, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    printed = []
    for seed in (7, 7, 8):
        result = scripts.run(script, [[str(seed)]] * 2, torchrun_variables(2))
        assert result.codes == [0, 0], result.output
        printed.append(result.output.splitlines()[-1])
    assert printed[0] == printed[1] != printed[2]


def test_after_the_launch_it_is_refused(scripts, tmp_path):
    script = tmp_path / "late.py"
    script.write_text(
        "from booster_core import launch\nfrom booster_tools import deterministic\nlaunch()\ndeterministic(7)\n"
    )
    result = scripts.run(script, [[]])
    assert result.codes != [0]
    assert "ConfigError: `deterministic` came after `launch`. Call it before" in result.output
