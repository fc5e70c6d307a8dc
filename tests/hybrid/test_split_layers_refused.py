"""Layers that can't be split are refused before anything is: what they compute depends on more than their part."""

from __future__ import annotations

import warnings

import pytest
from torch import nn
from torch.nn.utils import parametrizations
from torch.nn.utils import weight_norm as old_weight_norm

from booster_core.errors import ConfigError
from booster_hybrid import ModuleRule, ShardingPolicy, Style
from booster_hybrid.rank_group import RankGroup
from booster_hybrid.tensor_parallel.linear import is_linear, is_transposed
from booster_hybrid.tensor_parallel.plan import parallelize

NORMS = {
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "old weight_norm": old_weight_norm,
    "old spectral_norm": nn.utils.spectral_norm,
}


def split(model, *rules):
    parallelize(model, ShardingPolicy(rules), RankGroup(None, 0, 2))


@pytest.mark.parametrize("style", [Style.COLUMN, Style.ROW])
@pytest.mark.parametrize("norm", NORMS)
def test_a_layer_that_computes_its_weight_is_refused(norm, style):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the old forms are deprecated, and in use
        model = nn.ModuleDict({"layer": NORMS[norm](nn.Linear(8, 8))})
    with pytest.raises(ConfigError, match=r"'layer', whose `weight` is no parameter of its own.*remove the param"):
        split(model, ModuleRule("layer", style))


@pytest.mark.parametrize("option", [{"scale_grad_by_freq": True}, {"max_norm": 1.0}])
def test_an_embedding_that_looks_at_all_rows_is_refused(option):
    model = nn.ModuleDict({"tokens": nn.Embedding(8, 4, **option)})
    with pytest.raises(ConfigError, match=rf"embedding 'tokens'.*`{next(iter(option))}=.*leave the embedding whole"):
        split(model, ModuleRule("tokens", Style.VOCABULARY))


class Own(nn.Linear):
    """A linear map in code of its own, which does what its kind says."""

    def __init__(self, kind, inputs=6, outputs=8):
        super().__init__(inputs, outputs)
        self.kind = kind
        if kind == "transposed":
            self.weight = nn.Parameter(self.weight.detach().t().contiguous())

    def forward(self, x):
        product = x @ (self.weight if self.kind == "transposed" else self.weight.t())
        if self.kind == "doubled bias":
            product = product + self.bias
        return product * 0.5 if self.kind == "scaled" else product + self.bias


@pytest.mark.parametrize(("kind", "order"), [("plain", False), ("transposed", True)])
@pytest.mark.parametrize("inputs", [6, 8])
def test_linear_layers_are_known_by_what_they_compute(kind, order, inputs):
    layer = Own(kind, inputs)
    before = dict(layer.named_parameters())
    assert is_linear(layer)
    assert is_transposed(layer) is order
    assert all(parameter is before[name] for name, parameter in layer.named_parameters())


class InFp32(nn.Linear):
    """A router, whose scores are in fp32 whatever its weight."""

    def forward(self, x):
        return nn.functional.linear(x.float(), self.weight.float(), self.bias.float())


def test_a_layer_that_computes_in_another_format_is_no_plain_one():
    assert not is_linear(InFp32(4, 6))


@pytest.mark.parametrize("kind", ["scaled", "doubled bias"])
def test_a_layer_that_computes_something_else_is_refused(kind):
    with pytest.raises(ConfigError, match="as a linear layer, but it is a Own, whose forward computes something else"):
        split(nn.ModuleDict({"layer": Own(kind)}), ModuleRule("layer", Style.COLUMN))
