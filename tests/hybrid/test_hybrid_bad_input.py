"""What can't be had is told on every rank, with the values that were asked for and those that would do."""

import pytest
import torch
from hybrid_runs import RING, boosted
from ranked import on_ranks, raises_on_ranks
from residual_stack import SPLIT, Layer, Stack
from torch import nn

from booster_core.errors import ConfigError


@raises_on_ranks(
    ConfigError,
    r"There is no sharding policy for Stack. Pass `custom_policy=ShardingPolicy\(rules=\(ModuleRule\(.*"
    r"'layers\.\*\.up', 'layers\.\*\.down'.*hook `sharding_policy`; docs/sharding-policies.md has a whole example",
    2,
)
def test_a_model_class_without_policy_is_told_how_to_write_one():
    boosted(Stack(), tp_size=2)


@pytest.mark.parametrize("options", [{"pp_size": 2}, RING], ids=["pp", "sp"])
@raises_on_ranks(
    ConfigError,
    r"the layers of Stack needs an example of what its forward takes. Pass the data loader to `boost`, or .*",
    2,
)
def test_layers_are_found_with_an_example_only(options):
    boosted(Stack(), **options)


@on_ranks(2)
def test_what_no_batch_shows_raises_unless_it_is_allowed_or_an_example_is_given():
    class Told(Layer):
        """A layer that needs more than hidden states."""

        def forward(self, x, scale):
            return super().forward(x * scale["all"])

    class Telling(Stack):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([Told() for _ in range(2)])

        def forward(self, x):
            for layer in self.layers:
                x = layer(x, {"all": torch.tensor(2.0)})
            return x

    def unchecked(**options):
        booster, *_ = boosted(Telling(), tp_size=2, custom_policy=SPLIT, **options)
        return list(booster.plugin.describe()["unchecked_layers"])

    message = r"could not be checked whether 'layers\.0' of Telling .*\(1 more.*no batch showed.*unchecked='allow'`"
    with pytest.raises(ConfigError, match=message):
        unchecked()
    assert unchecked(unchecked="allow") == ["layers.0", "layers.1"]
    assert unchecked(example_batch=torch.zeros(2, 3, 8)) == []
