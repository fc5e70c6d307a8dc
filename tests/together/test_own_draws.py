"""From `boost` on, random numbers differ between ranks that see different samples, and are alike on the others."""

import random

import numpy as np
import pytest
import torch
from named_plugins import plugin_named
from torch.utils.data import DataLoader, Dataset, IterableDataset, WeightedRandomSampler

from booster_core import Booster
from booster_core.ranks import seed_everything
from booster_testing import run_on_ranks
from booster_testing.models import tiny_llama

NUM_SAMPLES = 16


def noise():
    """Return numbers of all global generators."""
    return torch.tensor([torch.rand(()).item(), np.random.rand(), random.random()], dtype=torch.float64)  # noqa: NPY002


class Augmented(Dataset):
    """Samples that have their number, and noise."""

    def __len__(self):
        return NUM_SAMPLES

    def __getitem__(self, index):
        return index, noise()


class Shuffled(IterableDataset):
    """A stream in an order that each pass draws from the global generators, with noise."""

    def __iter__(self):
        order = list(range(NUM_SAMPLES))
        random.shuffle(order)
        for index in torch.randperm(NUM_SAMPLES).tolist():
            yield order[index], noise()


def with_noise(samples):
    """Collate samples with noise of the batch's own, as one that masks tokens."""
    return torch.utils.data.default_collate(samples), noise()[None]


def loader_of(kind):
    settings = {"batch_size": 2, "collate_fn": with_noise}
    if kind == "stream":
        return DataLoader(Shuffled(), **settings)
    sampler = WeightedRandomSampler([1.0] * NUM_SAMPLES, NUM_SAMPLES, replacement=False) if kind == "sampler" else None
    return DataLoader(Augmented(), sampler=sampler, **settings)


def draw(name, kind):
    seed_everything(3)
    booster = Booster(plugin=plugin_named(name))
    loader = loader_of(kind)
    if name.startswith("hybrid"):  # which would look at the batches
        booster.boost(tiny_llama())
        loader = booster.prepare_dataloader(loader.dataset, 2, collate_fn=with_noise)
    else:
        loader = booster.boost(tiny_llama(), dataloader=loader).dataloader
    mask = torch.nn.functional.dropout(torch.ones(64))
    epochs = []
    for _ in range(2):
        batches = list(loader)
        numbers = [int(number) for (numbers, _), _ in batches for number in numbers]
        drawn = [
            value for (_, values), own in batches for value in (*values.flatten().tolist(), *own.flatten().tolist())
        ]
        epochs.append((numbers, drawn))
    return mask.tolist(), epochs


@pytest.mark.parametrize("kind", ["map", "sampler", "stream"])
@pytest.mark.parametrize("name", ["reference", pytest.param("zero", marks=pytest.mark.slow)])
def test_ranks_that_see_different_samples_draw_differently(name, kind):
    (first, epochs), (second, others) = run_on_ranks(draw, 2, name, kind)
    assert first != second
    seen = set()
    for (numbers, drawn), (other_numbers, other_drawn) in zip(epochs, others, strict=True):
        assert sorted(numbers + other_numbers) == list(range(NUM_SAMPLES))
        assert not set(drawn) & set(other_drawn)
        assert not seen & {*drawn, *other_drawn}, "another epoch has other noise"
        seen |= {*drawn, *other_drawn}


@pytest.mark.parametrize("name", ["hybrid-tp", pytest.param("hybrid-pp", marks=pytest.mark.slow)])
def test_ranks_that_share_samples_draw_alike(name):
    for kind in ("map", "stream"):
        first, second = run_on_ranks(draw, 2, name, kind)
        assert first == second


def boost_two(name):
    """Boost a model that was made once ranks draw differently; return its values."""
    seed_everything(3)
    booster = Booster(plugin=plugin_named(name))
    booster.boost(tiny_llama())
    model = booster.boost(tiny_llama()).model
    ids = torch.arange(6)[None]
    return model(input_ids=ids).logits.detach()


@pytest.mark.parametrize("name", ["ddp", "fsdp", "zero", "gemini", "hybrid"])
def test_a_model_made_later_is_the_first_ranks_on_all(name):
    [expected] = run_on_ranks(boost_two, 1, "single")
    for logits in run_on_ranks(boost_two, 2, name):
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-6)
