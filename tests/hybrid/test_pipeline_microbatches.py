"""Examples, and which containers batches and outputs may come in; what would be cut wrongly is refused."""

from __future__ import annotations

import dataclasses
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, Dataset

from booster_core.errors import ConfigError
from booster_hybrid.pipeline.batches import (
    check_entries,
    count_samples,
    example_batch,
    join_outputs,
    share_samples,
    split_batch,
)


def test_samples_of_a_loader_with_a_batch_sampler_are_collated():
    loader = DataLoader(range(8), batch_sampler=[[0, 1], [2, 3]])
    assert example_batch(nn.Linear(1, 1), loader).dim() == 1


def test_batches_of_a_data_set_that_makes_its_own_are_left_as_they_are():
    loader = DataLoader([[5, 6], [7, 8]], batch_size=None)
    assert example_batch(nn.Linear(1, 1), loader) == [5, 6]


def test_batches_of_a_data_set_that_makes_its_own_are_not_compared_with_single_samples():
    batches = [torch.ones(4, 2), torch.ones(4, 2)]
    check_entries(DataLoader(batches, batch_size=None))


@pytest.mark.parametrize(
    ("config", "shape"),
    [
        ({"image_size": 8}, (2, 3, 8, 8)),
        ({"image_size": (8, 6), "num_channels": 1}, (2, 1, 8, 6)),
        ({"image_size": [8, 6], "num_channels": 4}, (2, 4, 8, 6)),
    ],
)
def test_vision_models_get_an_image_of_the_size_that_they_are_configured_for(config, shape):
    class Vision(nn.Module):
        """Has what transformers' vision models have."""

        main_input_name = "pixel_values"
        dummy_inputs = None

        def __init__(self, **config):
            super().__init__()
            self.config = SimpleNamespace(**config)

    batch = example_batch(Vision(**config), None)
    assert list(batch) == ["pixel_values"]
    assert batch["pixel_values"].shape == shape


def test_reading_an_example_leaves_all_generators_as_they_were():
    class Drawing(Dataset):
        """Draws from every generator that a data set may use."""

        def __len__(self):
            return 8

        def __getitem__(self, index):
            return torch.tensor([random.random(), np.random.rand(), torch.rand(()).item()]) + index  # noqa: NPY002 - as in user code

    def seed():
        random.seed(1)
        np.random.seed(1)  # noqa: NPY002 - the generator that such data sets use
        torch.manual_seed(1)

    model = nn.Linear(3, 1)
    seed()
    expected = Drawing()[0]
    seed()
    loader = DataLoader(Drawing(), batch_size=2)
    example_batch(model, loader)
    check_entries(loader)
    assert torch.equal(Drawing()[0], expected)


@dataclasses.dataclass(frozen=True)
class Inner:
    hidden: torch.Tensor
    name: str = "inner"


class Opaque:
    def __init__(self, logits):
        self.logits = logits


def test_outputs_in_dataclasses_are_joined():
    @dataclasses.dataclass
    class Outputs:
        logits: torch.Tensor
        inner: Inner
        seen: list[torch.Tensor]

    def outputs(start):
        values = torch.arange(start, start + 2.0)
        return Outputs(values, Inner(values + 10), [values + 20])

    joined = join_outputs([outputs(0), outputs(2)], [2, 2])
    assert isinstance(joined, Outputs)
    assert joined.logits.tolist() == [0, 1, 2, 3]
    assert isinstance(joined.inner, Inner)
    assert joined.inner.name == "inner"
    assert joined.inner.hidden.tolist() == [10, 11, 12, 13]
    assert joined.seen[0].tolist() == [20, 21, 22, 23]


def test_outputs_about_the_images_of_some_samples_are_joined():
    whole = torch.arange(36.0).view(12, 3)
    shown = [{"logits": torch.ones(2, 3), "patches": part, "each": [*part.split(3)]} for part in whole.split(6)]
    joined = join_outputs(shown, [2, 2])
    assert torch.equal(joined["patches"], whole)
    assert torch.equal(torch.cat(joined["each"]), whole)
    mixed = join_outputs([{"logits": torch.zeros(2, 3)}, shown[1]], [2, 2])
    assert [*mixed] == ["logits", "patches", "each"]
    assert torch.equal(mixed["patches"], whole[6:])
    assert mixed["logits"].shape == (4, 3)


