"""What needs no ranks: which modules are units, which parameters are left out, and options that are refused."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from booster_core.errors import ConfigError
from booster_fsdp import FSDPConfig, TorchFSDPPlugin
from booster_fsdp.units import choose_units, find_ignored
from booster_testing.models import tiny_llama


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(4, 10, bias=False)


def units(model, **options):
    return choose_units(model, FSDPConfig(**options))


def large_members():
    return nn.Sequential(nn.Linear(300, 300), nn.ReLU(), nn.Linear(300, 2), nn.ModuleList([nn.Linear(300, 300)]))


def frozen_members():
    return nn.Sequential(nn.Linear(300, 300).requires_grad_(requires_grad=False), nn.Linear(2, 2))


def tied_over_units():
    model = Net()
    model.head.weight = model.embedding.weight
    return model


def tied_within_a_unit():
    model = Net()
    model.blocks[0].second.weight = model.blocks[0].first.weight
    return model


def shared_by_units():
    model = Net()
    model.blocks[1].second = model.blocks[0].second
    return model


def registered_twice():
    block, model = Block(), nn.Module()
    model.layers = nn.ModuleList([block, block])
    return model


LAYERS = ["blocks.0.first", "blocks.0.second", "blocks.1.first", "blocks.1.second"]


@pytest.mark.parametrize(
    ("build", "options", "expected"),
    [
        (tiny_llama, {}, ["model.layers.0", "model.layers.1"]),
        (large_members, {}, ["0", "3.0"]),
        (frozen_members, {}, ["0"]),
        (lambda: nn.Linear(1000, 1000), {}, []),
        (Net, {"unit_classes": ("Block", "Embedding")}, ["embedding", "blocks.0", "blocks.1"]),
        # A block has 40 elements in two layers of 20, which do not count for it; head and embedding have 40 each.
        (Net, {"unit_min_numel": 40}, ["embedding", "blocks.0", "blocks.1", "head"]),
        (Net, {"unit_min_numel": 20}, ["embedding", *LAYERS, "head"]),
        (lambda: nn.Sequential(nn.MultiheadAttention(8, 2)), {"unit_min_numel": 50}, ["0"]),
        (Net, {"unit_if": lambda name, _: name.endswith("second")}, LAYERS[1::2]),
        (
            tied_over_units,
            {"unit_classes": ("Block", "Embedding", "Linear")},
            ["blocks.0", *LAYERS[:2], "blocks.1", *LAYERS[2:]],
        ),
        (tied_within_a_unit, {"unit_classes": ("Block", "Linear")}, ["blocks.0", "blocks.1", *LAYERS[2:], "head"]),
        (shared_by_units, {"unit_classes": ("Block",)}, []),
        (registered_twice, {"unit_classes": ("Block",)}, ["layers.0"]),
    ],
)
def test_units(build, options, expected):
    assert units(build(), **options) == expected


def ignored(model, **options):
    found = find_ignored(model, FSDPConfig(**options))
    return sorted(name for name, parameter in model.named_parameters() if parameter in found)


def test_ignored_modules_by_name_or_class():
    assert ignored(Net(), ignored_modules=("head", "Embedding")) == ["embedding.weight", "head.weight"]


def test_ignored_parameters_by_name():
    assert ignored(Net(), ignored_parameters=("blocks.1.first.bias",)) == ["blocks.1.first.bias"]


@pytest.mark.parametrize(
    ("choose", "options", "message"),
    [
        (units, {"unit_classes": ("Blocks",)}, "'Blocks', but the model has no.*It has: 'Block', 'Embedding'"),
        (
            units,
            {"unit_classes": ("ModuleList",)},
            "unit_classes` chooses 'blocks', a ModuleList, which has no",
        ),
        (units, {"unit_if": lambda name, _: name == "blocks"}, "unit_if` chooses 'blocks', a ModuleList"),
        (ignored, {"ignored_modules": ("heat",)}, "'heat', which is neither a module"),
        (ignored, {"ignored_parameters": ("head.weights",)}, "'head.weights', which is not a parameter"),
    ],
)
def test_what_is_no_unit_or_not_there_raises(choose, options, message):
    with pytest.raises(ConfigError, match=message):
        choose(Net(), **options)


# ---- options of the plugin


def test_options_reach_the_config():
    plugin = TorchFSDPPlugin(replica_size=2, unit_classes=["Block"], precision="bf16")
    assert plugin.config.replica_size == 2
    assert plugin.describe()["unit_classes"] == ("Block",)
    assert plugin.precision.name == "bf16"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reshard_after_forward": 1}, "`reshard_after_forward=1` is the size of a group"),
        ({"replica_size": 0}, "`replica_size=0` must be at least 1"),
        ({"unit_min_numel": 0}, "`unit_min_numel=0` must be at least 1"),
        ({"forward_prefetch": -1}, "`forward_prefetch=-1` must be at least 0"),
        ({"backward_prefetch": -1}, "`backward_prefetch=-1` must be at least 0"),
        ({"max_norm": -1.0}, "`max_norm=-1.0` must be 0"),
        ({"partition": "rows"}, "`partition='rows'` is not one of"),
        ({"unit_classes": ["A"], "unit_min_numel": 1}, "`unit_classes` and `unit_min_numel` all choose the units"),
        (
            {"mixed_precision": MixedPrecisionPolicy(param_dtype=torch.float16), "precision": "bf16"},
            r"`mixed_precision` has param_dtype torch.float16, and the precision 'bf16' asks for torch.bfloat16",
        ),
    ],
)
def test_invalid_option_raises(options, message):
    with pytest.raises(ConfigError, match=message):
        TorchFSDPPlugin(**options)


@pytest.mark.parametrize("option", ["unit_classes", "ignored_modules", "ignored_parameters", "forward_methods"])
def test_string_instead_of_names_raises(option):
    with pytest.raises(TypeError, match=f"`{option}='Block'` is one string"):
        TorchFSDPPlugin(**{option: "Block"})
