import errno
import os

import pytest
import torch
from mapped_memory import mapped_bytes

from booster_core.errors import ConfigError, OffloadError
from booster_runtime.memory import MappedFolder
from booster_testing import peak_memory


def test_tensors_hold_values_like_any_other(tmp_path):
    mapped = MappedFolder(tmp_path).zeros((3, 5), torch.float32)
    assert mapped.shape == (3, 5)
    assert not mapped.any()
    expected = torch.arange(15.0).view(3, 5)
    mapped.copy_(expected)
    mapped.mul_(2).add_(1)
    assert torch.equal(mapped, 2 * expected + 1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.uint8, torch.bool])
def test_any_format_and_no_elements_at_all(tmp_path, dtype):
    folder = MappedFolder(tmp_path)
    assert folder.zeros(7, dtype).dtype == dtype
    assert folder.zeros((0, 3), dtype).shape == (0, 3)


def test_files_have_no_name_and_their_room_goes_with_the_tensor(tmp_path):
    folder = MappedFolder(tmp_path)
    tensor = folder.zeros(3 * 2**20, torch.float32)
    view = tensor[5:]
    assert list(tmp_path.iterdir()) == []
    assert mapped_bytes(tmp_path) == 12 * 2**20
    del tensor
    assert mapped_bytes(tmp_path) == 12 * 2**20, "a view keeps it"
    del view
    assert mapped_bytes(tmp_path) == 0


def test_pages_do_not_count_as_the_process_own(tmp_path):
    folder = MappedFolder(tmp_path)
    with peak_memory(maps_files=True) as used:
        tensor = folder.zeros(2**24, torch.float32).fill_(1.0)
    assert float(tensor[-1]) == 1.0
    assert used.kept_bytes < 2**22


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"`offload_dir='.*absent'` does not exist on this host"):
        MappedFolder(tmp_path / "absent", option="offload_dir").check()


def test_a_file_is_no_folder(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="is no folder"):
        MappedFolder(tmp_path / "file").check()


def test_a_folder_that_can_not_be_written_to_is_refused(tmp_path, monkeypatch):
    # Whoever runs the tests may be allowed everything, so the refusal is the system call's.
    def refuse(*_args, **_kwargs):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    with pytest.raises(ConfigError, match="can't be written to: Permission denied"):
        MappedFolder(tmp_path).check()
    monkeypatch.undo()
    MappedFolder(tmp_path).check()
    assert list(tmp_path.iterdir()) == []


def test_more_than_the_disk_has_is_refused_with_both_numbers(tmp_path, monkeypatch):
    def fill(*_):
        pytest.fail("other programs find the disk full while room is taken that there is not")

    monkeypatch.setattr(os, "posix_fallocate", fill, raising=False)
    folder = MappedFolder(tmp_path)
    numel = folder.free_bytes() // 4 + 2**28
    with pytest.raises(OffloadError, match=rf"needs {4 * numel} bytes, and \d+ are free"):
        folder.zeros(numel, torch.float32)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_has_gone_is_refused(tmp_path):
    (tmp_path / "soon").mkdir()
    folder = MappedFolder(tmp_path / "soon")
    (tmp_path / "soon").rmdir()
    with pytest.raises(OffloadError, match="needs 40 bytes, and the folder can't be asked: No such file"):
        folder.zeros(10, torch.float32)


def test_room_is_taken_before_anything_is_written(tmp_path, monkeypatch):
    if not hasattr(os, "posix_fallocate"):
        pytest.skip("this system has no posix_fallocate")
    taken = []
    monkeypatch.setattr(os, "posix_fallocate", lambda _, start, size: taken.append((start, size)))
    MappedFolder(tmp_path).zeros(100, torch.float64)
    assert taken == [(0, 800)]
