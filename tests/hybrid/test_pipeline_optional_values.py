"""Batches without what the example had, such as images: stages send each other nothing for it."""

from functools import partial

import pytest
import torch
from cases import Case, assert_equals_one_process, train_boosted
from hybrid_runs import stages
from torch import nn

from booster_core.errors import BoosterError
from booster_testing import expect_on_ranks


class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 4)
        self.is_blind = False

    def forward(self, image):
        return None if self.is_blind else torch.tanh(self.linear(image))


class Adding(nn.Module):
    """A layer that adds features to its output, where it gets some."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x, features=None):
        x = torch.tanh(self.linear(x))
        return x if features is None else x + features


class Seeing(nn.Module):
    """Uses the features of images, where there are some, after its layers, and in them."""

    def __init__(self, *, in_layers=True):
        super().__init__()
        self.in_layers = in_layers
        self.tower = Tower()
        self.layers = nn.ModuleList(Adding() for _ in range(4))
        self.exit = nn.Linear(4, 1)
        self.is_blind = False

    def forward(self, x, image=None):
        features = None if image is None or self.is_blind else self.tower(image)
        for layer in self.layers:
            x = layer(x, features if self.in_layers else None)
        return {"out": self.exit(x if features is None else x * features), "features": features}


def batch_of(with_images, number, replica):
    generator = torch.Generator().manual_seed(5 + 10 * number + replica)
    batch = {"x": torch.randn(4, 4, generator=generator)}
    return (
        {**batch, "image": torch.randn(4, 3, generator=generator)} if with_images[number % len(with_images)] else batch
    )


def loss_of(outputs, _):
    return outputs["out"].square().mean()


def case_of(*with_images, in_layers=True, **options):
    return Case(
        build=partial(Seeing, in_layers=in_layers),
        batch=partial(batch_of, with_images),
        loss=loss_of,
        steps=len(with_images),
        **options,
    )


EXAMPLE = batch_of([True], 0, 0)


@pytest.mark.parametrize(
    ("num_ranks", "options", "in_layers"),
    [
        (2, {}, True),
        (2, {}, False),
        pytest.param(2, {"pp_style": "zbv"}, True, marks=pytest.mark.slow),
        pytest.param(4, {}, False, marks=pytest.mark.slow),
    ],
    ids=["argument", "output", "zbv", "pp4"],
)
def test_batches_without_images_equal_one_process(num_ranks, options, in_layers):
    case = case_of(True, False, True, in_layers=in_layers, outputs=True)
    assert_equals_one_process(case, stages(EXAMPLE, num_ranks, **options))


def be_blind_on_rank_0(_step, model, _optimizer):
    model.is_blind = torch.distributed.get_rank() == 0


def return_nothing(_step, model, _optimizer):
    model.tower.is_blind = True


@pytest.mark.parametrize(
    ("change", "in_layers", "message"),
    [
        (be_blind_on_rank_0, True, r"Stage 0 .* has no tensor to send as argument 'features' of layer 'layers\.2'"),
        (return_nothing, False, r"Stage 0 .* has no tensor to send as what module 'tower' returns"),
        (be_blind_on_rank_0, False, "needs values of"),
    ],
    ids=["argument", "output", "read"],
)
def test_what_a_later_stage_lacks_raises_on_every_rank(change, in_layers, message):
    case = case_of(True, in_layers=in_layers, before_step=change)
    expect_on_ranks(BoosterError, message, train_boosted, 2, case, stages(EXAMPLE))
