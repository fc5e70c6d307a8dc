from __future__ import annotations

import pytest
from torch import nn

from booster_core.errors import ConfigError
from booster_fsdp import FSDPConfig
from booster_fsdp.units import choose_units, find_ignored
from booster_runtime.sharding import parameters_by_unit
from booster_testing.models import tiny_llama


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(4, 10, bias=False)


def units(model, **options):
    return choose_units(model, FSDPConfig(**options))


def test_no_split_modules_are_units_by_default():
    assert units(tiny_llama()) == ["model.layers.0", "model.layers.1"]


def test_large_members_of_containers_are_units_by_default():
    model = nn.Sequential(nn.Linear(300, 300), nn.ReLU(), nn.Linear(300, 2), nn.ModuleList([nn.Linear(300, 300)]))
    assert units(model) == ["0", "3.0"]


def test_model_without_layers_is_one_unit():
    assert units(nn.Linear(1000, 1000)) == []


def test_units_by_class():
    assert units(Net(), unit_classes=("Block", "Embedding")) == ["embedding", "blocks.0", "blocks.1"]


def test_units_by_size_do_not_count_inner_units():
    # A block has 40 elements in two layers of 20; the head and the embedding have 40 each.
    assert units(Net(), unit_min_numel=40) == ["embedding", "blocks.0", "blocks.1", "head"]
    assert units(Net(), unit_min_numel=20) == [
        "embedding",
        "blocks.0.first",
        "blocks.0.second",
        "blocks.1.first",
        "blocks.1.second",
        "head",
    ]


def test_projection_of_multihead_attention_is_not_a_unit():
    assert units(nn.Sequential(nn.MultiheadAttention(8, 2)), unit_min_numel=50) == ["0"]


def test_units_by_a_function():
    assert units(Net(), unit_if=lambda name, module: name.endswith("second")) == ["blocks.0.second", "blocks.1.second"]


def test_tied_parameters_stay_in_one_unit():
    model = Net()
    model.head.weight = model.embedding.weight
    assert units(model, unit_classes=("Block", "Embedding", "Linear")) == [
        "blocks.0",
        "blocks.0.first",
        "blocks.0.second",
        "blocks.1",
        "blocks.1.first",
        "blocks.1.second",
    ]


def test_tie_within_a_unit_keeps_the_unit():
    model = Net()
    model.blocks[0].second.weight = model.blocks[0].first.weight
    assert units(model, unit_classes=("Block", "Linear")) == [
        "blocks.0",
        "blocks.1",
        "blocks.1.first",
        "blocks.1.second",
        "head",
    ]


def test_module_shared_by_two_units_removes_both_units():
    model = Net()
    model.blocks[1].second = model.blocks[0].second
    assert units(model, unit_classes=("Block",)) == []


def test_unit_that_is_registered_twice_is_kept():
    block = Block()
    model = nn.Module()
    model.layers = nn.ModuleList([block, block])
    assert units(model, unit_classes=("Block",)) == ["layers.0"]


def test_each_parameter_belongs_to_its_innermost_unit():
    model = Net()
    owned = parameters_by_unit(model, ["blocks.0", "blocks.0.first"])
    assert owned["blocks.0.first"] == list(model.blocks[0].first.parameters())
    assert owned["blocks.0"] == list(model.blocks[0].second.parameters())
    assert len(owned[""]) == 6


def test_unknown_class_raises_and_lists_the_classes():
    with pytest.raises(
        ConfigError, match=r"'Blocks', but the model has no.*'Block', 'Embedding'.*Did you mean 'Block'\?"
    ):
        units(Net(), unit_classes=("Blocks",))


@pytest.mark.parametrize(
    "options", [{"unit_classes": ("ModuleList",)}, {"unit_if": lambda name, _: name == "blocks"}], ids=["class", "if"]
)
def test_container_as_unit_raises(options):
    with pytest.raises(ConfigError, match="chooses 'blocks', a ModuleList, which has no forward"):
        units(Net(), **options)


def ignored(model, **options):
    found = find_ignored(model, FSDPConfig(**options))
    return sorted(name for name, parameter in model.named_parameters() if parameter in found)


def test_ignored_modules_by_name_or_class():
    assert ignored(Net(), ignored_modules=("head", "Embedding")) == ["embedding.weight", "head.weight"]


def test_ignored_parameters_by_name():
    assert ignored(Net(), ignored_parameters=("blocks.1.first.bias",)) == ["blocks.1.first.bias"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ignored_modules": ("heat",)}, r"'heat', which is neither a module.*Did you mean 'head'\?"),
        (
            {"ignored_parameters": ("head.weights",)},
            r"'head.weights', which is not a parameter.*Did you mean 'head.weight'",
        ),
    ],
)
def test_unknown_ignored_name_raises(options, message):
    with pytest.raises(ConfigError, match=message):
        ignored(Net(), **options)


def test_frozen_parameters_count_for_unit_sizes():
    model = nn.Sequential(nn.Linear(300, 300).requires_grad_(requires_grad=False), nn.Linear(2, 2))
    assert units(model) == ["0"]
