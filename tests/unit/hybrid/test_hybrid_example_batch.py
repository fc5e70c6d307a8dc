from torch import nn
from torch.utils.data import DataLoader

from booster_hybrid.pipeline.example import example_batch


def test_samples_of_a_loader_with_a_batch_sampler_are_collated():
    loader = DataLoader(range(8), batch_sampler=[[0, 1], [2, 3]])
    assert example_batch(nn.Linear(1, 1), loader).dim() == 1


def test_batches_of_a_data_set_that_makes_its_own_are_left_as_they_are():
    loader = DataLoader([[5, 6], [7, 8]], batch_size=None)
    assert example_batch(nn.Linear(1, 1), loader) == [5, 6]
