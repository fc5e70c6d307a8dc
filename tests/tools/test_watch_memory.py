"""Memory over steps: sampled under any plugin, with phases, as a trace."""

from __future__ import annotations

import mmap
import re
import time
from pathlib import Path

import pytest
import torch

from booster_core import Booster
from booster_core.errors import ConfigError
from booster_runtime.trace import read_traces
from booster_tools.tracking import watch_memory

MIB = 1 << 20


def anonymous_bytes():
    """Return what the kernel says of this process's mappings: another source than the one that is sampled."""
    kilobytes = re.search(r"Anonymous: +(\d+) kB", Path("/proc/self/smaps_rollup").read_text())
    return int(kilobytes[1]) * 1024


class Wide(torch.nn.Module):
    """Maps 64 MiB while it computes, and keeps them until a timeline has taken a sample of them.

    They are mapped without `malloc`, which may have resident memory left from what ran earlier in this process.
    """

    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(4, 1)
        self.timeline = None
        self.peak = 0

    def forward(self, batch):
        mapping = mmap.mmap(-1, 64 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        for _ in range(64):
            mapping.write(b"1" * MIB)
        self.peak = max(self.peak, anonymous_bytes())
        taken = 0 if self.timeline is None else len(self.timeline.samples)
        while self.timeline is not None and len(self.timeline.samples) < taken + 2:  # one may have begun before
            time.sleep(0.001)
        mapping.close()
        return self.inner(batch)


def test_samples_show_what_forward_allocates_and_end_with_the_block(tmp_path):
    booster = Booster()
    wide = Wide()
    model, optimizer, *_ = booster.boost(wide, torch.optim.SGD(wide.parameters(), lr=0.1))
    num_hooks = len(model._forward_pre_hooks), len(model._forward_hooks)
    with watch_memory(model, tmp_path, interval_seconds=0.0005) as wide.timeline:
        for _ in range(2):
            loss = model(torch.ones(2, 4)).sum()
            booster.backward(loss, optimizer)
            optimizer.step()
            optimizer.zero_grad()
    timeline, wide.timeline = wide.timeline, None
    assert [phase.name for phase in timeline.phases] == ["forward", "backward and step"] * 2
    assert all(phase.start <= phase.end for phase in timeline.phases)
    assert [after.start >= before.end for before, after in zip(timeline.phases, timeline.phases[1:], strict=False)]
    least, most = (choose(nbytes for _, nbytes in timeline.samples) for choose in (min, max))
    assert abs(most - wide.peak) < 2 * MIB
    # 64 MiB, but for other memory that is freed meanwhile.
    assert 56 * MIB < most - least < 200 * MIB
    assert (len(model._forward_pre_hooks), len(model._forward_hooks)) == num_hooks
    trace = read_traces(tmp_path)
    assert [event["name"] for event in trace if event["ph"] == "X"] == [phase.name for phase in timeline.phases]
    assert sum(event["ph"] == "C" for event in trace) == len(timeline.samples)
    booster.backward(model(torch.ones(2, 4)).sum(), optimizer)
    optimizer.step()
    assert len(timeline.phases) == 4


def test_steps_of_another_model_are_no_phases(tmp_path):
    booster, (one, other) = Booster(), (torch.nn.Linear(4, 1) for _ in range(2))
    watched, *_ = booster.boost(one, torch.optim.SGD(one.parameters(), lr=0.1))
    model, optimizer, *_ = booster.boost(other, torch.optim.SGD(other.parameters(), lr=0.1))
    with watch_memory(watched, tmp_path) as timeline:
        watched(torch.ones(2, 4))
        booster.backward(model(torch.ones(2, 4)).sum(), optimizer)
        optimizer.step()
    assert [phase.name for phase in timeline.phases] == ["forward"]


def test_a_block_that_raises_writes_nothing(tmp_path):
    model, *_ = Booster().boost(torch.nn.Linear(2, 1))
    with pytest.raises(KeyError), watch_memory(model, tmp_path / "run"):
        raise KeyError
    assert not (tmp_path / "run").exists()


def test_what_cannot_be_watched_is_refused(tmp_path):
    with pytest.raises(TypeError, match=r"needs the model returned by `Booster.boost`; got `Linear`"):
        watch_memory(torch.nn.Linear(2, 1), tmp_path)
    model, *_ = Booster().boost(torch.nn.Linear(2, 1))
    with pytest.raises(ConfigError, match=r"`interval_seconds=0` is not a positive"):
        watch_memory(model, tmp_path, interval_seconds=0)
