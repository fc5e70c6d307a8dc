"""State in 8 and 4 bits, by torchao and bitsandbytes: trained as in one process, and saved for any plugin."""

import sys
from contextlib import nullcontext

import pytest
import torch
from isolated_libraries import FOLDER, import_quietly, missing_libraries, use_isolated_libraries
from matrix import matrix
from ranked import on_ranks, raises_on_ranks
from torch import nn

from booster_core import Booster
from booster_core.errors import CheckpointError, ConfigError
from booster_fsdp import TorchFSDPPlugin
from booster_gemini import GeminiPlugin
from booster_hybrid import HybridParallelPlugin
from booster_runtime import whole_parameters
from booster_testing.models import tiny_llama
from booster_zero import LowLevelZeroPlugin

pytestmark = [
    pytest.mark.usefixtures("ranks_with_isolated_libraries"),
    pytest.mark.skipif(bool(missing_libraries(["torchao"])), reason=f"torchao not installed, nor in {FOLDER}"),
]
BITSANDBYTES = "AdamW8bit of bitsandbytes"
NEEDS_BITSANDBYTES = [
    pytest.mark.slow,  # it loads slowly
    pytest.mark.skipif(bool(missing_libraries(["bitsandbytes"])), reason=f"not installed, nor in {FOLDER}"),
]
PLUGINS = {
    "ddp": lambda: "ddp",
    "fsdp": lambda: "fsdp",
    "zero 1": lambda: LowLevelZeroPlugin(stage=1),
    "zero 2": lambda: LowLevelZeroPlugin(stage=2),
    "gemini": GeminiPlugin,
    "hybrid": lambda: HybridParallelPlugin(zero_stage=1),
    "zero flat": lambda: LowLevelZeroPlugin(partition="flat"),
    "gemini flat": lambda: GeminiPlugin(partition="flat"),
    "fsdp flat": lambda: TorchFSDPPlugin(partition="flat"),
}
STEPS = 4


def begin(kind, name=None):
    """Return a model of which torchao keeps the matrices' state in few bits, its optimizer, and what boosted them."""
    use_isolated_libraries()
    library = "bitsandbytes" if kind == BITSANDBYTES else "torchao"
    import_quietly([f"{library}.optim"])
    torch.compiler.set_stance("force_eager")
    torch.manual_seed(0)
    # Half of the parameters ends within the second matrix, with a block of 256 elements.
    layers = [nn.Linear(64, 256, bias=False), nn.Linear(256, 128, bias=False), nn.Linear(128, 64, bias=False)]
    model = nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])
    make = getattr(sys.modules[f"{library}.optim"], kind.partition(" ")[0])
    optimizer = make(model.parameters(), lr=1e-2)
    if name is None:
        return None, model, optimizer
    booster = Booster("cpu", plugin=PLUGINS[name]())
    return booster, *booster.boost(model, optimizer)[:2]


def samples_of(step):
    return torch.randn(8, 64, generator=torch.Generator().manual_seed(step))


def train(booster, model, optimizer, first, last):
    rank = booster.context.coordinator.rank
    for step in range(first, last):
        booster.backward(model(samples_of(step)[4 * rank : 4 * rank + 4]).square().mean(), optimizer)
        optimizer.step()
        optimizer.zero_grad()


@matrix(
    ["AdamW8bit-zero 2-ddp", "AdamW4bit-fsdp-zero 1", "AdamW8bit-gemini-fsdp"],
    2,
    kind=["AdamW8bit", "AdamW4bit", pytest.param(BITSANDBYTES, marks=NEEDS_BITSANDBYTES)],
    saver=["ddp", "fsdp", "zero 1", "zero 2", "gemini", "hybrid"],
    loader=["ddp", "fsdp", "zero 1", "zero 2", "gemini", "hybrid"],
)
@on_ranks(2)
def test_a_run_goes_on_as_if_it_had_not_been_saved(kind, saver, loader, tmp_path):
    """Compare with a run on one process, and with the run that has saved half-way and went on itself."""
    _, plain, optimizer = begin(kind)
    for step in range(STEPS):
        plain(samples_of(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    plain = plain.state_dict()
    booster, model, optimizer = begin(kind, saver)
    train(booster, model, optimizer, 0, STEPS // 2)
    booster.save_checkpoint(tmp_path, step=1, model=model, optimizer=optimizer)
    train(booster, model, optimizer, STEPS // 2, STEPS)
    expected = {name: tensor.clone() for name, tensor in whole_parameters(booster, model)}
    booster, model, optimizer = begin(kind, loader)
    booster.load_checkpoint(tmp_path, model=model, optimizer=optimizer)
    tensors = [each for state in optimizer.unwrap().state.values() for each in state.values()]
    kinds = {getattr(each, "dtype", None) if kind == BITSANDBYTES else type(each).__name__ for each in tensors}
    assert (torch.uint8 if kind == BITSANDBYTES else f"OptimState{kind[5:]}") in kinds, "it stays in few bits"
    train(booster, model, optimizer, STEPS // 2, STEPS)
    torch.testing.assert_close(dict(whole_parameters(booster, model)), expected, rtol=0, atol=0)
    for name, values in expected.items():
        # Blocks are the same. Gradients were added in another order, so that a state between two codes may take either:
        # that changes few elements, each by less than the updates themselves.
        distance = (values - plain[name]).abs()
        assert (distance > 1e-5).float().mean() < 0.005, name
        assert distance.max() < STEPS * 1e-2, name


@pytest.mark.parametrize("plugin", ["zero flat", "gemini flat", "fsdp flat"])
@on_ranks(2)
def test_parts_of_blocks_are_neither_saved_nor_loaded(plugin, tmp_path):
    what = r"'.\.weight' can't be saved: '.*Leave out `partition='flat'`.*or save and load the model alone"
    for name in (plugin, "ddp"):
        booster, model, optimizer = begin("AdamW8bit", name)
        train(booster, model, optimizer, 0, 1)
        with nullcontext() if name == "ddp" else pytest.raises(CheckpointError, match=what):
            booster.save_checkpoint(tmp_path, step=1, model=model, optimizer=optimizer)
        assert any(tmp_path.rglob("*.safetensors")) == (name == "ddp")
        booster.context.coordinator.block_all()
    what = r"can't be loaded: 'exp_avg/codes' belongs to a whole tensor, and each rank has a part"
    booster, model, optimizer = begin("AdamW8bit", plugin)
    with pytest.raises(CheckpointError, match=what):
        booster.load_checkpoint(tmp_path, model=model, optimizer=optimizer)


@raises_on_ranks(ConfigError, "AdamW8bit keeps its state in few bits.*`tp_size=1`", 2)
def test_tensor_parallelism_refuses_blocks_of_whole_matrices():
    use_isolated_libraries()
    import_quietly(["torchao.optim"])
    import torchao.optim

    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 4}
    model = tiny_llama(num_hidden_layers=1, **sizes)
    booster = Booster("cpu", plugin=HybridParallelPlugin(tp_size=2))
    booster.boost(model, torchao.optim.AdamW8bit(model.parameters()))
