"""A rank's own stream of random numbers: apart from other ranks' between `enter` and `leave`, alike around it."""

import pytest
import torch

from booster_hybrid.random_streams import Stream

HOST = torch.device("cpu")


@pytest.fixture(autouse=True)
def kept_generator():
    with torch.random.fork_rng(devices=[]):
        yield


def drawn():
    return float(torch.rand((), dtype=torch.float64))


def on_each(function, num_ranks=3):
    """Return what each of some ranks that are seeded alike returns, and where its generator is then."""
    found = []
    for rank in range(num_ranks):
        torch.manual_seed(4)
        found.append((function(rank), torch.get_rng_state()))
    return [value for value, _ in found], [state for _, state in found]


def are_alike(states):
    return all(torch.equal(state, states[0]) for state in states)


@pytest.mark.parametrize("is_counted", [False, True])
def test_what_draws_nothing_leaves_the_generator_as_it_was_unless_it_counts(is_counted):
    def nothing(rank):
        stream = Stream(rank)
        stream.enter(HOST)
        stream.leave(is_counted=is_counted)

    _, states = on_each(nothing)
    torch.manual_seed(4)
    if is_counted:
        torch.randint(2**62, ())
    assert are_alike([torch.get_rng_state(), *states])


def test_ranks_draw_alike_in_a_pause_and_apart_before_and_after_it():
    def paused(rank):
        stream = Stream(rank)
        stream.enter(HOST)
        before = drawn()
        stream.pause()
        alike = drawn()
        stream.resume()
        after = drawn()
        stream.leave()
        return before, alike, after

    values, states = on_each(paused)
    before, alike, after = zip(*values, strict=True)
    assert len({*alike}) == 1
    assert len({*before, *after, *alike}) == 7
    assert are_alike(states)


def test_streams_of_two_axes_differ_inside_of_each_other():
    def nested(rank):
        outer, inner = Stream(rank // 2), Stream(rank % 2)
        outer.enter(HOST)
        of_outer = [drawn()]
        inner.enter(HOST)
        of_inner = drawn()
        assert inner.is_current
        inner.leave()
        assert outer.is_current
        of_outer.append(drawn())
        outer.leave()
        return tuple(of_outer), of_inner

    values, states = on_each(nested, 4)
    of_outer, of_inner = zip(*values, strict=True)
    assert of_outer[0] == of_outer[1]
    assert of_outer[2] == of_outer[3]
    assert len({*of_outer}) == 2
    assert len({*of_inner}) == 4
    assert are_alike(states)


def test_a_stream_is_entered_again_where_a_generator_was_restored():
    stream = Stream(1)
    torch.manual_seed(4)
    before = torch.get_rng_state()
    stream.enter(HOST)
    first = drawn()
    torch.set_rng_state(before)  # as recomputation does that ends early
    assert not stream.is_current
    stream.enter(HOST)
    assert stream.is_current
    assert drawn() == first
