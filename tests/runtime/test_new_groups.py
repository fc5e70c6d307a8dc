"""Groups of disjoint ranks: a rank makes its own alone, and all have the names that they would have if all made all."""

import os
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranked import on_ranks
from torch.distributed import distributed_c10d

from booster_runtime.collectives import new_groups


def sum_of_ranks(group):
    tensor = torch.tensor([dist.get_rank()])
    dist.all_reduce(tensor, group=group)
    return tensor.item()


@on_ranks(4)
def test_each_rank_makes_its_own_group_along_each_axis():
    with mock.patch.object(dist, "new_group", wraps=dist.new_group) as made:
        groups = [new_groups([[0, 1], [2, 3]]), new_groups([[0, 2], [1, 3]]), new_groups([[0], [1], [2], [3]])]
    assert made.call_count == 3
    after = dist.new_group()  # by every rank, as torch asks for
    sums = [[1, 2, 0], [1, 4, 1], [5, 2, 2], [5, 4, 3]][dist.get_rank()]
    assert [sum_of_ranks(group) for group in (*groups, after)] == [*sums, 6]
    names = [None] * 4
    dist.all_gather_object(names, [group.group_name for group in (*groups, after)])
    assert names[0][0] == names[1][0] != names[2][0] == names[3][0]
    assert names[0][1] == names[2][1] != names[1][1] == names[3][1]
    assert len({of_rank[2] for of_rank in names}) == 4
    assert len({of_rank[3] for of_rank in names}) == 1


@on_ranks(4)
def test_a_rank_may_be_in_no_group():
    dist.new_group([0, 1])  # torch then knows of more groups on some ranks than on others
    group, later = new_groups([[0, 1], [3]]), new_groups([[0, 3], [1, 2]])
    found = None if group is None else sum_of_ranks(group), sum_of_ranks(later)
    assert found == [(1, 3), (1, 3), (None, 3), (3, 3)][dist.get_rank()]


@pytest.mark.parametrize("are_alike", [False, True])
@on_ranks(4)
def test_groups_that_a_split_could_not_tell_apart_are_made_one_after_the_other(are_alike):
    color = (lambda _: 7) if are_alike else distributed_c10d._process_group_color
    with (
        mock.patch.object(distributed_c10d, "_process_group_color", color),
        mock.patch.object(dist, "new_group", wraps=dist.new_group) as made,
    ):
        total = sum_of_ranks(new_groups([[0, 1], [2, 3]]))
    own = [[0, 1], [2, 3]][dist.get_rank() // 2]
    assert total == sum(own)
    assert [call.args[0] for call in made.call_args_list] == ([[0, 1], [2, 3]] if are_alike else [own])


@on_ranks(4)
def test_with_torchs_barrier_after_each_group_every_rank_makes_all():
    with mock.patch.dict(os.environ, TORCH_DIST_INIT_BARRIER="1"):
        assert sum_of_ranks(new_groups([[0, 1], [2, 3]])) == [1, 1, 5, 5][dist.get_rank()]
