"""booster-core alone: it trains, saves and loads, and names the distribution that has more."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
CORE = ROOT / "packages" / "booster-core"

SAVE = """
import json
import os
import torch
from booster_core import Booster

def make(seed):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    booster = Booster()
    model, optimizer, _, _, scheduler = booster.boost(model, optimizer, lr_scheduler=scheduler)
    return booster, model, optimizer, scheduler

def train(booster, model, optimizer, scheduler, steps):
    losses = []
    for _ in range(steps):
        loss = model(torch.randn(8, 4)).square().mean()
        booster.backward(loss, optimizer)
        optimizer.clip_grad_by_norm(1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(loss.item())
    return losses

expected = train(*make(0), 6)
booster, model, optimizer, scheduler = make(0)
losses = train(booster, model, optimizer, scheduler, 3)
random_state = torch.get_rng_state()
booster.save_model(model, "model.safetensors")
booster.save_optimizer(optimizer, "optimizer.safetensors")
booster.save_lr_scheduler(scheduler, "scheduler.json")
booster.wait()
os.mkdir("run")
booster, model, optimizer, scheduler = make(2)
assert booster.load_model(model, "model.safetensors").is_complete
booster.load_optimizer(optimizer, "optimizer.safetensors")
booster.load_lr_scheduler(scheduler, "scheduler.json")
torch.set_rng_state(random_state)
assert losses + train(booster, model, optimizer, scheduler, 3) == expected
"""

REFUSED = {
    "booster.save_model(model, 'out', shard=True)": ("ConfigError", "booster-checkpoint"),
    "booster.load_model(model, 'run')": ("CheckpointError", "booster-checkpoint"),
    "booster.save_checkpoint('run', step=1, model=model)": ("ConfigError", "booster-checkpoint"),
    "booster.prepare_dataloader(torch.utils.data.ChainDataset([]))": ("ConfigError", "booster-runtime"),
    "booster.enable_lora(torch.nn.Linear(2, 2), lora_config=None)": ("ConfigError", "booster-runtime"),
}
"""Uses of what other distributions have; the error that each raises, and the distribution that it names."""


@pytest.fixture(scope="module")
def outcome(build_wheel, environment_of, tmp_path_factory):
    """Train, save, load and go on with core alone; return the errors of refused calls, and the names of files."""
    script = f"""{SAVE}
errors = {{}}
for call in {[*REFUSED]!r}:
    try:
        exec(call)
    except Exception as caught:
        errors[call] = f"{{type(caught).__name__}} {{caught}}"
print(json.dumps(errors))
"""
    folder = tmp_path_factory.mktemp("run")
    done = environment_of(build_wheel(CORE)).run("-c", script, cwd=folder)
    return json.loads(done.stdout.splitlines()[-1]), sorted(path.name for path in folder.iterdir())


def test_it_saves_loads_and_goes_on(outcome):
    assert outcome[1] == ["model.safetensors", "optimizer.safetensors", "run", "scheduler.json"]


@pytest.mark.parametrize("call", REFUSED)
def test_what_others_have_is_refused_by_their_name(outcome, call):
    kind, distribution = REFUSED[call]
    error = outcome[0][call]
    assert error.startswith(kind)
    assert f"pip install {distribution}" in error
