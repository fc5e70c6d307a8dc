"""What ranks of a plan send each other: a plan runs one rank after the other, and each finds what others have sent.

A rank that needs what is not there yet ends, and is run again once the sender has been. So nothing is assumed about
what another rank sends: that rank's own run has sent it.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
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


class NotSentError(BaseException):
    """A rank needs what another one has not sent yet; no error of the code that runs, which must not catch it.

    Args:
        rank: The rank that needs it.
        sender: The rank that has to send it.
        key: Where it will be, for `Mail.has`.
    """

    def __init__(self, rank: int, sender: int, key: Key) -> None:
        super().__init__(f"rank {rank} waits for rank {sender}")
        self.sender, self.key = sender, key


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
    """One run of one rank: what it sends and receives.

    Args:
        mail: What ranks have sent.
        rank: This one.

    Attributes:
        rank: As above.
        waiting: Receives that are under way; torch's C++ code does not keep the Python objects alive.
    """

    def __init__(self, mail: Mail, rank: int) -> None:
        self.rank = rank
        self.waiting: set[Work] = set()
        self._mail = mail
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
        """Return a message.

        Raises:
            NotSentError: If it is not there yet.
        """
        key = channel, index
        if not self._mail.has(key):
            raise NotSentError(self.rank, channel.sender, key)
        message: Message = self._mail.get(key)
        return message

    def broadcast(self, group: tuple[int, ...], source: int, values: list[Any]) -> list[Any]:
        """Return the objects of the rank that sends some to its group.

        Args:
            group: Ranks of the group.
            source: The sender.
            values: What this rank has of them.

        Raises:
            NotSentError: If this rank has none, and the sender has not been run.
        """
        name = ("objects", group, source)
        key = name, self._next("objects", name)
        if source == self.rank:
            self._mail.put(key, pickle.dumps(values))
            return values
        if self._mail.has(key):
            sent: list[Any] = pickle.loads(self._mail.get(key))  # noqa: S301 - from this process
            return sent
        if all(value is None for value in values):
            raise NotSentError(self.rank, source, key)
        return values

    def _next(self, what: str, name: Any) -> int:
        index = self._counts.get((what, name), 0)
        self._counts[what, name] = index + 1
        return index
