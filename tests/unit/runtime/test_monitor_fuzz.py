"""Whatever is sent to the monitor, it goes on to watch, and calls no living rank dead."""

from __future__ import annotations

import contextlib
import json
import socket
import threading

import pytest
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from booster_core.ranks import World
from booster_runtime.watch import NOT_WANTED, Monitor, links, start_monitor
from booster_runtime.watch import server as server_module
from booster_runtime.watch.server import Server
from booster_runtime.watch.wire import FROM_MEMBERS, FROM_SERVER, MAX_LINE_BYTES, Lines, encode

TOKEN = "secret"
HELLO = {"type": "hello", "rank": 1, "pid": 1001, "token": TOKEN}
DEEP = b"[" * 100_000 + b"]" * 100_000


def as_bytes(**fields):
    return json.dumps({**HELLO, **fields}).encode() + b"\n"


BAD = {
    "null rank": as_bytes(rank=None),
    "rank that is true": as_bytes(rank=True),
    "rank in words": as_bytes(rank="1"),
    "rank in a list": as_bytes(rank=[1]),
    "infinite rank": as_bytes(rank=float("inf")),
    "rank that is no number": as_bytes(rank=float("nan")),
    "rank that overflows": b'{"type": "hello", "rank": 1e999, "pid": 1, "token": "secret"}\n',
    "rank of many digits": b'{"type": "hello", "rank": ' + b"9" * 3000 + b', "pid": 1, "token": "secret"}\n',
    "rank of too many digits": b'{"type": "hello", "rank": ' + b"9" * 5000 + b', "pid": 1, "token": "secret"}\n',
    "negative rank": as_bytes(rank=-1),
    "null pid": as_bytes(pid=None),
    "infinite pid": as_bytes(pid=float("-inf")),
    "null token": as_bytes(token=None),
    "token that is not ASCII": as_bytes(token="gehëim"),
    "token that is a lone surrogate": as_bytes(token="\ud800"),
    "wrong token": as_bytes(token="guess"),
    "null type": as_bytes(type=None),
    "type that cannot be hashed": as_bytes(type=["hello"]),
    "unknown type": as_bytes(type="shutdown"),
    "no fields": b"{}\n",
    "null": b"null\n",
    "number": b"1\n",
    "text": b'"hello"\n',
    "infinity": b"Infinity\n",
    "list": b"[]\n",
    "empty line": b"\n",
    "HTTP": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "binary": bytes(range(256)) + b"\n",
    "wrong UTF-8": b"\xff\xfe\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\n",
    "deep list": DEEP + b"\n",
    "deep field": b'{"type": "hello", "rank": ' + DEEP + b"}\n",
    "deep objects": b'{"a":' * 50_000 + b"1" + b"}" * 50_000 + b"\n",
    "long line": b"x" * (2 * MAX_LINE_BYTES) + b"\n",
    "long line without end": b"x" * (2 * MAX_LINE_BYTES),
    "part of a line": b'{"type": "hel',
    "record that is deep": b'{"type": "here", "idle_seconds": 0.0, "record": {"last": '
    + b"[" * 500
    + b"]" * 500
    + b"}}\n",
    "record of another kind": b'{"type": "here", "idle_seconds": 0.0, "record": 1}\n',
    "counts that are no numbers": b'{"type": "here", "idle_seconds": 0.0, "record": {"counts": {"step": "x"}}}\n',
    "counts without end": b'{"type": "here", "idle_seconds": 0.0, "record": {"counts": {"step": Infinity}}}\n',
    "ranks that are no numbers": b'{"type": "here", "idle_seconds": 0.0, "record": {"ranks": ["x"]}}\n',
    "call of three parts": b'{"type": "where", "record": {}, "ranks": null, "call": ["step", 1, 1]}\n',
    "call of ranks that are none": b'{"type": "where", "record": {}, "ranks": [{}], "call": ["step", 1]}\n',
    "failure without words": b'{"type": "failed", "text": null, "record": {}}\n',
}


