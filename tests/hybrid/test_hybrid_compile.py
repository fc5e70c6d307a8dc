"""``torch.compile`` of models in stages and with spread experts: as eager training and one process, or a refusal."""

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from cases import Case, Setting, assert_equals_one_process, sgd, tokens, train_boosted
from compiler_warnings import ignore_compiler_warnings
from expert_models import expert_case
from matrix import matrix

from booster_core.errors import ConfigError
from booster_hybrid import HybridParallelPlugin
from booster_testing import expect_on_ranks
from booster_testing.compare import tolerance_for
from booster_testing.models import tiny_llama

BACKEND = "aot_eager"  # needs no C++ compiler


def in_place(model):
    model.compile(backend=BACKEND)
    return model


def layers(model):
    for layer in model.model.layers:
        layer.compile(backend=BACKEND)
    return model


def wrapped_layers(model):
    for index, layer in enumerate(model.model.layers):
        model.model.layers[index] = torch.compile(layer, backend=BACKEND)
    return model


def as_it_is(model):
    return model


def compiled(make, how):
    """Return a model that ranks compile, and not the one process with which they are compared."""
    model = make()
    if not dist.is_initialized():
        return model
    ignore_compiler_warnings()
    return how(model)


def compile_after_boost(how, step, model, _optimizer):
    if step == 0 and dist.is_initialized():
        how(model)


WAYS = {
    "layers": (layers, as_it_is),
    "wrapped": (wrapped_layers, as_it_is),
    "whole": (in_place, as_it_is),
    "layers after boost": (as_it_is, layers),
    "whole after boost": (as_it_is, in_place),
}


def compiled_case(case, way):
    before, after = WAYS[way]
    return replace(case, build=partial(compiled, case.build, before), before_step=partial(compile_after_boost, after))


LLAMA = Case(build=partial(tiny_llama, num_hidden_layers=2), batch=tokens(4, 8))
PIPELINE = Setting(HybridParallelPlugin, {"pp_size": 2})


@pytest.mark.slow
@pytest.mark.parametrize("way", ["layers", "wrapped", "layers after boost"])
def test_a_pipeline_of_compiled_parts_trains_as_one_process(way):
    assert_equals_one_process(compiled_case(LLAMA, way), PIPELINE)


def test_a_model_that_was_compiled_as_a_whole_is_not_cut():
    message = r"Compile its layers instead, for example .*layer\.compile\(\)"
    expect_on_ranks(ConfigError, message, train_boosted, 2, compiled_case(LLAMA, "whole"), PIPELINE)


# the least to compile; experts break graphs in the same way
@matrix(["qwen3_moe-layers"], name=["qwen3_moe", "gpt_oss"], way=["layers", "whole", "whole after boost"])
def test_compiled_models_have_the_gradients_of_one_process(name, way):
    sizes = {"dtype": torch.float32, "num_hidden_layers": 1}  # two take twice as long to compile
    close = {"elements": (1e-4, 2e-6), "tolerance": tolerance_for(torch.float32)}
    case = expert_case(name, settings=sizes, optimizer=sgd, max_norm=None, **close)
    assert_equals_one_process(compiled_case(case, way), Setting(HybridParallelPlugin, {"ep_size": 2}))
