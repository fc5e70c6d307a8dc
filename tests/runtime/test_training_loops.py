"""What training loops ask of a Booster: accumulation, several loaders, nested batches, unwrapping, printing."""

import collections
import dataclasses

import pytest
import torch
from accumulation_runs import PER_BATCH, STEPS, assert_accumulates, make_data, make_model
from ranked import on_ranks, raises_on_ranks
from reference_plugins import ReferencePipelinePlugin, ReferencePlugin
from torch.utils.data import DataLoader

from booster_core import Booster
from booster_core.errors import ConfigError, GradientError
from booster_runtime import accumulate, join, reduce, train_batch
from booster_runtime.data.batches import call_with, move_batch, taken_by
from booster_testing import expect_on_ranks
from booster_testing.compare import assert_same_tensors, tolerance_for
from booster_testing.training import whole_model


@pytest.mark.parametrize("kind", ["map", "sampler", "batch sampler", "stream", "shards"])
def test_accumulated_steps_are_those_of_large_batches_also_at_an_end_of_an_epoch(kind):
    assert_accumulates("reference", kind)


@pytest.mark.parametrize("joins", [False, True])
@on_ranks(2)
def test_losses_of_a_pipeline_are_divided_by_the_micro_batches(joins):
    """Take two steps of two micro-batches, the same on both ranks, in a pipeline."""
    (x, _), plain, model = make_data(), make_model(), make_model()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for start in (0, 2 * PER_BATCH):
        plain(x[start : start + 2 * PER_BATCH]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    booster = Booster(plugin=ReferencePipelinePlugin())
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    batches = [{"input": part} for part in x.split(PER_BATCH)][:4]
    source = join(booster, batches) if joins else iter(batches)
    for _ in range(4):
        with accumulate(booster, model, STEPS) as is_last:
            booster.execute_pipeline(source, model, lambda outputs, _: outputs.square().mean(), optimizer)
        if is_last:
            optimizer.step()
            optimizer.zero_grad()
    expected = {name: parameter.detach() for name, parameter in plain.named_parameters()}
    assert_same_tensors(whole_model(booster, model), expected, tolerance_for(torch.float32))


def _boosted():
    booster, model = Booster(plugin=ReferencePlugin()), make_model()
    return booster, *booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))[:2]


@raises_on_ranks(GradientError, "before the last micro-batch", 2)
def test_a_step_before_the_last_micro_batch_raises():
    booster, model, optimizer = _boosted()
    with accumulate(booster, model, steps=2) as is_last:
        assert not is_last
        booster.backward(model(torch.ones(2, 8)).mean(), optimizer)
        optimizer.step()


@on_ranks(1)
def test_accumulation_that_cannot_be_right_raises():
    booster, model, _ = _boosted()
    for arguments, message in (
        ((), "needs the number of micro-batches of a step"),
        ((2, DataLoader([1, 2])), "how many batches the `dataloader` has left"),
    ):
        with pytest.raises(ConfigError, match=message), accumulate(booster, model, *arguments):
            pass
    inner = pytest.raises(ConfigError, match="is active already")
    with accumulate(booster, model, steps=2), inner, accumulate(booster, model, steps=2):
        pass


def _train_batch_in_block(plugin_class, position, steps):
    booster, model = Booster(plugin=plugin_class()), make_model()
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    batches = iter([{"input": torch.ones(2, 8)}] * 2)

    def take_step():
        return train_batch(booster, batches, model, lambda outputs, _: outputs.square().mean(), optimizer)

    for block in range(steps):
        with accumulate(booster, model, steps=steps):
            if block == position:
                take_step()
    assert steps == 1, "train_batch in a block of several micro-batches"
    assert take_step(), "the second and last batch"


@pytest.mark.parametrize("plugin_class", [ReferencePlugin, ReferencePipelinePlugin])
@pytest.mark.parametrize("position", [0, 1])
def test_a_whole_step_among_micro_batches_raises(plugin_class, position):
    message = r"takes a whole step.*multiplies by 0\.5.*`train_batch\(booster, \.\.\., accumulation=N\)` outside"
    expect_on_ranks(ConfigError, message, _train_batch_in_block, 2, plugin_class, position, 2)


@on_ranks(1)
def test_a_whole_step_in_a_block_of_one_micro_batch_is_taken():
    _train_batch_in_block(ReferencePlugin, 0, 1)


