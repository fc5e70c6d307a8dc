"""Start of a distributed run: process group, device, seeds; the one place that reads environment variables.

`launch_from_torch` serves ``torchrun`` and plain ``python``, `launch_from_slurm` and `launch_from_openmpi` their
launchers, and `launch` processes started by hand. All check what they were given before anything is opened.
"""

from __future__ import annotations

import atexit
import os
import random
import sys
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from booster_core.errors import ConfigError, LaunchError
from booster_core.plugin.hooks import hook_relay
from booster_core.ranks.coordinator import DistCoordinator
from booster_core.ranks.host import Host, distinct_names, this_host
from booster_core.ranks.world import DEFAULT_TIMEOUT_SECONDS, close_world, current_world, open_world

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.distributed import Store  # type: ignore[attr-defined] # torch does not list it as public

    from booster_core.ranks.world import World

_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_SLURM = ("SLURM_PROCID", "SLURM_NPROCS", "SLURM_LOCALID")
_OPENMPI = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK")
_MAX_PORT = 65535
_LAST_SECONDS = 10.0
"""How long rank 0, which holds the store, stays at the end for ranks that are not through yet."""
_LET_GO_SECONDS = 0.1
_closed_at = float("-inf")
"""When this process has closed its last group, on `time.monotonic`'s clock."""
_MAX_SEED = 2**32 - 1


@dataclass(frozen=True, kw_only=True)
class _Start:
    """What a run is started with, checked when made."""

    rank: int
    world_size: int
    host: str
    port: int
    backend: str | None
    local_rank: int | None
    seed: int
    timeout_seconds: float
    url: str

    def __post_init__(self) -> None:
        _check_integer("world_size", self.world_size, 1, None)
        _check_integer("rank", self.rank, 0, self.world_size - 1, "of the world")
        _check_integer("port", self.port, 1, _MAX_PORT)
        _check_integer("seed", self.seed, 0, _MAX_SEED)
        if self.local_rank is not None:
            _check_integer("local_rank", self.local_rank, 0, None)
        if not isinstance(self.host, str):
            msg = f"`host` must be a str, not {type(self.host).__name__}."
            raise TypeError(msg)
        if not self.host:
            msg = "`host=''` is empty. Pass the host on which rank 0 runs."
            raise ConfigError(msg)
        if not 0 < self.timeout_seconds < float("inf"):
            msg = f"`timeout_seconds={self.timeout_seconds}` is not a positive, finite number of seconds."
            raise ConfigError(msg)


def launch(
    rank: int,
    world_size: int,
    host: str,
    port: int,
    backend: str | None = None,
    local_rank: int | None = None,
    seed: int = 1024,
    verbose: bool = True,  # noqa: FBT001, FBT002 - positional in the scripts that people bring
    *,
    config: Mapping[str, Any] | None = None,
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
) -> DistCoordinator:
    """Start the process group of a run whose processes were started by hand.

    Args:
        rank: This process' rank, ``0 <= rank < world_size``.
        world_size: Number of processes.
        host: Host on which rank 0 runs.
        port: A free port there.
        backend: As for ``torch.distributed.init_process_group``; by default ``cpu:gloo,cuda:nccl`` where there is
            CUDA, else ``gloo``.
        local_rank: This process' index on its host, and of its CUDA device; by default counted by host name.
        seed: Seed of Python's, NumPy's and torch's random numbers, the same on every rank.
        verbose: Print a line on rank 0.
        config: Must be empty; options belong to the plugin.
        timeout_seconds: How long collective calls wait for missing ranks, from the launch on.

    Returns:
        The coordinator of the world.

    Raises:
        ConfigError: If a value is wrong; nothing has been opened then.
        LaunchError: If the run cannot be started: host unreachable, port in use, ranks missing, started already.

    Collective: every rank of the run.
    """
    _check_config(config)
    _check_not_started("launch")
    bracketed = f"[{host}]" if ":" in str(host) else host
    start = _Start(
        rank=rank,
        world_size=world_size,
        host=host,
        port=port,
        backend=backend,
        local_rank=local_rank,
        seed=seed,
        timeout_seconds=timeout_seconds,
        url=f"tcp://{bracketed}:{port}",
    )
    return _start(start, verbose=verbose)


