"""Messages between stages travel while the receiver computes, whatever their shapes do from one to the next."""

import torch
import torch.distributed as dist
from matrix import matrix
from ranked import on_ranks

from booster_hybrid.pipeline.p2p import P2PChannel, make_channels
from booster_testing import run_on_ranks

LARGE = (1024, 1024)
"""4 MiB: more than what travels before anybody has asked for it."""


class CountingLink(P2PChannel):
    """Counts the elements that are asked for and not received yet."""

    asked = peak = 0

    def _ask(self, tensor, sender):
        self.asked += tensor.numel() if tensor.is_floating_point() else 0
        self.peak = max(self.peak, self.asked)
        return super()._ask(tensor, sender)

    def receive(self, sender):
        received = super().receive(sender)
        self.asked = 0
        return received


def link(names=("x", "y")):
    size = dist.get_world_size()
    return CountingLink(names, range(size), dist.get_rank(), make_channels([range(size)]), torch.device("cpu"))


@on_ranks(2, timeout_seconds=30)
def test_large_tensors_of_usual_shapes_travel_before_they_are_received():
    """Wait on the sender until a message has left, and on the receiver for word of that before receiving it."""
    pair, word = link(), torch.zeros(1)
    for number in range(4):
        message = {"x": torch.full(LARGE, float(number))}
        if dist.get_rank() == 0:
            sent = pair.send(message, 1)
            if number >= 2:
                pair.release(sent)
                dist.send(word, 1)
        else:
            pair.expect(0)
            if number >= 2:
                dist.recv(word, 0)
            assert torch.equal(pair.receive(0)["x"], message["x"])
    pair.finish()


def tensors(lengths, number):
    return {name: torch.full((length, 3), float(number)) for name, length in lengths.items()}


SEQUENCES = {
    "alike": [{"x": 4}] * 5,
    "changing": [{"x": 2 + number} for number in range(6)],
    "once": [{"x": 4}, {"x": 4}, {"x": 4}, {"x": 9}, {"x": 9}, {"x": 9}, {"x": 4}],
    "missing": [{"x": 4, "y": 2}] * 3 + [{"x": 4}] * 3 + [{}] * 3 + [{"y": 2}],
    "empty": [{"x": 4, "y": 0}] * 3 + [{"x": 0, "y": 0}] * 3,
    "failed": [{"x": 4}, {"x": 4}, {"x": 4}, None, None, {"x": 4}, {"x": 4}],
    "failed_at_once": [None, {"x": 4}],
}


def exchanged(messages):
    pair = link()
    for number, lengths in enumerate(messages):
        if dist.get_rank() == 0:
            pair.send(None if lengths is None else tensors(lengths, number), 1)
        else:
            pair.expect(0)
            received = pair.receive(0)
            expected = None if lengths is None else tensors(lengths, number)
            assert (received is None) == (expected is None)
            for name, tensor in (expected or {}).items():
                assert torch.equal(received[name], tensor), (number, name)
            assert set(received or {}) == set(expected or {})
    pair.finish()
    return pair.peak


@matrix(["empty"], sequence=SEQUENCES)
def test_messages_arrive_unchanged(sequence):
    run_on_ranks(exchanged, 2, SEQUENCES[sequence])


def test_one_message_is_in_flight_at_a_time():
    assert run_on_ranks(exchanged, 2, [{"x": 4}] * 8)[1] == 4 * 3
    # A larger one after a smaller one takes the room of both until it has come.
    assert run_on_ranks(exchanged, 2, [{"x": 4}] * 3 + [{"x": 8}])[1] == (4 + 8) * 3
