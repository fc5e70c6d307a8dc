"""`StopSignal.until` ends a loop after the step in which a signal came, and no step earlier."""

import os
import signal

import pytest

from booster_core import Booster
from booster_runtime import StopSignal


@pytest.fixture
def before():
    """The handler of SIGTERM, which every test leaves as it was."""
    handler = signal.getsignal(signal.SIGTERM)
    yield handler
    assert signal.getsignal(signal.SIGTERM) is handler


def test_ends_after_the_step_in_which_a_signal_came(before):
    seen = []
    for batch in StopSignal(Booster("cpu")).until(range(10)):
        seen.append(batch)
        if batch == 3:
            os.kill(os.getpid(), signal.SIGTERM)
    assert seen == [0, 1, 2, 3]


def test_yields_all_batches_without_a_signal(before):
    assert list(StopSignal(Booster("cpu")).until(range(5))) == [0, 1, 2, 3, 4]


def test_later_epochs_are_empty(before):
    seen = []
    with StopSignal(Booster("cpu")) as stop:
        for epoch in range(3):
            for batch in stop.until(range(4)):
                seen.append((epoch, batch))
                if seen[-1] == (1, 1):
                    os.kill(os.getpid(), signal.SIGTERM)
            assert signal.getsignal(signal.SIGTERM) is not before, "it stays open between epochs"
    assert seen[-1] == (1, 1)
    assert len(seen) == 6


def test_a_loop_that_breaks_gives_the_signal_back(before):
    batches = StopSignal(Booster("cpu")).until(range(5))
    for batch in batches:
        if batch == 2:
            break
    batches.close()
