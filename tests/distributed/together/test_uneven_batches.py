"""`Booster.join`: ranks with uneven numbers of batches end together, and steps follow the ranks that have some left."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from booster_core import Booster
from booster_core.errors import ConfigError
from booster_ddp import TorchDDPPlugin
from booster_fsdp import TorchFSDPPlugin
from booster_gemini import GeminiPlugin
from booster_hybrid import HybridParallelPlugin, ShardingPolicy
from booster_testing import expect_on_ranks, run_on_ranks
from booster_testing.compare import assert_same_tensors, tolerance_for
from booster_zero import LowLevelZeroPlugin

POLICY = ShardingPolicy(layers=("layers",))
PLUGINS = {
    "ddp": (2, TorchDDPPlugin, {}),
    "fsdp": (2, TorchFSDPPlugin, {}),
    "zero": (2, LowLevelZeroPlugin, {"stage": 2}),
    "gemini": (2, GeminiPlugin, {"min_chunk_bytes": 8192}),
    "hybrid-dp": (2, HybridParallelPlugin, {}),
    "hybrid-pp": (4, HybridParallelPlugin, {"pp_size": 2, "custom_policy": POLICY, "example_batch": torch.ones(2, 8)}),
}
NUM_BATCHES = (2, 5)
"""Of each data parallel rank."""


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def make():
    torch.manual_seed(0)
    model = Stack()
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def batches_of(index):
    generator = torch.Generator().manual_seed(10 + index)
    return [torch.randn(2, 8, generator=generator) for _ in range(NUM_BATCHES[index])]


def square(outputs, _):
    return outputs.square().mean()


def train_plainly():
    model, optimizer = make()
    for number in range(max(NUM_BATCHES)):
        present = [batches_of(index)[number] for index in range(2) if number < NUM_BATCHES[index]]
        (sum(square(model(x), None) for x in present) / len(present)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def boosted(name):
    booster = Booster("cpu", plugin=PLUGINS[name][1](**PLUGINS[name][2]))
    model, optimizer, *_ = booster.boost(*make())
    index, _ = booster.plugin.data_parallel_coordinates(booster.context.coordinator)
    return booster, model, optimizer, index


def train(name, folder):
    booster, model, optimizer, index = boosted(name)
    joined = booster.join(batches_of(index))
    count = 0
    if name == "hybrid-pp":
        while True:
            try:
                booster.execute_pipeline(joined, model, square, optimizer)
            except StopIteration:
                break
            optimizer.step()
            optimizer.zero_grad()
            count += 1
    else:
        for x in joined:
            booster.backward(square(model(x), None), optimizer)
            optimizer.step()
            optimizer.zero_grad()
            count += 1
    booster.save_model(model, folder, shard=True)
    return count


@pytest.mark.parametrize("name", PLUGINS)
def test_steps_follow_the_ranks_that_have_batches(name, tmp_path):
    from safetensors.torch import load_file

    num_ranks = PLUGINS[name][0]
    assert run_on_ranks(train, num_ranks, name, str(tmp_path)) == [max(NUM_BATCHES)] * num_ranks
    found = {key: values for file in tmp_path.glob("*.safetensors") for key, values in load_file(file).items()}
    assert_same_tensors(found, train_plainly(), tolerance_for(torch.float32))


def evaluate():
    booster, model, _, index = boosted("zero")
    model.eval()
    with torch.no_grad():
        return sum(len(model(x)) for x in booster.join(iter(batches_of(index))))


def test_evaluation_ends_together():
    assert run_on_ranks(evaluate, 2) == [10, 10]


def with_batches(*of_ranks):
    booster, model, optimizer, index = boosted("ddp")
    for x in booster.join(of_ranks[index]):
        booster.backward(square(model(x), None), optimizer)
        optimizer.step()


def failing(count):
    yield torch.ones(2, 8)
    for _ in range(count):
        yield torch.ones(2, 8)
    msg = "disk gone"
    raise OSError(msg)


def fail_on_one_rank():
    booster, model, optimizer, index = boosted("ddp")
    for x in booster.join(failing(0) if index else batches_of(1)):
        booster.backward(square(model(x), None), optimizer)
        optimizer.step()


def test_a_rank_without_any_batch_is_named_on_every_rank():
    expect_on_ranks(ConfigError, "no batch at all", with_batches, 2, [], [torch.ones(2, 8)])


def test_no_batch_on_any_rank_is_no_step():
    run_on_ranks(with_batches, 2, [], [])


def test_an_error_of_one_ranks_batches_raises_on_every_rank():
    expect_on_ranks(OSError, "disk gone", fail_on_one_rank, 2)


def step_by_hand():
    booster, model, optimizer, index = boosted("ddp")
    for x in booster.join(batches_of(index)):
        square(model(x), None).backward()
        optimizer.step()


def test_gradients_that_were_not_weighed_raise_on_every_rank():
    expect_on_ranks(ConfigError, r"Call it in place of `loss\.backward\(\)`", step_by_hand, 2)


def train_whole_batches():
    booster, model, optimizer, index = boosted("ddp")
    booster.train_batch(booster.join(batches_of(index)), model, square, optimizer)


def test_whole_batches_can_not_be_joined():
    expect_on_ranks(ConfigError, "`Booster.train_batch` does not know which batches", train_whole_batches, 2)


def leave_and_go_on(keeps):
    """Leave the loop where one rank has run out, and take one more step on other batches."""
    booster, model, optimizer, index = boosted("ddp")
    joined = booster.join(batches_of(index))
    batches = enumerate(joined)
    if not keeps:
        del joined
    for number, x in batches:
        optimizer.zero_grad()
        booster.backward(square(model(x), None), optimizer)
        optimizer.step()
        if number == NUM_BATCHES[0]:
            break
    if not keeps:
        del batches
    optimizer.zero_grad()
    booster.backward(square(model(torch.ones(2, 8)), None), optimizer)
    gradient = model.unwrap().layers[1].weight.grad.clone()
    optimizer.step()
    optimizer.zero_grad()
    square(model.unwrap().eval()(torch.ones(2, 8)), None)
    return gradient


def test_steps_after_a_loop_that_was_left_are_not_weighed():
    first, second = run_on_ranks(leave_and_go_on, 2, False)
    assert torch.equal(first, second)
    assert float(first.abs().sum()) > 0


def test_steps_after_a_loop_whose_iterator_is_kept_raise():
    expect_on_ranks(ConfigError, "Delete the iterator", leave_and_go_on, 2, True)
