"""Files of an earlier save never stand in for those of the last one, nor block the other kind of checkpoint."""

import pytest
import torch
from engine_calls import EngineCalls
from torch import nn

from booster_core.errors import CheckpointError
from booster_core.ranks.coordinator import DistCoordinator
from booster_core.state import ReplicatedStateAdapter


def parts(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 512), nn.Linear(512, 512))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    coordinator = DistCoordinator()
    return EngineCalls(), ReplicatedStateAdapter(model, optimizer, coordinator), model


def names(folder):
    return sorted(path.name for path in folder.iterdir())


FORMS = {
    "one file": {"name": "model.safetensors"},
    "divided": {"shard": True, "size_per_shard": 1},
    "divided, bin": {"shard": True, "size_per_shard": 1, "use_safetensors": False},
}


def save(folder, form, seed):
    options = dict(FORMS[form])
    io, adapter, model = parts(seed)
    name = options.pop("name", "")
    io.save_model(adapter, folder / name, **options)
    return model


@pytest.mark.parametrize("second", ["divided", "divided, bin"])
@pytest.mark.parametrize("first", FORMS)
def test_a_folder_holds_and_loads_one_form_of_a_model(first, second, tmp_path):
    save(tmp_path, first, seed=1)
    expected = save(tmp_path, second, seed=2).state_dict()
    io, adapter, model = parts(seed=3)
    io.load_model(adapter, tmp_path)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())
    suffixes = {name.rpartition(".")[2] for name in names(tmp_path) if not name.endswith(".json")}
    assert suffixes == {"bin" if "bin" in second else "safetensors"}
    assert len([name for name in names(tmp_path) if ".index." in name]) == 1


@pytest.mark.parametrize("kind", ["model", "optimizer"])
def test_an_interrupted_save_of_one_kind_does_not_block_the_other(kind, tmp_path):
    io, adapter, _ = parts(seed=1)
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
    expected = save(tmp_path, form, seed=2).state_dict()
    assert not [name for name in names(tmp_path) if name.endswith(".interrupted")]
    io, adapter, model = parts(seed=3)
    io.load_model(adapter, tmp_path)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())


def test_both_kinds_in_one_save_are_marked_while_they_are_replaced(tmp_path, monkeypatch):
    from booster_checkpoint.files.names import FileNames
    from booster_checkpoint.save import targets
    from booster_checkpoint.save.parts import ModelPart, OptimizerPart

    io, adapter, _ = parts(seed=1)

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
