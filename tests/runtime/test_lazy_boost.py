"""Lazy models under the default plugin, and in the hands of a plugin that places values itself."""

import torch
from torch import nn

from booster_core.state.shard import TensorShard
from booster_runtime import LazyInitContext
from booster_runtime.lazy import take_recording
from booster_runtime.lazy.log import Entry
from booster_runtime.lazy.replay import Replay
from booster_runtime.sharding import whole_shard
from booster_testing.models import TinyMixedBag, TinyMLP


def build(lazy: bool, model_class: type[nn.Module] = TinyMLP) -> nn.Module:
    torch.manual_seed(5)
    if not lazy:
        return model_class()
    with LazyInitContext():
        return model_class()


def whole_shards(model: nn.Module) -> list[TensorShard]:
    """Return one shard for each parameter and buffer, which has all of it."""
    tensors = (*model.named_parameters(), *model.named_buffers())
    return [whole_shard(name, None, torch.empty(each.shape, dtype=each.dtype), is_owner=True) for name, each in tensors]


def test_each_shard_is_announced_once_and_written() -> None:
    model = build(lazy=True, model_class=TinyMixedBag)
    eager = build(lazy=False, model_class=TinyMixedBag)
    recording = take_recording(model)
    shards = whole_shards(model)
    announced: list[str] = []
    recording.fill(shards, before_write=lambda shard: announced.append(shard.name))
    expected = {**dict(eager.named_parameters()), **dict(eager.named_buffers())}
    assert sorted(announced) == sorted(expected)
    assert all(torch.equal(shard.data, expected[shard.name]) for shard in shards)


def test_values_go_while_the_replay_runs(monkeypatch) -> None:
    with LazyInitContext():
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8))).half()
    recording = take_recording(model)
    alive: list[int] = []
    finish = Replay._finish

    def count(replay: Replay, entry: Entry) -> None:
        alive.append(len(replay._storages))
        finish(replay, entry)

    monkeypatch.setattr(Replay, "_finish", count)
    order: list[str] = []
    recording.fill(whole_shards(model), before_write=lambda shard: order.append(shard.name))
    # A weight and what it was converted from, although conversion was asked for after the last layer was made.
    assert max(alive) == 2
    assert order == [name for name, _ in model.named_parameters()]


def test_what_stands_in_for_values_takes_one_element_each_whatever_its_shape() -> None:
    with LazyInitContext():
        model = nn.Linear(3, 2)
        model.scale = nn.Parameter(torch.ones(()))
        model.gate = nn.Parameter(torch.ones(1))
        model.register_buffer("mean", torch.zeros(()))
    before = {name: id(parameter) for name, parameter in model.named_parameters()}
    recording = take_recording(model, "cpu")
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == {
        "weight": (2, 3),
        "bias": (2,),
        "scale": (),
        "gate": (1,),
        "mean": (),
    }
    assert all(tensor.untyped_storage().nbytes() == 4 for tensor in tensors.values())
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == before
    assert recording.name_of == {id(tensor): name for name, tensor in tensors.items()}


def test_nothing_is_made_for_parameters_that_the_model_has_lost() -> None:
    model = build(lazy=True, model_class=TinyMixedBag)
    eager = build(lazy=False, model_class=TinyMixedBag)
    recording = take_recording(model)
    del model.embedding.weight, model.repeated.weight
    kept = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    recording.leave_out_absent()
    assert "repeated.weight" not in recording.name_of.values()
    assert "embedding.weight" in recording.name_of.values(), "the head has it still"
    recording.fill((), "cpu")
    assert all(torch.equal(model.get_parameter(name), eager.get_parameter(name)) for name in kept)
