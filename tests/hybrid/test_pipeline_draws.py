"""Random values of a model's own forward, and outputs that the example did not ask for: right, or raised everywhere."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, ViTMAEConfig, ViTMAEForPreTraining

from booster_core import Booster
from booster_core.errors import AbsentValueError
from booster_hybrid import HybridParallelPlugin
from booster_testing import expect_on_ranks, run_on_ranks


class Diffusion(nn.Module):
    """Adds noise before its layers, which return what they get, and takes it away after them."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(4))
        for layer in self.layers:
            nn.init.eye_(layer.weight)

    def forward(self, x):
        noise = torch.randn_like(x) + np.random.rand() + random.random()  # noqa: NPY002 - what models do
        found = x + noise
        for layer in self.layers:
            found = layer(found)
        return found - x - noise


def losses_of(style, is_seeded_by_rank):
    """Return the losses of models that return zero, in training and evaluation."""
    plugin = HybridParallelPlugin(pp_size=2, pp_style=style, num_microbatches=4, example_batch={"x": torch.randn(2, 8)})
    booster = Booster("cpu", plugin=plugin)
    model = Diffusion()
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.0))
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
    seed = dist.get_rank() if is_seeded_by_rank else 0
    torch.manual_seed(seed)
    np.random.seed(seed)  # noqa: NPY002 - the generator that models use
    random.seed(seed)
    before = random.getstate()
    found = []
    for trained in (optimizer, None, optimizer):
        result = booster.execute_pipeline(iter([{"x": x}]), model, lambda out, _: out.square().mean(), trained)
        found.append(result["loss"])
    assert random.getstate() == before
    return [float(each) for each in found if each is not None]


@pytest.mark.parametrize(
    ("style", "is_seeded_by_rank"),
    [("1f1b", True), pytest.param("interleaved", False, marks=pytest.mark.slow), ("zbv", True)],
)
def test_noise_before_layers_is_that_after_them(style, is_seeded_by_rank):
    found = [loss for losses in run_on_ranks(losses_of, 2, style, is_seeded_by_rank) for loss in losses]
    assert found == pytest.approx([0.0] * 3, abs=1e-10)


def orders_of_patches(rate):
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 12,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 8,
        "patch_size": 2,
        "decoder_num_hidden_layers": 2,
        "decoder_hidden_size": 12,
        "decoder_intermediate_size": 16,
        "decoder_num_attention_heads": 2,
    }
    model = ViTMAEForPreTraining(ViTMAEConfig(**sizes, mask_ratio=0.5, hidden_dropout_prob=rate))
    seen = []
    model.vit.embeddings.register_forward_hook(lambda _, __, out: seen.append(out[2].tolist()))
    example = {"pixel_values": torch.randn(2, 3, 8, 8)}
    booster = Booster("cpu", plugin=HybridParallelPlugin(pp_size=2, num_microbatches=2, example_batch=example))
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    seen.clear()
    batch = {"pixel_values": torch.randn(4, 3, 8, 8)}
    booster.execute_pipeline(iter([batch]), model, lambda out, _: out.loss, optimizer)
    return seen


@pytest.mark.parametrize("rate", [0.1, pytest.param(0.0, marks=pytest.mark.slow)])
def test_masked_autoencoders_restore_the_order_in_which_they_masked(rate):
    one, other = run_on_ranks(orders_of_patches, 2, rate)
    assert one == other
    assert one[0] != one[1]


def ask_for_states_late(reads):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=4, num_attention_heads=4
    )
    ids = torch.randint(32, (4, 6))
    plugin = HybridParallelPlugin(pp_size=2, example_batch={"input_ids": ids[:2]})
    booster = Booster("cpu", plugin=plugin)
    net = LlamaForCausalLM(config)
    model, optimizer, *_ = booster.boost(net, torch.optim.SGD(net.parameters(), lr=0.1))

    def criterion(out, _):
        early = out.hidden_states[1].mean() if reads and out.hidden_states else 0
        return out.logits.mean() + early

    for step in range(3):
        net.config.output_hidden_states = step == 2
        booster.execute_pipeline(iter([{"input_ids": ids}]), model, criterion, optimizer, return_outputs=not reads)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("reads", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_states_that_no_batch_asks_for_raise_on_every_rank(reads):
    expect_on_ranks(AbsentValueError, "which another pipeline stage has", ask_for_states_late, 2, reads)


def penalize_parameters():
    torch.manual_seed(0)
    model = Diffusion()
    batch = {"x": torch.randn(4, 8)}
    booster = Booster("cpu", plugin=HybridParallelPlugin(pp_size=2, example_batch=batch))
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def criterion(out, _):
        return out.square().mean() + sum(each.square().sum() for each in model.parameters())

    booster.execute_pipeline(iter([batch]), model, criterion, optimizer)


def test_a_penalty_on_all_parameters_raises_on_every_rank():
    message = r"parameter 'layers\.[01]\.weight', which another pipeline stage has"
    expect_on_ranks(AbsentValueError, message, penalize_parameters, 2)


def train_in_float64():
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)]
    model, whole = nn.Sequential(*layers), nn.Sequential(*layers)
    batch = torch.randn(3, 8)
    expected = whole(batch).square().mean()
    booster = Booster("cpu", plugin=HybridParallelPlugin(pp_size=2, num_microbatches=3, example_batch=torch.ones(2, 8)))
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    result = booster.execute_pipeline(
        iter([batch]), model, lambda out, _: out.square().mean(), optimizer, return_outputs=True
    )
    if result["loss"] is not None:
        assert result["loss"].dtype == torch.float64
        torch.testing.assert_close(result["loss"], expected.detach(), rtol=1e-12, atol=1e-14)
    return result["loss"] is not None


def test_a_default_of_float64_keeps_all_digits():
    assert run_on_ranks(train_in_float64, 2) == [False, True]
