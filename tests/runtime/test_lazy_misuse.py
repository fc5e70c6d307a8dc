"""What is not possible with a model that has no values yet says so."""

import copy
import io
import pickle
import sys

import pytest
import torch
from torch import nn

from booster_core import Booster
from booster_core.errors import ConfigError, LazyInitError
from booster_runtime import LazyInitContext
from booster_runtime.lazy import is_lazy, load_pretrained, materialize, take_recording
from booster_runtime.single import SingleDeviceStrategy
from booster_testing.models import TinyMLP


@pytest.fixture
def model() -> TinyMLP:
    with LazyInitContext():
        return TinyMLP()


@pytest.mark.parametrize(
    ("use", "match"),
    [
        (
            lambda model: model(torch.ones(2, 8)),
            r"A lazy model was run.*`Booster\.boost`.*`booster_runtime\.lazy\.materialize`",
        ),
        (copy.deepcopy, r"deepcopy.*Copy it inside of the context"),
        (pickle.dumps, "no values to pickle or save"),
        (lambda model: torch.save(model.state_dict(), io.BytesIO()), "no values to pickle or save"),
    ],
    ids=["forward", "deepcopy", "pickle", "save"],
)
def test_a_use_without_values_is_refused(model, use, match) -> None:
    with pytest.raises(LazyInitError, match=match):
        use(model)


def test_contexts_do_not_nest() -> None:
    with LazyInitContext(), pytest.raises(LazyInitError, match="inside of another one"), LazyInitContext():
        pass
    assert not is_lazy(nn.Linear(2, 2))


def test_a_context_is_used_once() -> None:
    context = LazyInitContext()
    with context:
        pass
    with pytest.raises(LazyInitError, match="used already"), context:
        pass


def test_an_error_inside_leaves_the_context() -> None:
    with pytest.raises(ZeroDivisionError), LazyInitContext():
        raise ZeroDivisionError
    assert not is_lazy(nn.Linear(2, 2))
    assert torch.nn.init._no_grad_trunc_normal_.__module__ == "torch.nn.init"


def test_materialize_needs_the_context_to_be_over() -> None:
    with LazyInitContext():
        model = nn.Linear(2, 2)
        with pytest.raises(LazyInitError, match="End the `with` block first"):
            materialize(model)


@pytest.mark.parametrize("device", ["meta", lambda: torch.device("meta")])
def test_default_device_has_values(device) -> None:
    with pytest.raises(ConfigError, match="no values to initialise"):
        LazyInitContext(default_device=device)


@pytest.mark.parametrize("device", [torch.device("cpu"), "cpu"])
def test_default_device_may_be_a_function(device) -> None:
    def get_current_device():
        return device

    with LazyInitContext(default_device=get_current_device) as context:
        model = nn.Linear(2, 2)
    assert context.default_device == torch.device("cpu")
    assert is_lazy(model)
    materialize(model)
    assert model.weight.device.type == "cpu"


def test_a_real_tensor_cannot_become_lazy() -> None:
    real = nn.Parameter(torch.ones(3))
    with LazyInitContext(), pytest.raises(RuntimeError, match="incompatible tensor type"):
        real.data = torch.randn(3)
    assert torch.equal(real, torch.ones(3))


def test_a_broken_transformers_does_no_harm(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with LazyInitContext():
        assert is_lazy(nn.Linear(2, 2))


class Raising(SingleDeviceStrategy):
    def shard(self, objects, context, values):
        message = "something is missing"
        raise ConfigError(message)


def test_a_model_whose_values_a_failed_boost_has_taken_is_refused(model) -> None:
    with pytest.raises(ConfigError, match="something is missing"):
        Booster(plugin=Raising()).boost(model)
    with pytest.raises(ConfigError, match=r"a `boost` that raised has taken its values\. Build another"):
        Booster().boost(model)


def test_tensors_of_two_contexts_do_not_mix(model) -> None:
    with LazyInitContext():
        other = nn.Linear(8, 16)
    with pytest.raises(LazyInitError, match="two `LazyInitContext`s"):
        model.first.weight.data.add_(other.weight.data)


def test_load_pretrained_is_for_lazy_models(tmp_path) -> None:
    with pytest.raises(LazyInitError, match=r"Boost it and use `Booster\.load_model`"):
        load_pretrained(TinyMLP(), tmp_path)


def test_a_taken_recording_leaves_meta_tensors(model) -> None:
    parameters = list(model.parameters())
    recording = take_recording(model)
    assert not is_lazy(model)
    assert all(now is before for now, before in zip(model.parameters(), parameters, strict=True))
    assert all(type(parameter) is nn.Parameter and parameter.is_meta for parameter in parameters)
    assert list(recording.name_of.values()) == [name for name, _ in model.named_parameters()]
