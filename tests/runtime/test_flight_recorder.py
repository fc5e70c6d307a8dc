import os
import socket

import pytest

from booster_core.errors import LaunchError
from booster_core.ranks import launch as launch_module
from booster_runtime.watch.flight_recorder import keep_flight_record

NAMES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCH_NCCL_ASYNC_ERROR_HANDLING")


def test_collectives_are_recorded_and_written_at_a_timeout():
    environment = {"PATH": "/bin"}
    keep_flight_record(environment, "cpu:gloo,cuda:nccl")
    assert environment == {"PATH": "/bin", **dict(zip(NAMES, ("2000", "1", "3"), strict=True))}


@pytest.mark.parametrize("name", [*NAMES, "TORCH_NCCL_TRACE_BUFFER_SIZE", "NCCL_ASYNC_ERROR_HANDLING"])
def test_what_the_user_has_set_stays(name):
    environment = {name: "0"}
    keep_flight_record(environment, "cpu:gloo,cuda:nccl")
    assert environment[name] == "0"
    assert len(environment) == len(NAMES)


@pytest.mark.parametrize(("backend", "is_set"), [("cpu:gloo,cuda:nccl", True), ("gloo", False)])
def test_a_launch_sets_what_the_backend_has(monkeypatch, backend, is_set):
    for name in NAMES:
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    monkeypatch.setattr(launch_module, "choose_backend", lambda _: backend)
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(LaunchError, match="port"):
        launch_module.launch(0, 2, "127.0.0.1", taken.getsockname()[1], timeout_seconds=2)
    assert [name in os.environ for name in NAMES] == [True, is_set, is_set]
