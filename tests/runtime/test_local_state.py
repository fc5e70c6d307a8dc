"""State dicts of models of which a rank holds a part: they are read, copied and loaded, and not pickled."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from booster_core.errors import CheckpointError
from booster_runtime.model_methods import mark_as_local


@pytest.fixture
def model():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    mark_as_local(model)
    return model


@pytest.mark.parametrize("save", [torch.save, pickle.dump])
def test_parts_are_not_saved_as_if_they_were_whole(save, model):
    for state in (model.state_dict(), {"model": model.state_dict(), "epoch": 3}):
        with pytest.raises(CheckpointError, match=r"one rank's shards of the model.*booster\.save_model"):
            save(state, io.BytesIO())


def test_copies_are_loaded_again(model):
    before = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert model.load_state_dict(before).missing_keys == []
    assert list(before) == list(model.state_dict())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert before["0.weight"].any()


def test_metadata_of_versions_stays(model):
    assert model.state_dict()._metadata["1"] == {"version": nn.BatchNorm1d._version}


def test_a_part_of_a_larger_model_does_not_mark_the_whole(model):
    whole = nn.ModuleDict({"part": model, "head": nn.Linear(2, 1)})
    file = io.BytesIO()
    torch.save(whole.state_dict(), file)
    file.seek(0)
    assert list(torch.load(file)) == list(whole.state_dict())
