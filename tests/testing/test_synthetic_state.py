"""Synthetic adapters: every layout covers each tensor, its owners once, and wrong values are told."""

from __future__ import annotations

import pytest
import torch
from synthetic_state import LAYOUTS, SyntheticAdapter, value_of

from booster_core.state import ParamGroup, TensorMeta

TENSORS = [
    ("first", (6, 4), torch.float32),
    ("second", (5,), torch.bfloat16),
    ("scalar", (), torch.float32),
    ("mask", (3, 3), torch.bool),
    ("fused", (12, 4), torch.float32),
]


def count(shard, counts):
    """Add one to the elements of a tensor that a shard has."""
    whole = counts.setdefault(shard.key, torch.zeros(shard.global_shape, dtype=torch.int64))
    part = whole[tuple(slice(*span) for span in shard.box)]
    added = torch.ones(part.numel(), dtype=torch.int64)
    if shard.flat is not None:
        added[: shard.flat[0]] = added[shard.flat[1] :] = 0
    part += added.view(part.shape)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_owners_hold_each_element_once(layout, world_size):
    owned = {}
    for rank in range(world_size):
        adapter = SyntheticAdapter(TENSORS, layout, rank, world_size)
        for shard in (*adapter.model_shards(), *adapter.optimizer_shards()):
            expected = value_of(shard.key, shard.global_shape, shard.dtype)[tuple(slice(*span) for span in shard.box)]
            flat = expected.reshape(-1) if shard.flat is None else expected.reshape(-1)[slice(*shard.flat)]
            assert torch.equal(shard.data.reshape(-1), flat)
            if shard.is_owner:
                count(shard, owned)
    assert owned.keys() == {f"{name}{state}" for name, *_ in TENSORS for state in ("", "/exp_avg", "/master")}
    assert all((counts == 1).all() for counts in owned.values())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_wrong_values_are_named(layout):
    filled, empty = (SyntheticAdapter(TENSORS, layout, 0, 2, is_filled=each) for each in (True, False))
    assert filled.keeps_values
    assert filled.wrong() == []
    assert "first" in empty.wrong()
    next(iter(filled.model_shards())).data.fill_(7)
    assert filled.wrong() == [next(iter(filled.model_shards())).key]


def test_state_that_is_loaded_replaces_what_there_was():
    source = SyntheticAdapter(TENSORS, "flat", 0, 2, states=("exp_avg",))
    target = SyntheticAdapter(TENSORS, "flat", 0, 2, is_filled=False)
    assert target.tied_names() == {"tied": "first"}
    assert list(target.optimizer_shards()) == []
    target.load_extra_state(source.extra_state())
    assert target.extra_state() == source.extra_state()
    metas = {
        shard.name: {"exp_avg": TensorMeta(shape=shard.global_shape, dtype=shard.dtype)}
        for shard in source.model_shards()
    }
    target.prepare_optimizer_load(metas, source.optimizer_scalars(), source.param_groups())
    assert {shard.key for shard in target.optimizer_shards()} == {shard.key for shard in source.optimizer_shards()}
    assert target.optimizer_scalars() == source.optimizer_scalars()
    assert target.param_groups()[0] == ParamGroup(params=("first", "second"), options=source.options)
    target.finish_load(model=True, optimizer=False)
    assert target.finished == [(True, False)]
