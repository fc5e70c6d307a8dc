"""Lazy models on several ranks: one model everywhere, whatever seeds the ranks have, and memory for one tensor."""

from __future__ import annotations

import contextlib
from typing import Any, ClassVar

import pytest
import torch
from ranked import on_ranks, raises_on_ranks
from torch import nn

from booster_core import Boosted, Booster
from booster_core.errors import ConfigError
from booster_core.plugin import Capability, ModelWrapper, OptimizerWrapper
from booster_core.ranks.coordinator import DistCoordinator
from booster_core.state import separate_random_state
from booster_core.state.shard import TensorShard, full_box
from booster_runtime import LazyInitContext
from booster_runtime.lazy import materialize, take_recording
from booster_runtime.strategy import STRATEGY_TRAINING, Strategy
from booster_testing import close_ranks
from booster_testing.memory import peak_memory
from booster_testing.models import TinyMixedBag

MIB = 2**20


class Rows(Strategy):
    """Keeps of each parameter the flat part that is this rank's, in `kept`."""

    name: ClassVar[str] = "rows"
    api_version: ClassVar[int] = 2
    capabilities: ClassVar[frozenset[Capability]] = STRATEGY_TRAINING
    placeholders: ClassVar[str | None] = "own"

    def __init__(self) -> None:
        self.kept: dict[str, torch.Tensor] = {}

    def shard(self, objects: Boosted, context: Any, values: Any) -> Boosted:
        assert values is None, "left to this plugin"
        rank, size = context.coordinator.rank, context.coordinator.world_size
        recording = take_recording(objects.model)
        shards = []
        for name, parameter in objects.model.named_parameters():
            flat = (rank * parameter.numel() // size, (rank + 1) * parameter.numel() // size)
            shape, data = tuple(parameter.shape), torch.empty(flat[1] - flat[0], dtype=parameter.dtype)
            shards.append(
                TensorShard(name=name, global_shape=shape, dtype=data.dtype, box=full_box(shape), flat=flat, data=data)
            )
            self.kept[name] = data
        recording.fill(shards, context.device)
        optimizer = objects.optimizer and OptimizerWrapper(objects.optimizer, context=context)
        return objects._replace(model=ModelWrapper(objects.model), optimizer=optimizer)


def build(seed: int, *, lazy: bool) -> TinyMixedBag:
    torch.manual_seed(seed)
    with LazyInitContext() if lazy else contextlib.nullcontext():
        return TinyMixedBag()


@on_ranks(3)
def test_ranks_with_other_seeds_keep_parts_of_the_first_ranks_model() -> None:
    rank = DistCoordinator().rank
    build(rank, lazy=False)
    separate_random_state(rank)
    expected_state = torch.get_rng_state()
    model, plugin = build(rank, lazy=True), Rows()
    Booster(plugin=plugin).boost(model)
    assert torch.equal(torch.get_rng_state(), expected_state)
    eager = build(0, lazy=False)
    for name, parameter in eager.named_parameters():
        own = slice(rank * parameter.numel() // 3, (rank + 1) * parameter.numel() // 3)
        assert torch.equal(plugin.kept[name], parameter.flatten()[own]), name
    buffers = dict(model.named_buffers())
    assert all(torch.equal(buffers[name], buffer) for name, buffer in eager.named_buffers())


@raises_on_ranks(ConfigError, r"'1\.weight'.*on rank 1", 2)
def test_other_models_on_other_ranks_are_refused() -> None:
    with LazyInitContext():
        model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(1 + DistCoordinator().rank)))
    Booster(plugin=Rows()).boost(model)


@on_ranks(2)
def test_what_draws_nothing_may_come_in_any_order() -> None:
    """Let tensors be made in an order of this rank's own, as threads that read files do."""
    rank, plugin = DistCoordinator().rank, Rows()
    with LazyInitContext():
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
        for index in range(3):
            number = (index + rank) % 3
            layer: Any = model[number]
            layer.bias.data = torch.full((2,), number, dtype=torch.float64).float() if number else torch.zeros(2)
    Booster(plugin=plugin).boost(model)
    assert [plugin.kept[f"{number}.bias"].tolist() for number in range(3)] == [[0], [1], [2]]


@pytest.fixture
def new_ranks() -> None:
    """End the ranks of earlier tests: a heap that those have cut up would serve one tensor and not the next."""
    close_ranks()


@pytest.mark.usefixtures("new_ranks")
@on_ranks(1)
def test_one_tensor_is_made_at_a_time() -> None:
    """Record a model of 64 MiB, keep a sixteenth of it, and materialize another."""

    def make() -> nn.Module:
        with LazyInitContext():
            return nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(16))).bfloat16()

    make()
    with peak_memory() as recording:
        model = make()
    taken = take_recording(model)
    box = ((0, 1024), (0, 64))
    shards = [
        TensorShard(name=name, global_shape=(1024, 1024), dtype=kept.dtype, box=box, data=kept)
        for name, kept in ((name, torch.zeros(1024, 64, dtype=torch.bfloat16)) for name, _ in model.named_parameters())
    ]
    with peak_memory() as sharded:
        taken.fill(shards)
    model = make()
    with peak_memory() as whole:
        materialize(model)
    assert recording.peak_bytes < 2 * MIB
    # The sixteenth (2 MiB), and a matrix in fp32 (4 MiB) and in bf16 (2 MiB).
    assert sharded.peak_bytes < (8 + 2) * MIB
    # All of the model in bf16 (32 MiB), and a matrix in fp32; eager construction peaks at 64 MiB.
    assert whole.peak_bytes < (32 + 4 + 2) * MIB
