"""Collectives over a communicator of one rank, which has the calls, formats and streams of larger ones.

`booster_runtime.collectives` sends nothing in a world of one: these cases make the calls of several ranks.
"""

import torch
import torch.distributed as dist

from booster_runtime.collectives import new_groups, transport
from device_runs.cases import Case
from device_runs.parts import case_of
from device_runs.small import spin

NUMEL = 1 << 20
SUMMED = (torch.bfloat16, torch.float16, torch.float32)
MOVED = (*SUMMED, torch.int64, torch.uint8, torch.bool)


def move(setting):
    """Gather, exchange and broadcast every format, by the world's communicator and by one of a new group."""
    assert dist.get_world_size() == 1
    for group in (dist.group.WORLD, dist.new_group([0])):
        for dtype in MOVED:
            values = _values(dtype, setting.device)
            gathered = values.clone()
            transport.all_gather_by_torch(gathered, range(0, NUMEL + 1, NUMEL), 0, group).wait()
            _assert_equal(gathered, values, f"all_gather of {dtype}")
            # Torch's call for slices of different lengths, which a single rank has only by itself.
            slices = [torch.empty_like(values)]
            dist.all_gather(slices, values, group=group, async_op=True).wait()
            _assert_equal(slices[0], values, f"all_gather of {dtype} into slices")
            received = torch.empty_like(values)
            transport.all_to_all_by_torch(values, [0, NUMEL], received, [0, NUMEL], group).wait()
            _assert_equal(received, values, f"all_to_all of {dtype}")
            sent = values.clone()
            dist.broadcast(sent, group=group, group_src=0, async_op=True).wait()
            _assert_equal(sent, values, f"broadcast of {dtype}")


def reduce(setting):
    """Reduce every format that is summed, scaled and added to what is there; fp16 by an average."""
    for group in (dist.group.WORLD, dist.new_group([0])):
        for dtype in SUMMED:
            values = _values(dtype, setting.device)
            for scale, accumulate in ((1.0, False), (0.5, True)):
                for bounds in (range(0, NUMEL + 1, NUMEL), [0, NUMEL]):
                    out = torch.ones(NUMEL, dtype=torch.float32, device=setting.device)
                    transport.reduce_scatter_by_torch(
                        values, bounds, out, group, scale=scale, accumulate=accumulate
                    ).wait()
                    expected = values.float() * scale + (1.0 if accumulate else 0.0)
                    _assert_equal(out, expected, f"reduce_scatter of {dtype} by {scale}, accumulate={accumulate}")
            for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX):
                reduced = values.clone()
                dist.all_reduce(reduced, op, group=group, async_op=True).wait()
                _assert_equal(reduced, values, f"all_reduce of {dtype} by {op}")
            slices = [values[:NUMEL]]
            own = torch.empty_like(values)
            dist.reduce_scatter(own, slices, dist.ReduceOp.SUM, group=group, async_op=True).wait()
            _assert_equal(own, values, f"reduce_scatter of {dtype} from slices")
        for dtype in (torch.int64, torch.uint8):
            reduced = _values(dtype, setting.device)
            expected = reduced.clone()
            dist.all_reduce(reduced, dist.ReduceOp.MAX, group=group, async_op=True).wait()
            _assert_equal(reduced, expected, f"all_reduce of {dtype}")


def wait_on_another_stream(setting):
    """A result that another stream waits for is there for its kernels, however late the collective runs."""
    group = dist.group.WORLD
    for number in range(20):
        values = torch.full((NUMEL,), float(number), device=setting.device)
        producer, reader = setting.module.Stream(), setting.module.Stream()
        out = torch.full((NUMEL,), -1.0, device=setting.device)
        producer.wait_stream(setting.module.current_stream())
        reader.wait_stream(setting.module.current_stream())
        with setting.module.stream(producer):
            spin(setting)
            source = values + 1
            pending = transport.reduce_scatter_by_torch(source, [0, NUMEL], out, group, scale=1.0, accumulate=False)
        with setting.module.stream(reader):
            pending.wait()
            seen = out * 2
        seen.record_stream(setting.module.current_stream())
        setting.module.current_stream().wait_stream(reader)
        setting.module.current_stream().wait_stream(producer)
        _assert_equal(seen, torch.full_like(seen, 2.0 * (number + 1)), f"reduce_scatter {number}")


def check_priority(setting):
    """Collectives run before the kernels of computation that are queued."""
    for group in (dist.group.WORLD, new_groups([[0]])):
        assert group is not None
        options = group._get_backend(torch.device(setting.device)).options
        assert options.is_high_priority_stream


def _values(dtype, device):
    values = torch.arange(NUMEL, device=device) % 97
    return (values % 2).bool() if dtype is torch.bool else values.to(dtype)


def _assert_equal(found, expected, what):
    found, expected = found.cpu(), expected.cpu()
    different = (found != expected).nonzero().flatten()
    if different.numel():
        at = int(different[0])
        msg = f"{what}: {different.numel()} elements differ, the first at {at}: {found[at]} != {expected[at]}"
        raise AssertionError(msg)


CASES = [
    case_of(
        "communicators of one rank",
        [
            Case("gather, exchange, broadcast", move),
            Case("reduce", reduce),
            Case("wait on another stream", wait_on_another_stream),
            Case("priority", check_priority, only_on="cuda"),
        ],
    )
]
