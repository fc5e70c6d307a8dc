"""How layers are run to check a policy: with which inputs, what is left untouched, and in what time."""

from __future__ import annotations

import copy
import gc
import time

import pytest
import torch
from torch import nn

from booster_core.errors import ConfigError
from booster_hybrid import ModuleRule, ShardingPolicy, Style
from booster_hybrid.probe.probe import check_policy

CPU = torch.device("cpu")
WIDTH = 12


class Gated(nn.Module):
    def __init__(self, width=WIDTH):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        gate, up = self.up(x).chunk(2, dim=-1)
        return self.down(gate.sigmoid() * up)


class Scaled(Gated):
    """Needs more than hidden states, as layers that are given tables of positions do."""

    def forward(self, x, scales):
        return super().forward(x * scales["all"])


class Sloped(Gated):
    """Works on split activations with a parameter that every rank has."""

    def __init__(self, width=WIDTH):
        super().__init__(width)
        self.slope = nn.Parameter(torch.ones(1))

    def forward(self, x):
        gate, up = self.up(x).chunk(2, dim=-1)
        return self.down((self.slope * gate).sigmoid() * up)


class Noisy(Gated):
    def forward(self, x):
        return super().forward(x) + torch.rand(())


class Broken(Gated):
    def forward(self, x):
        raise RuntimeError(len(x))


class Flagged(Gated):
    """Fuses its projections only where a value of its attribute, and so its printed form, says so."""

    def __init__(self, width=WIDTH, *, is_gated=True):
        super().__init__(width)
        self.is_gated = is_gated
        if not is_gated:
            self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        return super().forward(x) if self.is_gated else self.down(self.up(x).relu())


class Model(nn.Module):
    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x, {"all": torch.tensor(2.0)}) if isinstance(layer, Scaled) else layer(x)
        return x


def policy(**options):
    rules = (ModuleRule("layers.*.up", Style.COLUMN, **options), ModuleRule("layers.*.down", Style.ROW))
    return ShardingPolicy(rules=rules, layers=("layers",))


def batch():
    return torch.ones(2, 3, WIDTH)


def test_a_layer_that_needs_more_than_hidden_states_is_checked_by_a_batch():
    model = Model(Scaled(), Scaled())
    assert check_policy(model, policy(num_blocks=2), 2, CPU, batch=batch).unchecked == {}
    with pytest.raises(ConfigError, match=r"layer 'layers\.0'.*`num_blocks=2`"):
        check_policy(model, policy(), 2, CPU, batch=batch)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [(Scaled, "no batch showed how it is called"), (Noisy, "other outputs in each call"), (Broken, "RuntimeError: 2")],
)
def test_a_layer_that_cannot_be_checked_is_named_with_the_reason(kind, reason):
    unchecked = check_policy(Model(kind(), kind()), policy(), 2, CPU).unchecked
    assert list(unchecked) == ["layers.0", "layers.1"]
    assert reason in unchecked["layers.0"]


def test_a_gradient_that_is_not_summed_is_found():
    model, rules = Model(Sloped(), Sloped()), policy(num_blocks=2).rules
    with pytest.raises(ConfigError, match=r"gradients of layer 'layers\.0', not its outputs: the gradient of 'slope'"):
        check_policy(model, ShardingPolicy(rules, ("layers",)), 2, CPU)
    summed = ModuleRule("layers.*.slope", Style.SUMMED_GRADIENT)
    assert check_policy(model, ShardingPolicy((*rules, summed), ("layers",)), 2, CPU).unchecked == {}


def test_layers_split_in_pairs_are_checked_together():
    def check(*layers):
        rules = (ModuleRule("layers.0", Style.COLUMN), ModuleRule(f"layers.{len(layers) - 1}", Style.ROW))
        return check_policy(Model(*layers), ShardingPolicy(rules, ("layers",)), 2, CPU).unchecked

    assert check(nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)) == {}
    with pytest.raises(ConfigError, match="changes what the model computes"):
        check(nn.Linear(WIDTH, 8), nn.Softmax(-1), nn.Linear(8, WIDTH))


def test_a_layer_of_another_form_than_the_first_is_checked():
    with pytest.raises(ConfigError, match=r"layer 'layers\.1'"):
        check_policy(Model(Flagged(is_gated=False), Flagged()), policy(), 2, CPU)


def test_nothing_of_the_model_is_changed():
    model = Model(Gated(), Gated())
    before, drawn = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    check_policy(model, policy(num_blocks=2), 2, CPU)
    assert torch.equal(drawn, torch.get_rng_state())
    assert all(module.training and "forward" not in vars(module) for module in model.modules())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_25_million_parameters_take_less_than_a_second():
    model = Model(*(Gated(512) for _ in range(16)))
    assert sum(each.numel() for each in model.parameters()) > 25e6
    gc.collect()
    gc.freeze()  # a collection, which the check ends with, takes as long as the tests before have left objects
    try:
        start = time.thread_time()  # other threads of this process are no part of the check
        assert check_policy(model, policy(num_blocks=2), 4, CPU).unchecked == {}
        assert time.thread_time() - start < 1
    finally:
        gc.unfreeze()
