"""Pipelines on devices: a host that waits for all of its streams in the middle of a batch stops nobody."""

import functools
from unittest import mock

import device_smoke
import pytest
import torch
import torch.distributed as dist
from device_smoke import Case
from simulated_device import NAME, run_on_devices

from booster_hybrid.pipeline.schedule import STYLES

CASES = {
    "1f1b": {"pp_size": 2, "num_microbatches": 4},
    "interleaved": {"pp_size": 2, "num_microbatches": 4, "pp_style": "interleaved", "num_model_chunks": 2},
    "zbv": {"pp_size": 2, "num_microbatches": 4, "pp_style": "zbv"},
}


class _Synchronizing(torch.nn.Module):
    """Waits for the device, as a host does where it frees memory or loads a kernel."""

    def __init__(self, inner, rank):
        super().__init__()
        self.inner, self.rank = inner, rank

    def forward(self, *args, **kwargs):
        found = self.inner(*args, **kwargs)
        if dist.get_rank() == self.rank:
            torch.accelerator.synchronize()
        return found


def train(case, rank):
    make_model = device_smoke.make_model

    def make():
        model = make_model()
        for layer in model.model.layers:
            layer.mlp = _Synchronizing(layer.mlp, rank)
        return model

    with mock.patch.object(device_smoke, "make_model", make):
        run = device_smoke.Run(case, NAME, "fp32")
    return [run.step(number) for number in range(4)], device_smoke.train_plainly("cpu")[0][:4]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    "style", [pytest.param(name, marks=[] if name == "zbv" else pytest.mark.slow) for name in CASES]
)
def test_a_host_that_waits_for_the_device_stops_no_pipeline(style, rank, simulated_device):
    limits = {"timeout_seconds": 240.0, "group_timeout_seconds": 30.0}
    for losses, expected in run_on_devices(train, 2, simulated_device, Case("hybrid", CASES[style]), rank, **limits):
        assert losses == pytest.approx(expected, rel=1e-5)


def make_tied(num_layers):
    """Return a Llama whose first and last stage share a weight."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": num_layers, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=64, num_key_value_heads=2, use_cache=False, tie_word_embeddings=True, **sizes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return LlamaForCausalLM(config)


def train_tied(case, num_layers):
    with mock.patch.object(device_smoke, "make_model", functools.partial(make_tied, num_layers)):
        run = device_smoke.Run(case, NAME, "fp32")
        return [run.step(number) for number in range(4)], device_smoke.train_plainly("cpu")[0][:4]


@pytest.mark.slow
@pytest.mark.parametrize("size", [3, 8])
@pytest.mark.parametrize("style", STYLES)
def test_more_ranks_with_a_weight_at_both_ends_train_as_one_process(style, size, simulated_device):
    chunks = 1 if style in ("1f1b", "gpipe") else 2
    options = {"pp_size": size, "num_microbatches": 8, "pp_style": style}
    if style == "interleaved":
        options |= {"num_model_chunks": chunks}
    limits = {"timeout_seconds": 500.0, "group_timeout_seconds": 60.0}
    case, num_layers = Case("hybrid", options), size * chunks
    for losses, expected in run_on_devices(train_tied, size, simulated_device, case, num_layers, **limits):
        assert losses == pytest.approx(expected, rel=1e-5)