def test_outputs_whose_samples_may_be_along_another_dimension_are_refused():
    with pytest.raises(ConfigError, match=r"which dimension of an output of shape \(3, 2, 5\) stands for samples"):
        join_outputs([torch.ones(3, 2, 5)] * 2, [2, 2])


@pytest.mark.parametrize("count", [12, torch.tensor(12)])
def test_losses_that_are_divided_by_the_items_of_a_batch_add_up(count):
    values = torch.arange(6.0)
    parts = split_batch({"x": values, "num_items_in_batch": count}, [4, 2])
    losses = [part["x"].sum() / part["num_items_in_batch"] for part in parts]
    assert float(losses[0] * 4 / 6 + losses[1] * 2 / 6) == pytest.approx(float(values.sum() / 12))


def test_outputs_of_other_classes_are_refused():
    with pytest.raises(ConfigError, match=r"outputs of class `Opaque` can't be joined.*`return_outputs`"):
        join_outputs([Opaque(torch.ones(2))], [2])


@pytest.mark.parametrize("hidden", [Inner(torch.ones(4)), Opaque(torch.ones(4))], ids=["dataclass", "object"])
def test_batches_with_tensors_inside_of_objects_are_refused(hidden):
    with pytest.raises(ConfigError, match=r"\['more'\] is a `\w+` that holds tensors"):
        count_samples({"x": torch.ones(4, 2), "more": hidden})


def loader(make):
    return DataLoader(list(range(8)), batch_size=4, collate_fn=make)


def test_class_weights_in_a_batch_are_refused_even_if_as_long_as_the_batch():
    with pytest.raises(ConfigError, match=r"\['weights'\] has 2 entries for 2 samples and 2 for 1.*criterion"):
        check_entries(loader(lambda samples: {"x": torch.zeros(len(samples), 3), "weights": torch.ones(2)}))


def test_entries_for_all_samples_may_have_a_first_dimension_of_one():
    shared = {"shared": torch.ones(1, 3), "scale": torch.tensor(2.0)}
    check_entries(loader(lambda samples: {"x": torch.zeros(len(samples), 3), **shared}))


@given(st.integers(1, 40), st.integers(1, 12))
def test_microbatches_share_samples_as_evenly_as_can_be(count, num_microbatches):
    if count < num_microbatches:
        with pytest.raises(ConfigError, match=rf"batch of {count} sample\(s\).*`num_microbatches={num_microbatches}`"):
            share_samples(count, num_microbatches, None)
        return
    shares = share_samples(count, num_microbatches, None)
    assert (len(shares), sum(shares)) == (num_microbatches, count)
    assert shares == sorted(shares, reverse=True)
    assert shares[0] - shares[-1] <= 1


@given(st.integers(1, 40), st.none() | st.integers(1, 12))
def test_microbatches_of_a_size_leave_what_is_left_to_the_last(count, size):
    shares = share_samples(count, None, size)
    assert sum(shares) == count
    assert set(shares[:-1]) <= {size}
    assert 1 <= shares[-1] <= (size or count)
    assert len(shares) == (1 if size is None else -(-count // size))


@given(st.lists(st.integers(1, 4), min_size=1, max_size=5))
def test_microbatches_put_together_are_the_batch(sizes):
    count = sum(sizes)
    batch = {
        "x": torch.arange(2 * count).view(count, 2),
        "y": [torch.arange(count)],
        "scale": torch.tensor(2.0),
        "n": 3,
    }
    shared = torch.arange(count + 1)
    parts = split_batch({**batch, "shared": shared}, sizes)
    assert [len(part["x"]) for part in parts] == sizes
    assert torch.equal(torch.cat([part["x"] for part in parts]), batch["x"])
    assert torch.equal(torch.cat([part["y"][0] for part in parts]), batch["y"][0])
    assert all(part["shared"] is shared and part["scale"] is batch["scale"] and part["n"] == 3 for part in parts)
    assert parts[0]["x"].data_ptr() == batch["x"].data_ptr(), "parts are views"


@given(st.lists(st.integers(1, 4), min_size=1, max_size=5), st.integers(0, 99))
def test_a_mean_of_each_microbatch_becomes_the_mean_of_the_batch(sizes, seed):
    values = torch.randn(sum(sizes), 2, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    parts = values.split(sizes)
    outputs = [(part.mean(), part, 5) for part in parts]
    joined = join_outputs(outputs, sizes)
    torch.testing.assert_close(joined[0], values.mean())
    assert torch.equal(joined[1], values)
    assert joined[2] == 5
