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

from booster_core.ranks.world import World
from booster_runtime.liveness import server as server_module
from booster_runtime.liveness import start_monitor
from booster_runtime.liveness.member import NOT_WANTED, Monitor
from booster_runtime.liveness.server import Server
from booster_runtime.liveness.wire import FROM_MEMBERS, MAX_LINE_BYTES, Lines, encode

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
    "record that is deep": b'{"type": "here", "question": 1, "record": {"a": ' + b"[" * 500 + b"]" * 500 + b"}}\n",
    "record of another kind": b'{"type": "here", "question": 1, "record": 1}\n',
    "question that is no number": b'{"type": "here", "question": Infinity, "record": {}}\n',
    "failure without words": b'{"type": "failed", "text": null, "is_derived": 1}\n',
}


class Client:
    def __init__(self, port):
        self.connection = socket.create_connection(("127.0.0.1", port), timeout=10)
        self.lines = Lines()
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

    def progress(self, records):
        """Ask for all ranks' progress, answer for this one, and return the answers."""
        self.send(type="where")
        question = self.receive()
        assert question["type"] == "where", question
        self.send(type="here", question=question["question"], record=records)
        return self.receive()

    def close(self):
        self.connection.close()


@pytest.fixture
def watched():
    """A server, and the connections of ranks 0 and 1 of three."""
    server = Server(["a", "a", "a"], TOKEN, speakers_end_first=False)
    server.start()
    clients = [Client(server.port) for _ in range(2)]
    for rank, client in enumerate(clients):
        client.send(type="hello", rank=rank, pid=1000 + rank, token=TOKEN)
        assert client.receive()["type"] == "welcome"
    yield server, clients
    for client in clients:
        client.close()
    server.close()


def check_that_it_watches(clients):
    """A question is answered, and a death is told."""
    clients[1].send(type="where")
    for number, client in enumerate(clients):
        question = client.receive()
        assert question["type"] == "where", question
        client.send(type="here", question=question["question"], record={"last": number})
    records = clients[1].receive()["records"]
    assert records["0"] == {"last": 0}
    assert records["1"] == {"last": 1}
    clients[1].close()
    failure = clients[0].receive()
    assert (failure["type"], failure["rank"]) == ("failure", 1)


@pytest.mark.parametrize("data", BAD.values(), ids=BAD.keys())
def test_what_strangers_send_ends_their_connection_only(watched, data, capfd):
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


@pytest.mark.parametrize("data", BAD.values(), ids=BAD.keys())
def test_what_a_rank_sends_by_mistake_is_no_death(watched, data, capfd):
    _, clients = watched
    clients[1].connection.sendall(data if data.endswith(b"\n") else data + b"\n")
    check_that_it_watches(clients)
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
    assert clients[0].receive()["rank"] == 2


def test_a_failure_right_behind_the_hello_counts(watched):
    server, clients = watched
    third = Client(server.port)
    failed = encode({"type": "failed", "text": "x" * 60_000, "is_derived": False})
    third.connection.sendall(as_bytes(rank=2) + failed)
    failure = clients[0].receive()
    assert (failure["rank"], len(failure["text"])) == (2, 60_000)
    third.close()


def test_nobody_takes_the_place_of_a_rank(watched):
    server, clients = watched
    other = Client(server.port).send(**HELLO)
    with pytest.raises((EOFError, ConnectionError)):
        other.receive()
    other.close()
    check_that_it_watches(clients)


def test_silent_strangers_keep_nobody_out(watched, monkeypatch):
    monkeypatch.setattr(server_module, "_MAX_UNKNOWN", 5)
    server, clients = watched
    others = [Client(server.port) for _ in range(50)]
    third = Client(server.port).send(**{**HELLO, "rank": 2})
    assert third.receive()["type"] == "welcome"
    with pytest.raises((EOFError, ConnectionError)):
        others[0].receive()
    for client in [*others, third]:
        client.close()
    assert clients[0].receive()["rank"] == 2


