"""Checksums by blocks: what ranks read is verified while they read it, whatever parts of a file each of them reads."""

import random
from pathlib import Path

import pytest
import torch
from file_faults import change_manifest, flip_bit
from resumable import ResumableRun as Run
from synthetic_state import parts_of

from booster_checkpoint.files import checksums
from booster_checkpoint.files.byte_file import ByteFile
from booster_checkpoint.files.checksums import Block, CheckedReads, block_sizes, blocks_of_file
from booster_checkpoint.run.manifest import FileEntry, Manifest
from booster_checkpoint.storage import locate
from booster_checkpoint.storage.open_file import LocalFile
from booster_core.errors import CheckpointError
from booster_core.state import box_numel, regions_of
from booster_testing import expect_on_ranks, run_on_ranks

SHAPE = (40, 30)
ITEMSIZE = 4
OFFSET = 100
SIZE = OFFSET + SHAPE[0] * SHAPE[1] * ITEMSIZE + 70


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(checksums, "BLOCK_BYTES", 256)


@pytest.mark.parametrize(
    ("pieces", "sizes"),
    [
        ([100, 100], [200]),
        ([100, 200], [100, 200]),
        ([256, 0, 1], [256, 1]),
        ([10, 600, 20, 30], [10, 256, 256, 88, 50]),
        ([512], [256, 256]),
        ([0], []),
    ],
)
def test_blocks_join_small_pieces_and_cut_large_ones(pieces, sizes, small_blocks):
    assert block_sizes(pieces) == sizes


