"""The monitor's server as members see it, members as the server does, and how ranks find it."""

import contextlib
import fcntl
import json
import resource
import socket
import threading

import pytest
import torch.distributed as dist
from patience import unhindered_seconds

from booster_core.errors import CheckpointError, RankFailedError
from booster_core.ranks import PROGRESS, World
from booster_runtime.watch import MonitorMember, start_monitor
from booster_runtime.watch import member as member_module
from booster_runtime.watch import server as server_module
from booster_runtime.watch.failure_detector import Point, Record
from booster_runtime.watch.server import Server
from booster_runtime.watch.sockets import encode, is_readable
from booster_runtime.watch.uncaught import is_consequence

TOKEN = "secret"


class MonitorClient:
    """A connection, of a rank once it has said hello."""

    def __init__(self, port):
        self.connection = socket.create_connection(("127.0.0.1", port), timeout=10)
        self.pending = b""
        self.messages = []

    def send(self, **message):
        self.connection.sendall(encode(message))
        return self

    def hello(self, rank, token=TOKEN):
        return self.send(type="hello", rank=rank, pid=1000 + rank, token=token)

    def here(self, name, number, **counts):
        return self.send(type="here", record=at(name, number, **counts))

    def where(self, name, number, ranks=None, **counts):
        return self.send(type="where", record=at(name, number, **counts), call=Point(name, number, ranks))

    def receive(self):
        """Return the next message; raise EOFError where the connection has ended."""
        while not self.messages:
            data = self.connection.recv(65536)
            if not data:
                raise EOFError
            self.messages += self.feed(data)
        return self.messages.pop(0)

    def feed(self, data):
        """Return the messages that some bytes complete."""
        *lines, self.pending = (self.pending + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def close(self):
        self.connection.close()


def at(name, number, **counts):
    """The record of a rank that is in a call."""
    call = Point(name, number)
    return Record(counts={**counts, name: number}, last=call, is_finished=False, waits=[call])


@pytest.fixture
def server():
    server = Server(["a", "a", "b"], TOKEN, "127.0.0.1")
    server.start()
    yield server
    server.close()


@pytest.fixture
def clients(server):
    clients = [MonitorClient(server.port).hello(rank) for rank in range(3)]
    assert [client.receive() for client in clients] == [
        {"type": "welcome", "reports_for_host": rank > 0} for rank in range(3)
    ]
    yield clients
    for client in clients:
        client.close()


def test_a_closed_connection_is_a_death(clients):
    clients[0].here("step", 3)
    clients[2].here("step", 3).where("step", 3)
    assert clients[2].receive()["missing"].startswith("rank 1 has not reached it; it made no such call yet")
    clients[1].close()
    for rank in (0, 2):
        failure = clients[rank].receive()
        assert (failure["type"], failure["reports_for_host"]) == ("failure", True)
        assert failure["text"].startswith("Booster: rank 1 died without a traceback: killed by a signal")
        assert (
            "Rank 1 was process 1001 on a. Last calls: ranks 0 and 2 entered `step` #3; rank 1 died" in failure["text"]
        )


def test_an_exception_is_told_to_all_at_once_and_said_once_per_host(clients):
    start = unhindered_seconds()
    clients[0].send(type="failed", text="ValueError: bad", record=at("step", 3))
    failures = [client.receive() for client in clients]
    assert unhindered_seconds() - start < 1
    assert [failure["reports_for_host"] for failure in failures] == [False, True, True]
    assert {failure["text"].splitlines()[0] for failure in failures} == {"Booster: rank 0 failed: ValueError: bad"}


def test_a_rank_that_connects_after_a_failure_hears_of_it(server):
    first, second = (MonitorClient(server.port).hello(rank) for rank in range(2))
    first.send(type="failed", text="ValueError: bad", record=at("step", 3))
    assert [second.receive()["type"] for _ in range(2)] == ["welcome", "failure"]
    late = MonitorClient(server.port).hello(2)
    assert late.receive()["type"] == "welcome"
    told = late.receive()
    assert (told["type"], told["reports_for_host"]) == ("failure", False)
    assert told["text"].startswith("Booster: rank 0 failed: ValueError: bad")
    for each in (first, second, late):
        each.close()


def test_what_a_rank_sends_by_mistake_is_ignored_and_said_once(clients, capfd):
    for _ in range(2):
        clients[1].send(type="here", record={"of another version": 1})
    clients[1].connection.sendall(b"no JSON\n")
    clients[0].where("step", 1)
    assert clients[0].receive()["missing"].startswith("ranks 1 and 2 have not reached it")
    assert capfd.readouterr().err.count("the monitor ignores what rank 1 sends") == 1


def test_a_goodbye_is_told_to_nobody_and_named_to_those_that_ask(clients):
    clients[1].send(type="bye").close()
    clients[0].where("step", 1)
    message = clients[0].receive()
    assert message["missing"].startswith("ranks 1 and 2 have not reached it; rank 1 ended normally; rank 2 made")
    assert message["ended"].startswith("rank 1 ended normally while rank 0 waits in `step` #1, which it never called.")


def test_askers_of_one_call_share_an_answer_and_others_get_their_own(clients):
    for rank in (0, 1):
        clients[rank].where("step", 5)
    clients[2].where("save", 1, (1, 2), backward=5)
    assert clients[0].receive()["missing"].startswith("rank 2 has not reached it; it entered `save` #1.")
    assert clients[1].receive()["missing"].startswith("rank 2 has not reached it; it entered `save` #1.")
    assert clients[2].receive()["missing"].startswith("rank 1 has not reached it; it entered `step` #5.")


def hello(**fields):
    return encode({"type": "hello", "rank": 1, "pid": 1, "token": TOKEN, **fields})


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        bytes(range(256)) + b"\n",
        b"null\n",
        b"[" * 100_000 + b"]" * 100_000 + b"\n",
        hello(token="guess"),
        hello(token="\ud800"),
        hello(rank=7),
        hello(rank=True),
        hello(rank="x"),
        b'{"type": "hello", "rank": ' + b"9" * 5000 + b', "pid": 1, "token": "secret"}\n',
        hello(pid=None),
        hello(rank=0),  # that is here
        encode({"type": "failed", "rank": 1, "token": TOKEN}),
        b"x" * (2 << 20),
    ],
)
def test_third_parties_are_not_let_in(server, data):
    client = MonitorClient(server.port).hello(0)
    assert client.receive()["type"] == "welcome"
    other = MonitorClient(server.port)
    with pytest.raises((EOFError, ConnectionError)):  # noqa: PT012 - it may be closed while we send
        other.connection.sendall(data)
        other.receive()
    other.close()
    second = MonitorClient(server.port)
    for byte in hello():  # a line cut into bytes counts
        second.connection.sendall(bytes([byte]))
    assert second.receive()["type"] == "welcome"
    second.close()
    assert client.receive()["text"].startswith("Booster: rank 1 died")
    client.close()


