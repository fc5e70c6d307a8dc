"""The zero-bubble V trains unmodified models as one process does, its backward split or not."""

from __future__ import annotations

import contextlib

import torch
from model_zoo import deepened, get_model
from ranked import on_ranks

from booster_core import Booster
from booster_hybrid import HybridParallelPlugin
from booster_hybrid.tensor_parallel import linear
from booster_runtime import full_gradient
from booster_testing import run_on_ranks


def boosted(name, options, precision=None):
    zoo = get_model(name)
    plugin = HybridParallelPlugin(**options, example_batch=zoo.share(0, 0, 2))
    booster = Booster(plugin=plugin, mixed_precision=precision)
    model = deepened(name)
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return booster, model, optimizer


def narrow_gradients(name, style):
    zoo = get_model(name)
    options = {"pp_size": 2, "tp_size": 2, "pp_style": style, "num_model_chunks": 2, "num_microbatches": 2}
    booster, model, optimizer = boosted(name, options, "bf16")
    booster.execute_pipeline(iter([zoo.share(0, 0, 4)]), model, zoo.loss, optimizer)
    return {key: full_gradient(booster, model, key) for key in booster.plugin.parameter_paths(model)}


def test_bf16_gradients_of_split_layers_do_not_depend_on_when_they_are_computed():
    """Microbatches reach a weight in their order in either schedule, so that the sums are the same, bit for bit."""
    name = "transformers/llama"
    found, expected = (run_on_ranks(narrow_gradients, 4, name, style)[0] for style in ("zbv", "interleaved"))
    assert found.keys() == expected.keys()
    for key, gradient in expected.items():
        assert torch.equal(found[key], gradient), key


@on_ranks(4)
def test_split_layers_compute_weight_products_in_the_weight_phase_only():
    name = "transformers/llama"
    zoo = get_model(name)
    options = {"pp_size": 2, "tp_size": 2, "pp_style": "zbv", "num_microbatches": 4}
    booster, model, optimizer = boosted(name, options)
    actions, original = [], linear._weight_gradient

    class Noting:
        def begin(self):
            actions.clear()

        @contextlib.contextmanager
        def during(self, action):
            actions.append([action.work.value, 0])
            yield

        def end(self, schedule):
            pass

    def counted(*args, **named):
        actions[-1][1] += 1
        return original(*args, **named)

    model.engine._run_options["record"] = Noting()
    linear._weight_gradient = counted
    try:
        booster.execute_pipeline(iter([zoo.share(0, 0, 4)]), model, zoo.loss, optimizer)
    finally:
        linear._weight_gradient = original
    at = {work: [count for each, count in actions if each == work] for work, _ in actions}
    # Seven of each layer, a layer in each stage, and the head in the last one.
    assert sorted(set(at["backward_weight"])) in ([7], [7, 8])
    assert not any(at["forward"])
    assert not any(at["backward_input"])
    assert len(at["backward_input"]) == len(at["backward_weight"]) == 8