@pytest.mark.parametrize("tensor_bytes", [1 << 20, 1 << 28])
def test_a_manifest_takes_five_megabytes_for_each_tebibyte(tensor_bytes, tmp_path):
    """1,024 files of a GiB, whatever the size of their tensors."""
    sizes = block_sizes([4096, *[tensor_bytes] * ((1 << 30) // tensor_bytes)])
    blocks = tuple(Block(size, f"{index:016x}") for index, size in enumerate(sizes))
    entry = FileEntry(nbytes=sum(sizes), blocks=blocks)
    files = {f"model/model-{number:05d}-of-01024.safetensors": entry for number in range(1, 1025)}
    Manifest(step=1, files=files).write(locate(tmp_path))
    assert (tmp_path / "manifest.json").stat().st_size <= 5_000_000


@pytest.mark.parametrize("is_shared", [True, False])
@pytest.mark.parametrize("layout", ["flat", "columns", "replicated"])
def test_damage_anywhere_is_found_by_one_of_the_ranks_that_read(layout, is_shared, small_blocks, tmp_path):
    path, content = tmp_path / "f", bytearray(random.Random(2).randbytes(SIZE))
    path.write_bytes(content)
    blocks = blocks_of_file(locate(path), block_sizes([OFFSET, SIZE - OFFSET - 70, 70]))
    assert sum(block.nbytes for block in blocks) == SIZE

    def read_on(rank, world_size):
        """Read like one rank; return what it found damaged."""
        found = []
        file = ByteFile(locate(path).open(), CheckedReads("f", blocks, is_shared=is_shared, on_damage=found.append))
        try:
            file.read_into(memoryview(bytearray(OFFSET)), 0)
            file.read_into(memoryview(bytearray(70)), SIZE - 70)
            for whole, flat, _ in parts_of(layout, SHAPE, 0, 0, rank, world_size):
                for box in (region.box for region in regions_of(whole, flat)):
                    out = torch.empty(box_numel(box), dtype=torch.int32)
                    file.read_box(OFFSET, SHAPE, ITEMSIZE, box, out)
        except CheckpointError:
            assert found, "told before it is raised"
        finally:
            file.close()
        return found

    for world_size in (1, 3, 7):
        assert not any(read_on(rank, world_size) for rank in range(world_size))
        for position in range(0, SIZE, 97):
            damaged = bytearray(content)
            damaged[position] ^= 1
            path.write_bytes(damaged)
            found = [read_on(rank, world_size) for rank in range(world_size)]
            assert any(found), (world_size, position)
        path.write_bytes(content)


# ---- a training state


def save_steps(root):
    """Save the steps 1 and 2, of some MiB, with the values of a step; return these."""
    run = Run(width=40_000)
    run.train(1)
    for run.step in (1, 2):
        run.save(root)
    return run.tensors()


def load(root, step):
    run = Run(width=40_000)
    return run.load(root, step=step).step, run.tensors()


def test_a_load_reads_each_byte_once(tmp_path, monkeypatch):
    save_steps(tmp_path)
    read, real = [], LocalFile.read_into

    def counted(self, target, offset):
        read.append(len(target))
        real(self, target, offset)

    monkeypatch.setattr(LocalFile, "read_into", counted)
    load(tmp_path, "latest")
    manifest = Manifest.read(tmp_path / "step-00000002")
    size = sum(entry.nbytes for entry in manifest.files.values())
    assert size > 4 << 20
    assert size * 0.95 < sum(read) < size * 1.05 + 2 * checksums.BLOCK_BYTES


def damage_values(folder, name="optimizer"):
    path = next((folder / name).glob("*.safetensors"))
    flip_bit(path, path.stat().st_size // 2)


def test_damage_met_halfway_is_an_error_that_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(checksums, "BLOCK_BYTES", 1 << 20)
    save_steps(tmp_path)
    damage_values(tmp_path / "step-00000002")
    message = (
        r"'optimizer/optimizer-00001-of-00001.safetensors' has the checksum \w+ in bytes \d+ to \d+, and was saved "
        r"with .* partly .*load it with `step=1`"
    )
    expect_on_ranks(CheckpointError, message, load, 2, str(tmp_path), "latest")


def test_newest_whole_goes_on_from_damage_met_halfway(tmp_path):
    expected = save_steps(tmp_path)
    damage_values(tmp_path / "step-00000002")
    damage_values(tmp_path / "step-00000002", "model")
    for step, values in run_on_ranks(load, 2, str(tmp_path), "newest-whole"):
        assert step == 1
        assert all(torch.equal(values[name], tensor) for name, tensor in expected.items())


# ---- the format before


@pytest.mark.parametrize("blocks", ["-1 5", "1", "x", None, 7, [4], "1x999999999999", "4x-1"])
def test_blocks_that_do_not_make_up_the_file_are_a_damaged_manifest(blocks, tmp_path):
    save_steps(tmp_path)
    folder = tmp_path / "step-00000002"
    change_manifest(folder, lambda content: content["files"]["training_state.json"].update(blocks=blocks))
    with pytest.raises(CheckpointError, match="is damaged"):
        Manifest.read(locate(folder))


@pytest.mark.parametrize(("version", "remedy"), [(2, "with the Booster that wrote it"), (5, "Update it")])
def test_another_format_version_is_named(version, remedy, tmp_path):
    save_steps(tmp_path)
    change_manifest(tmp_path / "step-00000002", lambda content: content.update(format_version=version))
    with pytest.raises(CheckpointError, match=f"has format version {version}; this Booster reads 3 to 4.*{remedy}"):
        load(tmp_path, "latest")


def test_a_step_of_version_3_loads(tmp_path):
    """It names the tensors of each file."""
    save_steps(tmp_path)
    folder = tmp_path / "step-00000002"

    def as_version_3(content):
        content["format_version"] = 3
        for name, entry in content["files"].items():
            entry["tensors"] = ["weight"] if name.endswith(".safetensors") else []

    change_manifest(folder, as_version_3)
    assert load(tmp_path, "latest")[0] == 2
    path = next((folder / "model").glob("*.safetensors"))
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    with pytest.raises(CheckpointError, match="is damaged"):
        load(tmp_path, "latest")


def test_a_file_that_is_replaced_while_it_is_read_is_an_error(tmp_path):
    path = Path(tmp_path / "f")
    path.write_bytes(b"12345678")
    file = ByteFile(locate(path).open())
    file.close()
    path.unlink()
    path.write_bytes(b"abcdefghi")
    with pytest.raises(CheckpointError, match="was replaced or changed"):
        file.read_into(memoryview(bytearray(4)), 0)
