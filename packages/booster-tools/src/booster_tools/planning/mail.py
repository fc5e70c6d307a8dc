"""What ranks of a plan send each other. Nothing is assumed about it: the sender's own run has sent it."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch import Tensor
    from torch.distributed import Work


class Channel(NamedTuple):
    """A way for messages, which arrive in the order in which they were sent.

    Args:
        group: Ranks of the group that they are sent in.
        sender: World rank.
        receiver: World rank.
        tag: Of the messages.
    """

    group: tuple[int, ...]
    sender: int
    receiver: int
    tag: int


class Message(NamedTuple):
    """A tensor that was sent.

    Args:
        shape: Its shape.
        dtype: Its format.
        values: A copy; ``None`` where values were not computed.
    """

    shape: torch.Size
    dtype: torch.dtype
    values: Tensor | None


Key = tuple[Any, int]
"""Something that is sent: a channel, or the sender and the group of objects, and its number there."""


@dataclass
class Mail:
    """All that ranks have sent until now."""

    _sent: dict[Any, list[Any]] = field(default_factory=dict, repr=False)

    def has(self, key: Key) -> bool:
        """Return whether something was sent."""
        return key[1] < len(self._sent.get(key[0], ()))

    def put(self, key: Key, what: Any) -> None:
        """Keep what was sent; a rank that is run again sends the same again."""
        sent = self._sent.setdefault(key[0], [])
        sent[key[1] : key[1] + 1] = [what]

    def get(self, key: Key) -> Any:
        """Return what was sent."""
        return self._sent[key[0]][key[1]]


class Mailbox:
    """What one rank sends and receives.

    Args:
        mail: What ranks have sent.
        rank: This one.
        wait_for: Called with this rank, the rank that has to send something, and its key; returns when it is there.

    Attributes:
        rank: As above.
        waiting: Receives that are under way; torch's C++ code does not keep the Python objects alive.
    """

    def __init__(self, mail: Mail, rank: int, wait_for: Callable[[int, int, Key], None]) -> None:
        self.rank = rank
        self.waiting: set[Work] = set()
        self._mail, self._wait_for = mail, wait_for
        self._counts: dict[tuple[str, Any], int] = {}

    def send(self, channel: Channel, message: Message) -> int:
        """Send a message, and return its number in the channel."""
        index = self._next("sent", channel)
        self._mail.put((channel, index), message)
        return index

    def expect(self, channel: Channel) -> int:
        """Return the number of the next message to receive."""
        return self._next("received", channel)

    def receive(self, channel: Channel, index: int) -> Message:
        """Return a message, when it is there."""
        key = channel, index
        if not self._mail.has(key):
            self._wait_for(self.rank, channel.sender, key)
        message: Message = self._mail.get(key)
        return message

    def broadcast(self, group: tuple[int, ...], source: int, values: list[Any]) -> list[Any]:
        """Return the objects of the rank that sends some to its group.

        Args:
            group: Ranks of the group.
            source: The sender.
            values: What this rank has of them; they are taken for the sender's, if that is not planned.
        """
        name = ("objects", group, source)
        key = name, self._next("objects", name)
        if source == self.rank:
            self._mail.put(key, pickle.dumps(values))
            return values
        if not self._mail.has(key):
            if any(value is not None for value in values):
                return values
            self._wait_for(self.rank, source, key)
        sent: list[Any] = pickle.loads(self._mail.get(key))  # noqa: S301 - from this process
        return sent

    def _next(self, what: str, name: Any) -> int:
        index = self._counts.get((what, name), 0)
        self._counts[what, name] = index + 1
        return index
