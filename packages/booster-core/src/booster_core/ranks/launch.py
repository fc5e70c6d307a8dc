"""Start of a distributed run: store, process group, device and seeds.

`launch` reads what the launcher says (`environments`), or takes the values of processes that were started by hand. It
checks what it was given before anything is opened.
"""

from __future__ import annotations

import atexit
import random
import sys
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from booster_core.errors import ConfigError, LaunchError
from booster_core.plugin.hooks import hook_relay
from booster_core.ranks import environments
from booster_core.ranks.coordinator import DistCoordinator
from booster_core.ranks.environments import Environment, choose_backend, use_device
from booster_core.ranks.store import distinct_names, hosts_of, local_rank_of, meet_at_launch, open_store
from booster_core.ranks.world import DEFAULT_TIMEOUT_SECONDS, close_world, current_world, open_world

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.distributed import Store  # type: ignore[attr-defined] # torch does not list it as public

    from booster_core.ranks.world import World

_LAST_SECONDS = 10.0
"""How long rank 0, which serves the store, waits at its end for the other ranks."""
_RELEASE_SECONDS = 0.1
_MAX_SEED = 2**32 - 1


def launch(
    rank: int | None = None,
    world_size: int | None = None,
    host: str | None = None,
    port: int | None = None,
    backend: str | None = None,
    local_rank: int | None = None,
    seed: int | None = 1024,
    verbose: bool = True,  # noqa: FBT001, FBT002 - positional in the scripts that people bring
    *,
    environment: Environment | None = None,
    config: Mapping[str, Any] | None = None,
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
) -> DistCoordinator:
    """Start the process group of this run.

    By default, the variables of torchrun, SLURM, Open MPI, PMI (MPICH, Intel MPI) or Kubeflow say which rank this is;
    without them, it runs alone. Processes that were started by hand pass ``rank``, ``world_size``, ``host``, ``port``.

    On Linux, ranks without a GPU get the scheduling policy ``SCHED_BATCH``, unless they have another one than the
    default: woken ranks interrupt each other less, so that steps take less time.

    Args:
        rank: This process's rank, ``0 <= rank < world_size``.
        world_size: Number of processes.
        host: Host on which rank 0 runs.
        port: A free port there.
        backend: As for ``torch.distributed.init_process_group``; by default gloo, and the backend
            that torch names for the accelerator of this machine, such as ``cpu:gloo,cuda:nccl``.
        local_rank: This process's index on its host; selects its device, modulo the number of visible ones. By
            default the launcher's, or counted by host.
        seed: Seed of Python's, NumPy's and torch's random numbers, the same on every rank until the first `boost`, from
            which on ranks that see different samples draw different ones; ``None`` to seed nothing.
        verbose: Print a line on rank 0.
        environment: Used in place of ``rank``, ``world_size``, ``host`` and ``port``.
        config: Must be empty; options belong to the plugin.
        timeout_seconds: How long collective calls wait for missing ranks, from the launch on.

    Raises:
        ConfigError: If a value or a launcher's variable is wrong or missing; nothing has been opened then.
        LaunchError: If the run cannot be started: host unreachable, port in use, ranks missing, started already.

    Collective: every rank of the run.
    """
    _end_group_of_accelerate()
    world = current_world()
    if world.process_group is not None:
        msg = (
            f"The process group has been started already: this is rank {world.rank} of {world.world_size}. Launch once "
            "per process, before what starts it by itself, such as `TrainingArguments` of transformers (also made by "
            "`HfArgumentParser`) and `Accelerator`; or call `booster_core.shutdown()` in between."
        )
        raise LaunchError(msg)
    if config:
        msg = f"`config={config!r}` has no effect here: a launch takes no config file. Pass options to the plugin."
        raise ConfigError(msg)
    if not 0 < timeout_seconds < float("inf"):
        msg = f"`timeout_seconds={timeout_seconds}` is not a positive, finite number of seconds."
        raise ConfigError(msg)
    if seed is not None:
        environments.check_integer("seed", seed, 0, _MAX_SEED)
    if environment is None:
        environment = _environment(rank, world_size, local_rank, host, port)
    elif (rank, world_size, local_rank, host, port) != (None,) * 5:
        msg = "`environment` takes the place of rank, world size, local rank, host and port. Leave those out."
        raise ConfigError(msg)
    backend = choose_backend(backend)
    is_watched = environments.is_switched_on("BOOSTER_MONITOR", "ranks learn at once when one dies")
    hook_relay().before_launch(backend=backend)
    store = open_store(environment, timeout_seconds)
    settings = {
        "backend": backend,
        "BOOSTER_MONITOR": int(is_watched),
    }
    meet_at_launch(store, environment, timeout_seconds, settings)
    _open_group(store, environment, backend, timeout_seconds, is_watched=is_watched)
    if seed is not None:
        seed_everything(seed)
    coordinator = DistCoordinator()
    # A rank that went on, and perhaps ended, now would close connections that others are still making.
    coordinator.block_all(name="launch")
    if verbose:
        where = f"{environment.address}:{environment.port}"
        who = f"{environment.world_size} ranks at {where}" if environment.world_size > 1 else "a single process"
        coordinator.print_on_master(f"Booster: {who}, backend {backend}, seed {seed}")
    return coordinator


def launch_from_torch(config: Mapping[str, Any] | None = None, *args: Any, **options: Any) -> DistCoordinator:
    """Call `launch`; arguments: ``config, backend, seed, verbose``, and others by keyword."""
    return _launch_at(None, *args, config=config, **options)


