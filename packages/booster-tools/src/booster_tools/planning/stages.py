"""The stages of a pipeline are simulated together, each in a thread, of which one runs at a time.

A rank runs until it needs a message that another one has not sent yet; then that one runs. Nothing is assumed about a
message: the sender's own run has sent it. The rank that is asked for runs in the caller's thread, and most plans need
no other.
"""

from __future__ import annotations

import copy
import pickle
import threading
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any, NamedTuple

from booster_core.errors import ConfigError
from booster_core.ranks import opened_world, set_world

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch import Tensor
    from torch.distributed import Work

    from booster_core.plugin import Plugin
    from booster_tools.planning.simulate import StepCost


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


class Busy(NamedTuple):
    """Computing, and communicating with ranks that do the same at the same time.

    Args:
        flops: Floating point operations.
        sent_bytes: What the rank sends in collectives.
    """

    flops: int
    sent_bytes: int


class Send(NamedTuple):
    """Start sending a message.

    Args:
        channel: Where.
        number: Its number there.
        num_bytes: Its size.
    """

    channel: Channel
    number: int
    num_bytes: int


class Receive(NamedTuple):
    """Wait for a message.

    Args:
        channel: Where.
        number: Its number there.
    """

    channel: Channel
    number: int


Timeline = list[Busy | Send | Receive]
"""What a rank does in a step, in its order."""


class Messages:
    """What one rank sends and receives.

    Args:
        rank: This one.
        sent: What all ranks have sent until now, by channel, or by sender and group of objects.
        wait_for: Called with this rank, the rank that has to send something, its channel and its number there; returns
            when it is there.

    Attributes:
        rank: As above.
        waiting: Receives that are under way; torch's C++ code does not keep the Python objects alive.
    """

    def __init__(self, rank: int, sent: dict[Any, list[Any]], wait_for: Callable[[int, int, Any, int], None]) -> None:
        self.rank = rank
        self.waiting: set[Work] = set()
        self._sent, self._wait_for = sent, wait_for
        self._expected: Counter[Any] = Counter()

    def send(self, channel: Channel, message: Message) -> int:
        """Send a message, and return its number in the channel."""
        self._sent[channel].append(message)
        return len(self._sent[channel]) - 1

    def expect(self, channel: Any) -> int:
        """Return the number of the next message to receive."""
        self._expected[channel] += 1
        return self._expected[channel] - 1

    def receive(self, channel: Any, number: int, sender: int | None = None) -> Any:
        """Return a message, when it is there."""
        if number >= len(self._sent[channel]):
            self._wait_for(self.rank, channel.sender if sender is None else sender, channel, number)
        return self._sent[channel][number]

    def broadcast(self, group: tuple[int, ...], source: int, values: list[Any]) -> list[Any]:
        """Return the objects of the rank that sends some to its group.

        Args:
            group: Ranks of the group.
            source: The sender.
            values: What this rank has of them; they are taken for the sender's, if that is not planned.
        """
        name = (group, source)
        if source == self.rank:
            self._sent[name].append(pickle.dumps(values))
            return values
        number = self.expect(name)
        if number >= len(self._sent[name]) and any(value is not None for value in values):
            return values
        sent: list[Any] = pickle.loads(self.receive(name, number, source))  # noqa: S301 - from this process
        return sent


class AbandonedError(BaseException):
    """Another rank of the plan has failed; no error of the code that runs, which must not catch it."""


class StageThreads:
    """Runs ranks until all are planned that the first one needs.

    Args:
        simulate: Simulates a rank: called with the plugin and the rank's messages.
        plugin: One that has boosted nothing; each rank gets a copy.
        rank: The first one.

    Attributes:
        found: What was found, by rank.
    """

    def __init__(self, simulate: Callable[[Plugin, Messages], StepCost], plugin: Plugin, rank: int) -> None:
        self.found: dict[int, StepCost] = {}
        self._simulate, self._plugin, self._first = simulate, plugin, rank
        self._copy = _copied(plugin)
        self._sent: dict[Any, list[Any]] = defaultdict(list)
        self._needs: dict[int, tuple[Any, int] | None] = {rank: None}  # of ranks that are not done: a message
        self._threads: list[threading.Thread] = []
        self._turn = rank
        self._changed = threading.Condition()
        self._error: BaseException | None = None

    def run(self) -> dict[int, StepCost]:
        """Return what was found of all ranks, in ascending order.

        Raises:
            Exception: The first that a rank raised.
        """
        try:
            self._plan(self._plugin, self._first)
            with self._changed:
                self._changed.wait_for(lambda: not self._needs or self._error is not None)
        except AbandonedError:
            pass  # for the error that another rank has left
        except BaseException as error:  # noqa: BLE001 - raised below, when the other ranks have ended
            self._fail(error)
        for thread in self._threads:
            thread.join()
        if self._error is not None:
            raise self._error
        return dict(sorted(self.found.items()))

    def _wait_for(self, rank: int, sender: int, channel: Any, number: int) -> None:
        """Return once a rank has its message; let other ranks run until then.

        Raises:
            AbandonedError: If another rank has failed.
        """
        world = opened_world()
        with self._changed:
            self._needs[rank] = channel, number
            if sender not in self._needs and sender not in self.found:
                self._start(sender)
            self._pass_on()
            self._changed.wait_for(lambda: self._turn == rank or self._error is not None)
            if self._error is not None:
                raise AbandonedError
            self._needs[rank] = None
        set_world(world)

    def _plan(self, plugin: Plugin, rank: int) -> None:
        found = self._simulate(plugin, Messages(rank, self._sent, self._wait_for))
        with self._changed:
            self.found[rank] = found
            del self._needs[rank]
            self._pass_on()

    def _start(self, rank: int) -> None:
        if isinstance(self._copy, ConfigError):
            raise self._copy
        plugin = copy.deepcopy(self._copy)

        def run() -> None:
            with self._changed:
                self._changed.wait_for(lambda: self._turn == rank or self._error is not None)
                if self._error is not None:
                    return
            try:
                self._plan(plugin, rank)
            except AbandonedError:
                pass  # likewise
            except BaseException as error:  # noqa: BLE001 - raised by `run`
                self._fail(error)

        self._needs[rank] = None
        self._threads.append(threading.Thread(target=run, name=f"planned rank {rank}", daemon=True))
        self._threads[-1].start()

    def _pass_on(self) -> None:
        """Give the turn to a rank that can go on; the last that came is the nearest to one that waits for nobody."""
        ready = [rank for rank, need in self._needs.items() if need is None or need[1] < len(self._sent[need[0]])]
        if ready:
            self._turn = ready[-1]
        elif self._needs and self._error is None:
            listed = ", ".join(map(str, sorted(self._needs)))
            self._error = ConfigError(f"Ranks {listed} of the plan wait for each other's messages.")
        self._changed.notify_all()

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()


def _copied(plugin: Plugin) -> Any:
    """Return a copy of a plugin that has boosted nothing, or the error of a plan that needs one."""
    try:
        return copy.deepcopy(plugin)
    except Exception as error:  # noqa: BLE001 - raised if a copy is needed
        return ConfigError(
            f"Each stage of a pipeline is planned under a copy of plugin '{plugin.name}', and `copy.deepcopy` failed "
            f"with {type(error).__name__}: {error}. Pass options that can be copied."
        )