class Client:
    def __init__(self, port):
        self.connection = socket.create_connection(("127.0.0.1", port), timeout=10)
        self.lines = Lines(FROM_SERVER, pytest.fail)
        self.messages = []

    def send(self, **message):
        self.connection.sendall(encode(message))
        return self

    def receive(self):
        while not self.messages:
            data = self.connection.recv(65536)
            if not data:
                raise EOFError
            self.messages += self.lines.feed(data)
        return self.messages.pop(0)

    def here(self, **counts):
        return self.send(type="here", record={"counts": counts}, idle_seconds=0.0)

    def missing(self, **counts):
        """Ask who has not come to `step` #9, answer for this rank, and return what the server says."""
        self.send(type="where", record={"counts": counts}, call=["step", 9], ranks=None)
        while (message := self.receive())["type"] == "where":
            self.here(**counts)
        return message["missing"]

    def close(self):
        self.connection.close()


@pytest.fixture
def patient(monkeypatch):
    """Let the server wait for answers until they have come, however busy the machine is."""
    for name in ("_ANSWER_SECONDS", "_NEWS_SECONDS"):
        monkeypatch.setattr(server_module, name, 600.0)


@pytest.fixture
def watched():
    """A server, and the connections of ranks 0 and 1 of three."""
    server = Server(["a", "a", "a"], TOKEN, ["127.0.0.1"])
    server.start()
    clients = [Client(server.port) for _ in range(2)]
    for rank, client in enumerate(clients):
        client.send(type="hello", rank=rank, pid=1000 + rank, token=TOKEN)
        assert client.receive()["type"] == "welcome"
    yield server, clients
    for client in clients:
        client.close()
    server.close()


def check_that_it_watches(clients, behind=b""):
    """A question is answered, right behind what a rank sends before it as well, and a death is told."""
    question = {"type": "where", "record": {"counts": {"step": 8}}, "call": ["step", 8], "ranks": [0, 1]}
    clients[1].connection.sendall(behind + encode(question))
    assert clients[0].receive() == {"type": "where"}
    clients[0].here(step=7)
    assert clients[1].receive()["missing"].startswith("rank 0 has not reached it")
    clients[1].close()
    assert clients[0].receive() == {"type": "where"}
    clients[0].here(step=7)
    failure = clients[0].receive()
    assert (failure["type"], failure["rank"]) == ("failure", 1)


def lost_rank(client):
    """Answer for a rank, and return the rank that it is told of."""
    while (message := client.receive())["type"] == "where":
        client.here()
    return message["rank"]


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("data", BAD.values(), ids=BAD.keys())
def test_what_third_parties_send_ends_their_connection_only(watched, data, capfd):
    server, clients = watched
    other = Client(server.port)
    with contextlib.suppress(OSError):  # the server may close it while we are still sending
        other.connection.sendall(data)
        other.connection.shutdown(socket.SHUT_WR)
    with pytest.raises((EOFError, ConnectionError)):
        other.receive()
    other.close()
    check_that_it_watches(clients)
    assert "Booster" not in capfd.readouterr().err


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("data", BAD.values(), ids=BAD.keys())
def test_what_a_rank_sends_by_mistake_is_no_death(watched, data, capfd):
    _, clients = watched
    check_that_it_watches(clients, behind=data if data.endswith(b"\n") else data + b"\n")
    told = capfd.readouterr().err
    is_known = data.startswith(b'{"type": "hello"') and b"1e999" not in data
    assert "the monitor ignores a message of rank 1" in told or is_known, told


def test_a_line_cut_into_bytes_counts(watched):
    server, clients = watched
    third = Client(server.port)
    for byte in as_bytes(rank=2):
        third.connection.sendall(bytes([byte]))
    assert third.receive()["type"] == "welcome"
    third.close()
    assert lost_rank(clients[0]) == 2


def test_a_failure_right_behind_the_hello_counts(watched):
    server, clients = watched
    third = Client(server.port)
    failed = encode({"type": "failed", "text": "x" * 60_000, "record": {}})
    third.connection.sendall(as_bytes(rank=2) + failed)
    assert clients[0].receive() == {"type": "where"}
    failure = clients[0].receive()
    assert failure["rank"] == 2
    assert failure["text"].startswith(f"Booster: rank 2 failed: {'x' * 60_000}\n")
    third.close()


