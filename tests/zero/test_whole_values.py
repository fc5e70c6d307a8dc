"""The states of a bucket's values and of a round, and memory for values that is used again."""

import torch

from booster_zero.engine import BufferPool


def test_memory_is_used_again_when_nobody_reads_it():
    pool = BufferPool(least_bytes=0, most_idle_bytes=1 << 20)
    buffer = pool.take(64, torch.float32, torch.device("cpu"))
    address, view = buffer.data_ptr(), buffer[3:5]
    pool.give(buffer)
    del buffer
    assert pool.take(64, torch.float32, torch.device("cpu")).data_ptr() != address
    del view
    assert pool.take(64, torch.float32, torch.device("cpu")).data_ptr() == address


def test_idle_memory_is_bounded():
    pool = BufferPool(least_bytes=0, most_idle_bytes=1024)
    buffers = [pool.take(128, torch.float32, torch.device("cpu")) for _ in range(4)]
    storages = [torch.multiprocessing.reductions.StorageWeakRef(buffer.untyped_storage()) for buffer in buffers]
    while buffers:
        pool.give(buffers.pop())
    assert sum(storage.expired() for storage in storages) == 2


def test_buffers_of_about_the_same_size_take_each_others_place():
    pool = BufferPool(least_bytes=512, most_idle_bytes=1024)
    buffer = pool.take(100, torch.float32, torch.device("cpu"))
    address = buffer.data_ptr()
    pool.give(buffer)
    del buffer
    again = pool.take(250, torch.bfloat16, torch.device("cpu"))
    assert (again.data_ptr(), again.shape, again.dtype) == (address, (250,), torch.bfloat16)
