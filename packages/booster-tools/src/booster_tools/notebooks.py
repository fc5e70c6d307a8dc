"""`notebook_launch`: train with several processes from a notebook, whose functions no other interpreter can import.

Ranks are forked, so that they have what the notebook has defined. A fork can't use CUDA where its parent has.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import traceback
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any

import torch

from booster_core.errors import ConfigError, LaunchError
from booster_core.ranks import current_world
from booster_tools.local_ports import free_port

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection
    from multiprocessing.synchronize import Event

__all__ = ["notebook_launch"]

_GRACE_SECONDS = 30.0


def notebook_launch(function: Callable[..., Any], num_processes: int, *args: Any, **kwargs: Any) -> Any:
    """Run a function on several ranks of this machine, each launched, and return what rank 0's returned.

    Example::

        def train(lr):
            booster = Booster(plugin="ddp")
            ...

        notebook_launch(train, 2, lr=1e-3)

    Args:
        function: May be defined in the notebook. It makes model, optimizer and Booster itself.
        num_processes: Number of ranks; at most one per CUDA device where there are any.
        *args: Arguments of the function, the same on every rank.
        **kwargs: Further ones, by name.

    Raises:
        ConfigError: If this process has been launched itself or has used CUDA, the machine has fewer devices, or
            processes can't be forked.
        LaunchError: If a rank raised or ended; its traceback is in the message.

    Collective: none; called in one process.
    """
    _check(function, num_processes)
    context = multiprocessing.get_context("fork")
    port = free_port()
    readers: dict[Connection, int] = {}
    ranks = []
    has_ended = context.Event()
    for rank in range(num_processes):
        reader, writer = context.Pipe(duplex=False)
        process = context.Process(
            target=_run, args=(writer, has_ended, rank, num_processes, port, function, args, kwargs), daemon=False
        )
        process.start()
        writer.close()
        readers[reader] = rank
        ranks.append(process)
    outcomes: dict[int, tuple[bool, Any]] = {}
    try:
        _collect(readers, outcomes)
    finally:
        has_ended.set()
        for process in ranks:
            if len(outcomes) == num_processes:
                process.join(timeout=_GRACE_SECONDS)
            if process.is_alive():
                process.kill()
            process.join()
    failed = {rank: text for rank, (is_value, text) in outcomes.items() if not is_value}
    if failed:
        # The rank that failed first is the cause; the others say that it is gone.
        rank = next(iter(failed))
        msg = f"`{function.__name__}` failed on rank {rank} of {num_processes}:\n{failed[rank]}"
        raise LaunchError(msg)
    return pickle.loads(outcomes[0][1])  # noqa: S301 - written by our own fork


def _check(function: Any, num_processes: Any) -> None:
    if not callable(function):
        msg = f"`notebook_launch` takes a function; got `{type(function).__name__}`. Pass `train`, not `train()`."
        raise TypeError(msg)
    if isinstance(num_processes, bool) or not isinstance(num_processes, int) or num_processes < 1:
        msg = f"`num_processes={num_processes!r}` is no number of processes. Use 1 or more."
        raise ConfigError(msg)
    if current_world().process_group is not None:
        msg = "This process has been launched itself. Restart the notebook, and launch by `notebook_launch` only."
        raise ConfigError(msg)
    if "fork" not in multiprocessing.get_all_start_methods():
        msg = "This system can't fork processes. Write the function to a script, and start that by torchrun."
        raise ConfigError(msg)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        msg = (
            "CUDA has been used in this process, which forked ranks can't do then. Restart the notebook, and use CUDA "
            "inside of the function only."
        )
        raise ConfigError(msg)
    num_devices = torch.accelerator.device_count()
    if 0 < num_devices < num_processes:
        msg = f"`num_processes={num_processes}`, but this machine has {num_devices} device(s). Use at most one each."
        raise ConfigError(msg)


def _collect(readers: dict[Connection, int], outcomes: dict[int, tuple[bool, Any]]) -> None:
    """Note what each rank sent, in the order in which they ended."""
    while readers:
        # After a failure the others end by themselves, unless they were never launched.
        has_failed = any(not is_value for is_value, _ in outcomes.values())
        ready = wait(list(readers), timeout=_GRACE_SECONDS if has_failed else None)
        if not ready:
            break
        for found in ready:
            reader: Any = found
            rank = readers.pop(reader)
            try:
                outcomes[rank] = reader.recv()
            except EOFError:
                outcomes[rank] = False, "Its process ended without a Python error: killed, or out of memory."
            reader.close()


def _run(
    writer: Connection,
    has_ended: Event,
    rank: int,
    world_size: int,
    port: int,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    """Launch a rank, call the function and send what it returned."""
    from booster_core import launch

    torch.set_num_threads(1)  # threads of OpenMP that this process has used are gone in a fork, and would be waited for
    outcome: tuple[bool, Any]
    try:
        launch(rank=rank, world_size=world_size, host="localhost", port=port, local_rank=rank, verbose=False)
        value = function(*args, **kwargs)
        outcome = True, pickle.dumps(value if rank == 0 else None)
    except BaseException:  # noqa: BLE001 - shown where the notebook is
        outcome = False, traceback.format_exc()
    with contextlib.suppress(OSError):
        writer.send(outcome)
    writer.close()
    if not outcome[0]:
        os._exit(1)  # the others learn at once, and no exit handler waits for them
    # Rank 0 has the store, by which others may still be meeting.
    notebook = multiprocessing.parent_process()
    while notebook is not None and notebook.is_alive() and not has_ended.wait(timeout=1):
        pass
