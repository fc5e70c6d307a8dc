import random
import socket
import subprocess
import sys
from datetime import timedelta
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from free_ports import free_port

from booster_core import Booster
from booster_core.errors import ConfigError, LaunchError
from booster_core.ranks.environments import Environment
from booster_core.ranks.launch import (
    ensure_process_group,
    launch,
    launch_from_openmpi,
    launch_from_slurm,
    launch_from_torch,
    shutdown,
)
from booster_core.ranks.world import current_world

TORCHRUN = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost"}
SLURM = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_LOCALID": "0"}
OPENMPI = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
LAUNCHERS = [*TORCHRUN, "MASTER_PORT", *SLURM, "SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_ID", *OPENMPI]


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
    return free_port()


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


def test_launching_twice():
    launch_from_torch()
    for call in (launch_from_torch, launch, lambda: launch(0, 1, "localhost", 29500)):
        with pytest.raises(
            LaunchError,
            match=r"started already: this is rank 0 of 1\. Launch.*`TrainingArguments`.*`booster_core\.shutdown\(\)`",
        ):
            call()


@pytest.mark.parametrize("config", ["./config.py", {"zero": 1}])
def test_a_config_is_refused(config):
    with pytest.raises(ConfigError, match=r"`config=.*` has no effect here"):
        launch_from_torch(config)


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
        ({"host": ""}, "address of rank 0's host is empty"),
        ({"timeout_seconds": 0}, "`timeout_seconds=0` is not a positive"),
        ({"timeout_seconds": float("nan")}, "`timeout_seconds=nan` is not a positive"),
        ({"config": {"a": 1}}, "has no effect here"),
        ({"port": None}, r"takes rank, world size, host and port together; got 0, 2, localhost and None\."),
        (
            {"environment": Environment(0, 2, 0, "localhost", 29500)},
            "`environment` takes the place of rank, world size",
        ),
    ],
)
def test_wrong_values_are_refused_before_anything_opens(monkeypatch, changes, words):
    monkeypatch.setattr(sys.modules[launch.__module__], "open_store", lambda *_, **__: pytest.fail("went on"))
    values = {"rank": 0, "world_size": 2, "host": "localhost", "port": 29500, **changes}
    with pytest.raises(ConfigError, match=words):
        launch(**values)


@pytest.mark.parametrize("name", ["rank", "world_size", "port", "local_rank", "seed", "host"])
def test_wrong_types_are_refused(name):
    values = {"rank": 0, "world_size": 2, "host": "localhost", "port": 29500, name: 1.5}
    with pytest.raises(
        TypeError, match="address of rank 0's host must be a str" if name == "host" else f"`{name}` must be"
    ):
        launch(**values)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA here, so nccl can be asked for")
def test_a_backend_that_cannot_run_here():
    with pytest.raises(ConfigError, match="`backend='nccl'` needs a device of type 'cuda'"):
        launch_from_torch(backend="nccl")


@pytest.mark.parametrize(
    ("call", "names"),
    [
        (
            launch_from_slurm,
            "Of srun's .*, none is set and SLURM_PROCID, SLURM_STEP_NUM_TASKS and SLURM_LOCALID are not",
        ),
        (launch_from_openmpi, "Of mpirun's .*, none is set and OMPI_.*, .* and OMPI_COMM_WORLD_LOCAL_RANK are not"),
    ],
)
def test_launchers_that_did_not_start_this_process(call, names):
    with pytest.raises(ConfigError, match=names):
        call("localhost", 29500)


@pytest.mark.parametrize(("call", "variables"), [(launch_from_slurm, SLURM), (launch_from_openmpi, OPENMPI)])
def test_variables_of_launchers_are_followed(monkeypatch, port, call, variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert call("localhost", port, timeout_seconds=20).world_size == 1


def test_arguments_by_position_as_in_older_scripts(monkeypatch, capsys):
    def draw():
        return random.random(), np.random.rand(), torch.rand(1).item()  # noqa: NPY002

    for name, value in {**SLURM, **OPENMPI}.items():
        monkeypatch.setenv(name, value)
    launch_from_torch({}, "gloo", 7, False)
    first = draw()
    shutdown()
    for call in (launch_from_slurm, launch_from_openmpi):
        call("localhost", 29500, "gloo", 7, False)
        assert draw() == first
        shutdown()
    launch(0, 1, "localhost", 29500, "gloo", 0, 7, False)
    assert draw() == first
    shutdown()
    launch(0, 1, "localhost", 29500, "gloo", 0, 8, False)
    assert not set(draw()) & set(first)
    assert capsys.readouterr().out == ""


class _Cuda:
    """What torch says of CUDA devices, of which this machine has none."""

    def __init__(self, monkeypatch, num_devices):
        self.current = None
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device("cuda"))
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: num_devices)
        monkeypatch.setattr(torch.accelerator, "set_device_index", lambda device: setattr(self, "current", device))


