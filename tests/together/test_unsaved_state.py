"""State that checkpoints have no place for is named when it would be lost, on every rank and under every plugin."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from matrix import matrix
from ranked import on_ranks
from torch import nn

from booster_core import Booster
from booster_core.errors import CheckpointError
from booster_testing import expect_on_ranks, run_on_ranks

PLUGINS = ["ddp", "fsdp", "zero", "gemini", "hybrid"]


class CountingSGD(torch.optim.SGD):
    """Keeps a count of its own, which is no parameter's state."""

    def step(self, closure: Any = None) -> Any:
        self.state["calls"] = self.state.get("calls", 0) + 1
        return super().step(closure)


class ReportingSGD(torch.optim.SGD):
    """Adds an entry to what it saves."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "history": [1, 2]}


def hooked(parameters: Any, **options: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(parameters, **options)
    optimizer.register_state_dict_post_hook(lambda _, state: {**state, "note": 3})
    return optimizer


class Packed(nn.Linear):
    """Saves what its weight was packed with, as quantised layers do."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.absmax = torch.ones(3)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight.absmax"] = self.absmax


class Sharded(nn.Linear):
    """Keeps what its weight was packed with, as bitsandbytes' layers do whose weight has become another tensor."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.quant_state = {"absmax": torch.ones(3)}

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)


def with_hook() -> nn.Module:
    layer = nn.Linear(8, 8)
    layer.register_state_dict_post_hook(lambda module, state, prefix, _: state.update({f"{prefix}scale": module.bias}))
    return layer


def harmless() -> nn.Module:
    layer = nn.utils.spectral_norm(nn.Linear(8, 8))

    def leave_out(_module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        del state[f"{prefix}bias"]

    layer.register_state_dict_post_hook(leave_out)
    return layer


LAYERS = {"override": Packed, "sharded": Sharded, "hook": with_hook, "harmless": harmless}
OPTIMIZERS = {"key": CountingSGD, "override": ReportingSGD, "hook": hooked}


def save(plugin: str, path: str, method: str, layer: str | None = None, kind: Any = torch.optim.SGD) -> None:
    """Train a step, and save by a method of the Booster, with ``dcp`` after its name as shards of DCP."""
    booster = Booster(plugin=plugin)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8) if layer is None else LAYERS[layer]())
    boosted, optimizer, *_ = booster.boost(model, OPTIMIZERS.get(kind, kind)(model.parameters(), lr=0.1, momentum=0.9))
    booster.backward(boosted(torch.ones(2, 8)).square().mean(), optimizer)
    optimizer.step()
    if method == "save_checkpoint":
        booster.save_checkpoint(path, step=1, model=boosted, optimizer=optimizer)
    else:
        name, _, is_dcp = method.partition(" ")
        saved = boosted if name == "save_model" else optimizer
        getattr(booster, name)(saved, path, shard=True, gather_dtensor=not is_dcp)
    assert Path(path).exists()


LOST = {"key": r"optimizer\.state\['calls'\]", "override": r"\['history'\]", "hook": r"\['note'\]"}
ADDED = {"override": "'1.weight.absmax'", "sharded": "'1.weight.quant_state'", "hook": "'1.scale'"}


@matrix(1, plugin=PLUGINS, kind=LOST)
def test_an_optimizer_with_state_of_no_parameter_is_not_saved(plugin, kind, tmp_path) -> None:
    expect_on_ranks(CheckpointError, LOST[kind], save, 2, plugin, str(tmp_path / "o"), "save_optimizer", kind=kind)


@matrix(1, plugin=PLUGINS, kind=ADDED)
def test_a_model_whose_layers_save_more_is_not_saved(plugin, kind, tmp_path) -> None:
    expect_on_ranks(CheckpointError, ADDED[kind], save, 2, plugin, str(tmp_path / "m"), "save_model", kind)


@pytest.mark.parametrize(
    ("method", "options", "match"),
    [
        ("save_checkpoint", {"kind": "key"}, LOST["key"]),
        ("save_optimizer dcp", {"kind": "key"}, LOST["key"]),
        ("save_checkpoint", {"layer": "override"}, ADDED["override"]),
        ("save_model dcp", {"layer": "override"}, ADDED["override"]),
    ],
)
def test_other_ways_to_save_refuse_it_too(method, options, match, tmp_path) -> None:
    expect_on_ranks(CheckpointError, match, save, 2, "ddp", str(tmp_path / "o"), method, **options)


def test_hooks_that_add_nothing_do_no_harm(tmp_path) -> None:
    run_on_ranks(save, 2, "ddp", str(tmp_path / "m"), "save_model", "harmless")


@matrix(["ddp-override", "fsdp-sharded"], plugin=PLUGINS, kind=["override", "sharded"])
@on_ranks(2)
def test_a_step_without_frozen_layers_needs_nothing_of_theirs(plugin, kind, tmp_path) -> None:
    """Resume without frozen layers; the trained tensors come back."""
    booster = Booster(plugin=plugin)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 8), LAYERS[kind]().requires_grad_(False))
    boosted, optimizer, *_ = booster.boost(model, torch.optim.SGD(model[0].parameters(), lr=0.1))
    with boosted.whole_parameters(writes=True):
        trained = [parameter.detach().clone() for parameter in boosted.unwrap()[0].parameters()]
    booster.save_checkpoint(tmp_path, step=1, model=boosted, optimizer=optimizer, save_frozen=False)
    booster.backward(boosted(torch.ones(2, 8)).sum(), optimizer)
    optimizer.step()
    booster.load_checkpoint(tmp_path, model=boosted, optimizer=optimizer)
    with boosted.whole_parameters():
        assert all(map(torch.equal, trained, boosted.unwrap()[0].parameters()))
