"""The store in which the ranks of a run meet: opened within a time limit, with errors that name the address.

torch's own client waits without limit for a service that accepts its connection and never answers, and reports each
failed attempt with a C++ stack. Here a plain socket waits until something listens, the client runs in a thread that can
be given up, and each rank checks that the store belongs to this run. There ranks also tell each other their hosts.
"""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from booster_core.errors import LaunchError, MissingRanksError
from booster_core.ranks.environments import has_agent_store
from booster_core.ranks.meeting import LongWait, Meeting

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch.distributed import Store, TCPStore  # type: ignore[attr-defined] # torch does not list it as public

    from booster_core.ranks.environments import Environment

_PUBLISHED = "booster/store"
_PROBE_SECONDS = 5.0
_PAUSE_SECONDS = 0.1
_openings = itertools.count()


class Host(NamedTuple):
    """Where a process runs. Processes with equal hosts reach each other by loopback and see one temporary folder.

    Args:
        name: The host's name.
        boot: Identifies the running kernel; empty, like the next two, where the system does not tell.
        network: Identifies the network namespace.
        files: Identifies the mount namespace.
    """

    name: str
    boot: str = ""
    network: str = ""
    files: str = ""

    @property
    def machine(self) -> tuple[str, str]:
        """Identifies the machine, whose processes share its devices."""
        return self.name, self.boot

    def to_text(self) -> str:
        """Return the host in a form for the store."""
        return "\n".join(self)

    @classmethod
    def from_text(cls, text: str) -> Host:
        """Return the host that `to_text` wrote."""
        return cls(*text.split("\n"))


def open_store(environment: Environment, timeout_seconds: float) -> Store:
    """Open the store of a run, which rank 0 serves.

    A store that torchrun's agent serves outlives the ranks, and the agents of several nodes may count restarts
    differently. In such a store rank 0 therefore only publishes the port of a store of its own.

    Raises:
        LaunchError: If the store cannot be opened or reached in time, or belongs to another run.

    Collective: every rank of the run; only rank 0 is waited for.
    """
    from torch.distributed import HashStore, PrefixStore  # type: ignore[attr-defined] # not listed as public

    opening = next(_openings)
    deadline = time.monotonic() + timeout_seconds
    if environment.world_size == 1:
        return HashStore()
    if has_agent_store(environment):
        return PrefixStore("booster", _meet_rank_0(environment, opening, deadline))
    served = _connect(environment, environment.port, deadline, is_server=environment.rank == 0)
    store = PrefixStore(f"booster/{opening}", served)  # a port that one process serves again keeps its keys
    if not _join(store, environment.rank):
        msg = (
            f"rank {environment.rank} has joined the run at {environment.address}:{environment.port} already: two "
            f"processes were started as rank {environment.rank}, or another run uses this port. Give each process its "
            "own rank, and each run its own port."
        )
        raise LaunchError(msg)
    return store


def meet_at_launch(store: Store, environment: Environment, timeout_seconds: float) -> None:
    """Wait until every rank of the run has opened the store, and tell each other's hosts.

    Raises:
        LaunchError: If some ranks do not come in time; the message names them.

    Collective: every rank of the run.
    """
    from torch.distributed import PrefixStore  # type: ignore[attr-defined] # torch does not list it as public

    rank, world_size = environment.rank, environment.world_size
    store.set(f"host/{rank}", this_host().to_text())
    try:
        Meeting(PrefixStore("launch", store), rank, range(world_size)).meet("launch", timeout_seconds=timeout_seconds)
    except MissingRanksError as error:
        who = str(error).partition(", which")[0].removeprefix("`launch` ")
        msg = (
            f"The run at {environment.address}:{environment.port} did not start: {who}. Check that all {world_size} "
            "processes were started, with the same host, port and world size, and that none of them ended with an "
            "error."
        )
        raise LaunchError(msg) from error


def hosts_of(store: Store, ranks: Iterable[int]) -> list[Host]:
    """Return where some ranks run, after `meet_at_launch`."""
    return [Host.from_text(store.get(f"host/{rank}").decode()) for rank in ranks]


def this_host() -> Host:
    """Return where this process runs."""
    boot = network = files = ""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    with contextlib.suppress(OSError):
        network = str(Path("/proc/self/ns/net").readlink())
        files = str(Path("/proc/self/ns/mnt").readlink())
    return Host(socket.gethostname(), boot, network, files)


def distinct_names(hosts: Sequence[Host]) -> list[str]:
    """Return a name for each host; hosts that share a name are numbered."""
    numbers: dict[str, dict[Host, int]] = {}
    for host in hosts:
        namesakes = numbers.setdefault(host.name, {})
        namesakes.setdefault(host, len(namesakes) + 1)
    return [h.name if len(numbers[h.name]) == 1 else f"{h.name} ({numbers[h.name][h]})" for h in hosts]


