"""The store in which the ranks of a run meet: opened within a time limit, with errors that name the address.

torch's own client waits without limit for a service that accepts its connection and never answers, and reports each
failed attempt with a C++ stack. Here a plain socket waits until something listens, the client runs in a thread that can
be given up, and each rank checks that the store belongs to this run. There ranks also tell each other their hosts.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import secrets
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
    from collections.abc import Iterable, Mapping, Sequence

    from torch.distributed import Store, TCPStore  # type: ignore[attr-defined] # torch does not list it as public

    from booster_core.ranks.environments import Environment

_PUBLISHED = "booster/store"
_BEGUN = "booster/begun"
"""Where rank 0 says which process serves the store, and for which launch."""
_joined: set[str] = set()
"""The launches whose store this process has joined."""
_PROBE_SECONDS = 5.0
_PAUSE_SECONDS = 0.1
_openings = itertools.count()


class Host(NamedTuple):
    """Where a process runs. Processes with equal hosts reach each other by loopback and see one temporary folder.

    Attributes:
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

    deadline = time.monotonic() + timeout_seconds
    if environment.world_size == 1:
        return HashStore()
    if has_agent_store(environment):
        return PrefixStore("booster", _meet_rank_0(environment, deadline))
    store = _begin(environment, deadline) if environment.rank == 0 else _join_rank_0(environment, deadline)
    if not _join(store, environment.rank):
        raise _joined_already(environment)
    return store


def meet_at_launch(store: Store, environment: Environment, timeout_seconds: float, settings: Mapping[str, Any]) -> None:
    """Wait until every rank of the run has opened the store, and tell each other's hosts.

    Args:
        store: That of `open_store`.
        environment: This rank's place.
        timeout_seconds: How long to wait for the others.
        settings: JSON values that must be the same on every rank.

    Raises:
        LaunchError: If some ranks do not come in time, or a rank's settings are not those of rank 0. On every rank that
            waits; the message names the ranks and values.

    Collective: every rank of the run.
    """
    from torch.distributed import PrefixStore  # type: ignore[attr-defined] # torch does not list it as public

    rank, host = environment.rank, this_host()
    store.set(f"host/{rank}", host.to_text())
    store.append(_of_machine(host), f"{rank} ")  # type: ignore[attr-defined] # torch does not list it
    meeting = Meeting(PrefixStore("launch", store), rank, range(environment.world_size))
    own = {"world_size": environment.world_size, **settings}
    if rank == 0:
        store.set("settings", json.dumps(own))
    of_rank_0 = json.loads(store.get("settings"))
    if differing := [name for name in own if own[name] != of_rank_0[name]]:
        here, there = (", ".join(f"{name}={of[name]}" for name in differing) for of in (own, of_rank_0))
        reason = f"rank {rank} has {here}, but rank 0 has {there}"
        meeting.refuse(reason)
        raise _not_started(environment, reason)
    try:
        meeting.meet("launch", timeout_seconds=timeout_seconds)
    except MissingRanksError as error:
        reason = str(error).partition(", which did not")[0]
        raise _not_started(environment, reason.removeprefix("`launch`").lstrip(": ")) from error


def _not_started(environment: Environment, reason: str) -> LaunchError:
    return LaunchError(
        f"The run at {environment.address}:{environment.port} did not start: {reason}. Check that all "
        f"{environment.world_size} processes were started, with the same host, port, world size and environment "
        "variables, and that none of them ended with an error."
    )


def hosts_of(store: Store, ranks: Iterable[int]) -> list[Host]:
    """Return where some ranks run, after `meet_at_launch`, by one request."""
    found = store.multi_get([f"host/{rank}" for rank in ranks])
    return [Host.from_text(text.decode()) for text in found]


def local_rank_of(store: Store, rank: int) -> int:
    """Return how many ranks below this one run on this machine, after `meet_at_launch`."""
    return sum(int(other) < rank for other in store.get(_of_machine(this_host())).split())


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


