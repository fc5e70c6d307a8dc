"""The user's optimizer with this rank's pieces in the place of parameters: state is cut, listed, saved and loaded."""

from itertools import pairwise

import pytest
import torch
from torch import nn

from booster_core.errors import ConfigError
from booster_core.state import TensorMeta
from booster_runtime.sharding import (
    HostedOptimizer,
    ParameterPiece,
    numbers_of_group,
    piece_meta,
    piece_shard,
    whole_shard,
)

NAMES = {0: "weight", 1: "bias"}


def trained():
    """Return parameters of a model and an optimizer that has stepped on them."""
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(2, 3)), nn.Parameter(torch.randn(4))]
    optimizer = torch.optim.AdamW(
        [{"params": [("weight", parameters[0])]}, {"params": [("bias", parameters[1])], "lr": 0.5}], lr=0.1
    )
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return parameters, optimizer


def piece_of(index, parameter, start, stop):
    is_whole = stop - start == parameter.numel()
    values = parameter.detach().clone() if is_whole else parameter.detach().view(-1)[start:stop].clone()
    return ParameterPiece(index, parameter, start, stop, nn.Parameter(values))


def hosted():
    """Host an optimizer on a rank that has the weight's last four elements, and all of the bias."""
    parameters, optimizer = trained()
    before = {index: dict(optimizer.state[parameter]) for index, parameter in enumerate(parameters)}
    host = HostedOptimizer(optimizer, NAMES)
    pieces = {0: piece_of(0, parameters[0], 2, 6), 1: piece_of(1, parameters[1], 0, 4)}
    host.adopt(0, [0], {0: pieces[0]})
    host.adopt(1, [1], {1: pieces[1]})
    return host, optimizer, pieces, before, parameters


def test_state_is_cut_as_the_parameter_is():
    host, optimizer, pieces, before, parameters = hosted()
    groups = optimizer.param_groups
    with host.showing_pieces():
        assert [group["params"] for group in groups] == [[pieces[0].values], [pieces[1].values]]
        assert [group["param_names"] for group in groups] == [["weight"], ["bias"]]
    assert all(group["params"][0] is parameter for group, parameter in zip(groups, parameters, strict=True))
    states = host.states()
    assert torch.equal(states[0]["exp_avg"], before[0]["exp_avg"].view(-1)[2:6])
    assert torch.equal(states[1]["exp_avg_sq"], before[1]["exp_avg_sq"])
    assert states[0]["step"] == before[0]["step"], "a count is no element of it"
    states[0]["exp_avg"].zero_()
    assert before[0]["exp_avg"].any(), "the state is a copy"
    assert set(optimizer.state) == {pieces[0].values, pieces[1].values}


def test_a_parameter_of_another_rank_leaves_the_list():
    parameters, optimizer = trained()
    host = HostedOptimizer(optimizer, NAMES)
    host.adopt(0, [0], {})
    assert set(optimizer.state) == {parameters[1]}
    with pytest.raises(ConfigError, match="state of 'weight' is kept by the part"):
        optimizer.state[parameters[0]]
    host.adopt(1, [1], {})
    with host.showing_pieces():
        assert [group["params"] for group in optimizer.param_groups] == [[], []]
        assert optimizer.param_groups[0]["param_names"] == []
    assert (host.members(), host.states()) == ({0, 1}, {})


def test_shards_name_their_part():
    host, _, pieces, _, _ = hosted()
    state = host.states()[0]
    shard = piece_shard("weight", "exp_avg", pieces[0], state["exp_avg"], is_owner=True)
    assert (shard.key, shard.global_shape, shard.flat_range, shard.is_owner) == ("weight/exp_avg", (2, 3), (2, 6), True)
    whole = piece_shard("bias", None, pieces[1], pieces[1].values, is_owner=True)
    assert (whole.flat, tuple(whole.data.shape)) == (None, (4,))
    count = piece_shard("weight", "row_var", pieces[0], torch.ones(2), is_owner=True)
    assert (count.global_shape, count.is_owner) == ((2,), False), "the rank of the first part writes it"
    assert whole_shard("x", None, torch.ones(()), is_owner=True).global_shape == ()