def _meet_rank_0(environment: Environment, opening: int, deadline: float) -> TCPStore:
    """Serve a store on rank 0 and publish it in the agent's; on other ranks connect to the one that is published."""
    from torch.distributed import DistNetworkError

    agent = _connect(environment, environment.port, deadline, is_server=False)
    # Tells this opening from an earlier one of the same processes, and from one before the number of nodes changed.
    name = f"{opening} {environment.world_size}"
    if environment.rank == 0:
        store = _connect(environment, 0, deadline, is_server=True)
        agent.set(_PUBLISHED, f"{name} {store.port}")
        return store
    while time.monotonic() < deadline:
        published, _, port = agent.get(_PUBLISHED).decode().rpartition(" ") if agent.check([_PUBLISHED]) else ("",) * 3
        # Until rank 0 of this attempt publishes its port, that of a failed attempt is there: dead, or already joined.
        if published == name and _probe(environment.address, int(port), deadline) is None:
            attempt = min(deadline, time.monotonic() + _PROBE_SECONDS)
            try:
                store = _connect(environment, int(port), attempt, is_server=False)
                if _join(store, environment.rank):
                    return store
            except (LaunchError, DistNetworkError):
                pass  # another program has the port, or the process that served the store has just ended
        time.sleep(_PAUSE_SECONDS)
    msg = (
        f"Rank {environment.rank} could not reach rank 0: the store of torchrun's agent at {environment.address}:"
        f"{environment.port} names no store of rank 0 that answers. Check that rank 0 was started and did not end with "
        "an error, and that the nodes accept each other's connections on any port."
    )
    raise LaunchError(msg)


def _join(store: Store, rank: int) -> bool:
    """Return whether this is the first process that joins the store as ``rank``."""
    return bool(store.add(f"joined/{rank}", 1) == 1)


def _probe(host: str, port: int, deadline: float) -> OSError | None:
    """Return why nothing accepts connections at an address, or ``None`` if something does."""
    limit = max(_PAUSE_SECONDS, min(_PROBE_SECONDS, deadline - time.monotonic()))
    try:
        socket.create_connection((host, port), timeout=limit).close()
    except OSError as error:
        return error
    return None


def _connect(environment: Environment, port: int, deadline: float, *, is_server: bool) -> TCPStore:
    """Connect to a store at the environment's address, or serve one there; port 0 stands for a free one.

    Raises:
        LaunchError: If that does not succeed before the deadline.
    """
    rank, address = environment.rank, f"{environment.address}:{port}"
    start = time.monotonic()
    wait = LongWait()
    while not is_server and (problem := _probe(environment.address, port, deadline)):
        if time.monotonic() + _PAUSE_SECONDS >= deadline:
            msg = (
                f"Rank {rank} could not reach rank 0 at {address} within {deadline - start:.3g} s: {problem}. Check "
                "the host name, that rank 0 runs there, and that no firewall closes the port."
            )
            raise LaunchError(msg) from problem
        wait.note(lambda: f"The launch waits for rank 0 at {address}" if rank == 1 else None)
        time.sleep(_PAUSE_SECONDS)
    result: dict[str, Any] = {}

    def connect() -> None:
        from torch.distributed import TCPStore  # type: ignore[attr-defined] # torch does not list it as public

        try:
            result["store"] = TCPStore(
                environment.address,
                port,
                is_master=is_server,
                timeout=timedelta(seconds=max(1.0, deadline - time.monotonic())),
                wait_for_workers=False,  # a meeting names those that are missing
                multi_tenant=port != 0,
            )
        except Exception as error:  # noqa: BLE001 - raised below
            result["error"] = error

    thread = threading.Thread(target=connect, name="booster store", daemon=True)
    thread.start()
    thread.join(max(1.0, deadline - time.monotonic()) + 1.0)
    if "store" in result:
        store: TCPStore = result["store"]
        return store
    reason = str(result.get("error", "no answer")).splitlines()[0].rstrip(".")
    if is_server:
        msg = (
            f"Rank 0 cannot serve the store at {address}: {reason}. Choose a port that no other program uses, and the "
            "name of the host on which rank 0 runs."
        )
    else:
        msg = (
            f"Rank {rank} connected to {address}, but what listens there did not answer as rank 0 of this run within "
            f"{deadline - start:.3g} s: {reason}. The port may be in use by another program. Choose another port."
        )
    raise LaunchError(msg) from result.get("error")
