"""Checkpoints at URLs: in a store of one process' own memory, on the local disk, and in a third party's store."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from file_faults import flip_bit
from folder_storage import FolderStorage, StorageHooks
from matrix import matrix
from ranked import on_ranks
from resumable import ResumableRun as Run

import booster_runtime
from booster_checkpoint.files.checksums import Block
from booster_checkpoint.run.checkpoint_root import open_run
from booster_checkpoint.run.manifest import FileEntry, Manifest
from booster_checkpoint.storage import leaves_folder, locate, storage_for
from booster_checkpoint.storage.fsspec_storage import storage_of_driver
from booster_core.checkpoint_io import local_path, scheme_of
from booster_core.cli import main
from booster_core.errors import CheckpointError, ConfigError
from booster_core.plugin.hooks import register_hooks, unregister_hooks
from booster_core.ranks.coordinator import DistCoordinator
from booster_testing import expect_on_ranks, run_on_ranks


@pytest.fixture
def ours(serve):
    return serve(FolderStorage)


def same(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def train_save_resume(root, use_async, base=None):
    """In one function, because the store may be of this process alone."""
    if base is not None:
        register_hooks(StorageHooks(FolderStorage(base)))
    run = Run()
    expected = run.train(8)
    run = Run()
    run.train(3)
    run.save(root, extra={"t": torch.ones(2)}, use_async=use_async)
    run.booster.wait()
    run = Run()
    run.train(5)
    run.save(root, keep_last=1, use_async=use_async)
    run.booster.wait()
    other = Run(seed=4)
    assert other.booster.has_checkpoint(root)
    loaded = other.load(root)
    losses = other.train(8)
    names = open_run(root).steps() if DistCoordinator().rank == 0 else ["step-00000005"]
    return loaded.step, losses == expected[5:], names, loaded.path


PLACES = [(1, "memory"), (2, "ours"), (2, "file")]


@matrix(["1-memory-True", "2-file-False"], **{"world_size, scheme": PLACES}, use_async=[False, True])
def test_a_training_state_at_a_url(world_size, scheme, use_async, tmp_path):
    root = f"file://{tmp_path}/a run" if scheme == "file" else f"{scheme}://run-{world_size}-{use_async}"
    base = str(tmp_path) if scheme == "ours" else None
    for step, is_equal, names, path in run_on_ranks(train_save_resume, world_size, root, use_async, base):
        assert (step, is_equal, names) == (5, True, ["step-00000005"])
        assert path == (f"{root}/step-00000005" if scheme != "file" else f"{tmp_path}/a run/step-00000005")


def test_a_storage_that_ranks_do_not_share_is_refused():
    match = r"Ranks \[1\] do not see what rank 0 wrote to 'memory://alone"
    expect_on_ranks(CheckpointError, match, train_save_resume, 2, "memory://alone", True)


@matrix(["1-memory-True", "2-file-False"], **{"world_size, scheme": PLACES}, use_async=[False, True])
@on_ranks("world_size")
def test_models_and_optimizers_at_a_url(world_size, scheme, use_async, tmp_path):
    if scheme == "ours":
        register_hooks(StorageHooks(FolderStorage(str(tmp_path))))
    base = f"file://{tmp_path}" if scheme == "file" else f"{scheme}://parts-{use_async}"
    run, other = Run(), Run(seed=1)
    run.train(2)
    run.booster.save_model(run.model, f"{base}/folder", shard=True, use_async=use_async)
    run.booster.save_model(run.model, f"{base}/one.safetensors", use_async=use_async)
    run.booster.save_model(run.model, f"{base}/one.bin", use_safetensors=False, use_async=use_async)
    run.booster.save_optimizer(run.optimizer, f"{base}/folder", shard=True, use_async=use_async)
    run.booster.save_lr_scheduler(run.scheduler, f"{base}/scheduler.json")
    other.booster.load_model(other.model, f"{base}/folder")
    other.booster.load_optimizer(other.optimizer, f"{base}/folder")
    other.booster.load_lr_scheduler(other.scheduler, f"{base}/scheduler.json")
    assert same(run.tensors(), other.tensors())
    assert other.scheduler.last_epoch == 2
    for path in ("one.safetensors", "one.bin", "folder/model.safetensors.index.json"):
        fresh = Run()
        fresh.booster.load_model(fresh.model, f"{base}/{path}")
        assert same(run.model.state_dict(), fresh.model.state_dict())
    ema = booster_runtime.ema(run.booster, run.model)
    ema.save(f"{base}/ema", shard=True)
    ema.load(f"{base}/ema")


def test_a_hook_brings_a_storage_and_the_index_and_manifest_come_last(ours):
    run = Run()
    run.save("ours://runs/a")
    step = "ours://runs/a/step-00000000"
    assert ours.written[-2:] == [f"{step}/manifest.json", "ours://runs/a/latest"]
    run.booster.save_model(run.model, "ours://model", shard=True)
    assert ours.written[-1] == "ours://model/model.safetensors.index.json"
    assert Run().load("ours://runs/a").step == 0


def test_fewer_files_replace_more(ours):
    booster = Run().booster
    large, small = (torch.nn.ModuleList(torch.nn.Linear(512, 1024) for _ in range(n)) for n in (3, 1))
    booster.save_model(large, "ours://model", shard=True, size_per_shard=1)
    booster.save_model(small, "ours://model", shard=True)
    assert sorted(ours.list("ours://model")) == ["model-00001-of-00001.safetensors", "model.safetensors.index.json"]


def test_an_upload_that_was_cut_off_is_no_step_and_is_cleared_away(ours):
    run = Run()
    run.save("ours://runs/b")
    run.step = 1
    whole = ours.open_write

    def fail(url, nbytes):
        if url.endswith("training_state.json"):
            raise OSError(28, "No space left on device")
        return whole(url, nbytes)

    ours.open_write = fail
    with pytest.raises(CheckpointError, match="No space left on device"):
        run.save("ours://runs/b")
    assert "step-00000001/model/model-00001-of-00001.safetensors" in ours.list("ours://runs/b")
    assert Run().load("ours://runs/b").step == 0
    ours.open_write = whole
    run.step = 2
    run.save("ours://runs/b")
    assert not any(name.startswith("step-00000001/") for name in ours.list("ours://runs/b"))


def test_a_step_that_is_listed_late_is_resumed_from_and_stays(ours):
    """Whoever asks for its objects finds them."""
    root, run, real = "ours://run", Run(), ours.list

    def without(*late):
        def listed(url):
            return {key: size for key, size in real(url).items() if not key or not f"{url}/{key}".endswith(late)}

        return listed

    for run.step in (1, 2):
        run.save(root)
    ours.list = without("step-00000002/manifest.json")
    assert Run().load(root, resume=True).step == 2
    run.step = 3
    run.save(root)
    ours.list = real
    assert open_run(root).steps() == ["step-00000001", "step-00000002", "step-00000003"]
    newest = ours.base / "run" / "step-00000003"
    ours.list = without(*(f"{newest.name}/{path.relative_to(newest).as_posix()}" for path in newest.rglob("*")))
    assert Run().load(root, resume=True).step == 3


def test_a_flipped_bit_at_a_url_is_found(ours):
    run = Run()
    for run.step in (1, 2):
        run.save("ours://runs/c")
    flip_bit(ours.base / "runs/c/step-00000002/model/model-00001-of-00001.safetensors", -5)
    with pytest.raises(CheckpointError, match=r"model-00001.* has the checksum .* load it with `step=1`"):
        Run().load("ours://runs/c")
    assert Run().load("ours://runs/c", step=1).step == 1


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("memory://none", "There is no model checkpoint at 'memory://none'"),
        ("nope://a/b", "No storage is known for 'nope://'"),
    ],
)
@on_ranks(2)
def test_a_url_without_a_model_or_a_storage_is_an_error_on_every_rank(url, message):
    run = Run()
    with pytest.raises(CheckpointError, match=message):
        run.booster.load_model(run.model, url)


@pytest.mark.parametrize(
    ("package", "function", "scheme", "match"),
    [
        ("fsspec", storage_of_driver, "memory", r"pip install fsspec.*booster-checkpoint\[storage\]"),
        ("gcsfs", storage_of_driver, "gcs", r"'gcs://' need a driver that is not installed: .*gcsfs"),
        ("obstore", storage_for, "s3", r"'s3://' need obstore.*booster-checkpoint\[storage\]"),
    ],
)
def test_the_package_that_lacks_is_named(package, function, scheme, match, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(CheckpointError, match=match):
        function(scheme)


def test_a_hook_that_returns_no_storage_is_named():
    hooks = StorageHooks(object())
    register_hooks(hooks)
    try:
        with pytest.raises(CheckpointError, match="returned a `object` for 'ours://', which lacks"):
            storage_for("ours")
    finally:
        unregister_hooks(hooks)


@pytest.mark.parametrize(
    ("path", "scheme"),
    [("s3://b/k", "s3"), ("S3://b", "s3"), ("/a/b", None), ("a://b", "a"), ("file:///x", None), (Path("s3:/b"), None)],
)
def test_schemes(path, scheme):
    assert scheme_of(path) == scheme


def test_file_urls_become_paths():
    assert local_path("file:///a%20b/c") == "/a b/c"
    assert local_path("file://localhost/a") == "/a"
    assert local_path("hdfs:///a/b..c") == "hdfs:///a/b..c"
    with pytest.raises(CheckpointError, match="names the host 'elsewhere'"):
        local_path("file://elsewhere/a")


# ---- keys that leave the folder


def tree(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


class ExtraKey(FolderStorage):
    """Lists one more key, as an object store may, whose keys are any text."""

    key = "model/../../../outside.bin"

    def list(self, url):
        found = super().list(url)
        return found if "" in found else {**found, self.key: 3}


@pytest.fixture
def extra_key(serve):
    return serve(ExtraKey)


@pytest.mark.parametrize("key", ["model/../../../outside.bin", "model/a/../../../../b", "model/.."])
def test_key_of_a_step_that_leaves_its_folder(key, extra_key, tmp_path):
    extra_key.key = "harmless"
    run = Run()
    run.save("ours://runs/a")
    extra_key.key = key
    before = tree(tmp_path)
    assert Run(seed=1).load("ours://runs/a").step == 0, "the manifest alone says what is read"
    assert tree(tmp_path) == before


@pytest.mark.parametrize("key", ["..", "/absolute", "C:\\windows", "..\\b", "\\\\host\\share", "a/../../b"])
def test_key_of_a_model_that_leaves_its_folder(key, extra_key):
    extra_key.key = "harmless.txt"
    run = Run()
    run.booster.save_model(run.model, "ours://model", shard=True)
    extra_key.key = key
    with pytest.raises(CheckpointError, match=re.escape(f"holds the key '{key}'")):
        run.booster.load_model(run.model, "ours://model")
    with pytest.raises(CheckpointError, match=re.escape(f"holds the key '{key}'")):
        run.booster.save_model(run.model, "ours://model", shard=True)
    assert leaves_folder(key)


@pytest.mark.parametrize("root", ["memory://a/../b", "memory://a/.."])
@on_ranks(2)
def test_url_with_parent_folders_is_an_error_on_every_rank(root):
    run = Run()
    calls = [
        lambda: run.save(root),
        lambda: run.load(root),
        lambda: run.booster.has_checkpoint(root),
        lambda: run.booster.save_model(run.model, f"{root}/m.safetensors"),
        lambda: run.booster.save_model(run.model, root, shard=True),
        lambda: run.booster.load_model(run.model, f"{root}/m.safetensors"),
        lambda: run.booster.save_optimizer(run.optimizer, root, shard=True),
    ]
    for call in calls:
        with pytest.raises(CheckpointError, match=r"has a part '\.\.'"):
            call()


@pytest.mark.parametrize("name", ["../other.json", "/etc/hostname", "model/../../x", ""])
def test_manifest_that_names_a_file_outside_of_its_folder(name, tmp_path):
    entry = FileEntry(nbytes=1, blocks=(Block(1, "0"),))
    Manifest(step=1, files={name: entry, "a": entry}).write(tmp_path)
    with pytest.raises(CheckpointError, match=re.escape(f"names the file '{name}', which is not in its folder")):
        Manifest.read(tmp_path)


# ---- names that leave the folder, when writing


@pytest.mark.parametrize("prefix", ["../x", "a/b"])
def test_prefix_that_leaves_the_folder(prefix, ours, tmp_path):
    run = Run()
    for base in ("ours://model", str(tmp_path / "model")):
        before = tree(tmp_path)
        with pytest.raises(ConfigError, match="leads out of"):
            run.booster.save_model(run.model, base, shard=True, prefix=prefix)
        assert tree(tmp_path) == before


def test_names_below_a_path_at_a_url(ours):
    path = locate("ours://run")
    for name in ("../x", "/etc/passwd", "a/../../b", "C:\\x", "\\\\host"):
        with pytest.raises(CheckpointError, match="leads out of the folder"):
            path / name
    assert str(path / "a" / "b.bin") == "ours://run/a/b.bin"
    assert (path / "a" / "b.bin").parent == path / "a"
    assert ((path / "a" / "b.bin").name, (path / "a" / "b.bin").suffix) == ("b.bin", ".bin")


# ---- the command line


def test_commands_at_a_storage(ours):
    run = Run()
    run.step = 3
    run.save("ours://run")
    commands = CliRunner()
    shown = commands.invoke(main, ["inspect", "ours://run/step-00000003", "--json"])
    assert shown.exit_code == 0, shown.output
    assert "first.weight" in {row["name"] for row in json.loads(shown.output)["tensors"]}
    assert "ours://run: root" in commands.invoke(main, ["inspect", "ours://run"]).output
    assert "whole" in commands.invoke(main, ["inspect", "--check", "ours://run"]).output
    for form in ("safetensors", "bin", "dcp"):
        target = str(ours.base / form) if form == "dcp" else f"ours://{form}"  # torch writes to file systems
        done = commands.invoke(main, ["convert", "ours://run/step-00000003/model", target, "--to", form])
        assert done.exit_code == 0, done.output
        fresh = Run(seed=1)
        fresh.booster.load_model(fresh.model, f"ours://{form}")
        assert same(run.model.state_dict(), fresh.model.state_dict())
    done = commands.invoke(main, ["convert", "ours://run/step-00000003/model", "ours://there", "--to", "dcp"])
    assert done.exit_code == 1
    assert "upload it" in done.output
    done = commands.invoke(main, ["inspect", "--check", "nope://x"])
    assert done.exit_code == 1
    assert "No storage is known for 'nope://'" in done.output
    path = ours.base / "run/step-00000003/model/model-00001-of-00001.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\x7f")
    done = commands.invoke(main, ["inspect", "--check", "ours://run"])
    assert done.exit_code == 1
    assert "has the checksum" in done.output
