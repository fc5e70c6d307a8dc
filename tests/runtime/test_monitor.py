"""The monitor's server as members see it, and how ranks find it."""

from __future__ import annotations

import contextlib
import json
import selectors
import socket
import threading

import pytest
import torch.distributed as dist
from many_files import numbered_high
from monitor_clients import WHERE, MonitorClient
from patience import unhindered_seconds

from booster_core.errors import CheckpointError, RankFailedError
from booster_core.ranks import PROGRESS, World
from booster_runtime.watch import start_monitor
from booster_runtime.watch.server import Server
from booster_runtime.watch.sockets import encode, is_readable
from booster_runtime.watch.start import _start_server
from booster_runtime.watch.uncaught import is_consequence


def at(name, count, **counts):
    return {"counts": {**counts, name: count}, "last": [name, count], "finished": False, "call": [name, count]}


@pytest.fixture
def server():
    server = Server(["a", "a", "b"], "secret", ["127.0.0.1"])
    server.start()
    yield server
    server.close()


@pytest.fixture
def clients(server):
    clients = [MonitorClient(server.port).hello(rank) for rank in range(3)]
    assert [client.receive() for client in clients] == [{"type": "welcome", "speaks": rank > 0} for rank in range(3)]
    yield clients
    for client in clients:
        client.close()


def answer(clients, ranks, record):
    for rank in ranks:
        assert clients[rank].receive() == WHERE
        clients[rank].here(record)


def test_a_closed_connection_is_a_death(clients):
    clients[1].close()
    answer(clients, (0, 2), at("step", 3))
    for rank in (0, 2):
        failure = clients[rank].receive()
        assert (failure["type"], failure["rank"], failure["speaks"]) == ("failure", 1, True)
        assert failure["text"].startswith("Booster: rank 1 died without a traceback: killed by a signal")
        assert failure["text"].endswith(
            "\nBooster: all 3 ranks end. Rank 1 was process 1001 on a. Last calls: ranks 0 and 2 entered `step` #3; "
            "rank 1 died (it made no such call yet when last heard of).\n"
        )


def test_an_exception_is_told_to_all_and_said_once_per_host(clients):
    clients[0].send(type="failed", text="ValueError: bad", record=at("step", 3))
    answer(clients, (0, 1, 2), at("step", 3))
    failures = [client.receive() for client in clients]
    assert [failure["speaks"] for failure in failures] == [False, True, True]
    assert {failure["text"].splitlines()[0] for failure in failures} == {"Booster: rank 0 failed: ValueError: bad"}


def test_news_do_not_wait_for_ranks_that_do_not_answer(clients):
    start = unhindered_seconds()
    clients[0].send(type="failed", text="ValueError: bad", record=at("step", 3))
    assert [clients[1].receive()["type"] for _ in range(2)] == ["where", "failure"]
    assert unhindered_seconds() - start < 5


def test_collectives_that_differ_are_told_also_where_all_ranks_end_already(clients, capfd):
    for rank, client in enumerate(clients):
        call = {"group": "0", "ranks": [0, 1, 2], "number": 1, "what": f"all_reduce of [{rank // 2}]", "site": "t.py:9"}
        client.send(type="ending", record=at("step", 3))
        client.send(type="called", call={**call, "caller": "", "sent": [], "received": []})
    told = clients[0].receive()["text"]
    assert told.startswith(
        "Booster: the ranks call different collectives as number 1 of the group of ranks 0, 1 and 2: "
    )
    assert "all_reduce of [0] at t.py:9" in told
    assert "rank 2 calls all_reduce of [1] at t.py:9" in told
    deadline = unhindered_seconds() + 5
    said = ""
    while told not in said and unhindered_seconds() < deadline:
        said += capfd.readouterr().err
    assert said.count(told) == 1


def test_a_goodbye_is_told_to_nobody(clients):
    clients[1].send(type="bye")
    with pytest.raises(EOFError):
        clients[1].receive()
    clients[0].where(at("step", 1), ["step", 1])
    answer(clients, (2,), at("step", 1))
    message = clients[0].receive()
    assert message["missing"].startswith("rank 1 has not reached it; it ended normally.")
    assert message["ended"].startswith("rank 1 ended normally while rank 0 waits in `step` #1, which it never called.")


def test_who_does_not_answer_is_said_not_to(clients):
    clients[1].here(at("step", 4))
    clients[0].where(at("step", 5), ["step", 5], "0 1")
    assert (
        clients[0]
        .receive()["missing"]
        .startswith("rank 1 has not reached it; it did not answer (it entered `step` #4 when last heard of).")
    )


def test_askers_share_one_question(clients):
    for rank in (0, 1):
        clients[rank].where(at("step", 5), ["step", 5])
    answer(clients, (2,), at("backward", 5))
    for rank in (0, 1):
        messages = []
        while not messages or messages[-1]["type"] == "where":
            messages.append(clients[rank].receive())
        assert [message["type"] for message in messages[:-1]] in ([], ["where"])
        assert messages[-1]["missing"].startswith("rank 2 has not reached it; it entered `backward` #5.")


class Crowd:
    """Many clients in one thread."""

    def __init__(self, port, num):
        self.clients = [MonitorClient(port).hello(rank) for rank in range(num)]
        self._selector = selectors.DefaultSelector()
        for rank, client in enumerate(self.clients):
            self._selector.register(client.connection, selectors.EVENT_READ, rank)

    def messages(self):
        """Yield each message that has come, and its rank."""
        for key, _ in self._selector.select(1):
            client = self.clients[key.data]
            for message in client.feed(client.connection.recv(1 << 16)):
                yield key.data, message

    def close(self):
        self._selector.close()
        for client in self.clients:
            client.send(type="bye")
            client.close()


