"""A user's function splits batches whose tensors don't begin with samples, such as patches of several images."""

from __future__ import annotations

import pytest
import torch
from matrix import matrix
from torch import nn

from booster_core import Booster
from booster_core.errors import ConfigError
from booster_hybrid import HybridParallelPlugin
from booster_runtime import evaluate_batch, full_gradient
from booster_testing import expect_on_ranks, run_on_ranks


class Patches(nn.Module):
    """Takes the patches of all images in a row, how many each image has, and positions of shape (2, images)."""

    def __init__(self):
        super().__init__()
        self.entry = nn.Linear(4, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, patches, counts, positions):
        x = self.entry(patches)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        images = torch.stack([part.mean(0) for part in torch.split(x, counts.tolist())])
        return images * positions.sum(0)[:, None]


def batch():
    generator = torch.Generator().manual_seed(3)
    counts = torch.tensor([3, 1, 4, 2, 5])
    return {
        "patches": torch.randn(15, 4, generator=generator, dtype=torch.float64),
        "counts": counts,
        "positions": torch.rand(2, 5, generator=generator, dtype=torch.float64),
    }


def split(batch, num_microbatches):
    """Give each microbatch some whole images."""
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


def seeded():
    torch.manual_seed(6)
    return Patches().double()


def loss_of(outputs, _):
    return outputs.square().mean()


def train(num_microbatches, through_booster):
    model, whole, asked = seeded(), seeded(), []

    def split_and_note(values, number):
        asked.append(number)
        return split(values, number)

    plugin = HybridParallelPlugin(
        pp_size=2, num_microbatches=num_microbatches, split_batch=split_and_note, example_batch=batch()
    )
    booster = Booster("cpu", plugin=plugin)
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    expected = whole(**batch())
    loss = loss_of(expected, None)
    if through_booster:
        found = evaluate_batch(booster, iter([batch()]), model, loss_of)
        torch.testing.assert_close(found.loss.double(), loss.detach(), rtol=1e-5, atol=1e-6)
    result = booster.execute_pipeline(iter([batch()]), model, loss_of, optimizer, return_outputs=True)
    loss.backward()
    for name, parameter in whole.named_parameters():
        torch.testing.assert_close(full_gradient(booster, model, name), parameter.grad, msg=name)
    if result["outputs"] is not None:
        torch.testing.assert_close(result["outputs"], expected.detach())
        torch.testing.assert_close(result["loss"], loss.detach())
    assert set(asked) == {num_microbatches}


@pytest.mark.parametrize(("num_microbatches", "through_booster"), [(2, True), (5, False)])
def test_batches_are_split_by_the_hook(num_microbatches, through_booster):
    run_on_ranks(train, 2, num_microbatches, through_booster)


def returning(value):
    plugin = HybridParallelPlugin(pp_size=2, split_batch=lambda *_: value, example_batch=batch())
    booster = Booster("cpu", plugin=plugin)
    model = booster.boost(seeded()).model
    booster.execute_pipeline(iter([batch()]), model, loss_of)


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
def test_what_is_no_microbatch_is_refused_on_every_rank(value, message):
    expect_on_ranks(ConfigError, message, returning, 2, value)


def test_a_hook_and_a_size_are_two_answers():
    with pytest.raises(ConfigError, match="`microbatch_size=2` and `split_batch` are two answers"):
        HybridParallelPlugin(pp_size=2, split_batch=split, microbatch_size=2)


def test_a_hook_without_a_pipeline_is_refused():
    with pytest.raises(ConfigError, match="`split_batch` splits the batches of a pipeline, and `pp_size=1` makes none"):
        HybridParallelPlugin(split_batch=split)


def test_a_hook_is_a_function():
    with pytest.raises(TypeError, match="got `int`"):
        HybridParallelPlugin(pp_size=2, split_batch=3)
