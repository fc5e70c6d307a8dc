"""A user's function splits batches whose tensors don't begin with samples, such as patches of several images."""

import pytest
import torch
from cases import Case, Setting, assert_equals_one_process, train_boosted
from matrix import matrix
from ranked import on_ranks
from torch import nn

from booster_core.errors import ConfigError
from booster_hybrid import HybridParallelPlugin
from booster_testing.compare import tolerance_for


class Patches(nn.Module):
    """Takes the patches of all images in a row, how many each image has, and positions of shape (2, images)."""

    def __init__(self):
        super().__init__()
        self.entry = nn.Linear(4, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.double()

    def forward(self, patches, counts, positions):
        x = self.entry(patches)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        images = torch.stack([part.mean(0) for part in torch.split(x, counts.tolist())])
        return images * positions.sum(0)[:, None]


def batch(number, _replica):
    generator = torch.Generator().manual_seed(number)
    counts = torch.tensor([3, 1, 4, 2, 5])
    return {
        "patches": torch.randn(15, 4, generator=generator, dtype=torch.float64),
        "counts": counts,
        "positions": torch.rand(2, 5, generator=generator, dtype=torch.float64),
    }


CASE = Case(build=Patches, batch=batch, steps=2, outputs=True, tolerance=tolerance_for(torch.float64))


def setting(num_microbatches, split_batch):
    options = {"pp_size": 2, "num_microbatches": num_microbatches, "example_batch": batch(0, 0)}
    return Setting(HybridParallelPlugin, {**options, "split_batch": split_batch})


@pytest.mark.parametrize("num_microbatches", [2, 5])
@on_ranks(2)
def test_batches_are_split_by_the_hook(num_microbatches):
    def split(batch, asked):
        """Give each microbatch some whole images."""
        assert asked == num_microbatches
        ends, parts, start = batch["counts"].cumsum(0).tolist(), [], 0
        for images in torch.arange(len(ends)).tensor_split(num_microbatches):
            stop = ends[images[-1]]
            part = {
                "patches": batch["patches"][start:stop],
                "counts": batch["counts"][images],
                "positions": batch["positions"][:, images],
            }
            parts.append((part, len(images)))
            start = stop
        return parts

    assert_equals_one_process(CASE, setting(num_microbatches, split))


# every kind of mistake needs no pipeline of its own
@matrix(
    1,
    **{
        "value, message": [
            ([], "returned no microbatches"),
            ([({}, 0)], r"it returned \(dict, 0\)"),
            ([{"patches": 1, "counts": 2, "positions": 3}], "it returned `dict`"),
        ]
    },
)
@on_ranks(2)
def test_what_is_no_microbatch_is_refused_on_every_rank(value, message):
    with pytest.raises(ConfigError, match=message):
        train_boosted(CASE, setting(2, lambda *_: value))
