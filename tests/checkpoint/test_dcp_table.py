"""Tables of DCP folders that are damaged or hostile: a `CheckpointError`, and nothing of what they name is made."""

import contextlib
import io
import pickle
import random
import struct

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from booster_checkpoint.load.source import Source
from booster_core.errors import CheckpointError

pytestmark = [
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning"),  # DCP's writer of torch 2.10 uses it
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),  # torch says so of `no_dist=True`
    pytest.mark.filterwarnings("ignore:Detected pickle protocol"),
]

META = "torch.distributed.checkpoint.metadata"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    state = {"w": torch.arange(12.0).view(3, 4), "n": 3, "deep": {"b": torch.ones(2)}}
    dcp.save(state, checkpoint_id=tmp_path / "m", no_dist=True)
    return tmp_path / "m"


def refused(folder, content, match="is damaged"):
    (folder / ".metadata").write_bytes(content)
    with pytest.raises(CheckpointError, match=match):
        Source(folder, "model").close()
    assert [path.name for path in folder.parent.iterdir()] == ["m"], "what it names was called"


def name(module, qualname):
    return b"c" + module.encode() + b"\n" + qualname.encode() + b"\n"


def text(value):
    return b"X" + struct.pack("<I", len(value)) + value.encode()


PROTO = b"\x80\x02"


def test_torchs_own_unpickler_does_not_read_what_dcp_writes(folder):
    """Where this fails, torch can: then its unpickler may replace ours."""
    with pytest.raises(pickle.UnpicklingError, match="Unsupported operand"):
        torch._weights_only_unpickler.load(io.BytesIO((folder / ".metadata").read_bytes()))


@pytest.mark.parametrize(
    "content",
    [
        name("os", "mkdir") + b"(" + text("made") + b"tR.",
        name("torch", "load") + b"(" + text("x") + b"tR.",
        name("torch", "os.system") + b".",
        name("torch", "Size") + b"K\x01R.",
        name(META, "Metadata") + b"(K\x01tR.",
        name(META, "Metadata") + b")\x81.",
        name(META, "torch.load") + b"(" + text("x") + b"tR.",
        name("torch", "float32") + b")R.",
        b"}]Ns.",  # a list as a key
        b"N" + b"r\xff\xff\xff\xff" + b".",
        b".",
        b"",
        b"N.",
    ],
)
def test_handwritten_pickles(content, folder):
    refused(folder, PROTO + content, "damaged|is not the table")


def properties(**changes):
    made = TensorProperties(dtype=torch.float32)
    for key, value in changes.items():
        setattr(made, key, value)
    return made


def tensor(size=(2,), offsets=(0,), sizes=(2,), **changes):
    chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
    return TensorStorageMetadata(properties(**changes), torch.Size(size), [chunk])


def chunked(size, *ranges):
    chunks = [ChunkStorageMetadata(torch.Size([first]), torch.Size([last - first])) for first, last in ranges]
    return TensorStorageMetadata(properties(), torch.Size([size]), chunks)


def test_loop_in_the_memo(folder):
    table = Metadata(state_dict_metadata={}, storage_data={})
    table.planner_data = {"a": table}
    table.storage_data[MetadataIndex("a")] = table
    refused(folder, pickle.dumps(table), "'a' of the table")


@pytest.mark.parametrize(
    ("entries", "data"),
    [
        ({"a": 1}, {}),
        ({1: BytesStorageMetadata()}, {}),
        ({"a": tensor(dtype="float32")}, {}),
        ({"a": tensor(dtype=None)}, {}),
        ({"a": tensor(offsets=(1,))}, {}),
        ({"a": tensor(offsets=(0, 0))}, {}),
        ({"a": tensor(size=(1 << 40, 1 << 40), offsets=(0, 0), sizes=(1, 1))}, {}),
        ({"a": TensorStorageMetadata(properties(), "ab", [])}, {}),
        ({"a": chunked(4, (0, 2), (1, 3))}, {}),  # as many elements as there are, and the last one is in none
        ({"a": chunked(4, (0, 2))}, {}),
        ({"a": chunked(4, (0, 3), (2, 4))}, {}),
        ({"a": TensorStorageMetadata(properties(), torch.Size([2]), 3)}, {}),
        ({"a": TensorStorageMetadata(None, torch.Size([2]), [])}, {}),
        ([], {}),
        ({}, {"a": filesystem._StorageInfo("f", 0, 1)}),
        ({}, {MetadataIndex("a"): filesystem._StorageInfo("f", -1, 1)}),
        ({}, {MetadataIndex("a"): filesystem._StorageInfo("f", 0, "1")}),
        ({}, {MetadataIndex("a"): filesystem._StorageInfo(3, 0, 1)}),
        ({}, {MetadataIndex("a"): filesystem._StorageInfo("f", 0, 1, 5)}),
        ({}, {MetadataIndex("a"): None}),
        ({}, {MetadataIndex("a"): filesystem._StorageInfo("../f", 0, 1)}),
        ({}, {MetadataIndex("a"): filesystem._StorageInfo("a\0b", 0, 1)}),
        ({"w": BytesStorageMetadata()}, {}),
        ({}, None),
    ],
)
def test_malformed_entries(entries, data, folder):
    table = Metadata(state_dict_metadata=entries, storage_data=data)
    refused(folder, pickle.dumps(table), "damaged|is not the table")


def test_chunk_that_is_not_what_the_table_says(folder):
    table = pickle.loads((folder / ".metadata").read_bytes())  # our own file
    info = table.storage_data
    table.state_dict_metadata["deep.b"] = tensor(size=(4,), sizes=(4,))
    (folder / ".metadata").write_bytes(pickle.dumps(table))
    source = Source(folder, "model")
    with pytest.raises(CheckpointError, match="is not what the table says"):
        source.read_whole("deep.b")
    source.close()
    info[MetadataIndex("w", torch.Size([0, 0]))] = info[MetadataIndex("n")]
    (folder / ".metadata").write_bytes(pickle.dumps(table))
    source = Source(folder, "model")
    with pytest.raises(CheckpointError, match="is damaged"):
        source.read_whole("w")
    source.close()


def test_random_damage(folder):
    content = (folder / ".metadata").read_bytes()
    draw = random.Random(0)
    for _ in range(400):
        changed = bytearray(content)
        for _ in range(draw.choice([1, 1, 2, 5])):
            changed[draw.randrange(len(changed))] = draw.randrange(256)
        if draw.random() < 0.2:
            del changed[draw.randrange(len(changed)) :]
        (folder / ".metadata").write_bytes(bytes(changed))
        with contextlib.suppress(CheckpointError):
            Source(folder, "model").close()
