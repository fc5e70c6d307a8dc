"""`gather_dtensor=False`: torch's own tools read what we write, and we read what they write."""

import contextlib
import errno
import os
import pickle
import random
import struct
from functools import partial
from io import BytesIO
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from engine_calls import EngineCalls, trained_parts
from matrix import matrix
from ranked import on_ranks
from synthetic_state import LAYOUTS, TENSORS, SyntheticAdapter, value_of
from torch import nn
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
from booster_checkpoint.save import dcp as writer
from booster_core.errors import CheckpointError, ConfigError
from booster_core.ranks.coordinator import DistCoordinator
from booster_core.state import ReplicatedStateAdapter

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),  # torch says so of `no_dist=True`
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning"),  # DCP's writer of torch 2.10 uses it
    pytest.mark.filterwarnings("ignore:Detected pickle protocol"),
]

LARGE = [("one", (100, 100), torch.float32), ("two", (100, 100), torch.float32)]


@matrix(["chunks"], layout=LAYOUTS)
@on_ranks(2)
def test_torch_and_we_read_what_we_write(layout, tmp_path):
    io, adapter = EngineCalls(bucket_bytes=1024), SyntheticAdapter(TENSORS, layout)
    for _ in range(2):  # the second time over the first
        io.save_model(adapter, tmp_path / "model", gather_dtensor=False)
        io.save_optimizer(adapter, tmp_path / "optimizer", gather_dtensor=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "optimizer"]
    state = {name: torch.zeros(shape, dtype=dtype) for name, shape, dtype in TENSORS}
    state["tied"] = torch.zeros(TENSORS[0][1])
    dcp.load(state, checkpoint_id=tmp_path / "model", no_dist=True)
    for name, shape, dtype in TENSORS:
        assert torch.equal(state[name], value_of(name, shape, dtype)), name
    assert torch.equal(state["tied"], state["embed.weight"])
    for other in LAYOUTS:
        adapter = SyntheticAdapter(TENSORS, other, is_filled=False)
        io.load_model(adapter, tmp_path / "model", num_threads=2)
        io.load_optimizer(adapter, tmp_path / "optimizer")
        assert adapter.wrong() == []
        assert adapter.extra["block._extra_state"]["scale"].tolist() == [2.0, 2.0, 2.0]
        assert adapter.options == {"lr": 0.5, "betas": (0.9, 0.99)}
        assert all(adapter.scalars[name] == {"step": 7} for name in adapter.scalars)


parts = partial(trained_parts, 6, 5, 2)


def optimizer_of(adapter):
    return adapter._optimizers[0]


def assert_same_optimizer(of_one, of_other):
    optimizer, expected = optimizer_of(of_one), optimizer_of(of_other)
    assert optimizer.param_groups[0]["lr"] == expected.param_groups[0]["lr"]
    for ours, theirs in zip(optimizer.state.values(), expected.state.values(), strict=True):
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_torch_reads_an_optimizer_into_its_own_form(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))  # torch sets it for good on import
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

    io, adapter, _ = parts()
    io.save_optimizer(adapter, tmp_path / "o", gather_dtensor=False)
    _, other, model = parts(seed=1)
    state = get_optimizer_state_dict(model, optimizer_of(other))
    dcp.load(state, checkpoint_id=tmp_path / "o", no_dist=True)
    set_optimizer_state_dict(model, optimizer_of(other), state)
    assert_same_optimizer(other, adapter)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_we_read_what_torch_writes(tmp_path):
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    io, adapter, model = parts()
    dcp.save(model.state_dict(), checkpoint_id=tmp_path / "m", no_dist=True)
    dcp.save(get_optimizer_state_dict(model, optimizer_of(adapter)), checkpoint_id=tmp_path / "o", no_dist=True)
    _, other, loaded = parts(seed=1)
    assert io.load_model(other, tmp_path / "m").is_complete
    io.load_optimizer(other, tmp_path / "o")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), loaded.parameters(), strict=True))
    assert_same_optimizer(other, adapter)


def test_a_truncated_file_is_found_before_anything_changes(tmp_path):
    io, adapter, _ = parts()
    io.save_model(adapter, tmp_path / "m", gather_dtensor=False)
    file = next((tmp_path / "m").glob("*.distcp"))
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"which has .* bytes. It is truncated"):
        io.load_model(adapter, tmp_path / "m")


