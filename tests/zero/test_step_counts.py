"""Counts of steps are where the optimizer takes them from: with the parameter for fused ones, else on the host."""

from types import SimpleNamespace

import pytest
import torch

from booster_zero import ShardedOptimizer


@pytest.mark.parametrize(
    ("options", "device"), [({"fused": True}, "meta"), ({"capturable": True}, "meta"), ({}, "cpu")]
)
def test_counts_follow_state_that_has_moved_to_the_device(options, device):
    values = torch.empty(3, device="meta")
    state = {values: {"step": torch.tensor(2.0), "exp_avg": torch.empty(3, device="meta")}}
    optimizer = SimpleNamespace(param_groups=[{"params": [values], **options}], optim=SimpleNamespace(state=state))
    ShardedOptimizer._bring_counters(optimizer, {id(values)})
    assert state[values]["step"].device.type == device
    assert state[values]["exp_avg"].device.type == "meta"


def test_counts_of_other_pieces_stay():
    values = torch.empty(3, device="meta")
    state = {values: {"step": torch.tensor(2.0)}}
    optimizer = SimpleNamespace(param_groups=[{"params": [values], "fused": True}], optim=SimpleNamespace(state=state))
    ShardedOptimizer._bring_counters(optimizer, set())
    assert state[values]["step"].device.type == "cpu"
