"""A plugin that takes only models of its own kind passes the conformance kit with `make_model`."""

from __future__ import annotations

from typing import NamedTuple

import torch  # noqa: TC002 - named tuples need it

from booster_core.errors import ConfigError
from booster_testing.conformance import PluginConformance
from booster_testing.models import TinyMixedBag
from booster_testing.mutants import ReferencePlugin


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


class TestModelsOfOneKind(PluginConformance):
    plugin_class = TakesConfiguredModels
    make_model = ConfiguredModel
    backend = "cpu:gloo"


def test_kits_own_model_is_not_used():
    kit = TestModelsOfOneKind()
    assert kit.training().model_factory is ConfiguredModel
    assert "dropout" not in kit.jobs()
