"""What goes wrong is an error on every rank, with path and remedy in it, and nothing is lost or half-written."""

import copy
import json
import os
import pickle
import re
import subprocess
from functools import partial
from pathlib import Path

import pytest
import torch
from engine_calls import on_hosts, trained_parts
from ranked import on_ranks
from reference_plugins import ReferencePlugin
from safetensors.torch import save_file
from torch import nn

from booster_checkpoint import ModelPart, OptimizerPart
from booster_checkpoint.files.names import FileNames
from booster_checkpoint.save import targets
from booster_core import Booster
from booster_core.errors import CheckpointError, ConfigError, MissingRanksError
from booster_core.ranks.coordinator import DistCoordinator
from booster_core.state import ReplicatedStateAdapter
from booster_testing import run_on_ranks
from booster_testing.compare import EXACT, assert_same_tensors


@on_ranks(2, timeout_seconds=30)
def test_a_scheduler_that_one_rank_cannot_write_raises_on_every_rank(tmp_path):
    scheduler = torch.optim.lr_scheduler.ConstantLR(torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1))
    if DistCoordinator().rank:
        scheduler.own = object()  # which has no JSON form
    with pytest.raises(CheckpointError, match="own"):
        Booster("cpu", plugin=ReferencePlugin()).save_lr_scheduler(scheduler, tmp_path / "scheduler.json")
    DistCoordinator().block_all()
    assert not list(tmp_path.iterdir())


parts = partial(trained_parts, 8, 16, 2)


def outcome(action, path, *, rank=None, **options):
    """Do something on this rank, and return the error's kind and text, and whether the model is as before."""
    io, adapter, model = parts(seed=1)
    before = copy.deepcopy(model.state_dict())
    kinds, text = [], ""
    try:
        getattr(io, action)(adapter, path, **options)
    except (CheckpointError, ConfigError) as error:
        kinds, text = [kind.__name__ for kind in type(error).__mro__], str(error)
    return kinds, text, all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def fails_on_every_rank(action, path, match, kind="CheckpointError", **options):
    for found, text, unchanged in run_on_ranks(outcome, 2, action, str(path), **options):
        assert kind in found, text
        assert match in text
        assert unchanged


ABSENT = "CheckpointAbsentError"
REFUSED = [
    ("load_model", "absent", {}, ABSENT, "There is no model checkpoint at"),
    ("load_optimizer", "absent", {}, ABSENT, "There is no optimizer checkpoint at"),
    ("load_model", "empty", {}, ABSENT, "holds no model checkpoint; it holds nothing"),
    ("load_model", "file/below", {}, ABSENT, "There is no model checkpoint at"),
    ("save_model", "empty", {}, "CheckpointError", "is a folder, but this call writes a file"),
    ("save_optimizer", "empty", {}, "CheckpointError", "is a folder, but this call writes a file"),
    ("save_model", "file/below.safetensors", {}, "CheckpointError", "A part of the path is a file"),
    ("save_model", "file", {"shard": True}, "CheckpointError", "is a file, but `shard=True` writes a folder"),
    ("save_model", "m.safetensors", {"use_safetensors": False}, "ConfigError", "Use a name that ends in '.bin', or"),
    ("save_model", "m.pt", {}, "ConfigError", "Use a name that ends in '.safetensors', or `use_safetensors=False`"),
    ("save_model", "m", {"shard": True, "size_per_shard": 0}, "ConfigError", "`size_per_shard=0` is not a size"),
    ("save_model", "m.safetensors", {"prefix": "ema"}, "ConfigError", "names the files of a folder"),
]


@pytest.mark.parametrize(("action", "name", "options", "kind", "match"), REFUSED)
def test_paths_and_options_that_cannot_be(action, name, options, kind, match, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("text")
    fails_on_every_rank(action, tmp_path / name, match, kind, **options)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "file"]
    assert (tmp_path / "file").read_text() == "text"


def save_wide(path, hosts):
    io, adapter, _ = trained_parts(8, 100_000, 2)
    try:
        with on_hosts(hosts):
            io.save_model(adapter, path, shard=True)
    except CheckpointError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("hosts", [(0, 0), (0, 1)], ids=["one host", "two hosts"])
def test_a_small_disk_fills_up(hosts, tmp_path):
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", tmp_path], check=False).returncode:
        pytest.skip("mounting a small file system needs root")
    try:
        for text in run_on_ranks(save_wide, 2, str(tmp_path / "m"), hosts):
            assert "The disk is full" in text
        assert list(tmp_path.iterdir()) == []
    finally:
        subprocess.run(["umount", tmp_path], check=True)


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_a_truncated_file_is_found_on_every_rank_before_anything_changes(suffix, tmp_path):
    io, adapter, _ = parts()
    path = tmp_path / f"m.{suffix}"
    io.save_model(adapter, path, use_safetensors=suffix == "safetensors")
    path.write_bytes(path.read_bytes()[:-10])
    fails_on_every_rank("load_model", path, "truncated", "CheckpointDamagedError")


