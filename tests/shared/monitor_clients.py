"""A connection to the monitor's server, driven by a test."""

from __future__ import annotations

import json
import socket

from booster_runtime.watch.failure_detector import Point, Record
from booster_runtime.watch.sockets import encode

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