def test_saved_options_and_state_come_back():
    host, optimizer, pieces, _, _ = hosted()
    kept = optimizer.param_groups[1]["lr"] = torch.tensor(7.0)
    for group in host.listed():
        group.set_options({**group.described().options, "lr": 0.25})
    assert optimizer.param_groups[0]["lr"] == 0.25
    assert optimizer.param_groups[1]["lr"] is kept
    assert kept == 0.25
    of_whole = {
        "exp_avg": TensorMeta(shape=(2, 3), dtype=torch.float32),
        "step": TensorMeta(shape=(), dtype=torch.float32),
        "master": TensorMeta(shape=(2, 3), dtype=torch.float32),
    }
    stored = {key: piece_meta(key, meta, pieces[0]) for key, meta in of_whole.items()}
    made = host.listed()[0].restore("weight", stored, {"count": 3})
    assert host.states()[0] is made
    assert made["exp_avg"].shape == pieces[0].values.shape
    assert (made["step"].shape, made["count"]) == ((), 3)
    assert "master" not in made, "it is no state of the optimizer"
    assert host.listed()[0].restore("weight", {}, {}) == {}
    assert 0 not in host.states(), "what the checkpoint lacks is dropped"


def test_parameters_of_a_new_group_are_checked():
    host, _, _, _, parameters = hosted()
    new = nn.Parameter(torch.ones(2))
    index_of = {id(parameters[0]): 0, id(parameters[1]): 1, id(new): 2}
    assert numbers_of_group([("new", new)], index_of, host.members(), NAMES, remedy="") == [2]
    assert numbers_of_group(new, index_of, host.members(), NAMES, remedy="") == [2]
    with pytest.raises(ConfigError, match="'bias' is in a parameter group already"):
        numbers_of_group([new, parameters[1]], index_of, host.members(), NAMES, remedy="")
    with pytest.raises(ConfigError, match=r"Parameter 1 of the new group, of shape \(5,\), .* Leave it out"):
        numbers_of_group([new, nn.Parameter(torch.ones(5))], index_of, (), NAMES, remedy="Leave it out.")


def pieces(parameter, cuts):
    bounds = [0, *cuts, parameter.numel()]
    return [piece_of(0, parameter, start, stop) for start, stop in pairwise(bounds)]


ROWS, LIKE = (lambda _: torch.zeros(4, 1)), (lambda piece: torch.zeros_like(piece.values))


@pytest.mark.parametrize(
    ("key", "state", "cuts", "is_owner", "expected"),
    [
        # of a shape of its own: the rank of the first part writes it
        ("rows", ROWS, [5, 9], True, [(True, (4, 1)), (False, (4, 1)), (False, (4, 1))]),
        ("step", lambda _: torch.tensor(3.0), [5], True, [(True, ()), (False, ())]),
        ("step", lambda _: torch.tensor([3.0]), [1, 2], True, [(True, (1,)), (False, (1,)), (False, (1,))]),
        # of each element: each rank writes its part
        ("exp_avg", LIKE, [5, 9], True, [(True, (4, 3), (0, 5)), (True, (4, 3), (5, 9)), (True, (4, 3), (9, 12))]),
        (None, lambda piece: piece.values, [5], True, [(True, (4, 3), (0, 5)), (True, (4, 3), (5, 12))]),
        ("exp_avg", LIKE, [], True, [(True, (4, 3), (0, 12))]),
        # a replica's copy: nobody
        ("rows", ROWS, [5], False, [(False,), (False,)]),
        ("exp_avg", LIKE, [5], False, [(False,), (False,)]),
    ],
)
def test_who_writes_which_part_of_state(key, state, cuts, is_owner, expected):
    parameter = nn.Parameter(torch.zeros(4, 3))
    shards = [piece_shard("p", key, piece, state(piece), is_owner=is_owner) for piece in pieces(parameter, cuts)]
    found = [(shard.is_owner, shard.global_shape, shard.flat_range) for shard in shards]
    assert [each[: len(wanted)] for each, wanted in zip(found, expected, strict=True)] == expected
