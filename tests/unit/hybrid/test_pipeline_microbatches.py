"""Which containers batches and outputs may come in, and what is refused because it would be cut wrongly."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.utils.data import DataLoader

from booster_core.errors import ConfigError
from booster_hybrid.pipeline.example import check_entries
from booster_hybrid.pipeline.microbatches import count_samples, join_outputs


@dataclasses.dataclass(frozen=True)
class Inner:
    hidden: torch.Tensor
    name: str = "inner"


@dataclasses.dataclass
class Outputs:
    logits: torch.Tensor
    inner: Inner
    seen: list[torch.Tensor]


class Opaque:
    def __init__(self, logits):
        self.logits = logits


def outputs(start):
    values = torch.arange(start, start + 2.0)
    return Outputs(values, Inner(values + 10), [values + 20])


def test_outputs_in_dataclasses_are_joined():
    joined = join_outputs([outputs(0), outputs(2)], [2, 2])
    assert isinstance(joined, Outputs)
    assert joined.logits.tolist() == [0, 1, 2, 3]
    assert joined.inner == Inner(joined.inner.hidden)
    assert joined.inner.hidden.tolist() == [10, 11, 12, 13]
    assert joined.seen[0].tolist() == [20, 21, 22, 23]


def test_outputs_of_other_classes_are_refused():
    with pytest.raises(ConfigError, match=r"outputs of class `Opaque` can't be joined.*`return_outputs`"):
        join_outputs([Opaque(torch.ones(2))], [2])


@pytest.mark.parametrize("hidden", [Inner(torch.ones(4)), Opaque(torch.ones(4))], ids=["dataclass", "object"])
def test_batches_with_tensors_inside_of_objects_are_refused(hidden):
    with pytest.raises(ConfigError, match=r"\['more'\] is a `\w+` that holds tensors"):
        count_samples({"x": torch.ones(4, 2), "more": hidden})


def loader(make, **options):
    return DataLoader(list(range(8)), batch_size=4, collate_fn=make, **options)


def with_class_weights(samples):
    return {"x": torch.zeros(len(samples), 3), "weights": torch.ones(2)}


def with_shared_rows(samples):
    return {"x": torch.zeros(len(samples), 3), "shared": torch.ones(1, 3), "scale": torch.tensor(2.0)}


def test_class_weights_in_a_batch_are_refused_even_if_as_long_as_the_batch():
    with pytest.raises(ConfigError, match=r"\['weights'\] has 2 entries for 2 samples and 2 for 1.*criterion"):
        check_entries(loader(with_class_weights))


def test_entries_for_all_samples_may_have_a_first_dimension_of_one():
    check_entries(loader(with_shared_rows))
