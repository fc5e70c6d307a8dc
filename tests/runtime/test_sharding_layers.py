"""What a sharding strategy gathers together, where it cuts, and which ranks share the pieces."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn, optim

from booster_core.errors import ConfigError
from booster_runtime.sharding import layers_of, modules_by_size, parameters_by_unit, partition_for, without_split_ties
from booster_runtime.sharding.ranks import sharding_groups

WIDE = 256  # a square matrix of this width is just large enough for a layer of its own


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.large, self.small = nn.Linear(WIDE, WIDE), nn.Linear(4, 4)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(8, 8)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.tail = nn.Sequential(nn.Linear(4, 4), nn.Linear(WIDE, WIDE))


def test_large_members_of_containers_are_layers():
    assert list(layers_of(Model())) == ["blocks.0", "blocks.1", "tail.1"]


def test_layers_that_a_model_lists_win():
    model = Model()
    model.blocks._no_split_modules = ["Embedding"]
    assert list(layers_of(model)) == ["embedding"]
    model.blocks._no_split_modules = ["Dropout"]  # which the model does not have
    assert list(layers_of(model)) == ["blocks.0", "blocks.1", "tail.1"]


def test_modules_count_what_is_in_no_module_inside_of_them():
    model = Model()
    # Blocks have nothing besides the modules inside of them, and a list has no forward.
    assert list(modules_by_size(model, 20, lambda name: True)) == [
        *("embedding", "blocks.0.large", "blocks.0.small", "blocks.1.large", "blocks.1.small", "tail.0", "tail.1"),
    ]
    assert list(modules_by_size(model, 21, lambda name: name not in ("", "embedding"))) == [
        *("blocks.0.large", "blocks.1.large", "tail.1"),
    ]


def test_projections_of_attention_are_gathered_with_it():
    model = nn.Sequential(nn.MultiheadAttention(8, 2))
    assert list(modules_by_size(model, 8 * 8, lambda name: name != "")) == ["0"]


def units_of(model, *names):
    modules = dict(model.named_modules())
    return {id(modules[name]) for name in names}


def test_a_parameter_of_two_units_dissolves_both():
    model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4), "c": nn.Linear(4, 4)})
    model["b"].weight = model["a"].weight
    assert without_split_ties(model, units_of(model, "a", "b", "c")) == units_of(model, "c")


def test_a_parameter_used_twice_in_one_unit_leaves_the_unit():
    model = nn.ModuleDict({"outer": nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})})
    model["outer"]["b"].weight = model["outer"]["a"].weight
    names = "outer", "outer.a", "outer.b"
    assert without_split_ties(model, units_of(model, *names)) == units_of(model, "outer")


def test_parameters_belong_to_the_innermost_unit():
    model = Model()
    shared = model.blocks[1].small
    model.again = shared  # registered twice, and gathered once
    found = parameters_by_unit(model, ["blocks.0", "tail.1"])
    assert list(found) == ["blocks.0", "tail.1", ""]
    assert found["blocks.0"] == list(model.blocks[0].parameters())
    assert found["tail.1"] == list(model.tail[1].parameters())
    rest = [*model.embedding.parameters(), *model.blocks[1].parameters(), *model.tail[0].parameters()]
    assert len(found[""]) == len(rest)
    assert {id(parameter) for parameter in found[""]} == {id(parameter) for parameter in rest}
    assert sum(map(torch.numel, found[""])) == sum(map(torch.numel, rest))


def parameters():
    return [nn.Parameter(torch.ones(3, 2))]


class Own(optim.AdamW):
    """A class that torch does not have: nothing tells what its step does."""


class Elementwise(Own):
    is_elementwise = True


class Lookahead(Own):
    """Keeps averages of the parameters in lists like those of its groups."""

    def __init__(self, optimizer):
        super().__init__(optimizer.param_groups)
        self.inner = optimizer
        self.slow_weights = [[p.detach().clone() for p in group["params"]] for group in self.param_groups]


class AroundLookahead(Own):
    def __init__(self, params):
        super().__init__(params)
        self.inner = Lookahead(optim.SGD(params, lr=0.1))
        self.codes = {"dynamic": torch.ones(3, 2)}


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (optim.SGD, "flat"),
        (optim.AdamW, "flat"),
        (optim.ASGD, "flat"),
        (optim.Adafactor, "parameter"),
        (optim.Muon, "parameter"),
        (Own, "parameter"),
        (Elementwise, "flat"),
    ],
)
def test_the_class_says_whether_parameters_may_be_cut(kind, expected):
    state = torch.get_rng_state()
    assert partition_for(kind(parameters(), lr=0.1), "auto") == expected
    assert torch.equal(torch.get_rng_state(), state)


def test_a_choice_goes_before_the_class():
    assert partition_for(Own(parameters()), "flat") == "flat"
    assert partition_for(optim.SGD(parameters()), "parameter") == "parameter"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: optim.LBFGS(parameters()), "LBFGS can't be sharded"),
        (lambda: optim.SparseAdam(parameters()), "SparseAdam takes sparse gradients"),
        (lambda: Lookahead(optim.SGD(parameters(), lr=0.1)), "in the list `slow_weights`.*plugin='ddp'"),
        (lambda: AroundLookahead(parameters()), "in the list `inner.slow_weights`"),
    ],
    ids=["lbfgs", "sparse", "lookahead", "around lookahead"],
)
def test_what_cannot_be_sharded_is_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        partition_for(make(), "auto")


@given(st.integers(1, 6), st.integers(1, 6))
def test_replicas_and_shards_are_a_grid(replica_size, shard_size):
    world_size = replica_size * shard_size
    replicas, shards = sharding_groups(world_size, replica_size)
    assert [len(replica) for replica in replicas] == [shard_size] * replica_size
    assert [len(holders) for holders in shards] == [replica_size] * shard_size
    assert sorted(rank for replica in replicas for rank in replica) == list(range(world_size))
    for number, replica in enumerate(replicas):
        for index, rank in enumerate(replica):
            assert shards[index][number] == rank == number * shard_size + index, "replicas are consecutive ranks"


def test_a_number_of_replicas_that_does_not_divide_is_refused_with_those_that_do():
    with pytest.raises(ConfigError, match=r"does not divide the world size 6\. Use one of 1, 2, 3, 6\."):
        sharding_groups(6, 4)
