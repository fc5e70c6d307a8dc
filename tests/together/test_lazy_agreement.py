"""Ranks that build other models: told before a strategy mixes parts of them, or replaced by the first rank's."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matrix import matrix
from ranked import on_ranks, raises_on_ranks
from safetensors.torch import save_file
from torch import nn

from booster_core import Booster
from booster_core.errors import LazyInitError
from booster_core.ranks import DistCoordinator, seed_everything
from booster_runtime import LazyInitContext
from booster_runtime.lazy import load_pretrained
from booster_testing import expect_on_ranks, run_on_ranks
from booster_testing.compare import EXACT, assert_same_tensors
from booster_testing.models import TinyMLP
from booster_testing.training import whole_model

LAZY = ["fsdp", "zero", "gemini", "hybrid"]
"""The plugins that lay a lazy model out themselves, and so could mix the ranks' models."""
WHOLE = ["ddp"]
"""Those that get it whole, with values, and then send the first rank's."""
SHARED_SEED = 7


class Drawn(nn.Module):
    """Takes values from NumPy and `random`, as scripts with initialisers of their own do."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.first = nn.Linear(96, 64)
        self.second = nn.Linear(64, 8)
        generator = np.random.default_rng(np.random.randint(2**31))  # noqa: NPY002 - what users call
        if source == "large-constant":
            self.second.weight.data.fill_(0.5)
            self.first.weight.data.copy_(torch.from_numpy(generator.standard_normal((64, 96), dtype=np.float32)))
        elif source == "small-constant":
            self.first.bias.data.add_(torch.tensor(generator.standard_normal(64), dtype=torch.float32))
        elif source == "assigned":
            self.first.bias.data = torch.tensor(generator.standard_normal(64), dtype=torch.float32)
        elif source == "scalar":
            nn.init.normal_(self.first.weight, std=random.uniform(0.1, 0.2))
        elif source == "in-place-scalar":
            with torch.no_grad():
                self.first.weight[random.randrange(64)] = 1.0
        elif source == "value-of-a-draw":
            self.first.weight.data.mul_(float(torch.rand(1)))

    def forward(self, x: torch.Tensor) -> Any:
        return self.second(torch.tanh(self.first(x)))


def boost_drawn(plugin: str, source: str, *, is_alike: bool) -> dict[str, torch.Tensor]:
    seed = SHARED_SEED if is_alike else DistCoordinator().rank
    seed_everything(seed)
    with LazyInitContext():
        model = Drawn(source)
    booster = Booster(plugin=plugin)
    boosted, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return whole_model(booster, boosted)


SOURCES = {
    "large-constant": "'first.weight'",
    "small-constant": "'first.bias'",
    "assigned": "'first.bias'",
    "scalar": "'first.weight'",
    "in-place-scalar": "'first.weight'",
    "value-of-a-draw": "'first.weight'",
}


@matrix(
    ["fsdp-in-place-scalar", "zero-small-constant", "zero-value-of-a-draw", "gemini-assigned", "hybrid-scalar"],
    plugin=LAZY,
    source=SOURCES,
)
def test_other_constants_on_other_ranks_raise_and_name_the_parameter(plugin, source) -> None:
    match = rf"1 of 4 tensors would have other values, the first of them {SOURCES[source]}.*seed .random., NumPy"
    expect_on_ranks(LazyInitError, match, boost_drawn, 2, plugin, source, is_alike=False)


@pytest.mark.parametrize("plugin", WHOLE)
def test_models_that_are_made_whole_become_the_first_ranks(plugin) -> None:
    seed_everything(0)
    expected = Drawn("large-constant").state_dict()
    for whole in run_on_ranks(boost_drawn, 2, plugin, "large-constant", is_alike=False):
        assert_same_tensors(whole, expected, EXACT)


@matrix(["zero", "hybrid"], plugin=LAZY)
def test_ranks_that_seed_alike_build_the_eager_model(plugin) -> None:
    for source in SOURCES:
        seed_everything(SHARED_SEED)
        eager = Drawn(source)
        for whole in run_on_ranks(boost_drawn, 2, plugin, source, is_alike=True):
            assert_same_tensors(whole, eager.state_dict(), EXACT)


@matrix(["fsdp", "zero"], plugin=LAZY)
@on_ranks(2)
def test_files_of_other_content_raise_and_copies_do_not(plugin, tmp_path) -> None:
    """Let each rank read a file of its own, as hosts without a shared disk do."""
    rank = DistCoordinator().rank

    def boost_from_own_file(seed):
        torch.manual_seed(seed)
        saved, path = TinyMLP().state_dict(), tmp_path / str(rank) / f"{seed}.safetensors"
        path.parent.mkdir(exist_ok=True)
        save_file(saved, path)
        with LazyInitContext():
            model = TinyMLP()
        load_pretrained(model, path)
        booster = Booster(plugin=plugin)
        boosted, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
        assert_same_tensors(whole_model(booster, boosted), saved, EXACT)

    with pytest.raises(LazyInitError, match=r"(?s)4 of 4 tensors would have other values.*read the same files"):
        boost_from_own_file(rank)
    boost_from_own_file(SHARED_SEED)


@pytest.mark.parametrize("plugin", [*WHOLE, *LAZY])
@raises_on_ranks(LazyInitError, "can't be read any more", 3)
def test_files_that_one_rank_lacks_are_an_error_on_all(plugin, tmp_path) -> None:
    """Lose the files of the last rank between the context and `boost`, and fill a model from them."""
    folder = str(tmp_path)
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
