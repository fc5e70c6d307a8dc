"""State dicts of models of which a rank holds a part: they are read, copied and loaded, and not pickled."""

import io

import pytest
import torch
from torch import nn

from booster_runtime.model_methods import mark_as_local


@pytest.fixture
def model():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    mark_as_local(model)
    return model


def test_metadata_of_versions_stays(model):
    assert model.state_dict()._metadata["1"] == {"version": nn.BatchNorm1d._version}


def test_a_part_of_a_larger_model_does_not_mark_the_whole(model):
    whole = nn.ModuleDict({"part": model, "head": nn.Linear(2, 1)})
    file = io.BytesIO()
    torch.save(whole.state_dict(), file)
    file.seek(0)
    assert list(torch.load(file)) == list(whole.state_dict())
