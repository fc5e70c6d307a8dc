from __future__ import annotations

import random
import socket
import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.distributed as dist

from booster_core.errors import ConfigError, LaunchError
from booster_core.ranks.launch import (
    ensure_process_group,
    launch,
    launch_from_openmpi,
    launch_from_slurm,
    launch_from_torch,
    shutdown,
)
from booster_core.ranks.store import _openings

TORCHRUN = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost"}
LAUNCHERS = [*TORCHRUN, "MASTER_PORT", "SLURM_PROCID", "SLURM_NPROCS", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS"]


@pytest.fixture(autouse=True)
def _unlaunched(monkeypatch):
    for name in LAUNCHERS:
        monkeypatch.delenv(name, raising=False)
    state = torch.get_rng_state(), np.random.get_state(), random.getstate()  # noqa: NPY002
    yield
    shutdown()
    torch.set_rng_state(state[0])
    np.random.set_state(state[1])  # noqa: NPY002
    random.setstate(state[2])


@pytest.fixture
def port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_a_plain_script_is_a_world_of_one(capsys):
    coordinator = launch_from_torch()
    assert (coordinator.rank, coordinator.world_size, coordinator.local_rank) == (0, 1, 0)
    assert dist.is_initialized()
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [1, 1]
    assert "a single process, backend" in capsys.readouterr().out


def test_torchruns_variables_are_followed(monkeypatch, port):
    for name, value in {**TORCHRUN, "MASTER_PORT": str(port)}.items():
        monkeypatch.setenv(name, value)
    coordinator = launch_from_torch(timeout_seconds=20)
    assert coordinator.world_size == 1
    assert coordinator.timeout_seconds == 20


def test_quiet(capsys):
    launch_from_torch(verbose=False)
    assert capsys.readouterr().out == ""


def test_seeds():
    def draw():
        return random.random(), np.random.rand(), torch.rand(1).item()  # noqa: NPY002

    launch_from_torch(seed=7)
    first = draw()
    shutdown()
    launch_from_torch(seed=7)
    assert draw() == first
    shutdown()
    launch_from_torch(seed=8)
    assert not set(draw()) & set(first)


def test_launching_twice():
    launch_from_torch()
    with pytest.raises(LaunchError, match=r"`launch_from_torch` was called, but .* this is rank 0 of 1\. Launch once"):
        launch_from_torch()
    with pytest.raises(LaunchError, match="`launch` was called, but the process group has been started already"):
        launch(0, 1, "localhost", 29500)


def test_launching_again_after_shutdown(port):
    for _ in range(2):
        assert launch(0, 1, "localhost", port, timeout_seconds=20).local_rank == 0
        shutdown()
        assert not dist.is_initialized()


def test_an_empty_config_is_accepted():
    launch_from_torch({})


@pytest.mark.parametrize("config", ["./config.py", {"zero": 1}])
def test_a_config_is_refused(config):
    with pytest.raises(ConfigError, match=r"`config=.*` has no effect here"):
        launch_from_torch(config)


def test_some_of_torchruns_variables(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(
        ConfigError, match="RANK and WORLD_SIZE are set and LOCAL_RANK, MASTER_ADDR and MASTER_PORT are not"
    ):
        launch_from_torch()


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"])
def test_a_variable_that_is_no_integer(monkeypatch, name):
    for key, value in {**TORCHRUN, "MASTER_PORT": "29500", name: "two"}.items():
        monkeypatch.setenv(key, value)
    with pytest.raises(ConfigError, match=f"environment variable {name}='two' is not an integer"):
        launch_from_torch()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rank": 2}, r"`rank=2` is out of range of the world: it must be from 0 to 1\."),
        ({"rank": -1}, "`rank=-1` is out of range"),
        ({"world_size": 0}, r"`world_size=0` is out of range: it must be at least 1\."),
        ({"port": 0}, "`port=0` is out of range: it must be from 1 to 65535"),
        ({"port": 65536}, "`port=65536` is out of range"),
        ({"local_rank": -1}, "`local_rank=-1` is out of range"),
        ({"seed": -1}, "`seed=-1` is out of range"),
        ({"host": ""}, "`host=''` is empty"),
        ({"timeout_seconds": 0}, "`timeout_seconds=0` is not a positive"),
        ({"timeout_seconds": float("nan")}, "`timeout_seconds=nan` is not a positive"),
        ({"config": {"a": 1}}, "has no effect here"),
    ],
)
def test_wrong_values_are_refused_before_anything_opens(monkeypatch, changes, words):
    monkeypatch.setattr(sys.modules[launch.__module__], "_start", lambda *_, **__: pytest.fail("went on"))
    values = {"rank": 0, "world_size": 2, "host": "localhost", "port": 29500, **changes}
    with pytest.raises(ConfigError, match=words):
        launch(**values)


