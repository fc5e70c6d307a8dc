"""Lazy models under the default plugin, and in the hands of a plugin that places values itself."""

from typing import Any, ClassVar

import torch
from torch import nn

from booster_core import Boosted, Booster, Plugin
from booster_core.plugin import ModelWrapper, OptimizerWrapper
from booster_core.state.shard import TensorShard, full_box
from booster_runtime import LazyInitContext
from booster_runtime.lazy import take_recording
from booster_runtime.lazy.log import Entry
from booster_runtime.lazy.replay import Replay
from booster_runtime.single import SingleDeviceStrategy
from booster_testing.models import TinyMixedBag, TinyMLP


def build(lazy: bool, model_class: type[nn.Module] = TinyMLP) -> nn.Module:
    torch.manual_seed(5)
    if not lazy:
        return model_class()
    with LazyInitContext():
        return model_class()


class SlicingPlugin(SingleDeviceStrategy):
    """Keeps the first row of every matrix, and all of the rest."""

    name: ClassVar[str] = "slicing"
    placeholders: ClassVar[str | None] = "own"

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[str, torch.Tensor] = {}

    def shard(self, objects: Boosted, context: Any, values: Any) -> Boosted:
        assert values is None, "left to this plugin"
        recording = take_recording(objects.model)
        shards = []
        for name, parameter in objects.model.named_parameters():
            assert parameter.is_meta
            if parameter.dim() == 2:
                shape = tuple(parameter.shape)
                self.kept[name] = torch.empty(1, shape[1])
                box = ((0, 1), (0, shape[1]))
                shards.append(
                    TensorShard(name=name, global_shape=shape, dtype=parameter.dtype, box=box, data=self.kept[name])
                )
        recording.fill(shards, context.device)
        optimizer = objects.optimizer and OptimizerWrapper(objects.optimizer, context=context)
        return objects._replace(model=ModelWrapper(objects.model), optimizer=optimizer)


def test_a_plugin_may_keep_parts() -> None:
    plugin = SlicingPlugin()
    assert isinstance(plugin, Plugin)
    model = build(lazy=True, model_class=TinyMixedBag)
    Booster(plugin=plugin).boost(model)
    eager = build(lazy=False, model_class=TinyMixedBag)
    for name, parameter in eager.named_parameters():
        if parameter.dim() == 2:
            assert torch.equal(plugin.kept[name], parameter[:1])
            assert model.get_parameter(name).is_meta
        else:
            assert torch.equal(model.get_parameter(name), parameter)
    for name, buffer in eager.named_buffers():
        assert torch.equal(model.get_buffer(name), buffer)


def whole_shards(model: nn.Module) -> list[TensorShard]:
    """Return one shard for each parameter and buffer, which has all of it."""
    return [
        TensorShard(
            name=name,
            global_shape=tuple(tensor.shape),
            dtype=tensor.dtype,
            box=full_box(tuple(tensor.shape)),
            data=torch.empty(tensor.shape, dtype=tensor.dtype),
        )
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
    ]


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
