"""Saves in the background: what is on disk is what was there when the call returned, and no error is lost."""

import re
import textwrap
import threading
import time
from functools import partial
from unittest import mock

import pytest
import torch
from engine_calls import trained_parts
from matrix import matrix
from ranked import on_ranks
from reference_plugins import ReferencePlugin
from safetensors.torch import load_file
from torch import nn

from booster_checkpoint.save import in_place
from booster_checkpoint.save.background import BackgroundWriter
from booster_core import Booster, hookimpl
from booster_core.errors import CheckpointError
from booster_core.plugin.hooks import register_hooks, unregister_hooks
from booster_core.ranks.coordinator import DistCoordinator

make = partial(trained_parts, 64, 64, 8)


@pytest.fixture
def gate(monkeypatch):
    """An event until which all writing is held back."""
    event, real = threading.Event(), in_place.write_ranges

    def held_back(*args):
        assert event.wait(30)
        return real(*args)

    monkeypatch.setattr(in_place, "write_ranges", held_back)
    return event


def test_the_file_holds_what_was_there_when_the_call_returned(gate, tmp_path):
    io, adapter, model = make(bucket_bytes=4096)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    io.save_model(adapter, tmp_path / "m.safetensors", use_async=True)
    for parameter in model.parameters():
        parameter.data.fill_(7)
    assert not (tmp_path / "m.safetensors").exists()
    gate.set()
    io.wait()
    for name, tensor in load_file(tmp_path / "m.safetensors").items():
        assert torch.equal(tensor, before[name])


@pytest.mark.parametrize("then", ["save", "load", "wait", "close"])
def test_the_next_call_waits(then, gate, tmp_path):
    io, adapter, _ = make()
    path = tmp_path / "m.safetensors"
    io.save_model(adapter, path, use_async=True)
    threading.Timer(0.2, gate.set).start()
    if then == "save":
        io.save_model(adapter, tmp_path / "n.safetensors")
    elif then == "load":
        assert io.load_model(adapter, path).is_complete
    else:
        getattr(io, then)()
    assert gate.is_set(), "the call came back before the write went on"
    assert path.exists()


@pytest.mark.parametrize("end", ["wait", "close", "a save that is not in the background", "a load"])
def test_buffers_are_used_again_and_given_back(end, tmp_path):
    io, adapter, _ = make(bucket_bytes=4096)
    sizes = []
    for index in range(3):
        io.save_model(adapter, tmp_path / f"{index}.safetensors", use_async=True)
        sizes.append(io.saver.buffers.nbytes)
    state = sum(shard.data.nbytes for shard in adapter.model_shards())
    assert len(set(sizes)) == 1
    assert state <= sizes[0] <= state + 4096
    if end == "a load":
        io.load_model(adapter, tmp_path / "0.safetensors")
    elif end in ("wait", "close"):
        getattr(io, end)()
    else:
        io.save_model(adapter, tmp_path / "last.safetensors")
    assert io.saver.buffers.nbytes == 0


@pytest.mark.parametrize("call", ["save_model", "save_optimizer", "save_checkpoint"])
def test_a_relative_path_means_the_folder_of_the_call(call, gate, tmp_path, monkeypatch):
    booster, model = Booster("cpu"), nn.Linear(4, 4)
    model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters()))
    before, after = tmp_path / "before", tmp_path / "after"
    before.mkdir()
    after.mkdir()
    monkeypatch.chdir(before)
    if call == "save_checkpoint":
        booster.save_checkpoint("out", step=1, model=model, optimizer=optimizer, use_async=True)
    else:
        getattr(booster, call)({"save_model": model, "save_optimizer": optimizer}[call], "out", use_async=True)
    monkeypatch.chdir(after)
    gate.set()
    booster.wait()
    assert list(after.iterdir()) == []
    if call == "save_checkpoint":
        assert booster.load_checkpoint(before / "out", model=model, optimizer=optimizer).step == 1
    else:
        load_file(before / "out")


@matrix(1, rank=[0, 1], then=["wait", "save", "load"])
@on_ranks(2)
def test_an_error_surfaces_on_every_rank_at_the_next_call(rank, then, tmp_path):
    io, adapter, _ = make()
    if io.rank == rank:
        (tmp_path / "m").mkdir()  # a folder takes the file's place once the save is on its way
    real = in_place.write_ranges

    def fail(*args):
        if io.rank == rank:
            raise OSError(28, "No space left on device")
        real(*args)

    with mock.patch.object(in_place, "write_ranges", fail):
        io.save_model(adapter, tmp_path / "new" / "m.safetensors", use_async=True)
        next_call = {
            "wait": io.wait,
            "save": lambda: io.save_model(adapter, tmp_path / "other.safetensors"),
            "load": lambda: io.load_model(adapter, tmp_path / "other.safetensors"),
        }[then]
        with pytest.raises(CheckpointError, match="The disk is full"):
            next_call()
    io.wait()  # an error is raised once
    DistCoordinator().block_all()
    assert [path.name for path in tmp_path.iterdir()] == ["m"], "nothing is left, not even the new folder"


@on_ranks(2)
def test_a_copy_that_fails_on_one_rank_is_an_error_on_every_rank(tmp_path):
    io, adapter, _ = make()
    if io.rank == 1:
        io.saver.buffers.take = mock.Mock(side_effect=MemoryError("no room for the copy"))
    io.save_model(adapter, tmp_path / "m.safetensors", use_async=True)
    with pytest.raises(MemoryError, match="no room for the copy"):
        io.wait()
    DistCoordinator().block_all()
    assert list(tmp_path.iterdir()) == []


