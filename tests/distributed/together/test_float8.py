"""Linear layers in 8 bits: gradients as torchao's on one process, and what is refused."""

import pytest
import torch
from isolated_libraries import FOLDER, import_quietly, missing_libraries, use_isolated_libraries
from torch import nn

from booster_core import Booster
from booster_core.errors import ConfigError
from booster_ddp import TorchDDPPlugin
from booster_fsdp import TorchFSDPPlugin
from booster_gemini import GeminiPlugin
from booster_hybrid import HybridParallelPlugin
from booster_runtime.float8 import convert_to_float8
from booster_testing import expect_on_ranks, run_on_ranks
from booster_testing.compare import assert_same_tensors, tolerance_for
from booster_testing.models import tiny_llama
from booster_zero import LowLevelZeroPlugin

pytestmark = [
    pytest.mark.usefixtures("new_interpreters"),
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
        gradients |= {f"{step} {name}": booster.full_gradient(model, name) for name in parameters}
        optimizer.step()
        optimizer.zero_grad()
    return gradients


@pytest.mark.parametrize("plugin", PLUGINS)
def test_gradients_equal_those_of_torchao_on_one_process(plugin):
    (expected,) = run_on_ranks(plainly, 1, of_torchao, 2)
    for gradients in run_on_ranks(boosted, 2, plugin):
        assert_same_tensors(gradients, expected, tolerance_for(torch.float32))


def test_products_are_in_8_bits():
    ((narrow,), wide) = run_on_ranks(plainly, 1, of_torchao, 1), plainly(lambda model: None, 1)
    name = "0 model.layers.0.mlp.up_proj.weight"
    difference = (narrow[name] - wide[name]).norm() / wide[name].norm()
    assert 0.01 < difference < 0.3


def boost_tensor_parallel():
    model = make_model()
    convert_to_float8(model, config=emulated())
    Booster("cpu", plugin=HybridParallelPlugin(tp_size=2)).boost(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_tensor_parallelism_refuses_such_layers():
    expect_on_ranks(ConfigError, "Float8Linear", boost_tensor_parallel, 2)


def ask_other_devices():
    emulated()
    model = make_model()
    before = str(model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        with pytest.raises(ConfigError, match=r"capability 8.9 or later, and this machine has no CUDA device"):
            convert_to_float8(model)
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "get_device_capability", lambda: (8, 6))
        with pytest.raises(ConfigError, match=r"and this one has 8\.6"):
            convert_to_float8(model)
        assert str(model) == before, "nothing is changed"
        patch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
        assert len(convert_to_float8(model)) == 14


def test_a_device_without_such_units_is_refused():
    run_on_ranks(ask_other_devices, 1)


def choose_layers():
    def chosen(name, _):
        return name.endswith("0.mlp.up_proj")

    assert convert_to_float8(make_model(), chosen, config=emulated()) == ["model.layers.0.mlp.up_proj"]
    linear = nn.Sequential(nn.Linear(8, 16))
    with pytest.raises(ConfigError, match=r"None of the 1 linear layers of `Sequential`"):
        convert_to_float8(linear, config=emulated())
    with pytest.raises(ConfigError, match="'0' maps 8 to 16 features, which are not both multiples of 16"):
        convert_to_float8(linear, lambda *_: True, config=emulated())
    with pytest.raises(TypeError, match=r"must be a torchao\.float8\.Float8LinearConfig; got `str`"):
        convert_to_float8(linear, config="fast")
    with pytest.raises(ConfigError, match="Leave out `enable_fsdp_float8_all_gather`"):
        convert_to_float8(linear, config=emulated(enable_fsdp_float8_all_gather=True))


def test_layers_that_are_chosen_must_fit():
    run_on_ranks(choose_layers, 1)


@pytest.mark.parametrize(
    ("model", "error", "message"),
    [
        (lambda: None, TypeError, "needs a torch.nn.Module; got `function`"),
        (nn.Linear(16, 16), ConfigError, "inside of a user's model before `boost`; got `Linear`"),
        (Booster("cpu").boost(nn.Sequential(nn.Linear(16, 16)))[0], ConfigError, "before `boost`; got"),
    ],
)
def test_other_models_are_refused(model, error, message):
    with pytest.raises(error, match=message):
        convert_to_float8(model)
