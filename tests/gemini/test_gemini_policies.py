"""Placement by somebody else: a policy that comes through the hook decides what is where, and bits stay equal."""

import pytest
import torch
import torch.distributed as dist

from booster_core import Booster
from booster_core.errors import PluginError
from booster_core.plugin import register_hooks, unregister_hooks
from booster_core.plugin.hookspecs import hookimpl
from booster_gemini import GeminiPlugin
from booster_gemini.placement import Moves, PlacementPolicy
from booster_testing import expect_on_ranks, run_on_ranks
from booster_testing.models import tiny_llama


class LastOnes(PlacementPolicy):
    """Keeps the first blocks, in the order in which they were made, and sends the others away after each use."""

    def __init__(self):
        self.num_plans = 0

    def may_stay(self, key, sizes):
        return list(sizes).index(key) < 6

    def plan(self, request):
        self.num_plans += 1
        moves = [Moves() for _ in range(len(request.events) + 1)]
        moves[-1] = Moves(evict=tuple(key for key in request.sizes if not self.may_stay(key, request.sizes)))
        return moves


class Brings:
    def __init__(self, policy):
        self.policy = policy

    @hookimpl
    def placement_policy(self, name):
        return self.policy if name == "last ones" else None


def train(options, policy):
    brings = Brings(policy)
    register_hooks(brings)
    try:
        booster = Booster(plugin=GeminiPlugin(min_chunk_bytes=8192, **options))
        torch.manual_seed(0)
        model = tiny_llama()
        model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    finally:
        unregister_hooks(brings)
    losses = []
    for step in range(4):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        tokens = torch.randint(64, (2, 8), generator=generator)
        loss = model(input_ids=tokens, labels=tokens).loss
        booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    state, memory = model.state_dict(), model.gatherer.memory
    places = memory.bytes_by_place() if memory.moves else {}
    if memory.moves:
        memory.close()
    return losses, state, places, getattr(policy, "num_plans", 0)


def test_a_policy_of_a_third_party_places_chunks(tmp_path):
    still = run_on_ranks(train, 2, {}, None)
    options = {"placement_policy": "last ones", "offload_dir": str(tmp_path)}
    moved = run_on_ranks(train, 2, options, LastOnes())
    for (losses, state, places, num_plans), (expected_losses, expected, *_) in zip(moved, still, strict=True):
        assert losses == expected_losses
        assert all(torch.equal(state[name], tensor) for name, tensor in expected.items())
        assert places["disk"] > 0
        assert num_plans > 0


@pytest.mark.parametrize(
    ("policy", "told"),
    [(None, "nobody answers the hook `placement_policy`"), (3, r"the hook returned 3")],
)
def test_a_name_without_a_policy_is_refused(policy, told, tmp_path):
    options = {"placement_policy": "last ones", "offload_dir": str(tmp_path)}
    expect_on_ranks(PluginError, told, train, 2, options, policy)
