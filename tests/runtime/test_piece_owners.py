"""Who writes what an optimizer keeps of a parameter that is cut: elementwise state each rank its part, the rest one."""

from itertools import pairwise

import torch
from torch import nn

from booster_runtime.sharding import ParameterPiece, piece_shard


def pieces(parameter, cuts):
    bounds = [0, *cuts, parameter.numel()]
    for start, stop in pairwise(bounds):
        values = nn.Parameter(parameter.detach().reshape(-1)[start:stop].clone())
        if stop - start == parameter.numel():
            values = nn.Parameter(parameter.detach().clone())
        yield ParameterPiece(0, parameter, start, stop, values)


def owners(state, cuts, *, is_owner=True, key="rows"):
    parameter = nn.Parameter(torch.zeros(4, 3))
    shards = [piece_shard("p", key, piece, state(piece), is_owner=is_owner) for piece in pieces(parameter, cuts)]
    return [(shard.is_owner, shard.global_shape, shard.flat_range) for shard in shards]


def test_state_of_a_shape_of_its_own_is_written_by_the_rank_of_the_first_part():
    for key, state in (("rows", lambda _: torch.zeros(4, 1)), ("step", lambda _: torch.tensor(3.0))):
        shape = tuple(state(None).shape)
        found = owners(state, [5, 9], key=key)
        assert [(owner, given) for owner, given, _ in found] == [(True, shape), (False, shape), (False, shape)]


def test_elementwise_state_is_written_by_each_rank():
    found = owners(lambda piece: torch.zeros_like(piece.values), [5, 9], key="exp_avg")
    assert found == [(True, (4, 3), (0, 5)), (True, (4, 3), (5, 9)), (True, (4, 3), (9, 12))]


def test_a_copy_of_a_replica_is_written_by_nobody():
    assert [owner for owner, *_ in owners(lambda _: torch.zeros(4, 1), [5], is_owner=False)] == [False, False]
    assert [owner for owner, *_ in owners(lambda p: torch.zeros_like(p.values), [5], is_owner=False)] == [False, False]


def test_a_step_count_is_whole_even_if_it_has_the_shape_of_a_piece():
    found = owners(lambda _: torch.tensor([3.0]), [1, 2], key="step")
    assert found == [(True, (1,), (0, 1)), (False, (1,), (0, 1)), (False, (1,), (0, 1))]


def test_values_are_cut_as_the_parameter():
    found = owners(lambda piece: piece.values, [5, 9], key=None)
    assert found == [(True, (4, 3), (0, 5)), (True, (4, 3), (5, 9)), (True, (4, 3), (9, 12))]


def test_a_whole_parameter_s_state_has_its_shape():
    assert owners(lambda piece: torch.zeros_like(piece.values), [], key="exp_avg") == [(True, (4, 3), (0, 12))]