def launch_from_slurm(host: str | None = None, port: int | None = None, *args: Any, **options: Any) -> DistCoordinator:
    """Call `launch` in a task of ``srun``; arguments: ``host, port, backend, seed, verbose``, and others by keyword."""
    return _launch_at(environments.from_slurm(host, port), *args, **options)


def launch_from_openmpi(
    host: str | None = None, port: int | None = None, *args: Any, **options: Any
) -> DistCoordinator:
    """Call `launch` under ``mpirun``; arguments: ``host, port, backend, seed, verbose``, and others by keyword."""
    return _launch_at(environments.from_openmpi(host, port), *args, **options)


def _launch_at(
    environment: Environment | None,
    backend: str | None = None,
    seed: int | None = 1024,
    verbose: bool = True,  # noqa: FBT001, FBT002 - positional in the scripts that people bring
    **options: Any,
) -> DistCoordinator:
    return launch(backend=backend, seed=seed, verbose=verbose, environment=environment, **options)


def ensure_process_group() -> DistCoordinator:
    """Return the coordinator of the process group; start one of this process alone, unseeded, if nothing launched it.

    Raises:
        ConfigError: If a launcher started this process as one of several, but the script did not call `launch`.

    Collective: none where a process group exists or nothing launched this process.
    """
    if current_world().process_group is not None:
        return DistCoordinator()
    check_launched()
    return launch(environment=environments.ALONE, seed=None, verbose=False)


def check_launched() -> None:
    """Raise if a launcher started this process as one of several, but the script did not call `launch`.

    Raises:
        ConfigError: If so.
    """
    num_started = 1 if current_world().process_group is not None else environments.detect().world_size
    if num_started > 1:
        msg = (
            f"A launcher started this process as one of {num_started}, but the process group has not been started. "
            "Call `booster_core.launch()` first."
        )
        raise ConfigError(msg)


def shutdown() -> None:
    """End this process's part of the run: process group, monitor and store. It may be launched again afterwards.

    Called when the interpreter ends. Does nothing where nothing was launched.

    Collective: none; ranks may shut down one after the other.
    """
    close_world()


def seed_everything(seed: int) -> None:
    """Seed Python's, NumPy's and torch's random numbers."""
    import numpy as np
    import torch

    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 - the global state is what a user's script draws from
    torch.manual_seed(seed)


def _end_group_of_accelerate() -> None:
    """End the process group that Accelerate started when a script made transformers' ``TrainingArguments``.

    Accelerate keeps no reference to it, and takes the one that `launch` starts in its place.
    """
    states: Any = sys.modules.get("accelerate.state")
    has_state = states is not None and bool(states.PartialState._shared_state)  # noqa: SLF001 - as Accelerate asks
    world = current_world()
    if has_state and world.process_group is not None and not world.generation:  # this package's openings are counted
        close_world()


def _at_exit() -> None:
    """Shut down, unless the interpreter ends by a failure that the others do not know of yet."""
    monitor = current_world().monitor
    if monitor is not None and not monitor.is_failing:
        monitor.leave(getattr(sys, "last_value", None), _LAST_SECONDS)
    shutdown()
    # gloo's threads release a collective's tensors only after its result is there, and need the interpreter's lock for
    # it; one that still waits for the lock when the interpreter is gone aborts the process.
    time.sleep(_RELEASE_SECONDS)


def _environment(
    rank: int | None, world_size: int | None, local_rank: int | None, host: str | None, port: int | None
) -> Environment:
    """Return what was passed to `launch`, or else what the launcher says."""
    if rank is not None and world_size is not None and host is not None and port is not None:
        return Environment(rank, world_size, local_rank, host, port)
    if (rank, world_size, host, port) != (None,) * 4:
        msg = f"`launch` takes rank, world size, host and port together; got {rank}, {world_size}, {host} and {port}."
        raise ConfigError(msg)
    environment = environments.detect()
    return environment if local_rank is None else replace(environment, local_rank=local_rank)


def _open_group(
    store: Store, environment: Environment, backend: str, timeout_seconds: float, *, is_watched: bool
) -> None:
    """Set this rank's device and start the monitor and the process group."""
    rank, local_rank = environment.rank, environment.local_rank
    if local_rank is None:
        local_rank = local_rank_of(store, rank)
    device = use_device(local_rank)
    atexit.unregister(_at_exit)  # of an earlier launch
    atexit.register(_at_exit)
    try:
        open_world(
            store,
            rank=rank,
            world_size=environment.world_size,
            local_rank=local_rank,
            backend=backend,
            timeout_seconds=timeout_seconds,
            device=device if "nccl" in backend else None,
            # Before the group is opened: a rank that fails in that brings down those that wait for it.
            watch=partial(_watch, store=store, address=environment.address) if is_watched else None,
        )
    except RuntimeError as error:
        msg = (
            f"Rank {rank} could not start the process group of backend {backend!r}: {error}. Ranks on several hosts "
            "must reach each other at the addresses to which their host names resolve; if those are wrong, name the "
            "network interface in the environment variable GLOO_SOCKET_IFNAME (for nccl, NCCL_SOCKET_IFNAME)."
        )
        raise LaunchError(msg) from error
    finally:
        world = current_world()
        if world.monitor is not None:  # torch wraps the hook for uncaught exceptions while it opens a group
            world.at_close.append(world.monitor.hear_uncaught())


def _watch(world: World, *, store: Store, address: str) -> None:
    """Start the monitor, which ends all ranks when one fails."""
    world.monitor = hook_relay().watch_ranks(
        world=world,
        hosts=distinct_names(hosts_of(store, range(world.world_size))) if world.rank == 0 else None,
        address=address,
        error_file=environments.agent_error_file(),
    )
