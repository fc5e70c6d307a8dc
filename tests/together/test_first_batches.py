"""Ranks that train on the same batch are told, whatever the plugin; ranks that share one are not."""

import logging

import pytest
import torch
from log_records import Records
from torch import nn
from torch.utils.data import DataLoader

from booster_core import Booster
from booster_core.ranks.coordinator import DistCoordinator
from booster_testing import run_on_ranks


def make_plugin(name):
    if name == "tensor":
        from booster_hybrid import HybridParallelPlugin

        return HybridParallelPlugin(tp_size=2)
    return name


def train(plugin, feed, steps=4):
    """Train in the way that ``feed`` names, and return what the project's logger said on this rank."""
    rank = DistCoordinator().rank
    torch.manual_seed(rank if feed == "seeded by rank" else 3)
    data = torch.randn(32, 8)
    torch.manual_seed(3)
    module = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 1))
    booster = Booster("cpu", plugin=make_plugin(plugin))
    loader = DataLoader(data, batch_size=4, shuffle=True)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    records = Records()
    logging.getLogger("booster").addHandler(records)
    try:
        passed = loader if feed == "boosted loader" else None
        model, optimizer, _, boosted, _ = booster.boost(module, optimizer, None, passed)
        torch.manual_seed(rank if feed == "seeded by rank" else 3)
        batches = iter(boosted if passed is not None else loader)
        for _ in range(steps):
            x = next(batches) if "loader" in feed else torch.randn(4, 8)
            booster.backward(model(x).square().mean(), optimizer)
            optimizer.step()
            optimizer.zero_grad()
        assert not model._forward_pre_hooks or steps == 1, "nothing is left in the way of a step"
    finally:
        logging.getLogger("booster").removeHandler(records)
    return records.texts


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


def train_in_pipeline(feed):
    """Train through `execute_pipeline`, and return how much was said after evaluation, and all after training."""
    from booster_hybrid import HybridParallelPlugin

    records = Records()
    logging.getLogger("booster").addHandler(records)
    try:
        plugin = HybridParallelPlugin(pp_size=2, num_microbatches=2, precision="fp32")
        booster = Booster("cpu", plugin=plugin)
        module = small_llama(num_hidden_layers=2)
        model, optimizer, *_ = booster.boost(module, torch.optim.SGD(module.parameters(), lr=0.1))
        replica, size = plugin.data_parallel_coordinates(DistCoordinator())
        assert size == 2

        def execute(count, *args):
            drawn = [torch.randint(64, (4, 8)) for _ in range(count)]
            batches = iter([{"input_ids": ids, "labels": ids} for ids in drawn])
            for _ in range(count):
                booster.execute_pipeline(batches, model, lambda outputs, _: outputs.loss, *args)
                optimizer.step()
                optimizer.zero_grad()
            with pytest.raises(StopIteration):
                booster.execute_pipeline(batches, model, lambda outputs, _: outputs.loss, *args)

        torch.manual_seed(3)
        execute(3)
        said = len(records.texts)
        torch.manual_seed(replica if feed == "seeded by replica" else 3)
        execute(4, optimizer)
        assert not model._forward_pre_hooks, "nothing is left in the way of a step"
    finally:
        logging.getLogger("booster").removeHandler(records)
    return said, records.texts


def test_replicas_of_a_pipeline_that_train_on_the_same_batch_are_told():
    results = run_on_ranks(train_in_pipeline, 4, "equal seeds")
    assert [said for said, _ in results] == [0] * 4, "evaluation is not looked at"
    assert [len(texts) for _, texts in results] == [1, 0, 0, 0]
    assert "ranks 0 and 1 got the same first batch" in results[0][1][0]


def test_replicas_of_a_pipeline_with_batches_of_their_own_are_not_told():
    assert run_on_ranks(train_in_pipeline, 4, "seeded by replica") == [(0, [])] * 4
