"""What launchers tell a process by environment variables, and what this machine has: its accelerator and its backend.

One reader per launcher tells a process its rank and where to meet the others; `detect` chooses among them. No other
module of this distribution reads environment variables.

Nothing here knows a kind of device: CUDA, ROCm (which torch calls CUDA), XPU and those that extend torch from outside,
such as NPU and HPU, are what ``torch.accelerator`` says, with the backend that is registered for them.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from booster_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

_MAX_PORT = 65535


def check_integer(name: str, value: int, low: int, high: int | None, of: str = "") -> None:
    """Check an argument.

    Raises:
        TypeError: If it is not an int.
        ConfigError: If it is out of range.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        msg = f"`{name}` must be an int, not {type(value).__name__}."
        raise TypeError(msg)
    if value < low or (high is not None and value > high):
        bounds = f"at least {low}" if high is None else f"from {low} to {high}"
        msg = f"`{name}={value}` is out of range{' ' + of if of else ''}: it must be {bounds}."
        raise ConfigError(msg)


@dataclass(frozen=True)
class Environment:
    """A process's place in a run.

    Args:
        rank: This process's rank, ``0 <= rank < world_size``.
        world_size: Number of processes.
        local_rank: This process's index on its host; ``None`` to count it by host.
        address: Host on which rank 0 runs.
        port: A free port there, or the port of the store that torchrun's agent serves.

    Raises:
        TypeError: If a value has the wrong type.
        ConfigError: If a value is out of range.
    """

    rank: int
    world_size: int
    local_rank: int | None
    address: str
    port: int

    def __post_init__(self) -> None:
        check_integer("world_size", self.world_size, 1, None)
        check_integer("rank", self.rank, 0, self.world_size - 1, "of the world")
        check_integer("port", self.port, 1, _MAX_PORT)
        if self.local_rank is not None:
            check_integer("local_rank", self.local_rank, 0, None)
        if not isinstance(self.address, str):
            msg = f"The address of rank 0's host must be a str, not {type(self.address).__name__}."
            raise TypeError(msg)
        if not self.address:
            msg = "The address of rank 0's host is empty."
            raise ConfigError(msg)


ALONE = Environment(rank=0, world_size=1, local_rank=0, address="localhost", port=29500)
"""Of a process that no launcher started as one of several; it opens no port."""


_SIZES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")
"""Variables in which launchers say how many processes they started; 1 is an answer."""


def detect() -> Environment:
    """Return what the launcher of this process says, or `ALONE`.

    torchrun comes first, because each of the others may start it. A task of ``srun`` counts as SLURM's, also where
    SLURM speaks PMI to it.

    Raises:
        ConfigError: If a launcher's variables are incomplete or wrong.
    """
    if _read("RANK") or _count("WORLD_SIZE") > 1 or _count("LOCAL_RANK") > 0:
        return from_torchrun() if _read("LOCAL_RANK") else from_kubeflow()
    if _count("OMPI_COMM_WORLD_SIZE") > 1:
        return from_openmpi()
    if _count("PMI_SIZE") > 1 and _read("PMI_SIZE") != _read("SLURM_STEP_NUM_TASKS"):
        return from_pmi()
    if _count("SLURM_STEP_NUM_TASKS") > 1:
        return from_slurm()
    if _read("PMIX_RANK") and not any(map(_read, _SIZES)):
        msg = (
            f"PMIX_RANK={_read('PMIX_RANK')} is set: a PMIx launcher such as `prun` started this process, perhaps as "
            "one of several. PMIx tells processes their number by no variable. Set RANK, WORLD_SIZE, MASTER_ADDR and "
            "MASTER_PORT in each, pass rank, world size, host and port to `launch`, or unset PMIX_RANK for a single "
            "process."
        )
        raise ConfigError(msg)
    return ALONE


def from_torchrun() -> Environment:
    """Read torchrun's variables."""
    return _environment("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK")


def from_kubeflow() -> Environment:
    """Read what Kubeflow's training operator sets, and many scripts: torchrun's variables without LOCAL_RANK."""
    return _environment("torchrun", "RANK", "WORLD_SIZE", None)


