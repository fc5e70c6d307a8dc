"""Files of lazy models that one rank has lost: an error on all ranks, under every plugin."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from booster_core import Booster
from booster_core.errors import LazyInitError
from booster_core.ranks.coordinator import DistCoordinator
from booster_runtime import LazyInitContext
from booster_runtime.lazy import load_pretrained
from booster_testing import expect_on_ranks
from booster_testing.models import TinyMLP


def boost_without_files(folder: str, plugin: str) -> None:
    """Lose the files of the last rank between the context and `boost`, and fill a model from them."""
    coordinator = DistCoordinator()
    own = Path(folder) / str(coordinator.rank)
    own.mkdir()
    save_file({f"first.{key}": value for key, value in nn.Linear(8, 16).state_dict().items()}, own / "m.safetensors")
    with LazyInitContext():
        model = TinyMLP()
    load_pretrained(model, own / "m.safetensors", strict=False)
    if coordinator.is_last_process():
        (own / "m.safetensors").unlink()
    Booster(plugin=plugin).boost(model, torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.parametrize("plugin", ["ddp", "fsdp", "zero", "gemini", "hybrid"])
def test_files_that_one_rank_lacks_are_an_error_on_all(plugin, tmp_path) -> None:
    expect_on_ranks(LazyInitError, "can't be read any more", boost_without_files, 3, str(tmp_path), plugin)
