"""The order in which buckets of a round are reduced, and that a gradient looks at few of them."""

from booster_zero.engine.reducer import BucketProgress, Round


def started(round_):
    found = []
    for bucket, filling in round_.take_complete():
        filling.is_started = True
        found.append(bucket)
    return found


def test_buckets_are_reduced_in_order_as_soon_as_all_before_them_are():
    fillings = {name: BucketProgress(missing=1) for name in "abc"}
    round_ = Round(fillings.items())
    fillings["b"].missing = 0
    assert started(round_) == []
    fillings["a"].missing = 0
    assert started(round_) == ["a", "b"]
    assert [bucket for bucket, _ in round_.take_rest()] == ["c"]
    assert started(round_) == []


def test_a_bucket_that_waits_for_the_end_holds_up_those_after_it():
    fillings = {
        "a": BucketProgress(missing=0),
        "b": BucketProgress(missing=0, waits_for_end=True),
        "c": BucketProgress(missing=0),
    }
    round_ = Round(fillings.items())
    assert started(round_) == ["a"]
    assert [bucket for bucket, _ in round_.take_rest()] == ["b", "c"]


class Looked:
    """A filling that counts how often it is looked at."""

    waits_for_end = is_started = False

    def __init__(self):
        self.looks = 0
        self.is_complete = False

    @property
    def missing(self):
        self.looks += 1
        return 0 if self.is_complete else 1


def test_a_gradient_looks_at_the_next_bucket_alone():
    fillings = [Looked() for _ in range(1000)]
    round_ = Round(enumerate(fillings))
    for number, filling in enumerate(fillings):
        filling.is_complete = True
        assert [bucket for bucket, _ in round_.take_complete()] == [number]
    assert max(filling.looks for filling in fillings) == 2
