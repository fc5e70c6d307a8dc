"""Linear layers in 8 bits under every plugin: gradients as torchao's on one process."""

from functools import partial

import pytest
import torch
from cases import Case, assert_same_training, train_boosted, train_plainly
from isolated_libraries import FOLDER, emulated, missing_libraries
from matrix import matrix
from plugin_runs import RUNS, runs
from ranked import raises_on_ranks

from booster_core import Booster
from booster_core.errors import ConfigError
from booster_hybrid import HybridParallelPlugin
from booster_testing import run_on_ranks
from booster_testing.models import tiny_llama

pytestmark = [
    pytest.mark.usefixtures("ranks_with_isolated_libraries"),
    pytest.mark.skipif(bool(missing_libraries(["torchao"])), reason=f"torchao not installed, nor in {FOLDER}"),
]
SETTINGS = {**runs("ddp", "fsdp", "zero2", "gemini"), "zero 3": RUNS["zero3"], "pipeline": RUNS["hybrid-pp"]}


def make_model(**changes):
    torch.manual_seed(4)
    return tiny_llama(use_cache=False, attention_dropout=0.0, hidden_size=32, intermediate_size=48, **changes)


def tokens_of(samples, number, replica):
    """Return two samples of a replica, or those of two replicas."""
    parts = range(samples // 2)
    tokens = torch.cat(
        [torch.randint(64, (2, 8), generator=torch.Generator().manual_seed(10 * number + replica + i)) for i in parts]
    )
    return {"input_ids": tokens, "labels": tokens}


def converted():
    """Return a model whose layers, but for the head, multiply in 8 bits."""
    model, settings = make_model(), emulated()
    from torchao.float8 import convert_to_float8_training

    return convert_to_float8_training(model, module_filter_fn=lambda _, name: "layers" in name, config=settings)


@matrix(["pipeline"], plugin=SETTINGS)
def test_gradients_equal_those_of_torchao_on_one_process(plugin):
    """Samples of a replica are computed by themselves: in a pipeline, they are a microbatch."""
    size = 2 if plugin == "pipeline" else 1
    case = Case(build=converted, batch=partial(tokens_of, 2 * size), steps=2, max_norm=None)
    (expected,) = run_on_ranks(train_plainly, 1, case, 2 // size, size)  # torchao is for ranks only
    for result in run_on_ranks(train_boosted, 2, case, SETTINGS[plugin]):
        assert_same_training(result.trained, expected, case)


@raises_on_ranks(ConfigError, "Float8Linear", 2)
def test_tensor_parallelism_refuses_such_layers():
    model = converted()
    Booster("cpu", plugin=HybridParallelPlugin(tp_size=2)).boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