def test_an_index_that_names_absent_files(tmp_path):
    io, adapter, _ = parts()
    io.save_model(adapter, tmp_path, shard=True)
    (tmp_path / "model-00001-of-00001.safetensors").unlink()
    message = "names 1 files that are not there: 'model-00001-of-00001.safetensors'"
    fails_on_every_rank("load_model", tmp_path, message, kind="CheckpointDamagedError")


@pytest.mark.parametrize("name", ["../other.safetensors", "/etc/passwd", ".."])
def test_an_index_that_leads_out_of_its_folder(name, tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    io, adapter, _ = parts()
    with pytest.raises(CheckpointError, match="which is not in its folder"):
        io.load_model(adapter, tmp_path)


def test_all_tensors_that_do_not_fit_are_named_and_nothing_is_loaded(tmp_path):
    _, _, model = parts(seed=3)
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    del tensors["0.bias"]
    tensors["1.weight"] = tensors["1.weight"].T.contiguous()
    tensors["1.bias"] = tensors["1.bias"].to(torch.int64)
    tensors |= {f"more.{index}": torch.zeros(1) for index in range(12)}
    save_file(tensors, tmp_path / "m.safetensors")
    for match in (
        "1 tensors are missing: '0.bias'",
        "12 tensors are unexpected: 'more.0'",
        "and 2 more.",
        "shape (16, 2) in the checkpoint, (2, 16) here",
        "torch.int64 in the checkpoint, torch.float32 here",
        "`strict=False` would leave what is missing as it is",
    ):
        fails_on_every_rank("load_model", tmp_path / "m.safetensors", match)


def test_what_fits_is_loaded_if_asked_for(tmp_path):
    io, adapter, model = parts(seed=3)
    save_file({"0.weight": torch.ones(16, 8), "1.bias": torch.ones(3), "x": torch.ones(1)}, tmp_path / "m.safetensors")
    bias = model[1].bias.detach().clone()
    report = io.load_model(adapter, tmp_path / "m.safetensors", strict=False)
    assert report.loaded == ("0.weight",)
    assert report.missing == ("0.bias", "1.weight")
    assert report.unexpected == ("x",)
    assert list(report.mismatched) == ["1.bias"]
    assert torch.equal(model[0].weight, torch.ones(16, 8))
    assert torch.equal(model[1].bias, bias)


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
def test_a_malicious_pickle_is_refused_and_not_run(legacy, tmp_path, monkeypatch):
    class Evil:
        def __reduce__(self):
            return os.mkdir, ("hacked",)

    monkeypatch.chdir(tmp_path)
    torch.save({"0.weight": Evil()}, tmp_path / "m.bin", _use_new_zipfile_serialization=not legacy)
    io, adapter, _ = parts()
    with pytest.raises(CheckpointError, match="holds more than tensors and plain values, and was not loaded"):
        io.load_model(adapter, tmp_path / "m.bin")
    (tmp_path / "p.bin").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(CheckpointError):
        io.load_model(adapter, tmp_path / "p.bin")
    assert not (tmp_path / "hacked").exists()


@pytest.mark.parametrize(
    ("width", "match"),
    [
        (16, "group 0 lists other parameters. It lacks 2: '2.weight', '2.bias'. List those that were saved, or"),
        (12, "3 parameters have other shapes: '0.bias ((16,) in the checkpoint, (12,) here)'"),
    ],
)
def test_the_optimizer_of_another_model_changes_nothing(width, match, tmp_path):
    io, adapter, _ = parts()
    io.save_optimizer(adapter, tmp_path, shard=True)
    model = nn.Sequential(nn.Linear(8, width), nn.Linear(width, 2))
    if width == 16:
        model.append(nn.Linear(2, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.25)
    with pytest.raises(CheckpointError, match=re.escape(match)):
        io.load_optimizer(ReplicatedStateAdapter(model, optimizer, DistCoordinator()), tmp_path)
    assert (optimizer.param_groups[0]["lr"], len(optimizer.state)) == (0.25, 0)


def test_a_model_is_no_optimizer(tmp_path):
    io, adapter, _ = parts()
    io.save_model(adapter, tmp_path / "m.safetensors")
    message = "without parameter groups"
    fails_on_every_rank("load_optimizer", tmp_path / "m.safetensors", message, kind="CheckpointAbsentError")


@on_ranks(2)
def test_a_save_on_one_rank_only_names_the_missing_ranks(tmp_path):
    path = str(tmp_path / "m.safetensors")
    io, adapter, _ = parts(timeout_seconds=1.0)
    coordinator = DistCoordinator()
    if coordinator.rank == 0:
        with pytest.raises(MissingRanksError, match=r"(?s)save_model.*rank 1"):
            io.save_model(adapter, path)
    assert not Path(path).exists()


# ---- files of an earlier save, which never stand in for those of the last one, nor block the other kind

wide_parts = partial(trained_parts, 8, 512, 512)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


FORMS = {
    "one file": {"name": "model.safetensors"},
    "divided": {"shard": True, "size_per_shard": 1},
    "divided, bin": {"shard": True, "size_per_shard": 1, "use_safetensors": False},
}


def save(folder, form, seed):
    options = dict(FORMS[form])
    io, adapter, model = wide_parts(seed=seed)
    io.save_model(adapter, folder / options.pop("name", ""), **options)
    return model


def assert_loads(folder, expected):
    io, adapter, model = wide_parts(seed=3)
    io.load_model(adapter, folder)
    assert_same_tensors(model.state_dict(), expected.state_dict(), EXACT)


@pytest.mark.parametrize("second", ["divided", "divided, bin"])
@pytest.mark.parametrize("first", FORMS)
def test_a_folder_holds_and_loads_one_form_of_a_model(first, second, tmp_path):
    save(tmp_path, first, seed=1)
    assert_loads(tmp_path, save(tmp_path, second, seed=2))
    suffixes = {name.rpartition(".")[2] for name in names(tmp_path) if not name.endswith(".json")}
    assert suffixes == {"bin" if "bin" in second else "safetensors"}
    assert len([name for name in names(tmp_path) if ".index." in name]) == 1


@pytest.mark.parametrize("kind", ["model", "optimizer"])
def test_an_interrupted_save_of_one_kind_does_not_block_the_other(kind, tmp_path):
    io, adapter, _ = wide_parts(seed=1)
    io.save_model(adapter, tmp_path, shard=True)
    io.save_optimizer(adapter, tmp_path, shard=True)
    (tmp_path / f".{kind}.safetensors.index.json.interrupted").touch()
    load = {"model": io.load_model, "optimizer": io.load_optimizer}
    for path in (tmp_path, tmp_path / f"{kind}.safetensors.index.json"):
        with pytest.raises(CheckpointError, match="was interrupted while it replaced"):
            load[kind](adapter, path)
    load["optimizer" if kind == "model" else "model"](adapter, tmp_path)


@pytest.mark.parametrize("form", FORMS)
def test_a_complete_save_ends_an_interruption(form, tmp_path):
    save(tmp_path, "divided", seed=1)
    (tmp_path / ".model.safetensors.index.json.interrupted").touch()
    expected = save(tmp_path, form, seed=2)
    assert not [name for name in names(tmp_path) if name.endswith(".interrupted")]
    assert_loads(tmp_path, expected)


def test_both_kinds_in_one_save_are_marked_while_they_are_replaced(tmp_path, monkeypatch):
    io, adapter, _ = wide_parts(seed=1)

    def write():
        model = ModelPart(adapter, FileNames(base="model"), max_bytes=1 << 20)
        optimizer = OptimizerPart(adapter, FileNames(base="optimizer"), max_bytes=1 << 20)
        io.write_folder("save", tmp_path, [model, optimizer])

    write()
    seen = []
    sync = targets.sync_folders
    monkeypatch.setattr(targets, "sync_folders", lambda *folders: (seen.append(names(folders[0])), sync(*folders)))
    write()
    marks = {name for name in seen[0] if name.endswith(".interrupted")}
    assert marks == {".model.safetensors.index.json.interrupted", ".optimizer.safetensors.index.json.interrupted"}
    assert not [name for name in names(tmp_path) if name.endswith(".interrupted")]


@pytest.mark.parametrize("form", FORMS)
def test_what_a_killed_save_left_goes_whatever_its_number_of_files(form, tmp_path):
    suffix = "bin" if "bin" in form else "safetensors"
    base = "pytorch_model" if suffix == "bin" else "model"
    left = [f"{base}-00007-of-00009.{suffix}", f"{base}.{suffix}", f"{base}.{suffix}.index.json"]
    for name in left if form != "one file" else left[1:2]:
        (tmp_path / f".{name}.0123456789abcdef.tmp").write_bytes(b"half")
    others = [".optimizer-00001-of-00002.safetensors.0123456789abcdef.tmp", ".notes.txt.0123456789abcdef.tmp"]
    for name in others:
        (tmp_path / name).write_bytes(b"another save's")
    save(tmp_path, form, seed=1)
    assert [name for name in names(tmp_path) if name.endswith(".tmp")] == sorted(others)
