"""Why gathers don't overlap by default: what reads memory by an older view of it can't wait for them."""

import threading

import pytest
import torch
import torch.distributed as dist
from late_gathers import hidden_until_waited_for
from torch import nn

from booster_core import Booster
from booster_testing import run_on_ranks
from booster_zero import LowLevelZeroPlugin

WIDTH = 8


def on_another_thread(read):
    found = []
    thread = threading.Thread(target=lambda: found.append(read()))
    thread.start()
    thread.join()
    return found[0]


READS = {
    "a parameter in a script's hands": lambda weight, view: weight.detach().clone(),
    "a parameter, on another thread": lambda weight, view: on_another_thread(lambda: weight.detach().clone()),
    "a parameter, by NumPy": lambda weight, view: torch.tensor(weight.detach().numpy().tolist()),
    "memory, by a view from before": lambda weight, view: torch.tensor(view.tolist()),
}
UNSEEN = ["memory, by a view from before"]


def read_after_a_step(how, overlaps):
    """Return what a script reads right after a step, what was there before it, and what should be there."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    booster = Booster(plugin=LowLevelZeroPlugin(overlap_allgather=overlaps))
    model, optimizer, *_ = booster.boost(net, torch.optim.SGD(net.parameters(), lr=0.1))
    with hidden_until_waited_for(is_nan=False):
        booster.backward(model(torch.ones(2, WIDTH)).square().mean(), optimizer)
        optimizer.step()
        optimizer.zero_grad()
        model.unwrap()
        weights = [layer.weight for layer in net]
        views = [weight.detach().numpy() for weight in weights]
        before = [weight.detach().clone() for weight in weights]
        booster.backward(model(torch.ones(2, WIDTH)).square().mean(), optimizer)
        optimizer.step()
        read = [READS[how](weight, view) for weight, view in zip(weights, views, strict=True)]
        model.unwrap()  # which waits
        after = [weight.detach().clone() for weight in weights]
    dist.barrier()
    return read, before, after


@pytest.mark.parametrize(
    ("how", "overlaps"),
    [(how, overlaps) for how in READS for overlaps in (False, True) if not (overlaps and how in UNSEEN)],
)
def test_a_read_right_after_a_step_sees_it(how, overlaps):
    for read, before, after in run_on_ranks(read_after_a_step, 2, how, overlaps):
        for found, old, new in zip(read, before, after, strict=True):
            assert torch.equal(found, new)
            assert not torch.equal(old, new)


@pytest.mark.parametrize("how", UNSEEN)
def test_an_overlapped_gather_is_not_waited_for_by_reads_that_nobody_sees(how):
    for read, before, after in run_on_ranks(read_after_a_step, 2, how, True):
        stale = [
            bool(((found == old) & (old != new)).any()) for found, old, new in zip(read, before, after, strict=True)
        ]
        assert any(stale), "values of another rank are those of the step before, and nothing says so"
