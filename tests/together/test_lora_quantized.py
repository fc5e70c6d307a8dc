"""Adapters over a base in 8 or 4 bits, on the kernels that bitsandbytes has for the CPU."""

from dataclasses import replace

import pytest
import torch
from adapted_models import bits
from isolated_libraries import FOLDER, import_quietly, missing_libraries, use_isolated_libraries
from matrix import matrix
from plugin_runs import RUNS
from ranked import on_ranks

from booster_core.errors import CheckpointError
from booster_testing import run_on_ranks
from booster_testing.models import tiny_llama

peft = pytest.importorskip("peft", reason="adapters need peft: pip install 'booster-runtime[lora]'")
transformers = pytest.importorskip("transformers", reason="the models are transformers'")

pytestmark = [
    pytest.mark.usefixtures("ranks_with_isolated_libraries"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),  # peft 0.21
    pytest.mark.skipif(
        bool(missing_libraries(["bitsandbytes"])), reason=f"bitsandbytes not installed, nor in {FOLDER}"
    ),
]

PACKED = ["ddp", "fsdp", "zero1", "zero2", "gemini"]


def enabled(booster, number, storage=torch.uint8):
    """Return a model with adapters whose linear layers are packed."""
    use_isolated_libraries()
    import_quietly(["bitsandbytes"])
    torch.manual_seed(3)
    model = tiny_llama()
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    return booster.enable_lora(model, lora_config=config, bnb_quantization_config=bits(number, storage))


def packed_weights(model):
    layers = [layer for layer in model.modules() if type(layer).__name__ in ("Linear4bit", "Linear8bitLt")]
    return [layer.weight for layer in layers if type(layer).__module__.startswith("bitsandbytes")]


def train(number, run, folder=None, precision=None):
    """Return the losses of a few steps on samples that are the same on every rank.

    With a folder, the bits are stored in bf16, and the run is resumed there without the base after two steps.
    """
    booster = replace(RUNS[run], precision=precision).make_booster()
    model = enabled(booster, number, torch.uint8 if folder is None else torch.bfloat16)
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.5))
    losses, packed = [], []
    for step in range(4):
        tokens = torch.randint(64, (2, 8), generator=torch.Generator().manual_seed(step))
        loss = model(input_ids=tokens, labels=tokens).loss
        booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        with model.whole_parameters():  # Gemini keeps the base in shards
            packed.append([each.detach().clone().view(torch.uint8) for each in packed_weights(model)])
        if folder is not None and step == 1:
            state = {"model": model, "optimizer": optimizer}
            with pytest.raises(CheckpointError, match=r"would be lost: .*`save_checkpoint\(.*save_frozen=False\)`"):
                booster.save_checkpoint(f"{folder}/whole", step=1, **state)
            booster.save_checkpoint(folder, step=1, **state, save_frozen=False)
            booster.load_checkpoint(folder, **state)
    if folder is not None and run == "fsdp":
        held = [each.to_local() for each in packed_weights(model)]
        assert 2 * sum(each.nbytes for each in held) == sum(each.nbytes for each in packed[0])
    assert len(packed[0]) == 2 * 7, "the linear layers of both blocks, and not the head"
    assert all(map(torch.equal, packed[0], packed[-1]))
    return losses


@pytest.mark.slow  # the library loads for long; one process trains over a packed base in runtime
@matrix(["8-zero2"], number=[4, 8], run=PACKED)
def test_adapters_over_a_packed_base_train_as_in_one_process(run, number):
    (expected,) = run_on_ranks(train, 1, number, "single")
    assert expected[-1] != expected[0]
    for losses in run_on_ranks(train, 2, number, run):
        assert losses == pytest.approx(expected, rel=1e-6)


@matrix(["fsdp-bf16", "gemini-fp32"], run=PACKED, precision=[None, "fp32", "bf16"])
def test_bits_in_a_floating_format_are_never_converted(run, precision, tmp_path):
    """FSDP shards them, and what they were packed with stays with the layers."""
    (expected,) = run_on_ranks(train, 1, 4, "single", None, precision)
    for losses in run_on_ranks(train, 2, 4, run, str(tmp_path), precision):
        assert losses == pytest.approx(expected, rel=1e-6)


@on_ranks(2)
def test_adapters_of_a_packed_base_load_in_stock_peft(tmp_path):
    booster = RUNS["zero2"].make_booster()
    model, *_ = booster.boost(enabled(booster, 4))
    booster.save_lora_as_pretrained(model, tmp_path)
    model = peft.PeftModel.from_pretrained(tiny_llama(), tmp_path)
    assert any("lora_A" in name for name, _ in model.named_parameters())
