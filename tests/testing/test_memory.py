import mmap
import time

import torch

from booster_testing import peak_memory

MIB = 2**20


def test_peak_is_measured_after_memory_was_freed():
    with peak_memory() as peak:
        block = torch.ones(64 * MIB, dtype=torch.uint8)
        del block
    assert 60 * MIB < peak.peak_bytes < 80 * MIB
    assert abs(peak.kept_bytes) < 8 * MIB


def test_pages_of_files_do_not_count(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(64 * MIB))
    with peak_memory(maps_files=True) as peak, path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        assert sum(mapped[index] for index in range(0, 64 * MIB, mmap.PAGESIZE)) == 0
        mapped.close()
    assert peak.peak_bytes < 8 * MIB


def test_sampling_measures_a_peak():
    with peak_memory(maps_files=True) as peak:
        block = torch.ones(64 * MIB, dtype=torch.uint8)
        time.sleep(0.1)
        del block
    assert 60 * MIB < peak.peak_bytes < 80 * MIB