@pytest.mark.usefixtures("patient")
def test_nobody_takes_the_place_of_a_rank(watched):
    server, clients = watched
    other = Client(server.port).send(**HELLO)
    with pytest.raises((EOFError, ConnectionError)):
        other.receive()
    other.close()
    check_that_it_watches(clients)


def test_silent_third_parties_keep_nobody_out(watched, monkeypatch):
    monkeypatch.setattr(server_module, "_MAX_UNKNOWN", 7)
    server, clients = watched
    others = [Client(server.port) for _ in range(50)]
    third = Client(server.port).send(**{**HELLO, "rank": 2})
    assert third.receive()["type"] == "welcome"
    with pytest.raises((EOFError, ConnectionError)):
        others[0].receive()
    for client in [*others, third]:
        client.close()
    assert lost_rank(clients[0]) == 2


@pytest.mark.usefixtures("patient")
def test_a_connection_that_says_nothing_is_closed(watched, monkeypatch):
    monkeypatch.setattr(server_module, "_HELLO_SECONDS", 0.2)
    server, clients = watched
    other = Client(server.port)
    with pytest.raises((EOFError, ConnectionError)):
        other.receive()
    other.close()
    check_that_it_watches(clients)


def test_a_rank_that_does_not_read_holds_nobody_up(watched, monkeypatch):
    monkeypatch.setattr(links, "_MAX_UNSENT_BYTES", 1 << 16)
    _, clients = watched
    for number in range(1, 4001):  # more than the kernel keeps for rank 1, which reads nothing of it
        clients[1].send(type="where", record={}, call=["step" * 500, number], ranks=None)
        if number % 100 == 0:
            assert clients[0].missing().startswith("ranks 0, 1 and 2 have not reached it")
    clients[1].close()
    assert lost_rank(clients[0]) == 1


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=10,
)
names = st.sampled_from(sorted({name for fields in FROM_MEMBERS.values() for name in fields} | {"type", "x"}))
kinds = st.sampled_from(sorted(FROM_MEMBERS)) | values
objects = st.builds(lambda kind, fields: {**fields, "type": kind}, kinds, st.dictionaries(names, values, max_size=6))
lines = st.binary(max_size=200) | values.map(lambda value: json.dumps(value).encode()) | objects.map(
    lambda value: json.dumps(value).encode()
)  # fmt: skip
streams = st.lists(lines, max_size=8).map(b"\n".join)


@pytest.fixture(scope="module")
def lasting():
    server = Server(["a"] * 2, TOKEN, ["127.0.0.1"])
    server.start()
    client = Client(server.port).send(type="hello", rank=0, pid=1000, token=TOKEN)
    assert client.receive()["type"] == "welcome"
    yield server, client
    client.close()
    server.close()


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=streams, cut=st.integers(min_value=0, max_value=300))
def test_any_bytes_of_a_third_party(lasting, data, cut):
    server, client = lasting
    other = Client(server.port)
    with contextlib.suppress(ConnectionError):
        other.connection.sendall(data[:cut])
        other.connection.sendall(data[cut:] + b"\n")
    other.close()
    assert client.missing(step=9).startswith("rank 1 has not reached it; it had not connected")


def _is_to_be_acted_on(line):
    """Whether a line says that its rank ends or waits, or asks something."""
    messages = Lines(FROM_MEMBERS, lambda _: None).feed(line + b"\n")
    return any(message["type"] in ("failed", "bye", "where", "ending") for message in messages)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=streams, cut=st.integers(min_value=0, max_value=300))
def test_any_bytes_of_a_rank(lasting, data, cut):
    _, client = lasting
    data = b"\n".join(line for line in data.split(b"\n") if not _is_to_be_acted_on(line))
    client.connection.sendall(data[:cut])
    client.connection.sendall(data[cut:] + b"\n")
    assert client.missing(step=9).startswith("rank 1 has not reached it; it had not connected")


