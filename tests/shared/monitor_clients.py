"""A connection to the monitor's server, driven by a test."""

from __future__ import annotations

import json
import socket

from booster_runtime.watch.sockets import encode

TOKEN = "secret"
WHERE = {"type": "where", "places": []}
"""What the server asks."""


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

    def here(self, record):
        return self.send(type="here", record=record, waited_seconds=0.0)

    def where(self, record, call, ranks=None):
        return self.send(type="where", record=record, call=call, ranks=ranks)

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
