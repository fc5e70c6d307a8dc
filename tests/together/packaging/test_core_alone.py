"""booster-core alone: it trains, saves, loads and resumes, and names the distribution that has more."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import pytest
from page_blocks import blocks_of
from safetensors.torch import load_file

ROOT = Path(__file__).parents[3]
CORE = ROOT / "packages" / "booster-core"

SAVE = """
import json
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
state = {"model": model, "optimizer": optimizer, "lr_scheduler": scheduler}
booster.save_checkpoint("run", step=3, **state, extra={"best": min(losses)}, keep_last=1)
booster.save_model(model, "model.safetensors")
booster.save_optimizer(optimizer, "optimizer.safetensors")
booster.save_lr_scheduler(scheduler, "scheduler.json")
booster.wait()
resumed = make(1)
assert resumed[0].has_checkpoint("run")
loaded = resumed[0].load_checkpoint("run", **dict(zip(state, resumed[1:])))
assert (loaded.step, loaded.extra) == (3, {"best": min(losses)})
assert losses + train(*resumed, 3) == expected
booster, model, optimizer, scheduler = make(2)
assert booster.load_model(model, "model.safetensors").is_complete
booster.load_optimizer(optimizer, "optimizer.safetensors")
booster.load_lr_scheduler(scheduler, "scheduler.json")
"""

REFUSED = {
    "booster.save_model(model, 'out', shard=True)": ("ConfigError", "booster-checkpoint"),
    "booster.save_model(model, 'out.bin')": ("ConfigError", "booster-checkpoint"),
    "booster.save_model(model, 'out', gather_dtensor=False)": ("ConfigError", "booster-checkpoint"),
    "booster.save_model(model, 'out', use_async=True)": ("ConfigError", "booster-checkpoint"),
    "booster.save_model(model, 's3://bucket/out')": ("CheckpointError", "booster-checkpoint"),
    "booster.save_lora_as_pretrained(model, 'out')": ("ConfigError", "booster-checkpoint"),
    "booster.load_model(model, 'run')": ("CheckpointError", "booster-checkpoint"),
    "booster.prepare_dataloader(torch.utils.data.ChainDataset([]))": ("ConfigError", "booster-runtime"),
    "booster.enable_lora(torch.nn.Linear(2, 2), lora_config=None)": ("ConfigError", "booster-runtime"),
}
"""Uses of what other distributions have; the error that each raises, and the distribution that it names."""


class Outcome(NamedTuple):
    """What the process printed, and the files that it left."""

    errors: dict[str, str]
    files: list[str]


@pytest.fixture(scope="module")
def environment(build_wheel, environment_of):
    return environment_of(build_wheel(CORE))


@pytest.fixture(scope="module")
def outcome(environment, tmp_path_factory):
    """Train, save, load and resume in one process that has only core, and make all calls that are refused."""
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
    errors = json.loads(environment.run("-c", script, cwd=folder).stdout.splitlines()[-1])
    return Outcome(errors, sorted(path.name for path in folder.iterdir()))


def test_it_saves_loads_and_resumes(outcome):
    assert outcome.files == ["model.safetensors", "optimizer.safetensors", "run", "scheduler.json"]


@pytest.mark.parametrize("call", REFUSED)
def test_what_others_have_is_refused_by_their_name(outcome, call):
    kind, distribution = REFUSED[call]
    assert outcome.errors[call].startswith(kind)
    assert f"pip install {distribution}" in outcome.errors[call]


@pytest.mark.slow  # two runs of it; it runs with the pages' examples
def test_the_script_of_its_readme_goes_on_where_it_stopped(environment, tmp_path):
    (script,) = (block for block in blocks_of(CORE / "README.md") if block.language == "python")
    interrupted = script.text.replace("while step < 3:", "while step < 1:")
    assert interrupted != script.text
    environment.run("-c", interrupted, cwd=tmp_path)
    assert [path.name for path in (tmp_path / "run").glob("step-*")] == ["step-00000001"]
    first = load_file(tmp_path / "out.safetensors")
    environment.run("-c", script.text, cwd=tmp_path)
    assert sorted(path.name for path in (tmp_path / "run").glob("step-*")) == ["step-00000002", "step-00000003"]
    last = load_file(tmp_path / "out.safetensors")
    assert all(not first[name].equal(last[name]) for name in ("weight", "bias"))
