"""A plugin that takes only models of its own kind passes the conformance kit with `make_model`."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch  # noqa: TC002 - named tuples need it
from kit_cases import by_default
from reference_plugins import ReferencePlugin

from booster_core.errors import ConfigError
from booster_testing.conformance import PluginConformance
from booster_testing.models import TinyMixedBag


class Outputs(NamedTuple):
    logits: torch.Tensor


class ConfiguredModel(TinyMixedBag):
    config = {"vocab_size": 16}  # noqa: RUF012 - as transformers' models have it

    def forward(self, tokens):
        return Outputs(super().forward(tokens))


class TakesConfiguredModels(ReferencePlugin):
    def configure(self, objects, context):
        if not hasattr(objects.model, "config"):
            msg = "The model has no `config`."
            raise ConfigError(msg)
        return super().configure(objects, context)


@by_default(
    *(
        "test_boost_makes_ranks_equal_or_raises",
        "test_frozen_parameters_do_not_change",
        "test_evaluation_changes_nothing",
    ),
    *(
        "test_equals_one_process[adafactor]",
        "test_lazy_model_trains_like_an_eager_model",
        "test_equal_seeds_give_equal_dropout",
    ),
    *("test_resumed_run_continues_exactly[fp32]", "test_checkpoint_loads_on_one_device[fp32]"),
)  # what makes or knows the model; the other tests only take it
class TestModelsOfOneKind(PluginConformance):
    plugin_class = TakesConfiguredModels
    make_model = ConfiguredModel
    backend = "cpu:gloo"


def test_kits_own_model_is_not_used():
    kit = TestModelsOfOneKind()
    assert kit.training().model_factory is ConfiguredModel
    with pytest.raises(pytest.skip.Exception, match="needs the kit's own model"):
        kit.test_equal_seeds_give_equal_dropout()
