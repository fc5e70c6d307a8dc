"""booster-core alone: what works, and errors that name the distribution to install."""

from __future__ import annotations

import textwrap
from pathlib import Path

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


@pytest.fixture
def core_alone(build_wheel, new_environment):
    return new_environment(build_wheel(ROOT / "packages" / "booster-core"))


def test_one_device_trains(core_alone):
    core_alone.run("-c", TRAIN + "print('trained')")


@pytest.mark.parametrize(
    ("call", "error"),
    [
        ("booster.save_model(model, 'out')", "CheckpointError"),
        ("booster.load_checkpoint('out', model=model)", "CheckpointError"),
        ("booster.ema(model)", "CheckpointError"),
        ("booster.prepare_dataloader([1, 2])", "ConfigError"),
        ("booster.gather_for_metrics(torch.ones(4), loader)", "ConfigError"),
        ("booster.enable_lora(torch.nn.Linear(2, 2), lora_config=None)", "ConfigError"),
        ("from booster_core import LazyInitContext", "ImportError"),
        ("from booster_core import enable_activation_checkpointing", "ImportError"),
    ],
)
def test_features_of_the_toolkit_name_its_distribution(core_alone, tmp_path, call, error):
    script = f"{TRAIN}\ntry:\n    {call}\nexcept Exception as caught:\n    print(type(caught).__name__, caught)\n"
    folder = tmp_path / "run"
    folder.mkdir()
    printed = core_alone.run("-c", textwrap.dedent(script), cwd=folder).stdout
    assert printed.startswith(error)
    assert "pip install" in printed
    assert "booster-runtime" in printed
    assert list(folder.iterdir()) == []