@pytest.mark.parametrize("name", ["rank", "world_size", "port", "local_rank", "seed", "host"])
def test_wrong_types_are_refused(name):
    values = {"rank": 0, "world_size": 2, "host": "localhost", "port": 29500, name: 1.5}
    with pytest.raises(TypeError, match=f"`{name}` must be a"):
        launch(**values)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA here, so nccl can be asked for")
def test_a_backend_that_cannot_run_here():
    with pytest.raises(ConfigError, match="`backend='nccl'` needs CUDA"):
        launch_from_torch(backend="nccl")


@pytest.mark.parametrize(
    ("launcher", "call", "names"),
    [
        (launch_from_slurm, "launch_from_slurm", "SLURM_PROCID, SLURM_NPROCS and SLURM_LOCALID"),
        (launch_from_openmpi, "launch_from_openmpi", "OMPI_COMM_WORLD_RANK, .* and OMPI_COMM_WORLD_LOCAL_RANK"),
    ],
)
def test_a_launcher_that_is_not_there(launcher, call, names):
    with pytest.raises(ConfigError, match=f"`{call}` reads .*, and {names} are not set"):
        launcher("localhost", 29500)


@pytest.mark.parametrize(
    ("launcher", "variables"),
    [
        (launch_from_slurm, {"SLURM_PROCID": "0", "SLURM_NPROCS": "1", "SLURM_LOCALID": "0"}),
        (
            launch_from_openmpi,
            {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0"},
        ),
    ],
)
def test_launchers_variables_are_followed(monkeypatch, port, launcher, variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert launcher("localhost", port, timeout_seconds=20).world_size == 1


def test_ensuring_a_process_group_alone(capsys):
    state = torch.get_rng_state()
    assert ensure_process_group().world_size == 1
    assert ensure_process_group().world_size == 1
    assert torch.equal(torch.get_rng_state(), state)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("RANK", r"`launch_from_torch\(\)`"),
        ("SLURM_STEP_NUM_TASKS", r"`launch_from_slurm\(host, port\)`"),
        ("OMPI_COMM_WORLD_SIZE", r"`launch_from_openmpi\(host, port\)`"),
    ],
)
def test_ensuring_a_process_group_under_a_launcher(monkeypatch, name, call):
    monkeypatch.setenv(name, "2")
    with pytest.raises(ConfigError, match=f"{name} is set, .* Call {call} first"):
        ensure_process_group()


def test_port_in_use():
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(LaunchError, match=f"Rank 0 cannot open 127.0.0.1:{port}: the port is in use"):
            launch(0, 2, "127.0.0.1", port, timeout_seconds=3)


def test_a_stranger_at_the_port():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(LaunchError, match=f"connected to 127.0.0.1:{port}, but what listens there did not answer"):
            launch(1, 2, "127.0.0.1", port, timeout_seconds=2)


def test_nobody_at_the_port(port):
    with pytest.raises(LaunchError, match=f"Rank 1 could not reach rank 0 at 127.0.0.1:{port} within 1 s: .*refused"):
        launch(1, 2, "127.0.0.1", port, timeout_seconds=1)


def test_a_host_that_does_not_exist(port):
    with pytest.raises(LaunchError, match=f"could not reach rank 0 at no-such-host.invalid:{port} within 1 s"):
        launch(1, 2, "no-such-host.invalid", port, timeout_seconds=1)


def test_the_other_ranks_do_not_come(port):
    with pytest.raises(LaunchError, match=r"did not start: waited 1 s for ranks 1 and 2 of 3\. Check that all 3"):
        launch(0, 3, "127.0.0.1", port, timeout_seconds=1)


def test_two_processes_of_one_rank(port):
    server = dist.TCPStore("127.0.0.1", port, is_master=True)
    server.add(f"booster/joined/{next(_openings) + 1}/1", 1)
    with pytest.raises(LaunchError, match=f"rank 1 has joined the run at 127.0.0.1:{port} already"):
        launch(1, 2, "127.0.0.1", port, timeout_seconds=5)


def test_a_process_that_found_a_stranger_ends():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        call = f"from booster_core.ranks.launch import launch; launch(1, 2, '127.0.0.1', {port}, timeout_seconds=1)"
        done = subprocess.run([sys.executable, "-c", call], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "did not answer as rank 0" in done.stderr.splitlines()[-1]


def test_the_function_is_not_hidden_by_its_module():
    lines = (
        "import sys, booster_core.ranks.launch",
        "from booster_core import launch",
        "assert callable(launch) and callable(booster_core.launch)",
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules",
    )
    subprocess.run([sys.executable, "-c", "\n".join(lines)], check=True, timeout=60)