def test_a_stranger_who_says_nothing_is_shown_out(watched, monkeypatch):
    monkeypatch.setattr(server_module, "_HELLO_SECONDS", 0.2)
    server, clients = watched
    other = Client(server.port)
    with pytest.raises((EOFError, ConnectionError)):
        other.receive()
    other.close()
    check_that_it_watches(clients)


def test_a_rank_that_does_not_read_holds_nobody_up(watched):
    _, clients = watched
    for number in range(1, 401):  # 20 MB for rank 1, which reads nothing of it
        clients[1].send(type="where")
        assert clients[0].receive() == {"type": "where", "question": number}
        clients[0].send(type="here", question=number, record={"text": "x" * 50_000})
        clients[1].send(type="here", question=number, record={})
    clients[1].close()
    assert clients[0].receive()["type"] == "failure"


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
    server = Server(["a"] * 2, TOKEN, speakers_end_first=False)
    server.start()
    client = Client(server.port).send(type="hello", rank=0, pid=1000, token=TOKEN)
    assert client.receive()["type"] == "welcome"
    yield server, client
    client.close()
    server.close()


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=streams, cut=st.integers(min_value=0, max_value=300))
def test_any_bytes_of_a_stranger(lasting, data, cut):
    server, client = lasting
    other = Client(server.port)
    with contextlib.suppress(ConnectionError):
        other.connection.sendall(data[:cut])
        other.connection.sendall(data[cut:] + b"\n")
    other.close()
    assert client.progress({"is": "here"})["records"]["0"] == {"is": "here"}


def _is_an_end(line):
    """Whether a line says that its rank ends, or asks something: those are to be acted on."""
    try:
        (message,) = Lines(FROM_MEMBERS).feed(line + b"\n")
    except ValueError:
        return False
    return message["type"] in ("failed", "bye", "where", "ending", "waiting")


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=streams, cut=st.integers(min_value=0, max_value=300))
def test_any_bytes_of_a_rank(lasting, data, cut):
    _, client = lasting
    data = b"\n".join(line for line in data.split(b"\n") if not _is_an_end(line))
    client.connection.sendall(data[:cut])
    client.connection.sendall(data[cut:] + b"\n")
    assert client.progress({"is": "here"})["records"]["0"] == {"is": "here"}


def test_a_server_that_fails_says_so_to_all(capfd, monkeypatch):
    server = Server(["a", "a"], TOKEN, speakers_end_first=False)
    server.start()
    client = Client(server.port).send(type="hello", rank=0, pid=1, token=TOKEN)
    assert client.receive()["type"] == "welcome"

    def fails(_):
        raise ZeroDivisionError

    monkeypatch.setattr(server._verdicts, "tick", fails)
    client.send(type="where")
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
    monitor = Monitor(1, connection, TOKEN, server=None, may_end_process=False, error_file=None, timeout_seconds=5.0)
    theirs.sendall(encode({"type": "welcome", "is_heir": True}))
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
    _wait_for_text(capfd, "the monitor on rank 0 has stopped: ValueError: x")
    assert monitor.ask_progress() is None
    theirs.close()
    monitor.close()


def test_a_member_outlasts_lines_that_are_no_messages(capfd):
    monitor, theirs = serve_one(b"\xff\n", DEEP + b"\n", encode({"type": "failure", "rank": None}))
    _wait_for_text(capfd, "the monitor of rank 1 ignores a message of rank 0")
    theirs.sendall(encode({"type": "where", "question": 1}))
    with theirs.makefile() as lines:
        said = [json.loads(next(lines)) for _ in range(2)]
    assert [each["type"] for each in said] == ["hello", "here"]
    theirs.close()
    monitor.close()


def test_a_member_whose_thread_fails_says_so(capfd):
    monitor, theirs = serve_one(encode({"type": "progress", "records": {"x": {}}}))
    _wait_for_text(capfd, "the monitor of rank 1 has stopped")
    theirs.close()
    monitor.close()


def test_a_server_that_cannot_be_started_is_told_to_every_rank(monkeypatch):
    def refuses(*_, **__):
        raise OSError(98, "no port is free")

    monkeypatch.setattr("booster_runtime.liveness.member.Server", refuses)
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