@on_ranks(1)
def test_steps_are_free_again_after_an_accumulation():
    booster, model, optimizer = _boosted()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    losses = []
    for _ in range(4):
        with accumulate(booster, model, steps=2) as is_last:
            booster.backward(model(torch.ones(2, 8)).square().mean(), optimizer)
        if is_last:
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            losses.append(model(torch.ones(2, 8)).square().mean().item())
    booster.backward(model(torch.ones(2, 8)).square().mean(), optimizer)
    optimizer.step()
    rates = scheduler.get_last_lr()
    assert losses[1] < losses[0]
    assert rates == [0.025]


@on_ranks(2)
def test_each_of_several_loaders_is_split():
    booster, model = Booster(plugin=ReferencePlugin()), make_model()
    loaders = [DataLoader(range(number), batch_size=2) for number in (8, 4)]
    for number, loader in zip((8, 4), booster.boost(model, dataloader=loaders).dataloader, strict=True):
        ours, theirs = booster.context.coordinator.all_gather_object(torch.cat(list(loader)).tolist())
        assert sorted(ours + theirs) == list(range(number))


@raises_on_ranks(TypeError, "torch.utils.data.DataLoader", 2)
def test_what_is_no_loader_among_several_raises_on_every_rank():
    Booster(plugin=ReferencePlugin()).boost(make_model(), dataloader=(DataLoader([1, 2]), [1, 2]))


def test_what_a_batch_consists_of_moves_with_it():
    @dataclasses.dataclass(frozen=True)
    class Graph:
        x: torch.Tensor
        name: str = "graph"

    class Boxes:
        """Moves itself, as batches of graphs and detectors' boxes do."""

        def __init__(self, x):
            self.x = x

        def to(self, device):
            return Boxes(self.x.to(device))

    x = torch.ones(2, 3, 4)
    packed = torch.nn.utils.rnn.pack_padded_sequence(x, torch.tensor([3, 2]), batch_first=True)
    batch = {"packed": packed, "graph": Graph(x), "boxes": [Boxes(x), torch.float32, Boxes]}
    moved = move_batch(batch, torch.device("meta"))
    assert isinstance(moved["packed"], torch.nn.utils.rnn.PackedSequence)
    assert (moved["packed"].data.device.type, moved["packed"].batch_sizes.device.type) == ("meta", "cpu")
    assert moved["graph"].x.device.type == moved["boxes"][0].x.device.type == "meta"
    assert (moved["graph"].name, batch["graph"].x.device.type, moved["boxes"][2]) == ("graph", "cpu", Boxes)
    recurrent = torch.nn.GRU(4, 2)
    assert torch.equal(call_with(recurrent, taken_by(recurrent, packed))[1], recurrent(packed)[1])


@on_ranks(2)
def test_loaders_place_batches_unless_told_not_to():
    class Recorded(collections.UserDict):
        def to(self, device):
            return "placed", device, self.data["x"].tolist()

    def collate(samples):
        return Recorded(x=torch.stack(samples))

    data = list(torch.arange(4.0))
    found = []
    for is_wanted in (True, False):
        booster = Booster(plugin=ReferencePlugin(), device_placement=is_wanted)
        loader = DataLoader(data, batch_size=1, collate_fn=collate)
        boosted = booster.boost(make_model(), dataloader=loader).dataloader
        [listed] = booster.boost(make_model(), dataloader=[loader]).dataloader
        prepared = booster.prepare_dataloader(data, batch_size=1, collate_fn=collate)
        found.append([next(iter(each)) for each in (boosted, listed, prepared)])
    device, rank = torch.device("cpu"), booster.context.coordinator.rank
    assert found[0] == [("placed", device, [float(rank)])] * 3
    assert [batch["x"].tolist() for batch in found[1]] == [[float(rank)]] * 3


@pytest.mark.parametrize(
    ("kind", "error", "message"),
    [
        ("text", TypeError, "got `str`"),
        ("shapes", ConfigError, "different shapes"),
        ("structure", ConfigError, "different structure"),
        ("reduction", ConfigError, "neither 'mean' nor 'sum'"),
    ],
)
@on_ranks(2)
def test_values_that_cannot_be_reduced_raise_on_every_rank(kind, error, message):
    booster = Booster(plugin=ReferencePlugin())
    rank = booster.context.coordinator.rank
    values = {"text": "text", "shapes": torch.ones(2 + rank), "structure": {str(rank): 1.0}, "reduction": 1.0}[kind]
    with pytest.raises(error, match=message):
        reduce(booster, values, "max" if kind == "reduction" else "mean")
