"""Page-locked memory that is kept: as much as was asked for, and given back in the end."""

import gc
import os

import pytest
import torch

from booster_runtime.memory import ALIGNMENT, host_memory, locked_buffer


class Driver:
    """Stands for CUDA's runtime, which locks pages."""

    def __init__(self, error=0):
        self.error = error
        self.locked = {}
        self.calls = []

    def cudaHostRegister(self, address, num_bytes, flags):  # noqa: N802 - CUDA's name
        assert flags == 0
        if not self.error:
            self.locked[address] = num_bytes
        return self.error

    def cudaHostUnregister(self, address):  # noqa: N802
        self.calls.append("unregister")
        del self.locked[address]

    def synchronize(self, device):
        self.calls.append(f"synchronize {device}")


@pytest.fixture
def driver(monkeypatch):
    driver = Driver()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    monkeypatch.setattr(torch.cuda, "synchronize", driver.synchronize)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    return driver


def test_pages_are_locked_until_the_last_tensor_is_gone(driver, monkeypatch):
    num_bytes = (1 << 20) + 12
    buffer = locked_buffer(num_bytes)
    assert buffer.numel() == (1 << 20) + ALIGNMENT
    assert buffer.untyped_storage().nbytes() == buffer.numel(), "nothing on top of it"
    assert buffer.data_ptr() % ALIGNMENT == 0
    assert not buffer.any()
    assert driver.locked == {buffer.data_ptr(): buffer.numel()}
    view = buffer[4096:].view(torch.float32)
    del buffer
    gc.collect()
    assert driver.locked
    view.fill_(2.0)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)  # as in a thread of its own
    del view
    gc.collect()
    assert not driver.locked
    assert driver.calls == ["synchronize 3", "unregister"], "copies that are under way end first, on the rank's device"


def test_another_process_unlocks_nothing(driver, monkeypatch):
    buffer = locked_buffer(1 << 20)
    own = os.getpid()
    with monkeypatch.context() as forked:
        forked.setattr(host_memory.os, "getpid", lambda: own + 1)
        del buffer
        gc.collect()
    assert driver.locked
    assert not driver.calls


def test_where_the_driver_refuses_torch_is_asked(driver, monkeypatch):
    driver.error = 1
    asked = []
    real = torch.empty

    def empty(*sizes, pin_memory=False, **options):
        asked.append((sizes, pin_memory))
        return real(*sizes, **options)

    def launch(*_sizes, device):
        driver.calls.append(f"launch on {device}")
        raise torch.AcceleratorError

    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(torch, "ones", launch)
    buffer = locked_buffer(1 << 21)
    assert driver.calls.pop() == "launch on cuda:3", "which takes CUDA's error: it would come at an innocent line"
    assert asked[0] == (((1 << 21) + ALIGNMENT,), True)
    assert buffer.numel() == 1 << 21
    assert buffer.data_ptr() % ALIGNMENT == 0
    del buffer
    gc.collect()
    assert not driver.calls, "there was nothing to unlock"