SCRIPT = """
import sys
from torch import nn
from booster_checkpoint.save import in_place
from booster_core import Booster
if sys.argv[2] == "fail":
    def fail(*args):
        raise OSError(28, "No space left on device")
    in_place.write_ranges = fail
Booster("cpu").save_model(nn.Linear(2, 2), sys.argv[1], use_async=True)
"""


@pytest.mark.parametrize(("mode", "code"), [("succeed", 0), ("fail", 1)])
def test_the_interpreter_waits_before_it_ends_and_fails_with_the_save(mode, code, scripts, tmp_path):
    path, script = tmp_path / "m.safetensors", tmp_path / "save.py"
    script.write_text(textwrap.dedent(SCRIPT))
    ended = scripts.run(script, [[path, mode]])
    assert ended.codes == [code], ended.output
    assert path.exists() == (mode == "succeed")
    assert ("The disk is full" in ended.output) == (mode == "fail")


@on_ranks(2)
def test_destroying_the_process_group_waits(tmp_path):
    io, adapter, _ = make()
    io.save_model(adapter, tmp_path / "m.safetensors", use_async=True)
    DistCoordinator().destroy()
    assert (tmp_path / "m.safetensors").exists()


@on_ranks(2)
def test_meetings_of_the_main_thread_and_of_a_save_do_not_mix(tmp_path):
    rank, real = DistCoordinator().rank, in_place.write_ranges
    may_write, kinds = threading.Event(), []

    class MeetingHook:
        """Meets when a save has ended, which ranks may hear of in different threads."""

        @hookimpl
        def after_save(self, kind):
            DistCoordinator().block_all(name="after the save")
            kinds.append(kind)

    hook = MeetingHook()
    register_hooks(hook)

    def held_back(*args):
        # On rank 0 in the middle of the main thread's meetings, on rank 1 before them.
        assert rank == 1 or may_write.wait(30)
        return real(*args)

    booster = Booster("cpu", plugin=ReferencePlugin())
    model, *_ = booster.boost(nn.Linear(64, 64))
    with mock.patch.object(in_place, "write_ranges", held_back):
        for index in range(3):
            booster.save_model(model, tmp_path / f"{index}.safetensors", use_async=True)
            if rank == 1:
                time.sleep(0.1)
            booster.boost(nn.Linear(8, 8))
            may_write.set()
            for _ in range(20):
                DistCoordinator().block_all(name="training")
                DistCoordinator().agree("training", index)
            booster.wait()
            may_write.clear()
    unregister_hooks(hook)
    assert kinds == ["model"] * 3
    assert {path.name for path in tmp_path.iterdir()} == {f"{index}.safetensors" for index in range(3)}


# ---- the hook ``after_save``, which is called when what was saved can be loaded


class Listener:
    def __init__(self):
        self.heard = []

    @hookimpl
    def after_save(self, kind, checkpoint):
        self.heard.append((kind, self.is_there(checkpoint), threading.current_thread() is threading.main_thread()))

    def is_there(self, checkpoint):
        return checkpoint.is_file() or (checkpoint / "latest").is_file()


@pytest.fixture
def listener():
    hooks = Listener()
    register_hooks(hooks)
    yield hooks
    unregister_hooks(hooks)


@pytest.mark.parametrize("use_async", [False, True])
def test_the_files_are_there_when_it_is_called(use_async, listener, tmp_path):
    booster = Booster("cpu")
    model, *_ = booster.boost(nn.Linear(300, 300))
    booster.save_model(model, tmp_path / "model.safetensors", use_async=use_async)
    booster.wait()
    booster.save_checkpoint(tmp_path / "run", step=1, model=model, use_async=use_async)
    booster.wait()
    assert [heard[:2] for heard in listener.heard] == [("model", True), ("checkpoint", True)]


def test_it_is_not_called_for_a_save_that_failed(listener, tmp_path, monkeypatch):
    booster = Booster("cpu")
    model, *_ = booster.boost(nn.Linear(3, 3))

    def fail(*_args, **_kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("booster_checkpoint.save.in_place.write_ranges", fail)
    booster.save_model(model, tmp_path / "model.safetensors", use_async=True)
    with pytest.raises(CheckpointError, match="No space left"):
        booster.wait()
    assert listener.heard == []


def test_a_follower_that_fails_fails_the_save():
    writer = BackgroundWriter()
    go = threading.Event()
    writer.start("save", go.wait)
    writer.follow(lambda: 1 / 0)
    go.set()
    assert isinstance(writer.join(), ZeroDivisionError)


@pytest.mark.parametrize(("patience", "shown"), [(-1.0, 2), (3600.0, 0)])
def test_saves_and_loads_that_last_are_logged_with_their_size_and_time(patience, shown, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("booster_checkpoint.session._PATIENCE_SECONDS", patience)
    booster = Booster("cpu")
    model, *_ = booster.boost(nn.Linear(512, 1024, bias=False))
    path = tmp_path / "model.safetensors"
    with caplog.at_level("INFO", logger="booster"):
        booster.save_model(model, path, use_async=True)
        booster.wait()
        booster.load_model(model, path)
    expected = [
        rf"save_model: 2\.0 MiB in \d+\.\d s at '{tmp_path}'\.",
        rf"load_model: 2\.0 MiB in \d+\.\d s at '{path}'\.",
    ]
    said = [record.getMessage() for record in caplog.records if " MiB in " in record.getMessage()]
    assert len(said) == shown
    assert all(re.fullmatch(pattern, text) for pattern, text in zip(expected, said, strict=False))
