"""``generate`` on ranks with prompts and texts of other lengths returns the tokens of one process."""

import warnings
from importlib.util import find_spec

import pytest
import torch
import torch.distributed as dist

from booster_core import Booster
from booster_testing import run_on_ranks
from booster_testing.models import tiny_llama

PROMPT = torch.arange(6)[None] + 3


def llama(adapted=False):
    torch.manual_seed(0)
    model = tiny_llama(hidden_size=64, intermediate_size=128, vocab_size=128, use_cache=True, initializer_range=0.3)
    if not adapted:
        return model
    import peft

    lora = {"r": 4, "target_modules": ["q_proj", "up_proj"], "init_lora_weights": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of peft's use of transformers
        return peft.get_peft_model(model, peft.LoraConfig(**lora))


def generated(model, rank):
    prompt = PROMPT[:, : 3 + rank]
    mask = torch.ones_like(prompt)
    new = 3 + 4 * rank
    return model.generate(
        input_ids=prompt, attention_mask=mask, max_new_tokens=new, do_sample=False, pad_token_id=0
    ).tolist()


def on_ranks(plugin, adapted=False):
    booster, model = Booster(plugin=plugin), llama(adapted)
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    model.eval()
    before = generated(model, dist.get_rank())
    model.train()
    booster.backward(model(input_ids=PROMPT, labels=PROMPT).loss, optimizer)
    optimizer.step()
    optimizer.zero_grad()
    return before, generated(booster.unwrap(model).eval(), dist.get_rank())


def alone(adapted=False):
    model = llama(adapted)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = [generated(model.eval(), rank) for rank in range(2)]
    model.train()(input_ids=PROMPT, labels=PROMPT).loss.backward()
    optimizer.step()
    return list(zip(before, [generated(model.eval(), rank) for rank in range(2)], strict=True))


@pytest.mark.parametrize("plugin", ["ddp", "fsdp", "zero", "gemini", "hybrid"])
def test_texts_of_other_lengths_end_on_every_rank(plugin):
    assert run_on_ranks(on_ranks, 2, plugin) == alone()


@pytest.mark.skipif(find_spec("peft") is None, reason="adapters need peft")
@pytest.mark.parametrize("plugin", ["fsdp", "gemini", "hybrid"])
def test_adapted_models_generate_before_any_forward(plugin):
    assert run_on_ranks(on_ranks, 2, plugin, True) == alone(True)
