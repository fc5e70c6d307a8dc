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
from monitor_clients import TOKEN, WHERE, MonitorClient

from booster_core.ranks import World
from booster_runtime.watch import Monitor, start_monitor
from booster_runtime.watch import member as member_module
from booster_runtime.watch import server as server_module
from booster_runtime.watch.server import Server
from booster_runtime.watch.sockets import encode

HELLO = {"type": "hello", "rank": 1, "pid": 1001, "token": TOKEN}
DEEP = b"[" * 100_000 + b"]" * 100_000
NOT_OURS = {
    "HTTP": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "binary": bytes(range(256)) + b"\n",
    "null": b"null\n",
    "list": b"[]\n",
    "no fields": b"{}\n",
    "deep list": DEEP + b"\n",
    "long line": b"x" * (2 << 20) + b"\n",
    "long line without end": b"x" * (2 << 20),
    "part of a line": b'{"type": "hel',
}


def hello(**fields):
    return encode({**HELLO, **fields})


BAD_HELLOS = {
    "wrong token": hello(token="guess"),
    "token that is a lone surrogate": hello(token="\ud800"),
    "null token": hello(token=None),
    "rank that is true": hello(rank=True),
    "rank in words": hello(rank="1"),
    "infinite rank": hello(rank=float("inf")),
    "rank of too many digits": b'{"type": "hello", "rank": ' + b"9" * 5000 + b', "pid": 1, "token": "secret"}\n',
    "negative rank": hello(rank=-1),
    "null pid": hello(pid=None),
    "rank that is here": hello(),
}
BAD_MESSAGES = {
    "unknown type": b'{"type": "shutdown", "record": {}}\n',
    "record that is deep": b'{"type": "here", "waited_seconds": 0.0, "record": {"last": '
    + DEEP[99_500:100_500]
    + b"}}\n",
    "collective that is none": b'{"type": "called", "call": {"group": "0", "ranks": [0, "x"]}}\n',
    "collective of other lengths": encode(
        {"type": "called", "call": {"group": "0", "ranks": [0, 1], "sent": [1], "received": [1]}}
    ),
    "record of another kind": b'{"type": "here", "waited_seconds": 0.0, "record": 1}\n',
    "counts that are no numbers": b'{"type": "here", "waited_seconds": 0.0, "record": {"counts": {"step": "x"}}}\n',
    "counts without end": b'{"type": "here", "waited_seconds": 0.0, "record": {"counts": {"step": Infinity}}}\n',
    "collectives without ranks": b'{"type": "here", "waited_seconds": 0.0, "record": {"collectives": [{}]}}\n',
    "call of three parts": b'{"type": "where", "record": {}, "ranks": null, "call": ["step", 1, 1]}\n',
    "ranks that are none": b'{"type": "where", "record": {}, "ranks": "x", "call": ["step", 1]}\n',
    "failure without words": b'{"type": "failed", "record": {}}\n',
}


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
    clients = [MonitorClient(server.port).hello(rank) for rank in range(2)]
    assert [client.receive()["type"] for client in clients] == ["welcome"] * 2
    yield server, clients
    for client in clients:
        client.close()
    server.close()


def check_that_it_watches(clients, behind=b""):
    """A question is answered, right behind what a rank sends before it as well, and a death is told."""
    question = {"type": "where", "record": {"counts": {"step": 8}}, "call": ["step", 8], "ranks": "0 1"}
    clients[1].connection.sendall(behind + encode(question))
    assert clients[0].receive() == WHERE
    clients[0].here({"counts": {"step": 7}})
    assert clients[1].receive()["missing"].startswith("rank 0 has not reached it")
    clients[1].close()
    assert lost_rank(clients[0]) == 1


def lost_rank(client):
    """Answer for a rank, and return the rank that it is told of."""
    while (message := client.receive())["type"] == "where":
        client.here({})
    assert message["type"] == "failure"
    return message["rank"]


def missing(client, record):
    """Ask who has not come to `step` #9, answer for this rank, and return what the server says."""
    client.where(record, ["step", 9])
    while (message := client.receive())["type"] == "where":
        client.here(record)
    return message["missing"]


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("data", [*NOT_OURS.values(), *BAD_HELLOS.values()], ids=[*NOT_OURS, *BAD_HELLOS])
def test_what_third_parties_send_ends_their_connection_only(watched, data, capfd):
    server, clients = watched
    other = MonitorClient(server.port)
    with contextlib.suppress(OSError):  # the server may close it while we are still sending
        other.connection.sendall(data)
        other.connection.shutdown(socket.SHUT_WR)
    with pytest.raises((EOFError, ConnectionError)):
        other.receive()
    other.close()
    check_that_it_watches(clients)
    assert "Booster" not in capfd.readouterr().err


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("data", [*NOT_OURS.values(), *BAD_MESSAGES.values()], ids=[*NOT_OURS, *BAD_MESSAGES])
def test_what_a_rank_sends_by_mistake_is_no_death(watched, data, capfd):
    _, clients = watched
    check_that_it_watches(clients, behind=data if data.endswith(b"\n") else data + b"\n")
    assert "the monitor ignores a message of rank 1" in capfd.readouterr().err


def test_a_line_cut_into_bytes_counts(watched):
    server, clients = watched
    third = MonitorClient(server.port)
    for byte in hello(rank=2):
        third.connection.sendall(bytes([byte]))
    assert third.receive()["type"] == "welcome"
    third.close()
    assert lost_rank(clients[0]) == 2


def test_a_failure_right_behind_the_hello_counts(watched):
    server, clients = watched
    third = MonitorClient(server.port)
    third.connection.sendall(hello(rank=2) + encode({"type": "failed", "text": "x" * 60_000, "record": {}}))
    assert clients[0].receive() == WHERE
    failure = clients[0].receive()
    assert failure["rank"] == 2
    assert failure["text"].startswith(f"Booster: rank 2 failed: {'x' * 60_000}\n")
    third.close()


