"""Linear layers in 8 bits under every plugin: gradients as torchao's on one process."""

import pytest
import torch
from isolated_libraries import FOLDER, import_quietly, missing_libraries, use_isolated_libraries
from matrix import matrix

from booster_core import Booster
from booster_core.errors import ConfigError
from booster_ddp import TorchDDPPlugin
from booster_fsdp import TorchFSDPPlugin
from booster_gemini import GeminiPlugin
from booster_hybrid import HybridParallelPlugin
from booster_runtime import full_gradient
from booster_runtime.float8 import convert_to_float8
from booster_testing import expect_on_ranks, run_on_ranks
from booster_testing.compare import assert_same_tensors, tolerance_for
from booster_testing.models import tiny_llama
from booster_zero import LowLevelZeroPlugin

pytestmark = [
    pytest.mark.usefixtures("ranks_with_isolated_libraries"),
    pytest.mark.skipif(bool(missing_libraries(["torchao"])), reason=f"torchao not installed, nor in {FOLDER}"),
]
PLUGINS = {
    "ddp": TorchDDPPlugin,
    "fsdp": TorchFSDPPlugin,
    "zero": lambda: LowLevelZeroPlugin(stage=2),
    "gemini": GeminiPlugin,
    "zero 3": lambda: HybridParallelPlugin(zero_stage=3),
    "pipeline": lambda: HybridParallelPlugin(pp_size=2, example_batch=both_of(0), num_microbatches=2),
}


def emulated(**changes):
    """Return settings with which the CPU computes what a device would; only ranks import torchao."""
    use_isolated_libraries()
    import_quietly(["torchao.float8"])
    from torchao.float8 import Float8LinearConfig

    return Float8LinearConfig(emulate=True, **changes)


def make_model(**changes):
    torch.manual_seed(4)
    return tiny_llama(use_cache=False, attention_dropout=0.0, hidden_size=32, intermediate_size=48, **changes)


def tokens_of(step, rank):
    tokens = torch.randint(64, (2, 8), generator=torch.Generator().manual_seed(10 * step + rank))
    return {"input_ids": tokens, "labels": tokens}


def both_of(step):
    first, second = tokens_of(step, 0), tokens_of(step, 1)
    return {name: torch.cat([first[name], second[name]]) for name in first}


def plainly(convert, ranks):
    """Return the gradients of two steps on one process, which computes each rank's samples by themselves."""
    model = make_model()
    convert(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gradients = {}
    for step in range(2):
        for rank in range(ranks):
            (model(**tokens_of(step, rank)).loss / ranks).backward()
        gradients |= {f"{step} {name}": p.grad.clone() for name, p in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
    return gradients


def of_torchao(model):
    settings = emulated()
    from torchao.float8 import convert_to_float8_training

    convert_to_float8_training(model, module_filter_fn=lambda _, name: "layers" in name, config=settings)


def boosted(plugin):
    model = make_model()
    parameters = dict(model.named_parameters())
    assert len(convert_to_float8(model, config=emulated())) == 14, "seven of each of two layers, not the head"
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
    booster = Booster("cpu", plugin=PLUGINS[plugin]())
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    rank, _ = booster.plugin.data_parallel_coordinates(booster.context.coordinator)
    gradients = {}
    for step in range(2):
        if plugin == "pipeline":  # a microbatch for each rank's samples
            booster.execute_pipeline(iter([both_of(step)]), model, lambda output, _: output.loss, optimizer)
        else:
            booster.backward(model(**tokens_of(step, rank)).loss, optimizer)
        gradients |= {f"{step} {name}": full_gradient(booster, model, name) for name in parameters}
        optimizer.step()
        optimizer.zero_grad()
    return gradients


@matrix(["pipeline"], plugin=PLUGINS)
def test_gradients_equal_those_of_torchao_on_one_process(plugin):
    (expected,) = run_on_ranks(plainly, 1, of_torchao, 2)
    for gradients in run_on_ranks(boosted, 2, plugin):
        assert_same_tensors(gradients, expected, tolerance_for(torch.float32))


def boost_tensor_parallel():
    model = make_model()
    convert_to_float8(model, config=emulated())
    Booster("cpu", plugin=HybridParallelPlugin(tp_size=2)).boost(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_tensor_parallelism_refuses_such_layers():
    expect_on_ranks(ConfigError, "Float8Linear", boost_tensor_parallel, 2)
