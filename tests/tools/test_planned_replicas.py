"""What a plan predicts of replicas in one process is what ranks hold and send, and what arithmetic says."""

import contextlib
from functools import partial

import pytest
import torch
import torch.distributed as dist
from ranked import on_ranks
from reference_plugins import ReferencePipelinePlugin, ReferencePlugin
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Shard

from booster_core.errors import ConfigError
from booster_runtime import collectives
from booster_runtime.memory import has_values
from booster_tools.planning import TrainingStep, measure, shares_of, simulate
from booster_tools.planning.recorder import StepRecorder, recorded
from booster_tools.planning.world import planned_world

WIDTH = 256
NUM_PARAMETERS = 2 * WIDTH * WIDTH + 2 * WIDTH


class Net(nn.Module):
    """Draws, counts and indexes besides its products, on tensors large and small."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.seen += len(x)
        hidden = nn.functional.dropout(torch.relu(self.first(x)), 0.1, self.training)
        return self.second(hidden[torch.arange(len(x) - 1, -1, -1)])


def build(make=Net):
    model = make()
    return model, torch.optim.AdamW(model.parameters())


def training(make):
    share = shares_of(lambda: {"x": torch.ones(512, WIDTH)})
    return TrainingStep(build=make, share=share, criterion=lambda outputs, _: outputs.square().mean())


def predict(make, world_size, rank=0, plugin_class=ReferencePlugin):
    return simulate(training(make), plugin_class(), world_size, rank)


def test_predictions_are_those_of_arithmetic():
    found = predict(build, 4, rank=3)
    assert (found.world_size, found.rank) == (4, 3)
    assert found.parameter_bytes == pytest.approx(4 * NUM_PARAMETERS, abs=64)
    assert found.gradient_bytes == pytest.approx(4 * NUM_PARAMETERS, abs=64)
    assert found.optimizer_bytes == pytest.approx(8 * NUM_PARAMETERS, abs=64)
    # All gradients are summed in a ring: each rank sends 3/4 of them twice.
    gradients = found.traffic["all_reduce"]
    assert gradients.sent_bytes == pytest.approx(2 * 3 / 4 * 4 * NUM_PARAMETERS, rel=0.01)
    # Two products forward; both once more for weights, and one for what came before it.
    assert found.flops == 5 * 2 * 128 * WIDTH * WIDTH
    assert found.activation_bytes > 4 * 128 * WIDTH


class Choosing(Net):
    def forward(self, x):
        out = super().forward(x)
        return out[out > 0]


@pytest.mark.parametrize(
    ("make", "rank", "message"),
    [
        (partial(build, Choosing), 0, "can't be known without computing it"),
        (build, 2, "`rank=2` is not one of the 2"),
        (Net, 0, r"`build` returns \(model, optimizer\).*got `Net`"),
        (lambda: (Net(), None), 0, "got `Net, NoneType`"),
    ],
)
def test_what_can_not_be_planned_says_why(make, rank, message):
    with pytest.raises(ConfigError, match=message):
        predict(make, 2, rank)


def test_a_pipeline_of_one_stage_is_planned():
    plain = predict(build, 2)
    found = predict(build, 2, plugin_class=ReferencePipelinePlugin)
    assert found.traffic["all_reduce"].sent_bytes == pytest.approx(plain.traffic["all_reduce"].sent_bytes, rel=0.01)
    assert found.flops == plain.flops


@on_ranks(2)
def test_planned_collectives_answer_and_count_as_those_of_ranks():
    """Each collective is used once, with the same values on both ranks."""
    rank, halves, traffic = dist.get_rank(), [0, 4, 8], []
    values = torch.arange(8, dtype=torch.float32)
    own = values[halves[rank] : halves[rank] + 4]
    for is_alone in (False, True):
        world = planned_world(2, rank) if is_alone else contextlib.nullcontext()
        with world, recorded(computes=False, is_alone=is_alone) as recorder:
            collectives.all_gather_object("the first call chooses a transport")
            recorder.start_step()
            added, gathered, exchanged = torch.ones(4), values.clone(), torch.zeros(8)
            reduced, sent = values.clone(), values.clone()
            collectives.reduce_scatter(values, halves, added, scale=0.5, accumulate=True).wait()
            plain = torch.empty(4)
            collectives.reduce_scatter(values, halves, plain).wait()
            gathered[4:] = gathered[:4]
            collectives.all_gather(gathered, halves).wait()
            same = torch.arange(4, dtype=torch.float32).repeat(2)
            collectives.all_to_all(same, halves, exchanged, halves).wait()
            collectives.all_reduce(reduced, dist.ReduceOp.SUM).wait()
            collectives.broadcast(sent).wait()
            collectives.reduce_scatter([(2, values[2:5])], halves, torch.zeros(4)).wait()
            objects = collectives.all_gather_object("same")
        found = recorder.traffic.items()
        traffic.append({kind: (each.calls, each.payload_bytes, each.sent_bytes) for kind, each in found})
        assert torch.equal(added, 1 + own)
        assert torch.equal(plain, 2 * own)
        assert torch.equal(reduced, 2 * values)
        assert torch.equal(sent, values)
        assert torch.equal(gathered, values[:4].repeat(2))
        assert torch.equal(exchanged, same)
        assert objects == ["same", "same"]
    of_ranks, planned = traffic
    assert planned == of_ranks
    # Whole buffers are 32 bytes, of which half stays; of the parts, two elements are the first rank's, and one is not.
    assert of_ranks["reduce_scatter"] == (3, 32 + 32 + 12, 16 + 16 + (8 if rank else 4))
    assert of_ranks["all_gather"] == of_ranks["all_to_all"] == (1, 32, 16)
    assert of_ranks["all_reduce"] == (1, 32, 32)
    assert of_ranks["broadcast"] == (1, 32, 32)


class Distributed(Net):
    """Gathers and reduces activations by DTensor, whose collectives are functional."""

    def forward(self, x):
        mesh = DeviceMesh.from_group(dist.group.WORLD, "cpu")
        gathered = DTensor.from_local(x[:64], mesh, [Shard(0)]).full_tensor()
        small = DTensor.from_local(torch.ones(3), mesh, [Partial()]).full_tensor()
        assert small[0].item() == 2, "a plan answers what is small"
        scattered = DTensor.from_local(gathered, mesh, [Partial()]).redistribute(mesh, [Shard(0)]).to_local()
        return super().forward(x) + scattered.sum() * small.sum()


@on_ranks(2)
def test_collectives_of_dtensor_are_counted():
    measured = measure(training(partial(build, Distributed)), ReferencePlugin()).traffic
    planned = predict(partial(build, Distributed), 2, dist.get_rank()).traffic
    assert planned == measured
    block = 4 * 64 * WIDTH
    assert (planned["all_gather"].payload_bytes, planned["all_gather"].sent_bytes) == (2 * block, block)
    assert planned["reduce_scatter"].sent_bytes == block
    assert planned["all_reduce"].payload_bytes >= 4 * NUM_PARAMETERS + 12


def test_nobody_compares_values_in_a_plan():
    """They are leftovers in memory: Gemini would take them for writes into gathered parameters."""
    with planned_world(2, 0):
        assert not has_values()
    assert has_values()


def test_small_tensors_have_their_values_and_what_comes_from_large_ones_is_zero():
    """Wherever a part of a large tensor is read, whose memory has leftovers in it; results have their own shapes."""
    planned = StepRecorder(computes=False, is_alone=True)
    with planned:
        ids = torch.zeros(100, dtype=torch.long)
        ids.copy_(torch.arange(100) + 1)
        assert (ids.sum().item(), ids[50].item()) == (5050, 51)
        large = torch.ones(1 << 16, dtype=torch.long)
    large.numpy().fill(7)
    with planned:
        part = large[3:103]
        assert [int(each) for each in (part[5], *torch.aminmax(part), part.clone()[5], (part + 1)[5])] == [0] * 5
        assert torch.equal(part, part)
        assert ids.copy_(part).sum().item() == 0
        with pytest.raises(ConfigError, match="its argument has no values in a plan"):
            part.nonzero()
        large = torch.ones(300, 200)
        assert torch.cat([large, large]).shape == (600, 200)
        assert torch.cat([large, large], 1).shape == (300, 400)
        assert torch.cat([large, large, large]).shape == (900, 200)
        assert (large + large.t().contiguous().t()).stride() == (200, 1)
        values, indices = large.max(1)
        assert (values.shape, indices.dtype, large.sum().item()) == ((300,), torch.long, 0)