def test_1024_ranks_that_ask_at_once_are_answered_within_5_seconds():
    world_size, missing, limit_seconds = 1024, 513, 5.0
    server = Server([str(rank // 8) for rank in range(world_size)], "secret", ["127.0.0.1"])
    server.start()
    crowd = Crowd(server.port, world_size)
    num_welcomes = 0
    while num_welcomes < world_size:
        num_welcomes += sum(message["type"] == "welcome" for _, message in crowd.messages())
    start = unhindered_seconds()
    for rank, client in enumerate(crowd.clients):
        if rank != missing:
            client.where(at("step", 12, backward=12), ["step", 12])
    answers = {}
    while len(answers) < world_size - 1:
        for rank, message in crowd.messages():
            if message["type"] == "missing":
                answers[rank] = message["missing"]
            elif rank == missing:
                crowd.clients[rank].here(at("backward", 12, step=11))
            else:
                crowd.clients[rank].here(at("step", 12, backward=12))
        assert unhindered_seconds() - start < limit_seconds, f"{len(answers)} answers"
    assert {text.partition(". ")[0] for text in answers.values()} == {
        "rank 513 has not reached it; it entered `backward` #12"
    }
    crowd.close()
    server.close()


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"[]\n",
        encode({"type": "hello", "rank": 1, "pid": 1, "token": "guess"}),
        encode({"type": "hello", "rank": 7, "pid": 1, "token": "secret"}),
        encode({"type": "failed", "rank": 1, "token": "secret"}),
        encode({"type": "hello", "rank": "x", "pid": 1, "token": "secret"}),
        encode({}),
        b"x" * (2 << 20),
    ],
)
def test_third_parties_are_not_let_in(server, data):
    other = MonitorClient(server.port)
    with pytest.raises((EOFError, ConnectionError)):  # noqa: PT012 - it may be closed while we send
        other.connection.sendall(data)
        other.receive()
    other.close()
    client = MonitorClient(server.port).hello(0)
    assert client.receive()["type"] == "welcome"
    client.close()


def test_the_end_of_the_server_is_announced(server):
    client = MonitorClient(server.port).hello(0)
    assert client.receive()["type"] == "welcome"
    server.close()
    assert client.receive() == {"type": "closing", "cause": None, "gone": {}}
    client.close()


def start_all(hosts, address="127.0.0.1"):
    store = dist.HashStore()
    worlds = [World(rank=rank, world_size=2, store=store) for rank in range(2)]
    monitors = {}

    def start(rank):
        monitors[rank] = start_monitor(worlds[rank], hosts, address, may_end_process=False)

    threads = [threading.Thread(target=start, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=20)
    return worlds, monitors, store


def test_ranks_find_the_server_through_the_store():
    _, monitors, _ = start_all(["a", "a"])
    try:
        PROGRESS.enter("step")
        assert monitors[1].describe_missing("step", 1, None).startswith("every rank has reached it")
        assert "ranks 0 and 1 have not reached it" in monitors[1].describe_missing("step", 2, None)
        assert monitors[1].describe_missing("step", 2, None, only_ended=True) is None
    finally:
        PROGRESS.clear()
        for rank in (1, 0):
            monitors[rank].close()


def _own_address():
    """An address of this host that is not a loopback's; no packet is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("this host has no network, so no interface but the loopback's")
        return probe.getsockname()[0]


@pytest.mark.parametrize("resolved_here", ["127.0.1.1", "203.0.113.7"])
def test_the_server_listens_where_other_hosts_reach_rank_0(resolved_here):
    store, own = dist.HashStore(), _own_address()
    store.set("monitor/1", json.dumps(["203.0.113.7", own]))  # the first stands for a router before this host
    server, news = _start_server(World(world_size=2, store=store), ["a", "b"], resolved_here)
    try:
        assert (news["address"], server._listener.getsockname()[0]) == (own, own)
    finally:
        server.close()


def test_without_an_address_that_others_reach_nobody_is_watched():
    worlds, monitors, _ = start_all(["a", "b"], "127.0.0.1")
    assert monitors == {0: None, 1: None}
    assert {world.unwatched_because for world in worlds} == {
        "rank 0 could not start it: no port could be opened: no address is known by which other hosts reach this one"
    }


def test_a_world_of_one_needs_no_monitor():
    assert start_monitor(World(), None, "localhost", may_end_process=True) is None


def test_a_server_that_cannot_be_reached():
    store = dist.HashStore()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        store.set("monitor", json.dumps({"address": "127.0.0.1", "port": probe.getsockname()[1], "token": ""}))
        world = World(rank=1, world_size=2, store=store, timeout_seconds=1)
        assert start_monitor(world, None, "127.0.0.1", may_end_process=True) is None
    assert world.unwatched_because.startswith("it could not be reached at 127.0.0.1:")


def _raised(error, cause=None):
    with contextlib.suppress(Exception):
        raise error from cause
    return error


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1"), True),
        (RuntimeError("Connection reset by peer"), True),
        (RankFailedError("rank 1: x"), True),
        (_raised(CheckpointError("rank 1: x"), RankFailedError("on rank 1")), True),
        (ValueError("bad shape"), False),
        (RuntimeError("Timed out waiting 5000ms for recv operation to complete"), False),
    ],
)
def test_consequences_are_told_from_causes(error, expected):
    assert is_consequence(error) == expected


def test_a_connection_of_a_process_with_a_thousand_open_files_is_looked_at():
    one, other = socket.socketpair()
    with one, other, numbered_high(one.fileno()) as number, socket.socket(fileno=number) as high:
        assert not is_readable(high, 0.0)
        other.send(b"x")
        assert is_readable(high, 5.0)
