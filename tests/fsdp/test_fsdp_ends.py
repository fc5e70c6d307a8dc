"""Embedding and output head as units of their own: what is gathered when, and gradients."""

from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from cases import Case, Setting, assert_equals_one_process, itself, train_boosted
from ranked import on_ranks
from torch.distributed.tensor import DTensor

from booster_core import Booster
from booster_core.errors import ConfigError
from booster_fsdp import FSDPConfig, TorchFSDPPlugin
from booster_fsdp.units import choose_units
from booster_runtime import collectives

VOCABULARY = 2048
"""Large enough for an embedding of 32 columns to be a unit."""


def make(*, tied=False):
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **sizes, tie_word_embeddings=tied))


def batch(number, replica):
    tokens = torch.randint(VOCABULARY, (2, 8), generator=torch.Generator().manual_seed(10 * number + replica))
    return {"input_ids": tokens, "labels": tokens}


def test_units():
    layers = ["model.layers.0", "model.layers.1"]
    assert choose_units(make(), FSDPConfig()) == ["model.embed_tokens", *layers, "lm_head"]
    assert choose_units(make(tied=True), FSDPConfig()) == layers


@pytest.mark.parametrize(
    ("tied", "options", "num_ranks"),
    [
        (False, {}, 2),
        (True, {}, 2),
        (False, {"reshard_after_forward": 2}, 4),
        (False, {"reshard_after_forward": False}, 4),
    ],
)
def test_training_equals_one_process(tied, options, num_ranks):
    case = Case(build=partial(make, tied=tied), batch=batch, steps=1)
    assert_equals_one_process(case, Setting(TorchFSDPPlugin, options, num_ranks))


def gathered_over_a_step(*, tied):
    """Return the sizes of gathers, and which ends are gathered in each layer's passes."""
    booster = Booster("cpu", plugin=TorchFSDPPlugin())
    net = make(tied=tied)
    model, optimizer, *_ = booster.boost(net, torch.optim.SGD(net.parameters(), lr=0.1))
    seen = {}

    def look(where):
        ends = {"embedding": net.model.embed_tokens, "head": net.lm_head}
        seen[where] = sorted(name for name, end in ends.items() if not isinstance(end.weight, DTensor))

    for index, layer in enumerate(net.model.layers):
        layer.register_forward_pre_hook(lambda *_, index=index: look(f"forward {index}"))
        layer.mlp.register_full_backward_hook(lambda *_, index=index: look(f"backward {index}"))
    with mock.patch.object(collectives, "all_gather", wraps=collectives.all_gather) as gathers:
        booster.backward(model(**batch(0, dist.get_rank())).loss, optimizer)
    return [call.args[0].numel() for call in gathers.call_args_list], seen


@on_ranks(2)
def test_embedding_and_head_are_gathered_once_and_only_while_they_are_used():
    sizes, seen = gathered_over_a_step(tied=False)
    assert sizes.count(VOCABULARY * 32) == 2, "the embedding and the head, once each"
    assert seen == {f"{when} {layer}": [] for when in ("forward", "backward") for layer in range(2)}


@on_ranks(2)
def test_tied_ends_are_gathered_with_the_model():
    _, seen = gathered_over_a_step(tied=True)
    assert set(map(tuple, seen.values())) == {("embedding", "head")}


@on_ranks(2)
def test_a_head_whose_weight_is_used_by_itself_raises_with_what_trains_it():
    class WithLossOfHead(torch.nn.Module):
        """Computes the loss from the head's weight, as fused losses do."""

        def __init__(self):
            super().__init__()
            self.net = make()

        get_input_embeddings = property(lambda self: self.net.get_input_embeddings)
        get_output_embeddings = property(lambda self: self.net.get_output_embeddings)

        def forward(self, input_ids):
            hidden = self.net.model(input_ids).last_hidden_state
            logits = hidden @ self.net.lm_head.weight.T
            return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), input_ids[:, 1:].flatten())

    case = Case(build=WithLossOfHead, batch=batch, loss=itself, steps=1)
    with pytest.raises(ConfigError, match="unit_classes"):
        train_boosted(case, Setting(TorchFSDPPlugin))
    assert_equals_one_process(case, Setting(TorchFSDPPlugin, {"unit_classes": ["LlamaDecoderLayer"]}))
