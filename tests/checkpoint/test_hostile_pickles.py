"""Files made by others than torch: an error at once, where they hold more than tensors and plain values."""

import io
import pickle
import zipfile

import pytest
import torch

from booster_checkpoint.files import torch_file
from booster_checkpoint.files.torch_file import load_plainly
from booster_checkpoint.load import open_source
from booster_core.errors import CheckpointDamagedError


def in_zip(path, content):
    """Write a file as torch.save does, with a pickle of our own."""
    torch.save({"w": torch.ones(3)}, path)
    with zipfile.ZipFile(path) as file:
        entries = {name: file.read(name) for name in file.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as file:
        for name, old in entries.items():
            file.writestr(name, content if name.endswith("/data.pkl") else old)
    return path


def as_legacy(path, content):
    """Write a file as torch.save did before version 1.6."""
    magic, version = torch.serialization.MAGIC_NUMBER, torch.serialization.PROTOCOL_VERSION
    head = b"".join(pickle.dumps(value, 2) for value in (magic, version, {"little_endian": True}))
    path.write_bytes(head + content + pickle.dumps([], 2))
    return path


def as_pickle(value):
    return pickle.dumps({"x": value}, 2)


def deep(opening, closing, levels=200_000):
    return b"\x80\x02}X\x01\x00\x00\x00x" + opening * levels + b"N" + closing * levels + b"s."


PREFIX = b"\x80\x02}X\x01\x00\x00\x00x"
HOSTILE = {
    "a deep list": deep(b"]", b"a"),
    "a deep tuple": deep(b"(", b"t"),
    "zeros": PREFIX + b"cbuiltins\nbytearray\n(\x8a\x06\x00\x00\x00\x00\x00\x01tRs.",
    "a list in itself": PREFIX + b"]q\x00h\x00as.",
    "an item of None": PREFIX + b"NNas.",
    "an opcode of pickle's own": PREFIX + b"Nq\x00h\x00\x85Qs.",
    "cut off": as_pickle([1, 2, 3])[:-3],
}


@pytest.mark.parametrize("write", [in_zip, as_legacy])
@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.timeout(30)
def test_a_hostile_pickle_is_refused_at_once(name, write, tmp_path):
    path = write(tmp_path / "model.bin", HOSTILE[name])
    with pytest.raises(CheckpointDamagedError) as caught, open_source(path, "model"):
        pass
    assert len(str(caught.value)) < 1000


def test_long_keys_are_not_copied_for_each_value(tmp_path):
    """A key of a megabyte is part of the name of each value below it; names are made for tensors only."""
    key = "k" * 1_000_000
    torch.save({"w": torch.ones(3), "x": {key: list(range(200_000))}}, tmp_path / "long.bin")
    with open_source(tmp_path / "long.bin", "model") as source:
        assert source.values["x"][key][-1] == 199_999
    torch.save({"x": {key: [torch.ones(1)]}}, tmp_path / "tensors.bin")
    with (
        pytest.raises(CheckpointDamagedError, match="has a name of 1000004 characters"),
        open_source(tmp_path / "tensors.bin", "model"),
    ):
        pass


def test_what_people_share_is_read(tmp_path):
    """Lists, strings and tensors that a state holds in several places."""
    shared, weight = ["a", (1, 2), {"b": 3.0}], torch.arange(3.0)
    state = {"w": weight, "again": weight, "extra": [shared] * 2_000, "tuple": (shared, shared), "set": {1, 2}}
    for legacy in (False, True):
        torch.save(state, tmp_path / "model.bin", _use_new_zipfile_serialization=not legacy)
        with open_source(tmp_path / "model.bin", "model") as source:
            assert torch.equal(source.read_whole("again"), weight)
            assert len(source.values["extra"]) == 2_000
            assert source.values["extra"][-1] == ["a", {"$tuple": [1, 2]}, {"b": 3.0}]


def test_values_that_have_no_form_are_named(tmp_path):
    torch.save({"w": torch.ones(2), "extra": 1 + 2j}, tmp_path / "model.bin")
    with pytest.raises(CheckpointDamagedError, match=r"model\.bin"), open_source(tmp_path / "model.bin", "model"):
        pass


@pytest.mark.parametrize("is_old", [False, True], ids=["this torch", "an older torch"])
def test_values_are_described_whichever_way_torch_does_it(is_old, monkeypatch):
    if is_old:
        monkeypatch.setattr(torch_file, "_tells_offsets_on_meta", lambda: False)
    stream, matrix = io.BytesIO(), torch.arange(12.0).view(3, 4)
    torch.save(matrix[1:], stream)
    stream.seek(0)
    described = load_plainly(stream, describe=True)
    assert described.shape == (2, 4)
    begin = torch_file.offset_of(described)
    assert stream.getvalue()[begin : begin + 32] == matrix[1:].numpy().tobytes()


def test_a_tensor_without_values_is_refused(tmp_path):
    torch.save({"w": torch.empty(2, device="meta")}, tmp_path / "model.bin")
    with (
        pytest.raises(CheckpointDamagedError, match="not a plain tensor"),
        open_source(tmp_path / "model.bin", "model"),
    ):
        pass
