"""Lazy models of transformers have the values of eager ones, bit for bit."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from booster_runtime import LazyInitContext
from booster_runtime.lazy import is_lazy, materialize
from booster_testing.models import tiny_llama

_TEXT = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 37,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def _make(model: str, config: str, **settings: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import transformers

        made: nn.Module = getattr(transformers, model)(getattr(transformers, config)(**settings))
        return made

    build.__name__ = model
    return build


@pytest.mark.parametrize(
    "build",
    [
        tiny_llama,
        lambda: tiny_llama(tie_word_embeddings=True),
        lambda: tiny_llama(dtype=torch.bfloat16),
        _make("GPT2LMHeadModel", "GPT2Config", n_embd=32, n_layer=2, n_head=4, vocab_size=99),
        _make("BertForMaskedLM", "BertConfig", **_TEXT),
    ],
)
def test_weights_equal_eager_ones(build: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    eager = build()
    expected_state = torch.get_rng_state()
    torch.manual_seed(0)
    with LazyInitContext() as context:
        lazy = build()
    assert is_lazy(lazy)
    materialize(lazy)
    expected = {**dict(eager.named_parameters()), **dict(eager.named_buffers())}
    actual = {**dict(lazy.named_parameters()), **dict(lazy.named_buffers())}
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype
        assert torch.equal(actual[name], tensor), name
    assert torch.equal(torch.get_rng_state(), expected_state)
    assert context.run_eagerly == {}