def launch_from_torch(
    config: Mapping[str, Any] | None = None,
    backend: str | None = None,
    seed: int = 1024,
    verbose: bool = True,  # noqa: FBT001, FBT002 - positional in the scripts that people bring
    *,
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
) -> DistCoordinator:
    """Start the process group of a run under ``torchrun``; of this process alone where nothing launched it.

    Args:
        config: Must be empty; options belong to the plugin.
        backend: As for `launch`.
        seed: As for `launch`.
        verbose: As for `launch`.
        timeout_seconds: As for `launch`.

    Raises:
        ConfigError: If some of torchrun's variables are missing or wrong.
        LaunchError: As for `launch`.

    Collective: every rank of the run.
    """
    _check_config(config)
    _check_not_started("launch_from_torch")
    found = [name for name in _TORCHRUN if os.environ.get(name)]
    if not found:
        return _start_alone(backend, seed, timeout_seconds, verbose=verbose)
    if len(found) < len(_TORCHRUN):
        missing = [name for name in _TORCHRUN if name not in found]
        msg = (
            f"Of torchrun's environment variables, {_enumerate(found)} {'is' if len(found) == 1 else 'are'} set and "
            f"{_enumerate(missing)} {'is' if len(missing) == 1 else 'are'} not. Start the script by `torchrun`, or set "
            "all of them, or none to run as a single process."
        )
        raise ConfigError(msg)
    start = _Start(
        rank=_integer_from("RANK"),
        world_size=_integer_from("WORLD_SIZE"),
        host=os.environ["MASTER_ADDR"],
        port=_integer_from("MASTER_PORT"),
        backend=backend,
        local_rank=_integer_from("LOCAL_RANK"),
        seed=seed,
        timeout_seconds=timeout_seconds,
        url="env://",
    )
    return _start(start, verbose=verbose)


def launch_from_slurm(
    host: str,
    port: int,
    backend: str | None = None,
    seed: int = 1024,
    verbose: bool = True,  # noqa: FBT001, FBT002 - positional in the scripts that people bring
    *,
    config: Mapping[str, Any] | None = None,
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
) -> DistCoordinator:
    """Start the process group of a run whose processes are tasks of SLURM's ``srun``.

    Args:
        host: Host of the first task.
        port: A free port there.
        backend: As for `launch`.
        seed: As for `launch`.
        verbose: As for `launch`.
        config: As for `launch`.
        timeout_seconds: As for `launch`.

    Raises:
        ConfigError: If SLURM's variables are missing or wrong.
        LaunchError: As for `launch`.

    Collective: every rank of the run.
    """
    rank, world_size, local_rank = _integers_of_launcher("launch_from_slurm", "srun", _SLURM)
    return launch(
        rank, world_size, host, port, backend, local_rank, seed, verbose, config=config, timeout_seconds=timeout_seconds
    )


def launch_from_openmpi(
    host: str,
    port: int,
    backend: str | None = None,
    seed: int = 1024,
    verbose: bool = True,  # noqa: FBT001, FBT002 - positional in the scripts that people bring
    *,
    config: Mapping[str, Any] | None = None,
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
) -> DistCoordinator:
    """Start the process group of a run whose processes were started by Open MPI's ``mpirun``.

    Args:
        host: Host of rank 0.
        port: A free port there.
        backend: As for `launch`.
        seed: As for `launch`.
        verbose: As for `launch`.
        config: As for `launch`.
        timeout_seconds: As for `launch`.

    Raises:
        ConfigError: If Open MPI's variables are missing or wrong.
        LaunchError: As for `launch`.

    Collective: every rank of the run.
    """
    rank, world_size, local_rank = _integers_of_launcher("launch_from_openmpi", "mpirun", _OPENMPI)
    return launch(
        rank, world_size, host, port, backend, local_rank, seed, verbose, config=config, timeout_seconds=timeout_seconds
    )