def test_a_server_that_fails_says_so_to_all(capfd, monkeypatch):
    server = Server(["a", "a"], TOKEN, ["127.0.0.1"])
    server.start()
    client = Client(server.port).send(type="hello", rank=0, pid=1, token=TOKEN)
    assert client.receive()["type"] == "welcome"

    def fails(_):
        raise ZeroDivisionError

    monkeypatch.setattr(server._verdicts, "tick", fails)
    while (message := client.receive())["type"] != "closing":
        pass
    assert message["cause"].startswith("ZeroDivisionError")
    told = capfd.readouterr().err
    assert "the monitor has stopped" in told
    assert "ZeroDivisionError" in told
    client.close()
    server.close()


def serve_one(*answers):
    """Play a server that lets a rank in and then says something; return the member."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        connection = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
    world = World(rank=1, world_size=2, timeout_seconds=5.0)
    monitor = Monitor(world, connection, TOKEN, server=None, may_end_process=False, error_file=None)
    theirs.sendall(encode({"type": "welcome", "speaks": True}))
    assert monitor.wait_for_welcome()
    for answer in answers:
        theirs.sendall(answer)
    return monitor, theirs


def _wait_for_text(capfd, text):
    told = ""
    for _ in range(200):
        told += capfd.readouterr().err
        if text in told:
            return
        threading.Event().wait(0.05)
    pytest.fail(f"{text!r} was not said, but {told!r}")


def test_a_member_says_that_its_watch_has_stopped(capfd):
    monitor, theirs = serve_one(encode({"type": "closing", "cause": "ValueError: x", "gone": {}}))
    _wait_for_text(capfd, "the monitor on rank 0 has stopped, so nobody is watched: ValueError: x")
    assert monitor.describe_missing("step", 1, None) is None
    theirs.close()
    monitor.close()


def test_a_member_outlasts_lines_that_are_no_messages(capfd):
    monitor, theirs = serve_one(b"\xff\n", DEEP + b"\n", encode({"type": "failure", "rank": None}))
    _wait_for_text(capfd, "the monitor of rank 1 ignores a message of rank 0")
    theirs.sendall(encode({"type": "where"}))
    with theirs.makefile() as lines:
        said = [json.loads(next(lines)) for _ in range(2)]
    assert [each["type"] for each in said] == ["hello", "here"]
    theirs.close()
    monitor.close()


def test_a_member_whose_thread_fails_says_so(capfd):
    monitor, theirs = serve_one(encode({"type": "closing", "cause": None, "gone": {"x": "ended normally"}}))
    _wait_for_text(capfd, "the monitor of rank 1 has stopped")
    theirs.close()
    monitor.close()


def test_a_server_that_cannot_be_started_is_told_to_every_rank(monkeypatch):
    def refuses(*_, **__):
        raise OSError(98, "no port is free")

    monkeypatch.setattr("booster_runtime.watch.start.Server", refuses)
    store = dist.HashStore()
    worlds = [World(rank=rank, world_size=2, store=store) for rank in range(2)]
    threads = [
        threading.Thread(target=start_monitor, args=(world, ["a", "a"], "x"), kwargs={"may_end_process": False})
        for world in worlds
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    expected = "rank 0 could not start it: [Errno 98] no port is free"
    assert [world.unwatched_because for world in worlds] == [expected] * 2


@pytest.mark.parametrize(("wanted", "watched_ranks"), [((False, False), []), ((False, True), []), ((True, False), [0])])
def test_a_monitor_that_is_turned_off(wanted, watched_ranks):
    store = dist.HashStore()
    worlds = [World(rank=rank, world_size=2, store=store) for rank in range(2)]
    monitors = {}

    def start(world, is_wanted):
        monitors[world.rank] = start_monitor(world, ["a", "a"], "x", may_end_process=False, is_wanted=is_wanted)

    threads = [threading.Thread(target=start, args=pair) for pair in zip(worlds, wanted, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    try:
        assert [rank for rank, monitor in sorted(monitors.items()) if monitor is not None] == watched_ranks
        for rank in {0, 1} - set(watched_ranks):
            assert worlds[rank].unwatched_because == NOT_WANTED
    finally:
        for monitor in monitors.values():
            if monitor is not None:
                monitor.close()
