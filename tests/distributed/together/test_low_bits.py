"""torchao's optimizers with state in 8 and 4 bits: trained as in one process, and saved for any plugin."""

import pytest
import torch
from isolated_libraries import FOLDER, import_quietly, missing_libraries, use_isolated_libraries
from matrix import matrix
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from booster_core import Booster
from booster_core.errors import CheckpointError
from booster_gemini import GeminiPlugin
from booster_hybrid import HybridParallelPlugin
from booster_testing import expect_on_ranks, run_on_ranks
from booster_zero import LowLevelZeroPlugin

pytestmark = [
    pytest.mark.usefixtures("new_interpreters"),
    pytest.mark.skipif(bool(missing_libraries(["torchao"])), reason=f"torchao not installed, nor in {FOLDER}"),
]
PLUGINS = {
    "ddp": lambda: "ddp",
    "fsdp": lambda: "fsdp",
    "zero 1": lambda: LowLevelZeroPlugin(stage=1),
    "zero 2": lambda: LowLevelZeroPlugin(stage=2),
    "gemini": GeminiPlugin,
    "hybrid": lambda: HybridParallelPlugin(zero_stage=1),
}
STEPS = 4


def begin(kind, name=None):
    """Return a model of which torchao keeps the matrices' state in few bits, its optimizer, and what boosted them."""
    use_isolated_libraries()
    import_quietly(["torchao.optim"])
    import torchao.optim

    torch.compiler.set_stance("force_eager")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64))
    optimizer = getattr(torchao.optim, kind)(model.parameters(), lr=1e-2)
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


def saved_and_not(kind, name, folder):
    """Return the parameters of a run on one process, and of one that saved half-way and went on."""
    _, plain, optimizer = begin(kind)
    for step in range(STEPS):
        plain(samples_of(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    booster, model, optimizer = begin(kind, name)
    train(booster, model, optimizer, 0, STEPS // 2)
    booster.save_checkpoint(folder, step=1, model=model, optimizer=optimizer)
    train(booster, model, optimizer, STEPS // 2, STEPS)
    return plain.state_dict(), model.state_dict()


def loaded(kind, name, folder):
    booster, model, optimizer = begin(kind, name)
    booster.load_checkpoint(folder, model=model, optimizer=optimizer)
    kinds = {type(each).__name__ for state in optimizer.unwrap().state.values() for each in state.values()}
    train(booster, model, optimizer, STEPS // 2, STEPS)
    return model.state_dict(), kinds


@matrix(
    ["AdamW8bit-zero 2-ddp"],
    kind=["AdamW8bit", "AdamW4bit"],
    saver=["ddp", "zero 1", "zero 2", "gemini", "hybrid"],
    loader=["ddp", "zero 1", "zero 2", "gemini", "hybrid"],
)
def test_a_run_goes_on_as_if_it_had_not_been_saved(kind, saver, loader, tmp_path):
    (plain, expected), *_ = run_on_ranks(saved_and_not, 2, kind, saver, tmp_path)
    for found, kinds in run_on_ranks(loaded, 2, kind, loader, tmp_path):
        assert f"OptimState{kind[5:]}" in kinds, "the state stays in few bits"
        for name, values in found.items():
            torch.testing.assert_close(values, expected[name], rtol=0, atol=0)
    for name, values in expected.items():  # a code of 8 bits is a 128th of a block's largest value
        torch.testing.assert_close(values, plain[name], rtol=0, atol=STEPS * 1e-2 / 64)


def save_under_fsdp(folder):
    booster, model, optimizer = begin("AdamW8bit", "fsdp")
    train(booster, model, optimizer, 0, 1)
    booster.save_checkpoint(folder, step=1, model=model, optimizer=optimizer)


def test_fsdp_refuses_to_save_parts_of_blocks(tmp_path):
    what = r"'0\.weight' can't be saved: 'exp_avg' is a part of a OptimState8bit.*under 'ddp', 'zero' or 'gemini'"
    expect_on_ranks(CheckpointError, what, save_under_fsdp, 2, tmp_path)
    assert not list(tmp_path.rglob("*.safetensors"))


def test_fsdp_refuses_to_load_them(tmp_path):
    run_on_ranks(saved_and_not, 2, "AdamW8bit", "ddp", tmp_path)
    what = r"belongs to a whole tensor, and each rank has a part.*or save and load the model alone"
    expect_on_ranks(CheckpointError, what, loaded, 2, "AdamW8bit", "fsdp", tmp_path)


def language_model(plugin):
    """Return a boosted model whose matrices tensor parallelism splits, after a step."""
    use_isolated_libraries()
    import_quietly(["torchao.optim"])
    import torchao.optim

    torch.compiler.set_stance("force_eager")
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, num_hidden_layers=1, **sizes))
    booster = Booster("cpu", plugin=plugin)
    model, optimizer, *_ = booster.boost(model, torchao.optim.AdamW8bit(model.parameters()))
    tokens = torch.arange(16).view(2, 8)
    booster.backward(model(input_ids=tokens, labels=tokens).loss, optimizer)
    optimizer.step()
    return booster, model, optimizer


def save_split(folder):
    booster, model, optimizer = language_model(HybridParallelPlugin(tp_size=2))
    booster.save_checkpoint(folder, step=1, model=model, optimizer=optimizer)


def load_split(folder):
    booster, model, optimizer = language_model("ddp")
    booster.save_checkpoint(folder, step=1, model=model, optimizer=optimizer)
    booster, model, optimizer = language_model(HybridParallelPlugin(tp_size=2))
    booster.load_checkpoint(folder, model=model, optimizer=optimizer)


def test_tensor_parallelism_refuses_to_save_and_load_parts_of_blocks(tmp_path):
    what = r"'lm_head\.weight' can't be saved or loaded: 'exp_avg/codes' belongs to a whole tensor, and each rank has a"
    expect_on_ranks(CheckpointError, what, save_split, 2, tmp_path / "saved")
    assert not list(tmp_path.rglob("*.safetensors"))
    expect_on_ranks(CheckpointError, what, load_split, 2, tmp_path / "loaded")
