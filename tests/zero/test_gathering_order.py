"""Prefetching follows the order of uses: recorded, expected again, and recorded again where a run goes another way."""

import pytest
import torch
import torch.distributed as dist
from gathering_plugin import GatheringPlugin
from matrix import matrix
from ranked import on_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint

from booster_core import Booster
from booster_testing.compare import assert_same_tensors, tolerance_for
from booster_zero.engine import Bucket, WholeState

WIDTH, DEPTH = 16, 8
LAYER_BYTES = WIDTH * WIDTH * 4


class Layers(nn.Module):
    """Layers that run in a given order; input of shape ``(N, T, 16)``."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH))
        self.is_checkpointed = False

    def forward(self, x, order):
        for index in order:
            if self.is_checkpointed:
                x = checkpoint(lambda x, layer=self.layers[index]: torch.tanh(layer(x)), x, use_reentrant=False)
            else:
                x = torch.tanh(self.layers[index](x))
        return x


class Counts:
    """Counts gathers, and uses of chunks that nobody had begun to bring."""

    def __init__(self, gatherer):
        self.gathers = self.waits = 0
        for chunk in gatherer.layout.buckets:
            chunk.start_gather = lambda chunk=chunk: self.gather(chunk)
        use, use_whole = gatherer.use, gatherer.use_whole
        gatherer.use = lambda chunk: self.use(use, chunk)
        gatherer.use_whole = lambda chunk: self.use(use_whole, chunk)

    def gather(self, chunk):
        self.gathers += 1
        Bucket.start_gather(chunk)

    def use(self, use, chunk):
        self.waits += chunk.state is WholeState.SHARDED
        return use(chunk)

    def take(self):
        taken, self.gathers, self.waits = (self.gathers, self.waits), 0, 0
        return taken


FORWARDS = list(range(DEPTH))
OTHER = [0, 2, 4, 6, 1, 3, 5, 7]
PART = [0, 1, 2, 5, 6, 7]


def batch(step, length):
    return torch.randn(4, length, WIDTH, generator=torch.Generator().manual_seed(step))


EVENTS = {
    "another order": [*[("train", FORWARDS, 3)] * 3, *[("train", OTHER, 3)] * 3, *[("train", FORWARDS, 3)] * 2],
    "a part": [*[("train", FORWARDS, 3)] * 3, *[("train", PART, 3)] * 3],
    "evaluation in between": [
        *[("train", FORWARDS, 3)] * 3,
        *[("eval", OTHER, 5)] * 2,
        ("train", FORWARDS, 3),
        ("eval", OTHER, 5),
    ],
    "another length": [*[("train", FORWARDS, 3)] * 3, *[("train", FORWARDS, 7)] * 2],
}


@matrix(["another order", "evaluation in between"], name=EVENTS)
@on_ranks(2)
def test_the_order_is_recorded_again_and_results_equal_one_process(name):
    net, plain = Layers(), Layers()
    booster = Booster(plugin=GatheringPlugin(chunk_bytes=LAYER_BYTES))
    model, optimizer, *_ = booster.boost(net, torch.optim.SGD(net.parameters(), lr=0.5))
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)
    before, counts = {}, None
    for step, (what, order, length) in enumerate(EVENTS[name]):
        x = batch(step, length)
        if what == "eval":
            model.eval()
            with torch.inference_mode():
                assert torch.allclose(model(x, order), plain(x, order), atol=1e-6)
            model.train()
        else:
            plain(x, order).square().mean().backward()
            booster.backward(model(x[dist.get_rank() :: 2], order).square().mean(), optimizer)
            for each in (plain_optimizer, optimizer):
                each.step()
                each.zero_grad()
        if counts is None:
            counts = Counts(model.gatherer)  # after the first step, which foresees no gather
            continue
        gathers, waits = counts.take()
        uses = len(order) if what == "eval" else 2 * len(order)
        assert gathers <= uses + 3, "few gathers are wasted, also where the order was another one"
        if before.get(what) == order:
            assert waits <= 2, "forward and backward wait for their first chunk alone"
            assert gathers <= uses
        before[what] = order
    assert_same_tensors(model.state_dict(), plain.state_dict(), tolerance_for(torch.float32))


@on_ranks(2)
def test_what_is_computed_again_is_gathered_once_for_that_and_for_its_gradient():
    # Forward gathers all; in backward the last is still there, and each serves recomputation and gradient at once.
    net = Layers()
    net.is_checkpointed = True
    booster = Booster(plugin=GatheringPlugin(chunk_bytes=LAYER_BYTES))
    model, optimizer, *_ = booster.boost(net, torch.optim.SGD(net.parameters(), lr=0.5))
    counts = None
    for step in range(3):
        booster.backward(model(batch(step, 2), FORWARDS).square().mean(), optimizer)
        optimizer.step()
        optimizer.zero_grad()
        counts = counts or Counts(model.gatherer)
        counted = counts.take()
    gathers, waits = counted
    assert gathers == 2 * DEPTH - 1
    assert waits <= 2


def most_ahead(**options):
    """Train, and return the most chunks and bytes that were underway at once."""
    layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH)))
    plugin = GatheringPlugin(chunk_bytes=LAYER_BYTES, **options)
    model, optimizer, *_ = Booster(plugin=plugin).boost(layers, torch.optim.SGD(layers.parameters(), lr=0.1))
    gatherer = model.gatherer
    seen = [(0, 0)]

    def counted(chunk):
        Bucket.start_gather(chunk)
        seen.append((len(gatherer._ahead), sum(each.whole_bytes for each in gatherer._ahead.values())))

    for step in range(3):
        if step:  # the first step foresees no gather
            for chunk in gatherer.layout.buckets:
                chunk.start_gather = lambda chunk=chunk: counted(chunk)
        optimizer.backward(model(torch.ones(2, WIDTH)).sum())
        optimizer.step()
        optimizer.zero_grad()
    return max(count for count, _ in seen), max(size for _, size in seen)


@pytest.mark.parametrize("depth", [pytest.param(0, marks=pytest.mark.slow), pytest.param(1, marks=pytest.mark.slow), 3])
@on_ranks(2)
def test_as_many_chunks_are_underway_as_asked_for(depth):
    assert most_ahead(max_prefetch=depth)[0] == depth


@pytest.mark.parametrize("most_bytes", [LAYER_BYTES // 2, 5 * LAYER_BYTES // 2], ids=["less than one", "two"])
@on_ranks(2)
def test_a_limit_bounds_what_is_underway_beyond_the_first(most_bytes):
    expected = max(most_bytes // LAYER_BYTES, 1)
    assert most_ahead(max_prefetch=DEPTH, max_ahead_bytes=most_bytes) == (expected, expected * LAYER_BYTES)