def from_openmpi(host: str | None = None, port: int | None = None) -> Environment:
    """Read the variables of Open MPI's ``mpirun``, and MASTER_ADDR and MASTER_PORT unless they are passed."""
    names = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK")
    return _environment("mpirun", *names, host=host, port=port)


def from_pmi(host: str | None = None, port: int | None = None) -> Environment:
    """Read the variables of the ``mpiexec`` of MPICH and Intel MPI, and MASTER_ADDR and MASTER_PORT unless passed."""
    local_rank = "MPI_LOCALRANKID" if _read("MPI_LOCALRANKID") else None
    return _environment("mpiexec", "PMI_RANK", "PMI_SIZE", local_rank, host=host, port=port)


def from_slurm(host: str | None = None, port: int | None = None) -> Environment:
    """Read the variables of SLURM's ``srun``.

    Without MASTER_ADDR, rank 0 is on the step's first node; without MASTER_PORT, the port follows from the last digits
    of the job's id, as in Lightning Fabric.
    """
    if host is None and not _read("MASTER_ADDR"):
        host = _first_node(_read("SLURM_STEP_NODELIST") or _read("SLURM_NODELIST")) or None
    if port is None and not _read("MASTER_PORT") and _read("SLURM_JOB_ID"):
        port = _slurm_port()
    # Only srun sets SLURM_STEP_NUM_TASKS: in a batch script, SLURM_NTASKS counts tasks that do not run.
    return _environment("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", host=host, port=port)


@dataclass(frozen=True, kw_only=True)
class SlurmStep:
    """The tasks that one ``srun`` started.

    Args:
        num_tasks: Number of them, of this process among others.
        num_nodes: Nodes that they are on.
        first_node: Name of the first one.
        port: A port for them to meet at, from the job's id.
        name: Job and step.
    """

    num_tasks: int
    num_nodes: int
    first_node: str
    port: int
    name: str


def slurm_step() -> SlurmStep | None:
    """Return the step of ``srun`` that this process is a task of, if any."""
    if not _count("SLURM_STEP_NUM_TASKS"):
        return None
    return SlurmStep(
        num_tasks=_integer("SLURM_STEP_NUM_TASKS"),
        num_nodes=max(1, _count("SLURM_STEP_NUM_NODES")),
        first_node=_first_node(_read("SLURM_STEP_NODELIST") or _read("SLURM_NODELIST")) or "localhost",
        port=_slurm_port(),
        name=f"{_read('SLURM_JOB_ID')}.{_read('SLURM_STEP_ID')}",
    )


def num_nodes_of_job() -> int:
    """Return the number of nodes of the SLURM job that this process belongs to; 0 where it does not."""
    return _count("SLURM_JOB_NUM_NODES")


