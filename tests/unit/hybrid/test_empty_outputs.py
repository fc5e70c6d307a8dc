"""What stands for the outputs of modules that a stage does not run has their form, shapes and formats."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from booster_hybrid.pipeline.empty_outputs import EmptyOutputs, UnknownShapeError


class Tower(nn.Module):
    """Cuts patches by sizes that it reads, and normalizes with statistics that it writes."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 6)
        self.norm = nn.BatchNorm1d(6)
        self.num_runs = 0

    def forward(self, patches, sizes=None, *, flag=True):
        self.num_runs += 1
        hidden = self.norm(self.linear(patches))
        if sizes is not None:
            parts = torch.split(hidden, [int(each) for each in sizes])
            hidden = torch.stack([part.mean(0) for part in parts])
        return {"hidden": hidden.t(), "flag": flag, "pair": (hidden.half(), None)}


def shapes(output):
    return [(leaf.shape, leaf.dtype, leaf.stride()) for leaf in (output["hidden"], output["pair"][0])]


@pytest.mark.parametrize("sizes", [None, [3, 2], [1, 1, 3], [5]])
def test_shapes_are_those_of_a_real_run(sizes):
    tower = Tower()
    before = {name: tensor.clone() for name, tensor in tower.state_dict().items()}
    empty = EmptyOutputs(tower, tower.forward)
    arguments = (torch.randn(5, 4), None if sizes is None else torch.tensor(sizes))
    state = torch.get_rng_state()
    found = [empty(arguments, {"flag": False}) for _ in range(3)]
    assert all(torch.equal(tensor, before[name]) for name, tensor in tower.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    runs = tower.num_runs
    expected = tower(*arguments, flag=False)
    for each in found:
        assert shapes(each) == shapes(expected)
        assert each["flag"] is False
        assert each["pair"][1] is None
        assert not each["hidden"].requires_grad
    assert runs <= 2  # on fake tensors, with integers that are real in the second run


def test_other_sizes_are_other_shapes():
    tower = Tower()
    empty = EmptyOutputs(tower, tower.forward)
    patches = torch.randn(6, 4)
    for sizes in ([3, 3], [2, 2, 2], [3, 3], [4, 2]):
        assert empty((patches, torch.tensor(sizes)), {})["hidden"].shape == (6, len(sizes))


class Reading(nn.Module):
    def __init__(self):
        super().__init__()
        self.num_runs = 0

    def forward(self, x):
        self.num_runs += 1
        return x[x > 0]


def test_shapes_that_depend_on_values_are_not_told():
    module = Reading()
    empty = EmptyOutputs(module, module.forward)
    for _ in range(2):
        with pytest.raises(UnknownShapeError):
            empty((torch.ones(3),), {})
    assert module.num_runs == 2  # it is not tried again


def test_objects_that_may_hold_anything_are_not_passed():
    module = Tower()
    with pytest.raises(UnknownShapeError):
        EmptyOutputs(module, module.forward)((torch.ones(3, 4), object()), {})
