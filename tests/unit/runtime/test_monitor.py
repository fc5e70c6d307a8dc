from __future__ import annotations

import contextlib
import json
import socket
import threading

import pytest
import torch.distributed as dist

from booster_core.errors import CheckpointError, RankFailedError
from booster_core.ranks.world import World
from booster_runtime.liveness import start_monitor
from booster_runtime.liveness.member import _is_consequence, _obituary
from booster_runtime.liveness.server import Server
from booster_runtime.liveness.wire import Lines, encode


class Client:
    """A connection to a server, driven by the test."""

    def __init__(self, port):
        self.connection = socket.create_connection(("127.0.0.1", port), timeout=10)
        self.lines = Lines()
        self.messages = []

    def send(self, **message):
        self.connection.sendall(encode(message))

    def hello(self, rank, token="secret"):
        self.send(type="hello", rank=rank, pid=1000 + rank, token=token)
        return self

    def receive(self):
        while not self.messages:
            data = self.connection.recv(65536)
            if not data:
                raise EOFError
            self.messages += self.lines.feed(data)
        return self.messages.pop(0)

    def close(self):
        self.connection.close()


@pytest.fixture
def server():
    server = Server(["a", "a", "b"], "secret", speakers_end_first=False)
    server.start()
    yield server
    server.close()


@pytest.fixture
def clients(server):
    clients = [Client(server.port).hello(rank) for rank in range(3)]
    assert [client.receive() for client in clients] == [{"type": "welcome", "is_heir": rank > 0} for rank in range(3)]
    yield clients
    for client in clients:
        client.close()


def test_a_death_is_told_to_the_others(clients):
    clients[1].close()
    for rank in (0, 2):
        failure = clients[rank].receive()
        assert (failure["type"], failure["rank"], failure["host"], failure["pid"]) == ("failure", 1, "a", 1001)
        assert failure["speaks"]


def test_a_goodbye_is_told_to_nobody(clients):
    clients[1].send(type="bye")
    clients[0].send(type="where")
    assert clients[0].receive()["type"] == "where"


def test_progress_is_collected(clients):
    clients[2].send(type="bye")
    with pytest.raises(EOFError):
        clients[2].receive()
    clients[0].send(type="where")
    for rank in (0, 1):
        question = clients[rank].receive()["question"]
        clients[rank].send(type="here", question=question, record={"last": rank})
    assert clients[0].receive() == {
        "type": "progress",
        "records": {"0": {"last": 0}, "1": {"last": 1}, "2": {"gone": "has ended normally"}},
    }


def test_who_does_not_answer_is_said_not_to(clients):
    clients[0].send(type="where")
    assert clients[0].receive()["type"] == "where"
    assert clients[0].receive()["records"]["1"] == {"gone": "does not answer"}


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
def test_strangers_are_shown_the_door(server, data):
    stranger = Client(server.port)
    with pytest.raises((EOFError, ConnectionError)):  # noqa: PT012 - the door may close while we speak
        stranger.connection.sendall(data)
        stranger.receive()
    stranger.close()
    client = Client(server.port).hello(0)
    assert client.receive()["type"] == "welcome"
    client.close()


def test_the_end_of_the_server_is_announced(server):
    client = Client(server.port).hello(0)
    assert client.receive()["type"] == "welcome"
    server.close()
    assert client.receive() == {"type": "closing", "cause": None, "gone": {}}
    client.close()


@pytest.mark.parametrize("hosts", [["a", "a"], ["a", "b"]])
def test_ranks_find_the_server_through_the_store(hosts):
    store = dist.HashStore()
    worlds = [World(rank=rank, world_size=2, store=store) for rank in range(2)]
    monitors = {}

    def start(rank):
        monitors[rank] = start_monitor(worlds[rank], hosts, "127.0.0.1", may_end_process=False)

    threads = [threading.Thread(target=start, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=20)
    try:
        assert set(monitors[1].ask_progress()) == {0, 1}
    finally:
        for rank in (1, 0):
            monitors[rank].close()


def test_a_world_of_one_needs_no_monitor():
    assert start_monitor(World(), None, "localhost", may_end_process=True) is None


def test_a_server_that_cannot_be_reached():
    store = dist.HashStore()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        store.set("monitor", json.dumps({"addresses": ["127.0.0.1"], "port": probe.getsockname()[1], "token": ""}))
        world = World(rank=1, world_size=2, store=store)
        assert start_monitor(world, None, "127.0.0.1", may_end_process=True) is None


def _raised(error, cause=None):
    with contextlib.suppress(Exception):
        raise error from cause
    return error


@pytest.mark.parametrize(
    ("error", "is_consequence"),
    [
        (RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1"), True),
        (RuntimeError("Connection reset by peer"), True),
        (RankFailedError("rank 1: x"), True),
        (_raised(CheckpointError("rank 1: x"), RankFailedError("on rank 1")), True),
        (ValueError("bad shape"), False),
        (RuntimeError("Timed out waiting 5000ms for recv operation to complete"), False),
    ],
)
def test_consequences_are_told_from_causes(error, is_consequence):
    assert _is_consequence(error) == is_consequence


def test_obituaries():
    failure = {"rank": 1, "world": 4, "host": "node7", "pid": 12, "how": "has died", "text": None}
    assert _obituary(failure).startswith("Booster: rank 1 of 4 (process 12 on node7) died without a traceback:")
    told = _obituary({**failure, "text": "Traceback ...\nValueError: x\n"})
    assert told.startswith("Booster: rank 1 of 4 (process 12 on node7) failed; all other ranks end.")
    assert told.endswith("ValueError: x\n")