def has_agent_store(environment: Environment) -> bool:
    """Return whether torchrun's agent serves a store at the environment's address."""
    is_served = _read("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return is_served and (_read("MASTER_ADDR"), _read("MASTER_PORT")) == (environment.address, str(environment.port))


def agent_error_file() -> str | None:
    """Return the file in which torchrun's agent expects the reason of a failure, where there is an agent."""
    return _read("TORCHELASTIC_ERROR_FILE") or None


def local_rank_of_launcher() -> int | None:
    """Return the local rank that torchrun or a script set, if any."""
    return _integer("LOCAL_RANK") if _read("LOCAL_RANK") else None


def is_switched_on(name: str, effect: str) -> bool:
    """Return whether a feature is on: it is, unless its environment variable is 0.

    Raises:
        ConfigError: If the variable is neither 0 nor 1; the message says which ``effect`` 1 has.
    """
    text = _read(name) or "1"
    if text not in ("0", "1"):
        msg = f"{name}={text!r} must be 1 ({effect}) or 0."
        raise ConfigError(msg)
    return text == "1"


def variables(*names: str) -> dict[str, str]:
    """Return those of some environment variables that are set, for a report."""
    return {name: os.environ[name] for name in names if name in os.environ}


def _environment(
    launcher: str, rank: str, world_size: str, local_rank: str | None, host: str | None = None, port: int | None = None
) -> Environment:
    """Read the named variables, and MASTER_ADDR and MASTER_PORT where host and port are not known."""
    names = [rank, world_size, local_rank, host is None and "MASTER_ADDR", port is None and "MASTER_PORT"]
    missing = [name for name in names if name and not _read(name)]
    found = [name for name in names if name and _read(name)]
    if missing:
        msg = (
            f"Of {launcher}'s environment variables, {_listed(found) if found else 'none is'} set and "
            f"{_listed(missing)} not. Start the script by `{launcher}`, set all of them, or none to run as a single "
            "process, or pass rank, world size, host and port to `launch`."
        )
        raise ConfigError(msg)
    return Environment(
        rank=_integer(rank),
        world_size=_integer(world_size),
        local_rank=_integer(local_rank) if local_rank else None,
        address=_read("MASTER_ADDR") if host is None else host,
        port=_integer("MASTER_PORT") if port is None else port,
    )


def _read(name: str) -> str:
    return os.environ.get(name, "").strip()


def _integer(name: str) -> int:
    try:
        return int(_read(name))
    except ValueError:
        msg = f"The environment variable {name}={_read(name)!r} is not an integer."
        raise ConfigError(msg) from None


def _count(name: str) -> int:
    return _integer(name) if _read(name) else 0


def _slurm_port() -> int:
    return 15000 + _count("SLURM_JOB_ID") % 10000


def _first_node(nodes: str) -> str:
    """Return the first host of a SLURM node list such as ``gpu[003-006,9],login``."""
    return re.sub(r"\[(\w+)[^]]*\]", r"\1", nodes).replace(",", " ").partition(" ")[0]


def _listed(names: Sequence[str]) -> str:
    """Return "A is", "A and B are" or "A, B and C are"."""
    return f"{names[0]} is" if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]} are"


def accelerator() -> str | None:
    """Return the type of the device that ranks train on here, such as ``"cuda"``; ``None`` where that is the CPU.

    One without a backend of its own for collectives (Apple's MPS) is used only where it is asked for.
    """
    import torch

    device = torch.accelerator.current_accelerator(check_available=True)
    return None if device is None or _own_backend(device.type) is None else device.type


def choose_backend(backend: str | None) -> str:
    """Return the backend to use: by default those of the CPU and of the accelerator, else the one asked for.

    Raises:
        ConfigError: If that belongs to devices which this machine does not have.
    """
    from torch.distributed import Backend

    here = accelerator()
    if backend is None:
        return "gloo" if here is None else f"cpu:gloo,{here}:{_own_backend(here)}"
    for kind in Backend.default_device_backend_map:
        own = _own_backend(kind)
        if own is not None and own in backend and kind != here:
            msg = (
                f"`backend={backend!r}` needs a device of type '{kind}', and torch sees none here. Leave `backend` "
                "out, or use 'gloo'."
            )
            raise ConfigError(msg)
    return backend


def use_device(local_rank: int) -> torch.device | None:
    """Make the device of a local rank the current one, where there is an accelerator."""
    import torch

    kind = accelerator()
    if kind is None:
        return None
    # Modulo: a task of srun may see its own device alone, whatever its local rank.
    device = torch.device(kind, local_rank % torch.accelerator.device_count())
    torch.accelerator.set_device_index(device)
    return device


def describe_devices() -> dict[str, str]:
    """Return the name and the memory of each device of the accelerator, by type and index."""
    import torch

    kind = accelerator()
    found = {}
    for index in range(0 if kind is None else torch.accelerator.device_count()):
        read = getattr(torch.get_device_module(kind), "get_device_properties", None)
        properties = None if read is None else read(index)
        memory = getattr(properties, "total_memory", 0)
        found[f"{kind} device {index}"] = f"{getattr(properties, 'name', 'unnamed')}, {memory / 2**30:.1f} GiB"
    return found


def _own_backend(kind: str) -> str | None:
    """Return the backend that torch has for a device type; ``None`` where that is the CPU's, or there is none."""
    from torch.distributed import get_default_backend_for_device

    try:
        backend = get_default_backend_for_device(kind)
    except ValueError:
        return None
    return None if backend == "gloo" else backend
