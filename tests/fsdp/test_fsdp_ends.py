"""Embedding and output head as units of their own: what is gathered when, and gradients."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from booster_core import Booster
from booster_core.errors import ConfigError
from booster_fsdp import FSDPConfig, TorchFSDPPlugin
from booster_fsdp.units import choose_units
from booster_runtime import collectives, full_gradient
from booster_testing import expect_on_ranks, run_on_ranks
from booster_testing.compare import assert_same_tensors, tolerance_for

VOCABULARY = 2048
"""Large enough for an embedding of 32 columns to be a unit."""


def make(*, tied=False):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **sizes, tie_word_embeddings=tied))


def loss_of(model, tokens):
    return model(input_ids=tokens, labels=tokens).loss


def batch():
    return torch.randint(VOCABULARY, (4, 8), generator=torch.Generator().manual_seed(0))


def test_units():
    layers = ["model.layers.0", "model.layers.1"]
    assert choose_units(make(), FSDPConfig()) == ["model.embed_tokens", *layers, "lm_head"]
    assert choose_units(make(tied=True), FSDPConfig()) == layers


def gathered_over_a_step(tied, options):
    """Return the sizes of gathers, which ends are gathered in each layer's passes, and gradients."""
    booster = Booster("cpu", plugin=TorchFSDPPlugin(**options))
    net = make(tied=tied)
    names = [name for name, _ in net.named_parameters()]
    model, optimizer, *_ = booster.boost(net, torch.optim.SGD(net.parameters(), lr=0.1))
    seen = {}

    def look(where):
        ends = {"embedding": net.model.embed_tokens, "head": net.lm_head}
        seen[where] = sorted(name for name, end in ends.items() if not isinstance(end.weight, DTensor))

    for index, layer in enumerate(net.model.layers):
        layer.register_forward_pre_hook(lambda *_, index=index: look(f"forward {index}"))
        layer.mlp.register_full_backward_hook(lambda *_, index=index: look(f"backward {index}"))
    sizes, original = [], collectives.all_gather

    def gathering(tensor, *args, **kwargs):
        sizes.append(tensor.numel())
        return original(tensor, *args, **kwargs)

    collectives.all_gather = gathering
    try:
        booster.backward(loss_of(model, batch()[dist.get_rank() :: dist.get_world_size()]), optimizer)
    finally:
        collectives.all_gather = original
    return sizes, seen, {name: full_gradient(booster, model, name) for name in names}


@pytest.mark.parametrize("tied", [False, True])
def test_gradients_equal_one_process(tied):
    plain = make(tied=tied)
    loss_of(plain, batch()).backward()
    expected = {name: parameter.grad for name, parameter in plain.named_parameters()}
    for _, _, gradients in run_on_ranks(gathered_over_a_step, 2, tied, {}):
        assert_same_tensors(gradients, expected, tolerance_for(torch.float32))


def test_embedding_and_head_are_gathered_once_and_only_while_they_are_used():
    for sizes, seen, _ in run_on_ranks(gathered_over_a_step, 2, False, {}):
        assert sizes.count(VOCABULARY * 32) == 2, "the embedding and the head, once each"
        assert seen == {f"{when} {layer}": [] for when in ("forward", "backward") for layer in range(2)}


def test_tied_ends_are_gathered_with_the_model():
    for _, seen, _ in run_on_ranks(gathered_over_a_step, 2, True, {}):
        assert set(map(tuple, seen.values())) == {("embedding", "head")}


class WithLossOfHead(torch.nn.Module):
    """Computes the loss from the head's weight, as fused losses do."""

    def __init__(self):
        super().__init__()
        self.net = make()

    get_input_embeddings = property(lambda self: self.net.get_input_embeddings)
    get_output_embeddings = property(lambda self: self.net.get_output_embeddings)

    def forward(self, tokens):
        hidden = self.net.model(tokens).last_hidden_state
        logits = hidden @ self.net.lm_head.weight.T
        return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def gradient_of_head(options):
    booster = Booster("cpu", plugin=TorchFSDPPlugin(**options))
    net = WithLossOfHead()
    model, optimizer, *_ = booster.boost(net, torch.optim.SGD(net.parameters(), lr=0.1))
    booster.backward(model(batch()[dist.get_rank() :: 2]), optimizer)
    return full_gradient(booster, model, "net.lm_head.weight")


def test_a_head_whose_weight_is_used_by_itself_raises_with_what_trains_it():
    assert all(expect_on_ranks(ConfigError, "unit_classes", gradient_of_head, 2, {}))
    plain = WithLossOfHead()
    plain(batch()).backward()
    expected = plain.net.lm_head.weight.grad
    for found in run_on_ranks(gradient_of_head, 2, {"unit_classes": ["LlamaDecoderLayer"]}):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_number_of_ranks_and_kept_parameters_hold_for_ends():
    for options in ({"reshard_after_forward": 2}, {"reshard_after_forward": False}):
        expected = run_on_ranks(gathered_over_a_step, 4, False, {})[0][2]
        for _, _, gradients in run_on_ranks(gathered_over_a_step, 4, False, options):
            assert_same_tensors(gradients, expected, tolerance_for(torch.float32))
