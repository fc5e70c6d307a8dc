"""Values that stages have sent take their places in a layer's arguments, in containers of any kind."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import pytest
import torch

from booster_core.errors import ConfigError
from booster_hybrid.pipeline.arguments import ArgumentNames


class State(NamedTuple):
    hidden: torch.Tensor
    memory: torch.Tensor


@dataclasses.dataclass
class Mask:
    rows: torch.Tensor
    name: str = "mask"


def layer(hidden, *others, state=None, mask=None):
    """Take arguments as layers do."""


NAMES = ArgumentNames(layer)


def numbers(count):
    return [torch.tensor(float(number)) for number in range(count)]


@pytest.mark.parametrize(
    ("state", "path"),
    [
        ((torch.zeros(()), torch.ones(())), "state[1]"),
        ([torch.zeros(()), torch.ones(())], "state[1]"),
        ({"a": torch.zeros(()), "b": torch.ones(())}, "state['b']"),
        (State(torch.zeros(()), torch.ones(())), "state[1]"),
        (((torch.zeros(()),), {"deep": [torch.ones(())]}), "state[1]['deep'][0]"),
    ],
    ids=["tuple", "list", "dict", "named tuple", "nest"],
)
def test_a_value_is_replaced_inside_of_a_container(state, path):
    hidden, new = numbers(2)
    before = NAMES.tensors((hidden,), {"state": state})
    args, kwargs = NAMES.replaced((hidden,), {"state": state}, {path: new}, "a layer")
    assert args == (hidden,)
    assert type(kwargs["state"]) is type(state)
    after = NAMES.tensors(args, kwargs)
    assert list(after) == list(before)
    assert after[path] is new
    assert all(after[name] is value for name, value in before.items() if name != path)
    assert NAMES.tensors((hidden,), {"state": state})[path] is before[path]  # the caller's container is left alone


def test_a_value_is_replaced_inside_of_a_dataclass():
    rows, new = numbers(2)
    mask = Mask(rows)
    _, kwargs = NAMES.replaced((), {"mask": mask}, {"mask.rows": new}, "a layer")
    assert kwargs["mask"].rows is new
    assert kwargs["mask"].name == "mask"
    assert mask.rows is rows


def test_containers_of_which_nothing_is_replaced_stay_the_same_objects():
    hidden, other, new = numbers(3)
    state = {"a": [other]}
    args, kwargs = NAMES.replaced((hidden, (other,)), {"state": state}, {"hidden": new}, "a layer")
    assert args[0] is new
    assert args[1] is not hidden
    assert kwargs["state"] is state


def test_arguments_without_a_name_of_their_own_and_missing_ones_are_replaced():
    hidden, one, two, new, mask = numbers(5)
    args, kwargs = NAMES.replaced((hidden, one, two), {}, {"others/1": new, "mask": mask}, "a layer")
    assert all(found is wanted for found, wanted in zip(args, (hidden, one, new), strict=True))
    assert kwargs == {"mask": mask}


def test_a_container_that_has_lost_a_place_is_named():
    hidden, new = numbers(2)
    with pytest.raises(ConfigError, match=r"Argument 'state\[1\]' of a layer, which an earlier stage has sent"):
        NAMES.replaced((hidden,), {"state": (hidden,)}, {"state[1]": new}, "a layer")