def ensure_process_group() -> DistCoordinator:
    """Return the coordinator of the present process group; start one of this process alone where nothing launched it.

    For `Booster`, so that a script without any launch runs as a single process. Seeds nothing.

    Raises:
        ConfigError: If a launcher started this process as one of several, but the script did not call `launch`.

    Collective: none where a process group exists or nothing launched this process.
    """
    if current_world().process_group is not None:
        return DistCoordinator()
    for call, found in (
        ("launch_from_torch()", [name for name in _TORCHRUN if os.environ.get(name)]),
        ("launch_from_slurm(host, port)", _counts_above_one("SLURM_STEP_NUM_TASKS")),
        ("launch_from_openmpi(host, port)", _counts_above_one("OMPI_COMM_WORLD_SIZE")),
    ):
        if found:
            msg = (
                f"{_enumerate(found)} {'is' if len(found) == 1 else 'are'} set, so a launcher started this process as "
                f"one of several, but the process group has not been started. Call `{call}` first."
            )
            raise ConfigError(msg)
    return _start_alone(None, None, DEFAULT_TIMEOUT_SECONDS, verbose=False)


def launched_world_size() -> tuple[int, str]:
    """Return how many processes a launcher says it started, and the call that would join them; 1 where none says so.

    Whether or not the process group has been started.

    Collective: none.
    """
    for name, call in (
        ("WORLD_SIZE", "launch_from_torch()"),
        ("SLURM_STEP_NUM_TASKS", "launch_from_slurm(host, port)"),
        ("OMPI_COMM_WORLD_SIZE", "launch_from_openmpi(host, port)"),
    ):
        text = os.environ.get(name, "")
        if text.isdigit() and int(text) > 1:
            return int(text), call
    return 1, "launch_from_torch()"


def shutdown() -> None:
    """End this process' part of the run: destroy the process group. Happens by itself when the interpreter ends.

    Collective: none; ranks may end one after the other.
    """
    global _closed_at  # noqa: PLW0603 - as the one default group that torch has in a process
    if current_world().process_group is not None:
        _closed_at = time.monotonic()
    close_world()


def _at_exit() -> None:
    """Shut down, unless the interpreter ends by a failure that the others have not heard of yet."""
    monitor = current_world().monitor
    if monitor is not None and not monitor.is_failing:
        monitor.leave(getattr(sys, "last_value", None), _LAST_SECONDS)
    shutdown()
    # gloo's threads let go of a collective's tensors only after its result is there, for which they need the
    # interpreter's lock; one that still waits for it when the interpreter is gone aborts the process.
    time.sleep(max(0.0, _closed_at + _LET_GO_SECONDS - time.monotonic()))


def _close_at_exit() -> None:
    atexit.unregister(_at_exit)  # of an earlier launch
    atexit.register(_at_exit)


def local_rank_from_environment() -> int | None:
    """Return the local rank that a launcher gave this process, if one did."""
    text = os.environ.get("LOCAL_RANK", "")
    return int(text) if text.isdigit() else None


