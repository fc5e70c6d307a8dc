from __future__ import annotations

import threading
from collections import Counter

import pytest
import torch.distributed as dist

from booster_core.errors import MissingRanksError
from booster_core.ranks.meeting import Rendezvous


class CountingStore:
    """Counts the operations that do something, which waiting (``check``) does not."""

    def __init__(self, store):
        self.store = store
        self.num_operations = Counter()

    def __getattr__(self, name):
        if name != "check":
            self.num_operations[name] += 1
        return getattr(self.store, name)


def meet_all(num_ranks, num_meetings):
    """Let all ranks meet, one thread each; return the stores' counts and the keys left."""
    shared = dist.HashStore()
    stores = [CountingStore(shared) for _ in range(num_ranks)]

    def run(rank):
        meetings = Rendezvous(stores[rank], rank, range(num_ranks))
        for _ in range(num_meetings):
            meetings.meet("step", 30)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [sum(store.num_operations.values()) for store in stores], shared.num_keys()


def test_the_work_of_a_rank_does_not_grow_with_their_number():
    few, _ = meet_all(2, 5)
    many, _ = meet_all(24, 5)
    assert max(many) <= max(few) + 10  # the last to come and the last to leave do a few operations more
    assert max(many) <= 5 * 12


def test_keys_do_not_pile_up():
    assert meet_all(3, 1)[1] == meet_all(3, 30)[1]


def test_many_missing_ranks_are_counted():
    meetings = Rendezvous(dist.HashStore(), 0, range(40))
    with pytest.raises(MissingRanksError) as caught:
        meetings.meet("save_model", 0.1)
    assert str(caught.value) == (
        "`save_model` waited 0.1 s for ranks 1, 2, 3, 4, 5, 6, 7, 8, 9, 10 and 29 others of 40, which did not call it. "
        "It is a collective call: call it on every rank, not under `if rank == 0`."
    )


def test_a_retry_meets_those_who_were_late():
    store = dist.HashStore()
    first, second = (Rendezvous(store, rank, range(2)) for rank in range(2))
    with pytest.raises(MissingRanksError, match=r"waited 0\.1 s for rank 1 of 2"):
        first.meet("step", 0.1)
    with pytest.raises(MissingRanksError, match="has failed before rank 1 came"):
        second.meet("step", 30)
    thread = threading.Thread(target=first.meet, args=("step", 30))
    thread.start()
    second.meet("step", 30)
    thread.join()
