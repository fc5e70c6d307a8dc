"""`verify` names the tensor at fault where a user's policy or criterion is wrong under tensor and pipeline parallelism.

`tools/test_verify_faults.py` has plugins that are wrong.
"""

from functools import partial
from unittest import mock

import pytest
import torch
from ranked import on_ranks, raises_on_ranks
from torch import nn
from torch.nn import functional

from booster_core.errors import ConfigError, GradientError
from booster_core.ranks import DistCoordinator
from booster_hybrid import HybridParallelPlugin, ModuleRule, ShardingPolicy, Style
from booster_hybrid.probe.probe import CheckedPolicy
from booster_tools import TrainingFunctions, verify

WIDTH = 8


def drawn(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


class Stack(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layers = nn.ModuleList(layer() for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def build(layer):
    model = Stack(layer)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


@on_ranks(2)
def test_a_projection_that_is_split_wrongly_is_refused_and_would_be_found():
    """Split the projection as if it were one, and not three; first with the check, then without it."""

    class Attending(nn.Module):
        def __init__(self):
            super().__init__()
            self.num_heads = 4
            self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            heads = [each.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for each in self.qkv(x).chunk(3, dim=-1)]
            return x + self.out(functional.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))

    rules = (
        ModuleRule("layers.*.qkv", Style.COLUMN, units="num_heads", scaled=("num_heads",)),
        ModuleRule("layers.*.out", Style.ROW, units="num_heads"),
    )
    plugin = partial(HybridParallelPlugin, tp_size=2, custom_policy=ShardingPolicy(rules=rules, layers=("layers",)))
    functions = TrainingFunctions(
        partial(build, Attending), partial(drawn, 2, 5, WIDTH), lambda outputs, _: outputs.square().mean()
    )
    with pytest.raises(ConfigError, match=r"layers\.0") as error:
        verify(functions, plugin())
    with mock.patch("booster_hybrid.boosting.check_policy", return_value=CheckedPolicy({})):
        report = verify(functions, plugin())
    found = [(each.what, each.name) for each in report.unexplained]
    assert ("gradient", "layers.0.qkv.weight") in found
    first, other = DistCoordinator().all_gather_object((str(error.value), found))
    assert first == other


@raises_on_ranks(GradientError, r"gradient 'layers\.\d\.(weight|bias)' at step 1", 2)
def test_class_weights_that_microbatches_cut_are_found():
    """Samples have the weights of eight classes among them."""

    def samples():
        return {"x": drawn(8, WIDTH), "y": torch.arange(8) % 4, "weights": torch.arange(1.0, 9.0)}

    def weighted(outputs, batch):
        losses = functional.cross_entropy(outputs, batch["y"], reduction="none")
        return (losses * batch["weights"][batch["y"]]).mean()

    policy = ShardingPolicy(layers=("layers",))
    plugin = HybridParallelPlugin(pp_size=2, custom_policy=policy, example_batch=drawn(2, WIDTH))
    layer = partial(nn.Linear, WIDTH, WIDTH)
    verify(TrainingFunctions(partial(build, layer), samples, weighted), plugin).check()
