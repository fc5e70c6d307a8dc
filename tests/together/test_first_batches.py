"""Ranks that train on the same batch are told, whatever the plugin; ranks that share one are not."""

import logging

import torch
from log_records import Records

from booster_core import Booster
from booster_testing import run_on_ranks


def make_plugin(name):
    if name == "tensor":
        from booster_hybrid import HybridParallelPlugin

        return HybridParallelPlugin(tp_size=2)
    return name


def test_ranks_that_work_on_one_batch_together_are_not_told():
    assert run_on_ranks(train_tensor_parallel, 2) == [[], []]


def small_llama(**options):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes, **options))


def train_tensor_parallel():
    records = Records()
    logging.getLogger("booster").addHandler(records)
    try:
        model = small_llama(num_hidden_layers=1)
        booster = Booster("cpu", plugin=make_plugin("tensor"))
        model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in range(4):
            ids = torch.randint(64, (2, 8))
            booster.backward(model(input_ids=ids, labels=ids).loss, optimizer)
            optimizer.step()
            optimizer.zero_grad()
    finally:
        logging.getLogger("booster").removeHandler(records)
    return records.texts