def test_does_not_replace_a_folder_of_other_things(tmp_path):
    io, adapter, _ = parts()
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="holds other files"):
        io.save_model(adapter, tmp_path / "a", gather_dtensor=False)
    io.save_model(adapter, tmp_path / "m", gather_dtensor=False)
    with pytest.raises(CheckpointError, match=r"holds a model; .* need a folder each"):
        io.save_optimizer(adapter, tmp_path / "m", gather_dtensor=False)
    assert (tmp_path / "a" / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize(
    ("path", "options", "match"),
    [
        ("m", {"use_async": True}, "has no meaning with `gather_dtensor=False`"),
        ("m", {"prefix": "ema"}, "has no meaning with `gather_dtensor=False`"),
        ("memory://models/m", {}, "Save to a local folder and upload it"),
    ],
)
def test_what_torch_does_not_write_is_refused(path, options, match, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    io, adapter, _ = parts()
    with pytest.raises(ConfigError, match=match):
        io.save_model(adapter, path, gather_dtensor=False, **options)


def test_a_nested_state_loads_here_too_with_its_tied_names(tmp_path):
    def made():
        model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
        model["b"].weight = model["a"].weight
        return model

    saved, loaded, coordinator = made(), made(), DistCoordinator()
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.3) for model in (saved, loaded)]
    sum(layer(torch.ones(2)).sum() for layer in saved.values()).backward()
    optimizers[0].step()
    io = EngineCalls()
    ours, theirs = (
        ReplicatedStateAdapter(model, optimizer, coordinator)
        for model, optimizer in zip((saved, loaded), optimizers, strict=True)
    )
    io.save_model(ours, tmp_path / "m", gather_dtensor=False, prefix="model")
    io.save_optimizer(ours, tmp_path / "o", gather_dtensor=False, prefix="optimizer")
    names = dcp.FileSystemReader(tmp_path / "m").read_metadata().state_dict_metadata
    assert {"model.a.weight", "model.b.weight", "model.a.bias", "model.b.bias"} == set(names)
    io.load_model(theirs, tmp_path / "m")
    io.load_optimizer(theirs, tmp_path / "o")
    for one, other in zip(saved.parameters(), loaded.parameters(), strict=True):
        assert torch.equal(one, other)
        assert torch.equal(optimizers[0].state[one]["exp_avg"], optimizers[1].state[other]["exp_avg"])


@pytest.mark.parametrize("number", [0, 1])
@on_ranks(2)
def test_a_full_disk_raises_on_every_rank_and_leaves_nothing(number, tmp_path):
    """One rank can't write more than a few bytes to a file."""

    def fill_disk(tensor, stream):
        stream.write(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    coordinator = DistCoordinator()
    adapter = SyntheticAdapter(LARGE, "columns")
    match = "^" if coordinator.rank == number else f"^rank {number}: "
    with contextlib.ExitStack() as faults:
        if coordinator.rank == number:
            faults.enter_context(mock.patch.object(writer, "_save", fill_disk))
        with pytest.raises(CheckpointError, match=f"{match}save_model failed at '.*': No space left on device"):
            EngineCalls().save_model(adapter, tmp_path / "new" / "model", gather_dtensor=False)
    coordinator.block_all()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_what_ends_a_save_stays_itself(error, tmp_path, monkeypatch):
    def fail(self):
        raise error

    engine, adapter, _ = parts()
    engine.save_model(adapter, tmp_path / "m", gather_dtensor=False)
    before = {path.name: path.read_bytes() for path in (tmp_path / "m").iterdir()}
    monkeypatch.setattr(writer._Item, "content", fail)
    with pytest.raises(error):
        engine.save_model(adapter, tmp_path / "m", gather_dtensor=False)
    assert {path.name: path.read_bytes() for path in (tmp_path / "m").iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


# ---- tables that are damaged or hostile: a `CheckpointError`, and nothing of what they name is made

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
        torch._weights_only_unpickler.load(BytesIO((folder / ".metadata").read_bytes()))


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
    table.state_dict_metadata["deep.b"] = tensor(size=(4,), sizes=(4,))
    table.storage_data[MetadataIndex("w", torch.Size([0, 0]))] = table.storage_data[MetadataIndex("n")]
    (folder / ".metadata").write_bytes(pickle.dumps(table))
    with contextlib.closing(Source(folder, "model")) as source:
        with pytest.raises(CheckpointError, match="is not what the table says"):
            source.read_whole("deep.b")
        with pytest.raises(CheckpointError, match="is damaged"):
            source.read_whole("w")


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
