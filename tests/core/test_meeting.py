import threading
import time
from collections import Counter
from datetime import timedelta

import pytest
import torch.distributed as dist
from thread_ranks import on_threads

from booster_core.errors import MissingRanksError
from booster_core.ranks import meeting as meeting_module
from booster_core.ranks.meeting import LongWait, Meeting, Outcome


class CountingStore:
    """Counts the operations that do something, which waiting (``check``) does not."""

    def __init__(self, store):
        self.store = store
        self.num_operations = Counter()

        self.keys_read = []

    def get(self, key):
        self.num_operations["get"] += 1
        self.keys_read.append(key)
        return self.store.get(key)

    def __getattr__(self, name):
        if name != "check":
            self.num_operations[name] += 1
        return getattr(self.store, name)


def meet_all(num_ranks, num_meetings):
    """Let all ranks meet, one thread each; return the stores' counts and the keys left."""
    shared = dist.HashStore()
    stores = [CountingStore(shared) for _ in range(num_ranks)]

    def run(group):
        meetings = Meeting(stores[group.rank], group.rank, range(num_ranks))
        for _ in range(num_meetings):
            meetings.meet("step", timeout_seconds=30)

    on_threads(num_ranks, run)
    return [sum(store.num_operations.values()) for store in stores], shared.num_keys()


def test_the_work_of_a_rank_does_not_grow_with_their_number():
    few, _ = meet_all(2, 5)
    many, _ = meet_all(24, 5)
    assert max(many) <= max(few) + 10  # the last to come and the last to leave do a few operations more
    assert max(many) <= 5 * 12


def test_keys_do_not_pile_up():
    assert meet_all(3, 1)[1] == meet_all(3, 30)[1]


def test_many_missing_ranks_are_counted():
    meetings = Meeting(dist.HashStore(), 0, range(40))
    with pytest.raises(MissingRanksError) as caught:
        meetings.meet("save_model", timeout_seconds=0.1)
    assert str(caught.value) == (
        "`save_model` waited 0.1 s for ranks 1, 2, 3, 4, 5, 6, 7, 8, 9, 10 and 29 others of 40, which did not call it. "
        "It is a collective call: call it on every rank, not under `if rank == 0`."
    )


def test_a_retry_meets_those_who_were_late():
    store = dist.HashStore()
    first, second = (Meeting(store, rank, range(2)) for rank in range(2))
    with pytest.raises(MissingRanksError, match=r"waited 0\.1 s for rank 1 of 2"):
        first.meet("step", timeout_seconds=0.1)
    with pytest.raises(MissingRanksError, match="has failed before rank 1 came"):
        second.meet("step", timeout_seconds=30)
    on_threads(2, lambda group: (first, second)[group.rank].meet("step", timeout_seconds=30))


def on_ranks(num_ranks, function):
    """Return what a function returns for each rank, one thread each."""
    store = CountingStore(dist.HashStore())
    return on_threads(num_ranks, lambda group: function(group.rank, Meeting(store, group.rank, range(num_ranks))))