def _meet_rank_0(environment: Environment, deadline: float) -> TCPStore:
    """Serve a store on rank 0 and publish it in the agent's; on other ranks connect to the one that is published."""
    from torch.distributed import DistNetworkError

    agent = _connect(environment, environment.port, deadline, is_server=False)
    # Tells this opening from an earlier one of the same processes, and from one before the number of nodes changed.
    name = f"{next(_openings)} {environment.world_size}"
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


def _begin(environment: Environment, deadline: float) -> Store:
    """Serve a store on rank 0; return the part of it that belongs to this launch."""
    from torch.distributed import PrefixStore  # type: ignore[attr-defined] # torch does not list it as public

    served = _connect(environment, environment.port, deadline, is_server=True)
    process, launch = f"{os.getpid()} on {this_host()}", secrets.token_hex(8)
    found, _, _ = served.compare_set(_BEGUN, "", f"{process}\n{launch}").decode().partition("\n")
    if found != process:  # the address is that of another run's rank 0
        raise _joined_already(environment)
    served.set(_BEGUN, f"{process}\n{launch}")  # a port that one process serves again keeps its keys
    return PrefixStore(f"booster/{launch}", served)


def _join_rank_0(environment: Environment, deadline: float) -> Store:
    """Return the part of rank 0's store that belongs to this launch.

    Where rank 0 launches again at the same port, its last store may still answer. This process has joined that already.

    Raises:
        LaunchError: If that does not succeed before the deadline.
    """
    from torch.distributed import DistNetworkError, DistStoreError, PrefixStore  # type: ignore[attr-defined] # as above

    while True:
        served = _connect(environment, environment.port, deadline, is_server=False)
        with contextlib.suppress(DistNetworkError, DistStoreError):  # it goes
            while time.monotonic() < deadline:
                launch = served.get(_BEGUN).decode().rpartition("\n")[2] if served.check([_BEGUN]) else ""
                if launch and launch not in _joined:
                    _joined.add(launch)
                    return PrefixStore(f"booster/{launch}", served)
                time.sleep(_PAUSE_SECONDS)
            msg = (
                f"Rank {environment.rank} reached a store at {environment.address}:{environment.port}, but rank 0 has "
                "begun no launch there that this process has not joined. Check that rank 0 was launched (again), and "
                "that no other run uses the port."
            )
            raise LaunchError(msg)
        time.sleep(_PAUSE_SECONDS)


def _joined_already(environment: Environment) -> LaunchError:
    return LaunchError(
        f"rank {environment.rank} has joined the run at {environment.address}:{environment.port} already: two "
        f"processes were started as rank {environment.rank}, or another run uses this port. Give each process its own "
        "rank, and each run its own port."
    )


def _of_machine(host: Host) -> str:
    return f"machine/{'/'.join(host.machine)}"


def _why_not_own(address: str) -> str | None:
    """Return why an address can't be one of this host's, or ``None`` if it is one."""
    try:
        found = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)
    except OSError as error:
        return f"the name {address} is not known on this host ({error.strerror})"
    for family, *_, where in found:
        with socket.socket(family, socket.SOCK_STREAM) as probe, contextlib.suppress(OSError):
            probe.bind(where)
            return None
    return f"{address} is not an address of this host, {socket.gethostname()}, on which rank 0 runs"


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
        remedy = "Choose a port that no other program uses, and the name of the host on which rank 0 runs."
        if why := _why_not_own(environment.address):
            reason = why
            remedy = "Set the host (MASTER_ADDR) to an address of this host's, or start rank 0 there."
        msg = f"Rank 0 cannot serve the store at {address}: {reason}. {remedy}"
    else:
        msg = (
            f"Rank {rank} connected to {address}, but what listens there did not answer as rank 0 of this run within "
            f"{deadline - start:.3g} s: {reason}. The port may be in use by another program. Choose another port."
        )
    raise LaunchError(msg) from result.get("error")
