import re
import time

import pytest
import torch.distributed as dist
from ranked import on_ranks, raises_on_ranks

from booster_core.errors import CheckpointError, ConfigError, MissingRanksError, RankFailedError
from booster_core.ranks.coordinator import DistCoordinator
from booster_testing import expect_on_ranks


def _bring_error(kind):
    c = DistCoordinator()
    with c.together("load_model"):
        if c.rank == 1:
            msg = "broken file"
            raise kind(msg)


class _PrivateError(Exception):
    pass


def _agree(values):
    c = DistCoordinator()
    c.agree("boost", values[c.rank])


def _double(value):
    return 2 * value


class _WithoutPlainForm:
    def __repr__(self):
        msg = "can't be printed"
        raise ValueError(msg)


@on_ranks(2)
def test_a_process_group_that_the_script_made(tmp_path):
    rank = dist.get_rank()
    if rank == 1:
        DistCoordinator()  # ranks need not have looked equally often
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 2), rank=rank, world_size=2)
    try:
        c = DistCoordinator()
        c.block_all(name="step")
        assert (c.rank, c.world_size, c.all_gather_object(c.rank)) == (rank, 2, [0, 1])
    finally:
        dist.destroy_process_group()


@on_ranks(2)
def test_a_missing_rank_is_named_and_later_calls_are_not_disturbed():
    c, start = DistCoordinator(), time.monotonic()
    if c.rank == 1:
        time.sleep(2)
    else:
        with pytest.raises(MissingRanksError) as caught:
            c.block_all(name="save_model", timeout_seconds=1)
        assert 0.9 < time.monotonic() - start < 30, "its own time limit, not that of the group"
        assert str(caught.value) == (
            "`save_model` waited 1 s for rank 1 of 2, which did not call it. It is a collective call: "
            "call it on every rank, not under `if rank == 0`."
        )
    c.block_all(name="afterwards")
    c.block_all(name="save_model")


@pytest.mark.parametrize("kind", [CheckpointError, ConfigError, ValueError, OSError, KeyError])
def test_the_same_class_is_raised_everywhere(kind):
    exceptions = expect_on_ranks(kind, "broken file", _bring_error, 3, kind)
    assert exceptions[0].args == ("rank 1: broken file",)
    assert exceptions[1].args == ("broken file",)


def test_a_class_that_others_may_not_know_becomes_a_rank_failed_error():
    exceptions = expect_on_ranks((RankFailedError, _PrivateError), "broken file", _bring_error, 2, _PrivateError)
    assert isinstance(exceptions[0], RankFailedError)
    assert str(exceptions[0]) == "rank 1: _PrivateError: broken file"


@on_ranks(3)
def test_an_own_error_comes_before_missing_ranks():
    c, error = DistCoordinator(), ValueError("mine")
    if c.rank == 0:
        match = "^`save_model` waited 1 s for rank 2 of 3"
        with pytest.raises(MissingRanksError, match=match), c.together("save_model", timeout_seconds=1):
            pass
    if c.rank == 1:
        with pytest.raises(ValueError, match="mine"), c.together("save_model", timeout_seconds=2):
            raise error
        assert isinstance(error.__context__, MissingRanksError), "who is missing stays visible"
        assert error.__context__.__context__ is None


@on_ranks(3)
def test_objects_are_exchanged():
    c = DistCoordinator()
    assert (c.broadcast_object({"from": c.rank}, src=1), c.all_gather_object(c.rank * 10)) == ({"from": 1}, [0, 10, 20])


@pytest.mark.parametrize("executor", [0, 2])
@on_ranks(3)
def test_one_rank_goes_first(executor):
    c = DistCoordinator()
    with c.priority_execution(executor):
        start = time.monotonic()
        if c.rank == executor:
            time.sleep(0.3)
        end = time.monotonic()
    times = c.all_gather_object((start, end))
    assert c.rank == executor or start >= times[executor][1]


@raises_on_ranks(CheckpointError, "no space", 2)
def test_a_failure_of_the_first_rank_reaches_those_that_wait():
    c = DistCoordinator()
    with c.priority_execution():
        if c.rank == 0:
            msg = "no space"
            raise CheckpointError(msg)


