"""How long a step takes where ranks wait for each other's messages, as the stages of a pipeline do.

A planned rank leaves a list of what it does: computing and collectives, messages that it sends, and those that it waits
for. `replay` works through the lists of all ranks at the speed of some devices, so that idle stages of a pipeline count
as the plugin's own order of actions has them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from booster_tools.planning.mail import Channel


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


def replay(timelines: Sequence[Sequence[Busy | Send | Receive]], flops_per_second: float, rate: float) -> float:
    """Return how many seconds the last rank needs.

    A message travels while its sender goes on. Computing and collectives of a rank come one after the other.

    Args:
        timelines: What each rank does. Messages from ranks that are not among them are there at once.
        flops_per_second: Speed of computation.
        rate: Bytes that a rank sends in a second.
    """
    clocks = [0.0] * len(timelines)
    places = [0] * len(timelines)
    own = {(event.channel, event.number) for each in timelines for event in each if isinstance(event, Send)}
    arrivals: dict[tuple[Channel, int], float] = {}
    while True:
        before = list(places)
        for rank, timeline in enumerate(timelines):
            for event in timeline[places[rank] :]:
                if isinstance(event, Busy):
                    clocks[rank] += event.flops / flops_per_second + event.sent_bytes / rate
                elif isinstance(event, Send):
                    arrivals[event.channel, event.number] = clocks[rank] + event.num_bytes / rate
                else:
                    key = event.channel, event.number
                    if key in own and key not in arrivals:
                        break
                    clocks[rank] = max(clocks[rank], arrivals.get(key, 0.0))
                places[rank] += 1
        if places == before:
            assert all(place == len(each) for place, each in zip(places, timelines, strict=True)), "ranks wait in turn"
            return max(clocks, default=0.0)
