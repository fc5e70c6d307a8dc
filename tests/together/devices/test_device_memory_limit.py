"""Training on four devices with a third of the memory that one device would need, eager on the host at first."""

import device_smoke
import pytest
import simulated_device as sim
import torch
from device_smoke import Case
from simulated_device import NAME, run_on_devices

CASES = {
    "fsdp": Case("fsdp", {"unit_classes": ("LlamaDecoderLayer",)}, world_size=4),
    "gemini": Case("gemini", {"min_chunk_bytes": 1 << 20}, world_size=4),
    "tensor parallel": Case("hybrid", {"tp_size": 4}, world_size=4),
    "pipeline": Case("hybrid", {"pp_size": 4, "num_microbatches": 4}, world_size=4),
}
SHARE = 0.35
"""Of parameters, gradients and both moments of AdamW in fp32: 16 bytes for each parameter."""
SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 16, "num_attention_heads": 4}


def make_model(folder=None):
    from transformers import LlamaConfig, LlamaForCausalLM

    if folder is not None:
        return LlamaForCausalLM.from_pretrained(folder)
    config = LlamaConfig(vocab_size=64, num_key_value_heads=4, use_cache=False, **SIZES)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return LlamaForCausalLM(config)


def tokens_of(step):
    tokens = torch.randint(64, (4, 4), generator=torch.Generator().manual_seed(step))
    return {"input_ids": tokens, "labels": tokens}


def make_optimizer(model):
    """Return an optimizer that steps on one parameter after the other: copies of all of them would not fit."""
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-2, foreach=False)


def train(case, folder):
    """Return the losses under the limit."""
    device_smoke.make_model = lambda: make_model(folder)
    device_smoke.batch_of, device_smoke.make_optimizer = tokens_of, make_optimizer
    with torch.device("meta"):
        needed = 16 * sum(parameter.numel() for parameter in make_model().parameters())
    with sim.memory_limit(torch.simulated.memory_allocated() + int(SHARE * needed)):
        run = device_smoke.Run(case, NAME, "fp32")
        return [run.step(number) for number in range(3)]


def train_plainly(folder):
    """Return the losses of one process, and write the model that it begins with to a folder."""
    device_smoke.make_model = make_model
    device_smoke.batch_of, device_smoke.make_optimizer = tokens_of, make_optimizer
    device_smoke.STEPS = 3
    make_model().save_pretrained(folder)
    return device_smoke.train_plainly("cpu")[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_training_with_a_third_of_one_devices_memory(name, simulated_device, tmp_path):
    folder = str(tmp_path / "model")
    limits = {"timeout_seconds": 500.0, "group_timeout_seconds": 240.0}
    (expected,) = run_on_devices(train_plainly, 1, simulated_device, folder, **limits)
    for source in (None, folder):
        for losses in run_on_devices(train, 4, simulated_device, CASES[name], source, **limits):
            assert losses == pytest.approx(expected, rel=1e-5)
