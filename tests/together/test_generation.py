"""``generate`` on ranks with prompts and texts of other lengths returns the tokens of one process."""

import warnings
from importlib.util import find_spec

import pytest
import torch
import torch.distributed as dist
from ranked import on_ranks

from booster_core import Booster
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


def assert_generates_as_one_process(plugin, adapted=False):
    rank, plain = dist.get_rank(), llama(adapted)
    sgd = torch.optim.SGD(plain.parameters(), lr=0.1)
    expected = [generated(plain.eval(), rank)]
    plain.train()(input_ids=PROMPT, labels=PROMPT).loss.backward()
    sgd.step()
    expected.append(generated(plain.eval(), rank))
    booster, model = Booster(plugin=plugin), llama(adapted)
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    model.eval()
    assert generated(model, rank) == expected[0]
    model.train()
    booster.backward(model(input_ids=PROMPT, labels=PROMPT).loss, optimizer)
    optimizer.step()
    optimizer.zero_grad()
    assert generated(booster.unwrap(model).eval(), rank) == expected[1]


@pytest.mark.parametrize("plugin", ["ddp", "fsdp", "zero", "gemini", "hybrid"])
@on_ranks(2)
def test_texts_of_other_lengths_end_on_every_rank(plugin):
    assert_generates_as_one_process(plugin)


@pytest.mark.skipif(find_spec("peft") is None, reason="adapters need peft")
@pytest.mark.parametrize("plugin", ["fsdp", "gemini", "hybrid"])
@on_ranks(2)
def test_adapted_models_generate_before_any_forward(plugin):
    assert_generates_as_one_process(plugin, adapted=True)