def _start(start: _Start, *, verbose: bool) -> DistCoordinator:
    """Open the store and the process group, and set device and seeds."""
    from torch.distributed import DistNetworkError

    from booster_core.ranks.store import meet_at_launch, open_store

    backend = _choose_backend(start.backend)
    hook_relay().before_launch()
    is_watched = _is_switched_on("BOOSTER_MONITOR", "ranks learn at once when one dies")
    is_hosted_elsewhere = start.url == "env://" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    _use_device(start.local_rank)
    store = open_store(
        start.url,
        start.host,
        start.port,
        rank=start.rank,
        timeout_seconds=start.timeout_seconds,
        is_hosted_elsewhere=is_hosted_elsewhere,
    )
    if is_hosted_elsewhere:
        from torch.distributed import PrefixStore  # type: ignore[attr-defined] # torch does not list it as public

        # torchrun's store outlives the ranks: a restarted run would find the addresses of the one that died.
        store = PrefixStore(f"booster/attempt/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    host = this_host()
    store.set(f"booster/host/{start.rank}", host.to_text())
    meet_at_launch(
        store,
        f"{start.host}:{start.port}",
        rank=start.rank,
        world_size=start.world_size,
        timeout_seconds=start.timeout_seconds,
    )
    local_rank = start.local_rank
    if local_rank is None:
        lower = [Host.from_text(store.get(f"booster/host/{rank}").decode()).machine for rank in range(start.rank)]
        local_rank = lower.count(host.machine)
        _use_device(local_rank)
    _seed_everything(start.seed)
    _close_at_exit()
    try:
        open_world(
            store,
            rank=start.rank,
            world_size=start.world_size,
            local_rank=local_rank,
            backend=backend,
            timeout_seconds=start.timeout_seconds,
            # Before the group is opened: a rank that fails in that brings down those that wait for it.
            watch=partial(_watch, launch_store=store, host=start.host, is_wanted=is_watched),
        )
    except RuntimeError as error:
        if isinstance(error, DistNetworkError):  # what torch raises of the connection to its store
            holder = "torchrun" if is_hosted_elsewhere else "rank 0"
            why = (
                f"the store that they share has gone away with {holder}, which held it ({error}). Look for the first "
                "error of that process."
            )
        else:
            why = (
                f"{error}. Ranks on several hosts must reach each other at the addresses that their host names stand "
                "for; if those are the wrong ones, name the network interface in the environment variable "
                "GLOO_SOCKET_IFNAME (for nccl, NCCL_SOCKET_IFNAME)."
            )
        msg = f"Rank {start.rank} could not start the process group of backend {backend!r}: {why}"
        raise LaunchError(msg) from error
    finally:
        _report_what_nobody_catches()
    coordinator = DistCoordinator()
    # A rank that went on, and perhaps ended, now would tear connections that others are still making.
    coordinator.rendezvous("launch")
    if verbose:
        coordinator.print_on_master(
            f"Booster: {start.world_size} ranks at {start.host}:{start.port}, backend {backend}, seed {start.seed}"
        )
    return coordinator


def _watch(world: World, *, launch_store: Store, host: str, is_wanted: bool) -> None:
    """Watch over the ranks, so that one that fails brings all down and the traceback of the first is seen last."""
    hosts = None
    if world.rank == 0:
        ranks = range(world.world_size)
        hosts = distinct_names([Host.from_text(launch_store.get(f"booster/host/{rank}").decode()) for rank in ranks])
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    world.monitor = hook_relay().watch_ranks(
        world=world, hosts=hosts, address=host, error_file=error_file, is_wanted=is_wanted
    )
    if world.monitor is None and world.unwatched_because is None and world.world_size > 1:
        world.unwatched_because = "booster-runtime, which brings the monitor, is not installed"


def _report_what_nobody_catches() -> None:
    """Let the monitor hear of exceptions first: torch wraps the present hook while it opens a group."""
    world = current_world()
    if world.monitor is not None:
        world.at_close.append(world.monitor.hear_uncaught())


def _start_alone(backend: str | None, seed: int | None, timeout_seconds: float, *, verbose: bool) -> DistCoordinator:
    """Start a process group of this process alone, without any port."""
    from torch.distributed import HashStore  # type: ignore[attr-defined] # torch does not list it as public

    backend = _choose_backend(backend)
    if seed is not None:
        _check_integer("seed", seed, 0, _MAX_SEED)
        _seed_everything(seed)
    _use_device(0)
    open_world(HashStore(), rank=0, world_size=1, local_rank=0, backend=backend, timeout_seconds=timeout_seconds)
    _close_at_exit()
    coordinator = DistCoordinator()
    if verbose:
        coordinator.print_on_master(f"Booster: a single process, backend {backend}, seed {seed}")
    return coordinator


def _choose_backend(backend: str | None) -> str:
    """Return the backend to use: the one asked for, if it can run here."""
    import torch

    has_cuda = torch.cuda.is_available()
    if backend is None:
        return "cpu:gloo,cuda:nccl" if has_cuda else "gloo"
    if not isinstance(backend, str):
        msg = f"`backend` must be a str or None, not {type(backend).__name__}."
        raise TypeError(msg)
    if "nccl" in backend and not has_cuda:
        msg = f"`backend={backend!r}` needs CUDA, and no CUDA device is here. Leave `backend` out, or use 'gloo'."
        raise ConfigError(msg)
    return backend


def _use_device(local_rank: int | None) -> None:
    """Make the CUDA device of this local rank the current one, where there is CUDA."""
    import torch

    if local_rank is None or not torch.cuda.is_available():
        return
    num_devices = torch.cuda.device_count()
    if local_rank >= num_devices:
        msg = (
            f"`local_rank={local_rank}` has no CUDA device: this host has {num_devices}. Start at most {num_devices} "
            "processes on it."
        )
        raise ConfigError(msg)
    torch.cuda.set_device(local_rank)


def _seed_everything(seed: int) -> None:
    import numpy as np
    import torch

    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 - the global state is what a user's script draws from
    torch.manual_seed(seed)


def _check_config(config: Mapping[str, Any] | None) -> None:
    if config:
        msg = (
            f"`config={config!r}` has no effect here: a launch takes no config file. Pass options to the plugin, as in "
            "`Booster(plugin=LowLevelZeroPlugin(stage=2))`."
        )
        raise ConfigError(msg)


def _check_not_started(call: str) -> None:
    world = current_world()
    if world.process_group is not None:
        msg = (
            f"`{call}` was called, but the process group has been started already: this is rank {world.rank} of "
            f"{world.world_size}. Launch once per process, or call `shutdown` of booster_core.launch in between."
        )
        raise LaunchError(msg)


def _check_integer(name: str, value: int, low: int, high: int | None, of: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        msg = f"`{name}` must be an int, not {type(value).__name__}."
        raise TypeError(msg)
    if value < low or (high is not None and value > high):
        bounds = f"at least {low}" if high is None else f"from {low} to {high}"
        msg = f"`{name}={value}` is out of range{' ' + of if of else ''}: it must be {bounds}."
        raise ConfigError(msg)


def _integers_of_launcher(call: str, command: str, names: tuple[str, ...]) -> list[int]:
    missing = [name for name in names if not os.environ.get(name)]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        msg = (
            f"`{call}` reads the environment variables of {command}, and {_enumerate(missing)} {verb} not set. Start "
            f"the script by `{command}`, or call `launch` with the values."
        )
        raise ConfigError(msg)
    return [_integer_from(name) for name in names]


def _is_switched_on(name: str, effect: str) -> bool:
    """Return whether an environment variable, 0 or 1, asks for what happens without it too."""
    text = os.environ.get(name, "1")
    if text not in ("0", "1"):
        msg = f"{name}={text!r} must be 1 ({effect}) or 0."
        raise ConfigError(msg)
    return text == "1"


def _counts_above_one(name: str) -> list[str]:
    """Return the variable's name in a list if it counts several processes."""
    return [name] if os.environ.get(name, "1") != "1" else []


def _integer_from(name: str) -> int:
    text = os.environ[name]
    try:
        return int(text)
    except ValueError:
        msg = f"The environment variable {name}={text!r} is not an integer."
        raise ConfigError(msg) from None


def _enumerate(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
