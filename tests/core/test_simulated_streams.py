"""Streams and events of the simulated accelerator: work that is not ordered raises, and copies complete late."""

import pytest
import torch
from simulated_device import NAME, run_on_devices


def _on_two_streams(orders):
    """Write on the current stream and read on another, with and without an event between."""
    other = torch.Stream(NAME)
    values = torch.ones(4, device=NAME)
    if orders:
        event = torch.Event(NAME)
        event.record()
        other.wait_event(event)
    with other:
        doubled = values * 2
    torch.simulated.current_stream().wait_stream(other)
    return doubled.sum().item()


def _reads_after_its_event():
    return _on_two_streams(orders=True)


def _reads_before_its_event():
    with pytest.raises(RuntimeError, match=r"race .* aten::mul on stream \d+ reads memory that .* on stream 0 writes"):
        _on_two_streams(orders=False)


def _overwrites_what_another_stream_reads():
    other = torch.Stream(NAME)
    values = torch.ones(4, device=NAME)
    other.wait_stream(torch.simulated.current_stream())
    with other:
        values.sum()
    with pytest.raises(RuntimeError, match=r"race .* aten::zero_ on stream 0 writes memory that aten::sum"):
        values.zero_()
    other.synchronize()
    values.zero_()


def _parts_of_one_tensor_are_apart():
    other = torch.Stream(NAME)
    values = torch.ones(8, device=NAME)
    other.wait_stream(torch.simulated.current_stream())
    with other:
        values[:4].mul_(2)
    values[4:].mul_(3)
    with pytest.raises(RuntimeError, match="race"):
        values[3:].sum()
    other.synchronize()


def _frees_what_another_stream_uses(records):
    other = torch.Stream(NAME)
    values = torch.ones(4, device=NAME)
    other.wait_stream(torch.simulated.current_stream())
    with other:
        total = values.sum()
    if records:
        values.record_stream(other)
    del values
    if records:
        torch.ones(1, device=NAME).add_(1)
    else:
        with pytest.raises(RuntimeError, match=r"race .* aten::sum on stream \d+ used, which was freed"):
            torch.ones(1, device=NAME).add_(1)
    other.synchronize()
    return total.item()


def _records_a_stream():
    return _frees_what_another_stream_uses(records=True)


def _does_not_record_a_stream():
    _frees_what_another_stream_uses(records=False)


def _copies_to_pinned_memory_complete_late():
    device = torch.arange(3.0, device=NAME)
    pinned = torch.zeros(3).pin_memory()
    pinned.copy_(device, non_blocking=True)
    device.zero_()  # later in the stream
    before = pinned.isnan().all().item()
    torch.simulated.current_stream().synchronize()
    return before, pinned.tolist()


def _copies_from_pinned_memory_read_late():
    device = torch.zeros(3, device=NAME)
    pinned = torch.ones(3).pin_memory()
    device.copy_(pinned, non_blocking=True)
    pinned.fill_(2)  # too early: the copy has not read it
    first = device.tolist()
    pinned.fill_(3)
    device.copy_(pinned, non_blocking=True)
    torch.simulated.synchronize()
    pinned.fill_(4)
    return first, device.tolist()


def _copies_of_pageable_memory_block():
    device = torch.zeros(3, device=NAME)
    plain = torch.ones(3)
    device.copy_(plain, non_blocking=True)
    plain.fill_(2)
    back = torch.empty(3)
    back.copy_(device, non_blocking=True)
    return back.tolist()


def _all_cases():
    return {
        case.__name__: case()
        for case in (
            _reads_after_its_event,
            _reads_before_its_event,
            _overwrites_what_another_stream_reads,
            _parts_of_one_tensor_are_apart,
            _records_a_stream,
            _does_not_record_a_stream,
            _copies_to_pinned_memory_complete_late,
            _copies_from_pinned_memory_read_late,
            _copies_of_pageable_memory_block,
        )
    }


def test_streams_order_work_and_copies(simulated_device):
    (results,) = run_on_devices(_all_cases, 1, simulated_device)
    assert {name: value for name, value in results.items() if value is not None} == {
        "_reads_after_its_event": 8.0,
        "_records_a_stream": 4.0,
        "_copies_to_pinned_memory_complete_late": (True, [0.0, 1.0, 2.0]),
        "_copies_from_pinned_memory_read_late": ([2.0, 2.0, 2.0], [3.0, 3.0, 3.0]),
        "_copies_of_pageable_memory_block": [1.0, 1.0, 1.0],
    }