def test_errors_and_digests_come_with_the_meeting():
    def meet(rank, meeting):
        error = ValueError("mine") if rank == 2 else None
        return meeting.meet("load", digest=bytes([rank // 2]), error=error, timeout_seconds=30)

    for outcome in on_ranks(3, meet):
        assert [(error["rank"], error["type"], error["text"]) for error in outcome.errors] == [
            (2, "ValueError", "mine")
        ]
        assert outcome.differs

    equal = on_ranks(3, lambda _, meeting: meeting.meet("load", digest=b"x", timeout_seconds=30))
    assert equal == [Outcome([], differs=False)] * 3


def test_ranks_in_different_calls_raise_at_once():
    def meet(rank, meeting):
        start = time.monotonic()
        with pytest.raises(MissingRanksError) as caught:
            meeting.meet("load_model" if rank == 1 else "save_model", timeout_seconds=60)
        meeting.meet("next", timeout_seconds=30)
        return str(caught.value), time.monotonic() - start

    results = on_ranks(3, meet)
    for rank, (message, seconds) in enumerate(results):
        assert message.startswith(f"`{'load_model' if rank == 1 else 'save_model'}` can't go on: ranks made different ")
        assert "`load_model` on rank 1" in message
        assert "`save_model` on rank " in message
        assert seconds < 30


def test_a_rank_that_left_out_a_call_passes_over_it():
    has_given_up = threading.Event()

    def meet(rank, meeting):
        if rank == 1:
            has_given_up.wait(30)
        else:
            for name in ("save_model", "save_optimizer"):
                with pytest.raises(MissingRanksError, match=f"`{name}` waited 0.1 s for rank 1"):
                    meeting.meet(name, timeout_seconds=0.1)
            has_given_up.set()
        return [meeting.meet(name, timeout_seconds=30) for name in ("load_model", "save_model")]

    assert on_ranks(2, meet) == [[Outcome([], differs=False)] * 2] * 2


def test_failed_meetings_leave_no_keys():
    store = dist.HashStore()
    meetings = [Meeting(store, rank, range(2)) for rank in range(2)]
    numbers = []
    for _ in range(5):
        for each in meetings:
            with pytest.raises(MissingRanksError):
                each.meet("save_model", timeout_seconds=0.01)
        on_threads(2, lambda group: meetings[group.rank].meet("x", timeout_seconds=9))
        numbers.append(store.num_keys())
    assert len(set(numbers)) == 1


def test_the_work_of_a_rank_does_not_grow_where_one_is_missing():
    most = {}
    for num_ranks in (3, 256):
        shared = dist.HashStore()
        stores = [CountingStore(shared) for _ in range(num_ranks - 1)]

        def run(group, stores=stores, num_ranks=num_ranks):
            match = f"for rank {num_ranks - 1} of {num_ranks}, which did not call it"
            with pytest.raises(MissingRanksError, match=match):
                Meeting(stores[group.rank], group.rank, range(num_ranks)).meet("save_model", timeout_seconds=2.0)

        on_threads(num_ranks - 1, run)
        most[num_ranks] = max(store.num_operations.total() for store in stores)
    assert most[256] <= most[3] <= 12


def test_one_rank_alone_reads_who_came_where_one_is_missing():
    shared = dist.HashStore()
    stores = [CountingStore(shared) for _ in range(24)]

    def run(group):
        group.exchange(None)  # so that all reach their limit at about the same time
        with pytest.raises(MissingRanksError, match=r"waited 0\.5 s for rank 24 of 25"):
            Meeting(stores[group.rank], group.rank, range(25)).meet("save_model", timeout_seconds=0.5)

    on_threads(24, run)
    assert sum("0/came" in store.keys_read for store in stores) == 1


def test_others_find_out_who_is_missing_where_the_first_to_look_does_not_say(monkeypatch):
    monkeypatch.setattr(meeting_module, "_LOOKUP_SECONDS", 0.2)
    store = dist.HashStore()
    store.add("0/gave up", 1)  # by a rank that has ended since
    with pytest.raises(MissingRanksError, match=r"waited 0\.1 s for rank 1 of 2"):
        Meeting(store, 0, range(2)).meet("save_model", timeout_seconds=0.1)


@pytest.mark.parametrize("num_ranks", [2, 64, 1024, 16384])
def test_the_questions_of_all_ranks_leave_the_store_time(num_ranks):
    meeting = Meeting(dist.HashStore(), 0, range(num_ranks))
    waited, num_questions = 0.0, 0
    while waited < 60:
        pause = meeting._pause_after(waited)
        assert pause <= 1.4
        assert pause <= max(waited / 5, 0.0005, num_ranks * 20e-6)  # short waits end soon
        waited += pause
        num_questions += 1
        if waited >= num_ranks * 200e-6:  # what else the ranks ask of the store takes as long
            assert num_ranks / pause <= 50_000
    assert num_questions <= 320


def test_only_errors_that_are_told_are_kept():
    store = CountingStore(dist.HashStore())

    def run(group):
        Meeting(store, group.rank, range(40)).meet("load", error=ValueError(group.rank), timeout_seconds=30)

    on_threads(40, run)
    assert store.num_operations["set"] == 40 + 10  # each rank's place, and ten errors
    assert store.num_operations["delete_key"] == 10 + 6


def test_a_long_meeting_names_who_is_missing_once_per_interval(monkeypatch, caplog):
    monkeypatch.setattr(meeting_module, "_NOTE_SECONDS", 0.2)
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
