from __future__ import annotations

import pytest

from booster_core.errors import ConfigError, name_ranks
from booster_core.ranks.coordinator import DistCoordinator


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


def test_an_executor_that_does_not_exist_is_refused(coordinator):
    with (
        pytest.raises(ConfigError, match=r"`executor_rank=1` takes no part[.] Use one of rank 0"),
        coordinator.priority_execution(1),
    ):
        pass


def test_a_source_that_does_not_exist_is_refused(coordinator):
    with pytest.raises(ConfigError, match="`src=3` takes no part"):
        coordinator.broadcast_object(1, src=3)


def test_printing(coordinator, capsys):
    coordinator.print_on_master("one", 2)
    coordinator.print_on_node_master("three")
    assert capsys.readouterr().out == "one 2\nthree\n"


def test_functions_on_the_master(coordinator):
    @coordinator.on_master_only()
    def double(x):
        return 2 * x

    assert double(4) == 8


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ([3], "rank 3"),
        ([1, 2], "ranks 1 and 2"),
        ([1, 2, 5], "ranks 1, 2 and 5"),
        (list(range(13)), "ranks 0, 1, 2, 3, 4, 5, 6, 7, 8, 9 and 3 others"),
    ],
)
def test_lists_of_ranks_are_short(ranks, words):
    assert name_ranks(ranks) == words
