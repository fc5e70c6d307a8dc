"""``generate`` on ranks with prompts and texts of other lengths returns the tokens of one process."""

import pytest
import torch
import torch.distributed as dist

from booster_core import Booster
from booster_testing import run_on_ranks

PROMPT = torch.arange(6)[None] + 3


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 128}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, initializer_range=0.3)
    return LlamaForCausalLM(config)


def generated(model, rank):
    prompt = PROMPT[:, : 3 + rank]
    mask = torch.ones_like(prompt)
    new = 3 + 4 * rank
    return model.generate(prompt, attention_mask=mask, max_new_tokens=new, do_sample=False, pad_token_id=0).tolist()


def on_ranks(plugin):
    booster, model = Booster(plugin=plugin), llama()
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    model.eval()
    before = generated(model, dist.get_rank())
    model.train()
    booster.backward(model(PROMPT, labels=PROMPT).loss, optimizer)
    optimizer.step()
    optimizer.zero_grad()
    return before, generated(booster.unwrap(model).eval(), dist.get_rank())


def alone():
    model = llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = [generated(model.eval(), rank) for rank in range(2)]
    model.train()(PROMPT, labels=PROMPT).loss.backward()
    optimizer.step()
    return list(zip(before, [generated(model.eval(), rank) for rank in range(2)], strict=True))


@pytest.mark.parametrize("plugin", ["ddp", "fsdp", "zero", "gemini", "hybrid"])
def test_texts_of_other_lengths_end_on_every_rank(plugin):
    assert run_on_ranks(on_ranks, 2, plugin) == alone()