def test_a_connection_that_says_nothing_is_closed(server, monkeypatch):
    monkeypatch.setattr(server_module, "_HELLO_SECONDS", 0.2)
    other = MonitorClient(server.port)
    with pytest.raises((EOFError, ConnectionError)):
        other.receive()
    other.close()


def test_the_end_of_the_server_is_announced(server, clients):
    server.close()
    assert clients[0].receive() == {"type": "closing", "cause": None}


def test_a_server_that_fails_says_so_to_all(server, clients, capfd, monkeypatch):
    def fails(_):
        raise ZeroDivisionError

    monkeypatch.setattr(server._verdicts, "tick", fails)
    message = clients[0].receive()
    assert message["type"] == "closing"
    assert message["cause"].startswith("ZeroDivisionError")
    assert "the monitor has stopped" in capfd.readouterr().err


def serve_one(*answers):
    """Play a server that lets a rank in and then says something; return the member and the server's end."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        connection = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
    world = World(rank=1, world_size=2, timeout_seconds=5.0)
    monitor = MonitorMember(world, connection, TOKEN, server=None, may_end_process=False, error_file=None)
    for answer in ({"type": "welcome", "reports_for_host": True}, *answers):
        theirs.sendall(encode(answer))
    assert monitor.wait_for_welcome()
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
    monitor, theirs = serve_one({"type": "closing", "cause": "ValueError: x"})
    _wait_for_text(capfd, "the monitor on rank 0 has stopped, so nobody is watched: ValueError: x")
    assert monitor.describe_missing("step", 1, None) is None
    theirs.close()
    monitor.close()


def test_the_last_place_that_a_member_tells_is_where_it_ended(monkeypatch):
    """Its own thread tells of an earlier one, and is slow: as if the rank had ended without its last call."""
    has_ended, progress = threading.Event(), member_module._progress

    def slow(*args):
        record = progress(*args)
        if threading.current_thread() is not threading.main_thread():
            is_told.set()
            has_ended.wait(0.5)
        return record

    is_told = threading.Event()
    monkeypatch.setattr(member_module, "_progress", slow)
    monitor, theirs = serve_one()
    is_told.clear()
    assert is_told.wait(10)
    PROGRESS.enter("boost")
    PROGRESS.finish("boost")
    monitor._end()
    is_told.clear()
    has_ended.set()
    assert is_told.wait(10)  # so it has told of the one before
    monitor.close()
    with theirs, theirs.makefile() as lines:
        records = [message["record"] for message in map(json.loads, lines) if "record" in message]
    PROGRESS.clear()
    made = [bool(record["counts"]) for record in records]
    assert made == sorted(made)
    assert made[-1]


def test_a_member_that_has_lost_rank_0_says_so_when_it_is_asked():
    monitor, theirs = serve_one()
    theirs.close()
    assert monitor.describe_missing("step", 1, None).startswith("rank 0 died without a traceback")
    assert monitor.describe_missing("step", 1, None, only_ended=True) is None
    monitor.close()


def test_a_member_that_gets_no_answer_does_not_say_that_there_is_no_monitor(monkeypatch):
    monkeypatch.setattr(member_module, "_ASK_SECONDS", -1.8)
    monitor, theirs = serve_one()
    said = monitor.describe_missing("step", 1, None)
    assert said.startswith("rank 0, which knows where the others are, gave no answer within 0.2")
    theirs.close()
    monitor.close()


def test_a_member_whose_thread_fails_says_so(capfd):
    monitor, theirs = serve_one([])
    _wait_for_text(capfd, "the monitor of rank 1 has stopped")
    theirs.close()
    monitor.close()


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
    return worlds, monitors


@pytest.mark.parametrize("hosts", [["a", "a"], ["a", "b"]])
def test_ranks_find_the_server_through_the_store(hosts):
    _, monitors = start_all(hosts, socket.gethostname())
    try:
        PROGRESS.enter("step")
        assert monitors[1].describe_missing("step", 1, None).startswith("every rank has reached it")
        assert "ranks 0 and 1 have not reached it" in monitors[1].describe_missing("step", 2, None)
        assert monitors[1].describe_missing("step", 2, None, only_ended=True) is None
    finally:
        PROGRESS.clear()
        for rank in (1, 0):
            monitors[rank].close()


def test_a_server_that_cannot_be_started_is_told_to_every_rank(monkeypatch):
    def refuses(*_, **__):
        raise OSError(98, "no port is free")

    monkeypatch.setattr("booster_runtime.watch.start.Server", refuses)
    worlds, monitors = start_all(["a", "a"])
    assert monitors == {0: None, 1: None}
    expected = "rank 0 could not start it: [Errno 98] no port is free"
    assert [world.unwatched_because for world in worlds] == [expected] * 2


def test_a_server_that_cannot_be_reached():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        store = dist.HashStore()
        store.set("monitor", encode({"address": "127.0.0.1", "port": port, "token": ""}).decode())
        world = World(rank=1, world_size=2, store=store, timeout_seconds=1)
        assert start_monitor(world, None, "127.0.0.1", may_end_process=True) is None
    assert world.unwatched_because.startswith("it could not be reached at 127.0.0.1:")


def test_a_world_of_one_needs_no_monitor():
    assert start_monitor(World(), None, "localhost", may_end_process=True) is None


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


@pytest.fixture
def many_files():
    """Let descriptors have numbers that ``select.select`` does not take."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(2048, hard)), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_connection_of_a_process_with_a_thousand_open_files_is_looked_at(many_files):
    one, other = socket.socketpair()
    with one, other, socket.socket(fileno=fcntl.fcntl(one.fileno(), fcntl.F_DUPFD, 1024)) as high:
        assert not is_readable(high, 0.0)
        other.send(b"x")
        assert is_readable(high, 5.0)
