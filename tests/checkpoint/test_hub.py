"""Loads from a hub: of a repository, only the index and the ranges that the model needs are read."""

import sys
from pathlib import Path

import pytest
import torch
from engine_calls import EngineCalls
from fsspec.implementations.local import LocalFileSystem
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem
from synthetic_state import SyntheticAdapter

from booster_core.errors import CheckpointAbsentError

TENSORS = [(f"layers.{index}.weight", (512, 512), torch.float32) for index in range(6)]
HEAD_BYTES = 64 << 10


class HubFile(AbstractBufferedFile):
    """A file as huggingface_hub's driver has it: each range is a request."""

    def _fetch_range(self, start, end):
        self.fs.ranges.append((Path(self.path).name, start, end))
        return (self.fs.folder / Path(self.path).relative_to("org/repo")).read_bytes()[start:end]


class HubFiles(AbstractFileSystem):
    """A driver of the scheme ``hf`` that shows a folder as the repository ``org/repo``."""

    protocol = "hf"
    folder: Path
    ranges: list

    def ls(self, path, detail=True, **_):
        local = self.folder / Path(self._strip_protocol(path)).relative_to("org/repo")
        entries = [
            {**entry, "name": f"org/repo/{Path(entry['name']).relative_to(self.folder).as_posix()}"}
            for entry in LocalFileSystem().ls(local, detail=True)
        ]
        return entries if detail else [entry["name"] for entry in entries]

    def _open(self, path, mode="rb", block_size=None, **options):
        return HubFile(self, path, mode, block_size or "default", **options)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A repository with a model in three files, the same as a .bin, another model and an optimizer."""
    adapter = SyntheticAdapter(TENSORS, "replicated", has_extra=False)
    io = EngineCalls()
    io.save_model(adapter, tmp_path, shard=True, size_per_shard=2)
    io.save_optimizer(adapter, tmp_path, shard=True, size_per_shard=2)
    io.save_model(adapter, tmp_path / "other" / "model.safetensors")
    io.save_model(adapter, tmp_path / "other" / "pytorch_model.bin", use_safetensors=False)
    (tmp_path / "README.md").write_text("A model.")
    monkeypatch.setattr(HubFiles, "folder", tmp_path, raising=False)
    monkeypatch.setattr(HubFiles, "ranges", [], raising=False)
    monkeypatch.setitem(sys.modules["fsspec.registry"]._registry, "hf", HubFiles)
    HubFiles.clear_instance_cache()
    return HubFiles


def by_file(ranges):
    found = {}
    for name, start, end in ranges:
        found[name] = found.get(name, 0) + end - start
    return found


def test_only_the_index_and_the_files_of_the_model_are_read(hub):
    fresh = SyntheticAdapter(TENSORS, "replicated", states=(), is_filled=False, has_extra=False)
    EngineCalls().load_model(fresh, "hf://org/repo")
    assert fresh.wrong() == []
    read = by_file(hub.ranges)
    parts = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    assert set(read) == {"model.safetensors.index.json", *parts}
    for name in parts:
        assert read[name] <= (hub.folder / name).stat().st_size + HEAD_BYTES


def test_a_rank_reads_only_files_and_ranges_of_its_stage(hub):
    """Of three files, a pipeline stage that has the last tensor reads the values of one, and heads of the others."""
    tensors = TENSORS[4:]
    fresh = SyntheticAdapter(tensors, "replicated", states=(), is_filled=False, has_extra=False)
    EngineCalls().load_model(fresh, "hf://org/repo", strict=False)
    assert fresh.wrong() == []
    read = by_file(hub.ranges)
    assert read["model-00001-of-00003.safetensors"] == HEAD_BYTES
    assert read["model-00002-of-00003.safetensors"] == HEAD_BYTES
    assert 2 << 20 <= read["model-00003-of-00003.safetensors"] <= (2 << 20) + 2 * HEAD_BYTES


def test_an_id_without_the_scheme_is_told_of(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fresh = SyntheticAdapter(TENSORS[:1], "replicated", states=(), is_filled=False)
    with pytest.raises(CheckpointAbsentError, match="pass 'hf://org/repo'"):
        EngineCalls().load_model(fresh, "org/repo")
    (tmp_path / "org").mkdir()
    with pytest.raises(CheckpointAbsentError, match=r"folder with such files\.$"):
        EngineCalls().load_model(fresh, "org/repo")
