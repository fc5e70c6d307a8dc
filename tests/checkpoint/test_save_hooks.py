"""The hook ``after_save`` is called when what was saved can be loaded, also where it is written in the background."""

import re
import threading

import pytest
from torch import nn

from booster_checkpoint.save.background import BackgroundWriter
from booster_core import Booster, hookimpl
from booster_core.errors import CheckpointError
from booster_core.plugin.hooks import register_hooks, unregister_hooks


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
