import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from booster_hybrid.pipeline.example import check_entries, example_batch


def test_samples_of_a_loader_with_a_batch_sampler_are_collated():
    loader = DataLoader(range(8), batch_sampler=[[0, 1], [2, 3]])
    assert example_batch(nn.Linear(1, 1), loader).dim() == 1


def test_batches_of_a_data_set_that_makes_its_own_are_left_as_they_are():
    loader = DataLoader([[5, 6], [7, 8]], batch_size=None)
    assert example_batch(nn.Linear(1, 1), loader) == [5, 6]


def test_batches_of_a_data_set_that_makes_its_own_are_not_compared_with_single_samples():
    batches = [torch.ones(4, 2), torch.ones(4, 2)]
    assert check_entries(DataLoader(batches, batch_size=None)) == []
    assert len(check_entries(DataLoader(batches, batch_size=2))) == 2


class Vision(nn.Module):
    """Has what transformers' vision models have."""

    main_input_name = "pixel_values"
    dummy_inputs = None

    def __init__(self, **config):
        super().__init__()
        self.config = SimpleNamespace(**config)


@pytest.mark.parametrize(
    ("config", "shape"),
    [
        ({"image_size": 8}, (2, 3, 8, 8)),
        ({"image_size": (8, 6), "num_channels": 1}, (2, 1, 8, 6)),
        ({"image_size": [8, 6], "num_channels": 4}, (2, 4, 8, 6)),
    ],
)
def test_vision_models_get_an_image_of_the_size_that_they_are_configured_for(config, shape):
    batch = example_batch(Vision(**config), None)
    assert list(batch) == ["pixel_values"]
    assert batch["pixel_values"].shape == shape


class Drawing(Dataset):
    """Draws from every generator that a data set may use."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.tensor([random.random(), np.random.rand(), torch.rand(()).item()]) + index  # noqa: NPY002 - as in user code


def test_reading_an_example_leaves_all_generators_as_they_were():
    model = nn.Linear(3, 1)
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002 - the generator that such data sets use
    torch.manual_seed(1)
    expected = Drawing()[0]
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002 - the generator that such data sets use
    torch.manual_seed(1)
    loader = DataLoader(Drawing(), batch_size=2)
    example_batch(model, loader)
    check_entries(loader)
    assert torch.equal(Drawing()[0], expected)
