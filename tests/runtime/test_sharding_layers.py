"""Which modules a sharding strategy gathers together."""

import torch
from torch import nn

from booster_runtime.sharding import layers_of, modules_by_size, parameters_by_unit, without_split_ties

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
