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
