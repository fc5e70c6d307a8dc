"""The time of a planned step follows from what ranks compute, send and wait for; ranks of a plan take turns."""

from __future__ import annotations

import threading

import pytest
import torch

from booster_core.errors import ConfigError
from booster_core.plugin import SingleDevicePlugin
from booster_tools.planning.ranking import replay
from booster_tools.planning.stages import Busy, Channel, Message, Receive, Send, StageThreads

SECOND = 10**12
"""Operations."""
FLOPS, RATE = 1e12, 1e9


def channel(sender, receiver):
    return Channel((0, 1, 2, 3), sender, receiver, 0)


def forwards(num_ranks, num_microbatches, num_bytes=0):
    """Return what ranks do that pass microbatches on, each after a second of work."""
    found = []
    for rank in range(num_ranks):
        events = []
        for index in range(num_microbatches):
            events += [Receive(channel(rank - 1, rank), index)] if rank else []
            events.append(Busy(SECOND, 0))
            events += [Send(channel(rank, rank + 1), index, num_bytes)] if rank < num_ranks - 1 else []
        found.append(events)
    return found


@pytest.mark.parametrize(("num_ranks", "num_microbatches"), [(1, 5), (2, 1), (4, 1), (4, 8)])
def test_stages_wait_for_the_first_microbatch(num_ranks, num_microbatches):
    assert replay(forwards(num_ranks, num_microbatches), FLOPS, RATE) == num_microbatches + num_ranks - 1


def test_messages_travel_while_their_sender_goes_on():
    # Half a second each, of which only the first stage's message is waited for in full.
    assert replay(forwards(3, 4, num_bytes=10**9 // 2), FLOPS, RATE) == 4 + 2 + 2 * 0.5


def test_one_rank_computes_and_communicates_one_after_the_other():
    assert replay([[Busy(SECOND, 10**9), Busy(SECOND, 0)]], FLOPS, RATE) == 3


def test_messages_of_ranks_that_are_not_there_have_come():
    assert replay([forwards(2, 3)[1]], FLOPS, RATE) == 3


def sent(value):
    return Message(torch.Size([1]), torch.float32, torch.tensor([value]))


def run(bodies):
    """Run a function of a messages for each rank; return what they return."""
    return StageThreads(lambda plugin, messages: bodies[messages.rank](messages), SingleDevicePlugin(), 0).run()


def test_ranks_run_when_they_are_needed_and_one_at_a_time():
    order = []

    def first(messages):
        order.append("first asks")
        messages.send(channel(0, 1), sent(2.0))
        answer = messages.receive(channel(1, 0), messages.expect(channel(1, 0))).values
        order.append("first ends")
        return float(answer)

    def second(messages):
        order.append(f"second begins in {threading.current_thread().name}")
        value = float(messages.receive(channel(0, 1), messages.expect(channel(0, 1))).values)
        messages.send(channel(1, 0), sent(3 * value))
        order.append("second ends")
        return value

    assert run({0: first, 1: second, 2: None}) == {0: 6.0, 1: 2.0}
    assert order == ["first asks", "second begins in planned rank 1", "second ends", "first ends"]


def test_objects_come_from_the_rank_that_broadcasts_them():
    def first(messages):
        return messages.broadcast((0, 1), 1, [None])

    def second(messages):
        return messages.broadcast((0, 1), 1, [{"layers": 4}])

    assert run({0: first, 1: second}) == {0: [{"layers": 4}], 1: [{"layers": 4}]}


def test_an_error_of_another_rank_ends_all():
    ended = []

    def first(messages):
        try:
            messages.receive(channel(1, 0), messages.expect(channel(1, 0)))
        finally:
            ended.append(0)

    def second(messages):
        msg = "not this model"
        raise ConfigError(msg)

    with pytest.raises(ConfigError, match="not this model"):
        run({0: first, 1: second})
    assert ended == [0]
    assert not [each for each in threading.enumerate() if each.name.startswith("planned rank")]


def test_ranks_that_wait_for_each_other_are_named():
    def waits_for(sender):
        return lambda messages: messages.receive(channel(sender, 1 - sender), 0)

    with pytest.raises(ConfigError, match="Ranks 0, 1 of the plan wait for each other"):
        run({0: waits_for(1), 1: waits_for(0)})
