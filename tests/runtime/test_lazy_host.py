"""An eager model on the host is sharded as lazy ones are: parameters are hollowed, and shards get the first rank's."""

import contextlib
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranked import on_ranks
from torch import nn

from booster_core.plugin import BoostContext
from booster_core.precision import PrecisionPolicy
from booster_core.ranks import DistCoordinator
from booster_core.state import TensorShard, full_box
from booster_runtime.lazy import holders, shards_from_host, take_recording
from booster_runtime.lazy.holders import compare_hosts

CPU = torch.device("cpu")


class Model(nn.Module):
    """Has a tied parameter, and one that a rank drops."""

    def __init__(self, seed=0, width=6):
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.second, self.dropped = nn.Linear(width, 5), nn.Linear(5, width), nn.Linear(2, 2)
        self.second.weight = nn.Parameter(self.first.weight.detach().t().contiguous())
        self.tied = self.first.weight


def shard_of(name, whole, box, flat=None):
    shape = tuple(stop - start for start, stop in box)
    data = torch.zeros(shape) if flat is None else torch.zeros(flat[1] - flat[0])
    return TensorShard(
        name=name, global_shape=tuple(whole.shape), dtype=whole.dtype, box=box, flat=flat, data=data, is_owner=True
    )


@on_ranks(2)
def test_shards_get_the_first_ranks_values_and_the_rest_is_whole():
    """Keep other parts of the first rank's model on each rank."""
    rank = dist.get_rank()
    model, expected = Model(seed=rank), dict(Model(seed=0).named_parameters(remove_duplicate=False))
    objects = dict(model.named_parameters())
    values = take_recording(model)
    assert all(parameter.is_meta for parameter in model.parameters())
    if rank:
        del model.dropped
    values.leave_out_absent()
    shards = [
        shard_of("tied", expected["first.weight"], ((rank, rank + 3), (0, 6))),
        shard_of("second.weight", expected["second.weight"], full_box((6, 5)), (7 + rank, 19)),
    ]
    written = []
    with mock.patch.object(holders, "_SENT_BYTES", 4 * 7):  # a row and a bit
        values.fill(shards, CPU, before_write=written.append)
    assert set(map(id, written)) == set(map(id, shards)), "each is announced"
    assert torch.equal(shards[0].data, expected["first.weight"][rank : rank + 3])
    assert torch.equal(shards[1].data, expected["second.weight"].view(-1)[7 + rank : 19])
    present = dict(model.named_parameters(remove_duplicate=False))
    for name in ["first.bias", "second.bias", *([] if rank else ["dropped.weight", "dropped.bias"])]:
        assert torch.equal(present[name], expected[name]), name
        assert present[name] is values.replaced.get(objects[name], objects[name])
    assert all(present[name].is_meta for name in ("first.weight", "second.weight"))


@on_ranks(2)
def test_an_error_is_raised_after_the_rank_has_taken_part_for_the_others():
    model = Model()
    values = take_recording(model, CPU)
    assert model.first.weight.untyped_storage().nbytes() == 4, "one element, expanded"

    def refuse(shard):
        if dist.get_rank():
            msg = f"no room for {shard.name}"
            raise RuntimeError(msg)

    shard = shard_of("first.bias", model.first.bias, ((0, 5),))
    fails = pytest.raises(RuntimeError, match=r"no room for first\.bias")
    with fails if dist.get_rank() else contextlib.nullcontext():
        values.fill([shard], CPU, before_write=refuse)


@pytest.mark.parametrize(("case", "expected"), [("plain", True), ("host", False), ("expanded", False)])
@on_ranks(2)
def test_ranks_agree_on_whether_it_is_possible(case, expected):
    model = Model()
    if case == "expanded" and dist.get_rank():
        model.first.bias = nn.Parameter(torch.zeros(1).expand(5))
    device = CPU if case == "host" else torch.device("meta")  # any device but the CPU
    context = BoostContext(
        booster=None, device=device, coordinator=DistCoordinator(), precision=PrecisionPolicy.parse("fp32"), hooks=None
    )
    with context.coordinator.together("boost") as meeting:
        compare_hosts(model, context, meeting)
    assert shards_from_host(context) == expected
