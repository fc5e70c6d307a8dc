"""Replicas that drift are found, with the tensor and the ranks."""

import pytest
import torch
from matrix import matrix

from booster_core import Booster
from booster_core.errors import CheckpointError, GradientError
from booster_core.plugin import unwrap_model
from booster_core.ranks import DistCoordinator
from booster_ddp import TorchDDPPlugin
from booster_fsdp import TorchFSDPPlugin
from booster_gemini import GeminiPlugin
from booster_hybrid import HybridParallelPlugin
from booster_runtime import check_replicas
from booster_testing import run_on_ranks
from booster_testing.models import tiny_llama
from booster_zero import LowLevelZeroPlugin

PLUGINS = {
    "ddp": (TorchDDPPlugin, {}),
    "fsdp": (TorchFSDPPlugin, {}),
    "zero1": (LowLevelZeroPlugin, {"stage": 1}),
    "gemini": (GeminiPlugin, {"min_chunk_bytes": 8192}),
    "hybrid-tp": (HybridParallelPlugin, {"tp_size": 2}),
}
REPLICATED = "model.layers.0.input_layernorm.weight"


def boost(name):
    plugin_class, options = PLUGINS[name]
    torch.manual_seed(0)
    model = tiny_llama()
    booster = Booster(plugin=plugin_class(**options))
    boosted = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    return booster, boosted.model, boosted.optimizer


def step(booster, model, optimizer):
    tokens = torch.arange(24).view(4, 6) % 16
    booster.backward(model(input_ids=tokens, labels=tokens).loss, optimizer)
    optimizer.step()
    optimizer.zero_grad()


def train_checked(name):
    booster, model, optimizer = boost(name)
    for _ in range(3):
        step(booster, model, optimizer)
        check_replicas(booster, model)


@matrix(["ddp"], name=PLUGINS)
def test_equal_replicas_pass(name):
    run_on_ranks(train_checked, 2, name)


def drift(name, what):
    booster, model, optimizer = boost(name)
    first = DistCoordinator().rank == 0
    step(booster, model, optimizer)
    with torch.no_grad():
        if what == "parameter" and first:
            dict(unwrap_model(model).named_parameters())[REPLICATED][0] += 1e-6
        elif what == "random" and first:
            torch.rand(())
    step(booster, model, optimizer)
    try:
        check_replicas(booster, model)
    except GradientError as error:
        return str(error)
    return None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "what", "message"),
    [
        ("hybrid-tp", "parameter", f"'{REPLICATED}' (rank 0 against rank 1)"),
        ("hybrid-tp", "random", "torch's random state (rank 0 against rank 1)"),
    ],
)
def test_a_drift_is_named_on_every_rank(name, what, message):
    messages = run_on_ranks(drift, 2, name, what)
    assert messages[0] == messages[1]
    assert message in messages[0]


def save_changed(name, folder, change):
    """Save a model of which the last rank has changed a norm, and return what it raises."""
    booster, model, optimizer = boost(name)
    step(booster, model, optimizer)
    parameter = dict(unwrap_model(model).named_parameters())[REPLICATED]
    booster.save_model(model, folder / "before")
    if change is not None and DistCoordinator().rank == 1:
        with torch.no_grad():
            change(parameter)
    found = []
    for kind, save in (
        ("model", lambda path: booster.save_model(model, path)),
        ("run", lambda path: booster.save_checkpoint(path, step=1, model=model, optimizer=optimizer)),
    ):
        try:
            save(folder / kind)
        except CheckpointError as error:
            found.append(str(error))
    booster.wait()
    return found


def double(parameter):
    parameter.data.mul_(2)


@pytest.mark.parametrize("name", ["ddp", "zero1", "hybrid-tp"])
def test_no_save_writes_a_mixture_of_ranks(name, tmp_path):
    messages = run_on_ranks(save_changed, 2, name, tmp_path, double)
    assert messages[0] == messages[1]
    assert len(messages[0]) == 2
    for message in messages[0]:
        assert f"other values on rank 1 than on the ranks before that hold the same: '{REPLICATED}'" in message
    assert not any((tmp_path / "model").rglob("*.safetensors"))


@matrix(["fsdp", "gemini"], name=PLUGINS)
def test_equal_replicas_are_saved(name, tmp_path):
    assert run_on_ranks(save_changed, 2, name, tmp_path, None) == [[], []]
