"""`verify_objects` under a plugin that replicates: no trace is left, what differs is named, the rest refused."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from noisy_training import Net, Samples, leaves_no_trace
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from booster_core import Booster
from booster_core.errors import ConfigError, GradientError
from booster_runtime.lazy import LazyInitContext
from booster_runtime.single import SingleDeviceStrategy
from booster_testing import expect_on_ranks, run_on_ranks
from booster_testing.reference import ReferencePlugin
from booster_tools import verify_objects


@pytest.mark.parametrize(
    ("kind", "world_size"), [("shuffled", 1), ("shuffled", 2), ("generator", 2), ("sampler", 2), ("stream", 2)]
)
def test_the_training_that_follows_is_the_same_bit_for_bit(kind, world_size):
    run_on_ranks(leaves_no_trace, world_size, ReferencePlugin if world_size > 1 else SingleDeviceStrategy, kind)


class ScalesOneGradient(ReferencePlugin):
    """Gets one parameter's gradient wrong by a tenth."""

    api_version = 2

    def configure(self, objects, context):
        objects.model.last.weight.register_hook(lambda gradient: gradient * 1.1)
        return super().configure(objects, context)


def verify_net(plugin=None, mixed_precision=None, loss=None, **changes):
    model = changes.pop("model", Net)()
    given = {
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "criterion": nn.CrossEntropyLoss(),
        "dataloader": DataLoader(TensorDataset(torch.randn(8, 8), torch.arange(8) % 3), batch_size=2),
        **{name: make() for name, make in changes.items()},
    }
    booster = Booster(plugin=plugin or ReferencePlugin(), mixed_precision=mixed_precision)
    return verify_objects(booster, model, **given, loss=loss)


def reported(plugin_class, precision):
    return str(verify_net(plugin_class(), mixed_precision=precision))


@pytest.mark.parametrize(
    ("plugin_class", "size", "precision"), [(ReferencePlugin, 2, None), (SingleDeviceStrategy, 1, "bf16")]
)
def test_it_says_how_long_it_took(plugin_class, size, precision):
    for text in run_on_ranks(reported, size, plugin_class, precision):
        assert text.startswith("Verified in ")
        assert f"on {size} rank(s) trains as one process does" in text


def verify_wrong():
    verify_net(ScalesOneGradient())


def test_a_plugin_that_is_wrong_raises_and_the_parameter_is_named():
    expect_on_ranks(GradientError, r"differs from one process .*\n  gradient 'last\.weight' at step 1", verify_wrong, 2)


def nothing():
    return None


def dicts():
    return DataLoader([{"x": torch.randn(8), "y": 0}] * 4, batch_size=2)


def empty():
    return DataLoader([], batch_size=2)


class Uncopyable(IterableDataset):
    """Keeps a generator."""

    def __init__(self):
        self.rows = (torch.randn(8) for _ in range(8))

    def __iter__(self):
        return self.rows


def uncopyable():
    return DataLoader(Uncopyable(), batch_size=2)


def vector_loss():
    return nn.CrossEntropyLoss(reduction="none")


def boosted_optimizer():
    model = Net()
    return Booster(plugin=ReferencePlugin()).boost(model, torch.optim.SGD(model.parameters(), lr=0.1)).optimizer


def lazy_net():
    with LazyInitContext():
        return Net()


class Waiting(ReferencePlugin):
    """Trains with the ranks of other launches."""

    def what_to_plan(self):
        return "its inner plugin 'ddp'"


REFUSED = {
    "no-loader": ({"dataloader": nothing}, "`verify_objects` .* got no data loader"),
    "no-optimizer": ({"optimizer": nothing}, "`verify_objects` .* got no optimizer"),
    "dicts": ({"dataloader": dicts}, r"(?s)could not compute a loss as it guessed .*Pass a function"),
    "no-criterion": (
        {"criterion": nothing},
        r"(?s)could not compute .* no criterion was given.*Pass a function",
    ),
    "empty": ({"dataloader": empty}, "has none|fewer samples|samples"),
    "uncopyable": ({"dataloader": uncopyable}, r"`copy\.deepcopy` failed with TypeError"),
    "boosted": ({"optimizer": boosted_optimizer}, "The optimizer is already boosted"),
    "vector-loss": ({"criterion": vector_loss}, r"got a tensor of shape \(2,\)"),
    "lazy": ({"model": lazy_net}, "this model is lazy"),
    "waiting": ({"plugin": Waiting()}, "waits for the ranks of other launches, .* Use its inner plugin 'ddp'"),
}


def refuse(case):
    verify_net(**REFUSED[case][0])


@pytest.mark.parametrize("case", REFUSED)
def test_what_can_not_be_verified_raises_on_every_rank(case):
    expect_on_ranks(ConfigError, REFUSED[case][1], refuse, 2, case)


def with_workers():
    return DataLoader(
        Samples(), batch_size=2, num_workers=1, multiprocessing_context="forkserver", timeout=60, prefetch_factor=2
    )


def verify_with_workers():
    loader = with_workers()
    with mock.patch("torch.utils.data.dataloader._MultiProcessingDataLoaderIter", side_effect=AssertionError):
        verify_net(dataloader=lambda: loader)
    return loader.num_workers


def test_no_worker_is_started():
    assert run_on_ranks(verify_with_workers, 2) == [1, 1]


def refuse_large():
    free = 1 << 14 if torch.distributed.get_rank() else None
    with mock.patch("booster_tools.verification.objects.available_bytes", return_value=free):
        verify_net()


def test_a_model_whose_copies_do_not_fit_raises_on_every_rank():
    expect_on_ranks(ConfigError, r"GiB on each of 2 rank\(s\); 0\.0 GiB are available", refuse_large, 2)


def by_function():
    seen = []

    def loss_of(model, batch):
        seen.append(batch["y"].shape)
        return nn.functional.cross_entropy(model(batch["x"]), batch["y"])

    verify_net(loss=loss_of, dataloader=dicts)
    return seen


def test_a_function_says_how_the_loss_is_computed():
    for seen in run_on_ranks(by_function, 2):
        assert seen
        assert set(seen) == {(2,)}


def verify_by(wrong):
    verify_net(loss=wrong if torch.distributed.get_rank() else None)


@pytest.mark.parametrize("wrong", ["yes", 1])
def test_a_wrong_loss_raises_on_every_rank(wrong):
    expect_on_ranks(TypeError, "`loss` of `verify_objects` is a function", verify_by, 2, wrong)
