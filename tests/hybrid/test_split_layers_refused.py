"""Layers that can't be split are refused before anything is: what they compute depends on more than their part."""

import contextlib
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.nn.utils import weight_norm as old_weight_norm

from booster_core.errors import ConfigError
from booster_hybrid import ModuleRule, ShardingPolicy, Style
from booster_hybrid.mesh import RankGroup
from booster_hybrid.probe.probe import check_policy
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


@pytest.mark.parametrize(("kind", "is_plain"), [("plain", True), ("transposed", True), ("doubled bias", False)])
def test_a_layer_that_computes_something_else_is_refused(kind, is_plain):
    class Own(nn.Linear):
        """A linear map in code of its own, which does what its kind says."""

        def forward(self, x):
            product = x @ (self.weight if kind == "transposed" else self.weight.t())
            if kind == "doubled bias":
                product = product + self.bias
            return product + self.bias

    own = Own(6, 8)
    if kind == "transposed":
        own.weight = nn.Parameter(own.weight.detach().t().contiguous())
    model = nn.Sequential(own, nn.ReLU(), nn.Linear(8, 6))
    policy = ShardingPolicy((ModuleRule("0", Style.COLUMN), ModuleRule("2", Style.ROW)))
    expected = contextlib.nullcontext() if is_plain else pytest.raises(ConfigError, match=r"changes what .* computes")
    with expected:
        check_policy(model, policy, 2, torch.device("cpu"))


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (ModuleRule("layer", Style.COLUMN), "as a linear layer, but it is a LayerNorm without a weight of two dim"),
        (ModuleRule("blocks.*.fc", Style.COLUMN), r"names 'blocks\.\*\.fc', which the model does not have"),
        (ModuleRule("up", Style.COLUMN, is_optional=True), "splits none of its layers: no name matches 'up'"),
    ],
    ids=["no matrix", "no module", "nothing"],
)
def test_a_rule_that_splits_nothing_is_refused(rule, message):
    with pytest.raises(ConfigError, match=message):
        split(nn.ModuleDict({"layer": nn.LayerNorm(8)}), rule)
