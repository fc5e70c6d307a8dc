"""booster-core alone: what works, and errors that name the distribution to install."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
TRAIN = """
import torch
from booster_core import Booster

model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = torch.utils.data.DataLoader(list(torch.randn(8, 4)), batch_size=4)
booster = Booster()
model, optimizer, criterion, loader, _ = booster.boost(model, optimizer, torch.nn.MSELoss(), loader)
for batch in loader:
    loss = criterion(model(batch), torch.zeros(4, 1))
    booster.backward(loss, optimizer)
    optimizer.clip_grad_by_norm(1.0)
    optimizer.step()
    optimizer.zero_grad()
"""


CALLS = {
    "booster.save_model(model, 'out')": "CheckpointError",
    "booster.load_checkpoint('out', model=model)": "CheckpointError",
    "booster.ema(model)": "CheckpointError",
    "booster.prepare_dataloader([1, 2])": "ConfigError",
    "booster.gather_for_metrics(torch.ones(4), loader)": "ConfigError",
    "booster.enable_lora(torch.nn.Linear(2, 2), lora_config=None)": "ConfigError",
    "from booster_core import LazyInitContext": "ImportError",
    "from booster_core import enable_activation_checkpointing": "ImportError",
}
"""Uses of the toolkit's features, and the error that each raises."""


class Outcome(NamedTuple):
    """What the process printed, and the files that it left."""

    errors: dict[str, str]
    files: list[Path]


@pytest.fixture(scope="module")
def outcome(build_wheel, environment_of, tmp_path_factory):
    """Train in one process that has only core, and make all calls."""
    environment = environment_of(build_wheel(ROOT / "packages" / "booster-core"))
    script = f"""{TRAIN}
import json
errors = {{}}
for call in {[*CALLS]!r}:
    try:
        exec(call)
    except Exception as caught:
        errors[call] = f"{{type(caught).__name__}} {{caught}}"
print(json.dumps(errors))
"""
    folder = tmp_path_factory.mktemp("run")
    return Outcome(json.loads(environment.run("-c", script, cwd=folder).stdout), list(folder.iterdir()))


def test_one_device_trains(outcome):
    assert outcome.errors.keys() == CALLS.keys()


@pytest.mark.parametrize("call", CALLS)
def test_features_of_the_toolkit_name_its_distribution(outcome, call):
    error = outcome.errors[call]
    assert error.startswith(CALLS[call])
    assert "pip install" in error
    assert "booster-runtime" in error
    assert outcome.files == []