@on_ranks(3)
def test_a_subgroup_meets_and_agrees_alone():
    group = dist.new_group([1, 2])
    c = DistCoordinator()
    if c.rank == 0:
        return
    c.block_all(group, name="pair", timeout_seconds=5)
    assert (c.is_master(group), c.is_last_process(group)) == (c.rank == 1, c.rank == 2)
    assert c.broadcast_object(c.rank, src=2, process_group=group) == 2
    assert c.all_gather_object(c.rank, process_group=group) == [1, 2]
    c.agree("boost", 1, process_group=group)
    with pytest.raises(ConfigError, match=r"Ranks disagree about what `boost` gets: 1 on rank 1, 2 on rank 2\. Pass"):
        c.agree("boost", c.rank, process_group=group)


@raises_on_ranks(ConfigError, "`save_model` was called on a coordinator of a process group that is not", 2)
def test_a_coordinator_of_a_destroyed_group_is_refused():
    c = DistCoordinator()
    c.destroy()
    c.block_all(name="save_model")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            [{"tp_size": 2, "seed": 1}, {"tp_size": 2, "seed": 2}, {"tp_size": 2, "seed": 1}],
            "Ranks disagree about `seed`: 1 on ranks 0 and 2, 2 on rank 1, in `boost`. Pass the same on all ranks.",
        ),
        (
            [{"pipeline": {"style": "1f1b"}}, {"pipeline": {"style": "1f1b"}}, {"pipeline": {"style": "1f1b", "x": 1}}],
            "Ranks disagree about `pipeline.x`: nothing on ranks 0 and 1, 1 on rank 2, in `boost`.",
        ),
        (
            [{"make": _double}, {"make": _double}, {"make": time.sleep}],
            "`make`: tests.core.test_coordinator_ranks._double on ranks 0 and 1, time.sleep on rank 2",
        ),
        ([["a"], ["a"], ["b"]], "about what `boost` gets: ['a'] on ranks 0 and 1, ['b'] on rank 2."),
    ],
)
def test_values_that_differ_are_named_with_their_ranks(values, message):
    message = message.replace("tests.core.test_coordinator_ranks", __name__)
    exceptions = expect_on_ranks(ConfigError, re.escape(message), _agree, 3, values)
    assert len({str(error) for error in exceptions}) == 1, "the same on every rank"


def test_a_value_that_can_not_be_compared_raises_everywhere():
    exceptions = expect_on_ranks(ValueError, "can't be printed", _agree, 2, [1, _WithoutPlainForm()])
    assert str(exceptions[0]) == "rank 1: can't be printed"


@pytest.fixture
def coordinator():
    return DistCoordinator()


def test_a_world_of_one(coordinator):
    assert (coordinator.rank, coordinator.world_size, coordinator.local_rank) == (0, 1, 0)
    assert coordinator.is_master()
    assert coordinator.is_node_master()
    assert coordinator.is_last_process()


def test_nobody_is_waited_for(coordinator):
    coordinator.block_all(name="save_model")
    coordinator.block_all()
    coordinator.agree("boost", {"seed": 1})
    with coordinator.together("save_model"):
        pass
    assert coordinator.broadcast_object("it") == "it"
    assert coordinator.all_gather_object("it") == ["it"]
    with coordinator.priority_execution():
        pass


def test_an_error_is_raised_as_it_is(coordinator):
    error = ValueError("mine")
    with pytest.raises(ValueError, match="mine") as caught, coordinator.together("save_model"):
        raise error
    assert caught.value is error


def test_ranks_that_do_not_exist_are_refused(coordinator):
    with pytest.raises(ConfigError, match="`src=3` takes no part"):
        coordinator.broadcast_object(1, src=3)
    with (
        pytest.raises(ConfigError, match=r"`executor_rank=1` takes no part[.] Use one of rank 0"),
        coordinator.priority_execution(1),
    ):
        pass


def test_printing(coordinator, capsys):
    coordinator.print_on_master("one", 2)
    coordinator.print_on_node_master("three")
    assert capsys.readouterr().out == "one 2\nthree\n"


def test_functions_on_the_master(coordinator):
    @coordinator.on_master_only()
    def double(x):
        return 2 * x

    assert double(4) == 8