@pytest.mark.parametrize(("local_rank", "num_devices", "index"), [(3, 4, 3), (3, 1, 0), (5, 4, 1)])
def test_the_device_is_the_local_rank_modulo_the_visible_ones(monkeypatch, local_rank, num_devices, index):
    cuda = _Cuda(monkeypatch, num_devices)
    launch(0, 1, "localhost", 29500, "gloo", local_rank)
    assert cuda.current == torch.device("cuda", index)
    assert current_world().local_rank == local_rank


@pytest.mark.parametrize(
    ("backend", "bound"), [(None, torch.device("cuda", 1)), ("nccl", torch.device("cuda", 1)), ("gloo", None)]
)
def test_nccl_is_bound_to_the_device(monkeypatch, backend, bound):
    _Cuda(monkeypatch, 2)
    for name in ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCH_NCCL_ASYNC_ERROR_HANDLING"):
        monkeypatch.setenv(name, "0")  # a launch with nccl sets them where the user has not
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    # A build for CPUs has none.
    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=SimpleNamespace), raising=False)
    passed = {}
    init = dist.init_process_group

    def record(backend, *, device_id, pg_options, **options):
        passed.update(backend=backend, device_id=device_id, options=pg_options)
        init("gloo", **options)

    monkeypatch.setattr(dist, "init_process_group", record)
    launch(0, 1, "localhost", 29500, backend, 1, timeout_seconds=70)
    given = passed.pop("options")
    assert passed == {"backend": backend or "cpu:gloo,cuda:nccl", "device_id": bound}
    if backend == "gloo":
        assert given is None
    else:
        assert vars(given) == {"is_high_priority_stream": True, "_timeout": timedelta(seconds=70)}


def test_ensuring_a_process_group_alone(capsys):
    state = torch.get_rng_state()
    assert ensure_process_group().world_size == 1
    assert ensure_process_group().world_size == 1
    assert torch.equal(torch.get_rng_state(), state)
    assert capsys.readouterr().out == ""


def test_ensuring_a_process_group_under_a_launcher(monkeypatch):
    several = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "node[1-2]", "SLURM_JOB_ID": "12345"}
    for name, value in {**SLURM, **several}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(
        ConfigError, match=r"started this process as one of 2, .* Call `booster_core\.launch\(\)` first"
    ):
        ensure_process_group()
    with pytest.raises(ConfigError, match="started this process as one of 2"):
        Booster("cpu").prepare_dataloader([1, 2, 3])


def test_port_in_use():
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(LaunchError, match=rf"Rank 0 cannot serve the store at 127.0.0.1:{port}: .*EADDRINUSE"):
            launch(0, 2, "127.0.0.1", port, timeout_seconds=3)


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
    server.set("booster/begun", "the process\nits launch")
    server.add("booster/its launch/joined/1", 1)
    with pytest.raises(LaunchError, match=f"rank 1 has joined the run at 127.0.0.1:{port} already"):
        launch(1, 2, "127.0.0.1", port, timeout_seconds=5)


def test_a_second_rank_0_elsewhere_leaves_the_run_alone(port):
    server = dist.TCPStore("127.0.0.1", port, is_master=True, multi_tenant=True)  # which this process serves once
    server.set("booster/begun", "another process\nits launch")
    with pytest.raises(LaunchError, match=f"rank 0 has joined the run at 127.0.0.1:{port} already"):
        launch(0, 2, "127.0.0.1", port, timeout_seconds=5)
    assert server.get("booster/begun") == b"another process\nits launch"


def test_a_store_of_another_library(port):
    server = dist.TCPStore("127.0.0.1", port, is_master=True)
    with pytest.raises(LaunchError, match=f"reached a store at 127.0.0.1:{port}, but rank 0 has begun no launch there"):
        launch(1, 2, "127.0.0.1", port, timeout_seconds=1)
    del server


def test_an_address_that_is_not_rank_0s_own(port):
    with pytest.raises(LaunchError, match=r"192\.0\.2\.1 is not an address of this host, .*\. Set the host \("):
        launch(0, 2, "192.0.2.1", port, timeout_seconds=1)


def test_an_address_that_no_resolver_knows(port):
    with pytest.raises(LaunchError, match=r"the name nowhere\.invalid is not known on this host .*\. Set the host \("):
        launch(0, 2, "nowhere.invalid", port, timeout_seconds=1)


def test_a_process_that_met_another_program_ends():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        call = f"from booster_core.ranks.launch import launch; launch(1, 2, '127.0.0.1', {port}, timeout_seconds=1)"
        done = subprocess.run([sys.executable, "-c", call], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    said = f"connected to 127.0.0.1:{port}, but what listens there did not answer as rank 0"
    assert said in done.stderr.splitlines()[-1]