def test_silent_third_parties_keep_nobody_out(watched, monkeypatch):
    monkeypatch.setattr(server_module, "_MAX_UNKNOWN", 7)
    server, clients = watched
    others = [MonitorClient(server.port) for _ in range(50)]
    third = MonitorClient(server.port).hello(2)
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
    other = MonitorClient(server.port)
    with pytest.raises((EOFError, ConnectionError)):
        other.receive()
    other.close()
    check_that_it_watches(clients)


def test_a_rank_that_does_not_read_holds_nobody_up(watched, monkeypatch):
    monkeypatch.setattr(server_module, "_MAX_UNSENT_BYTES", 1 << 16)
    _, clients = watched
    for number in range(1, 4001):  # more than the kernel keeps for rank 1, which reads nothing of it
        clients[1].where({}, ["step" * 500, number])
        if number % 100 == 0:
            assert missing(clients[0], {}).startswith("ranks 0, 1 and 2 have not reached it")
    clients[1].close()
    assert lost_rank(clients[0]) == 1


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=10,
)
names = st.sampled_from(["call", "pid", "rank", "ranks", "record", "text", "token", "waited_seconds", "x"])
# Not those by which a rank says that it ends or asks something.
kinds = st.sampled_from(["hello", "here", "welcome"]) | values.filter(lambda value: not isinstance(value, str))
objects = st.builds(lambda kind, fields: {**fields, "type": kind}, kinds, st.dictionaries(names, values, max_size=6))
lines = st.binary(max_size=200) | (values | objects).map(lambda value: json.dumps(value).encode())
streams = st.lists(lines, max_size=8).map(b"\n".join)


@pytest.fixture(scope="module")
def lasting():
    server = Server(["a"] * 2, TOKEN, ["127.0.0.1"])
    server.start()
    client = MonitorClient(server.port).hello(0)
    assert client.receive()["type"] == "welcome"
    yield server, client
    client.close()
    server.close()


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=streams, cut=st.integers(min_value=0, max_value=300), is_rank=st.booleans())
def test_any_bytes(lasting, data, cut, is_rank):
    server, client = lasting
    sender = client if is_rank else MonitorClient(server.port)
    with contextlib.ExitStack() as stack:
        if not is_rank:
            stack.enter_context(contextlib.suppress(ConnectionError))
        sender.connection.sendall(data[:cut])
        sender.connection.sendall(data[cut:] + b"\n")
    if not is_rank:
        sender.close()
    assert missing(client, {"counts": {"step": 9}}).startswith("rank 1 has not reached it; it had not connected")


def test_a_server_that_fails_says_so_to_all(capfd, monkeypatch):
    server = Server(["a", "a"], TOKEN, ["127.0.0.1"])
    server.start()
    client = MonitorClient(server.port).hello(0)
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


def serve_one(*answers, timeout_seconds=5.0):
    """Play a server that lets a rank in and then says something; return the member and the server's end."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        connection = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
    world = World(rank=1, world_size=2, timeout_seconds=timeout_seconds)
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


def test_a_member_that_has_lost_rank_0_says_so_when_it_is_asked():
    monitor, theirs = serve_one()
    theirs.close()
    assert monitor.describe_missing("step", 1, None).startswith("rank 0 died without a traceback")
    assert monitor.describe_missing("step", 1, None, only_ended=True) is None
    monitor.close()


def test_a_member_that_gets_no_answer_does_not_say_that_there_is_no_monitor(monkeypatch):
    monkeypatch.setattr(member_module, "_ASK_SECONDS", 0.2)
    monitor, theirs = serve_one()
    said = monitor.describe_missing("step", 1, None)
    assert said.startswith("rank 0, which knows where the others are, gave no answer within 0.2")
    theirs.close()
    monitor.close()


def test_a_member_outlasts_what_is_no_message(capfd):
    monitor, theirs = serve_one(b"\xff\n", DEEP + b"\n", b"[]\n", encode({"type": "failure", "rank": None}))
    _wait_for_text(capfd, "the monitor of rank 1 ignores a message of rank 0")
    theirs.sendall(encode(WHERE))
    with theirs.makefile() as said:
        assert [json.loads(next(said))["type"] for _ in range(2)] == ["hello", "here"]
    theirs.close()
    monitor.close()


def test_a_member_whose_thread_fails_says_so(capfd, monkeypatch):
    monitor, theirs = serve_one()
    monkeypatch.setattr(monitor, "_look", "no function")
    _wait_for_text(capfd, "the monitor of rank 1 has stopped")
    theirs.close()
    monitor.close()


def start_both():
    """Start the monitor of two ranks; return their worlds, and those that have one."""
    store = dist.HashStore()
    worlds = [World(rank=rank, world_size=2, store=store) for rank in range(2)]
    monitors = {}

    def start(world):
        monitors[world.rank] = start_monitor(world, ["a", "a"], "x", may_end_process=False)

    threads = [threading.Thread(target=start, args=[world]) for world in worlds]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return worlds, {rank: monitor for rank, monitor in monitors.items() if monitor is not None}


def test_a_server_that_cannot_be_started_is_told_to_every_rank(monkeypatch):
    def refuses(*_, **__):
        raise OSError(98, "no port is free")

    monkeypatch.setattr("booster_runtime.watch.start.Server", refuses)
    worlds, monitors = start_both()
    assert monitors == {}
    expected = "rank 0 could not start it: [Errno 98] no port is free"
    assert [world.unwatched_because for world in worlds] == [expected] * 2
