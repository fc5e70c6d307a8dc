"""What ranks say while they wait long: one rank of those that have come names the others."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch.distributed as dist
from thread_ranks import on_threads

from booster_core.errors import MissingRanksError
from booster_core.ranks import meeting
from booster_core.ranks.meeting import LongWait, Meeting


def test_a_long_meeting_names_who_is_missing_once_per_interval(monkeypatch, caplog):
    monkeypatch.setattr(meeting, "_NOTE_SECONDS", 0.2)
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=30))

    def come(group):
        with pytest.raises(MissingRanksError):
            Meeting(store, (1, 3)[group.rank], range(4)).meet("boost", timeout_seconds=0.9)

    on_threads(2, come)
    said = [record.getMessage().partition(", ")[0] for record in caplog.records if record.name == "booster"]
    assert 1 <= len(said) <= 4
    # rank 3 says nothing once rank 1 is there, and both name the two that never come
    assert set(said) <= {"`boost` waits for ranks 0 and 2", "`boost` waits for ranks 0, 1 and 2"}
    assert said[-1] == "`boost` waits for ranks 0 and 2"


def test_short_waits_say_nothing(caplog):
    wait = LongWait()
    wait.note(lambda: pytest.fail("not asked before its time"))
    assert not caplog.records
