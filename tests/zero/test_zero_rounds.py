"""A gradient looks at few of the buckets of a round; their order, trainings show."""

from booster_zero.engine.reducer import Round


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
