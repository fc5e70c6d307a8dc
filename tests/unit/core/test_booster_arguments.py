"""What a user can get wrong at Booster's door, in one process; the conformance kit repeats the main ones on ranks."""

import pytest
import torch
from torch import nn

from booster_core import Booster, Plugin
from booster_core.errors import ConfigError, PluginError
from booster_core.launch import shutdown
from booster_core.plugin import Capability
from booster_core.testing.models import TinyMLP


@pytest.fixture(autouse=True)
def _no_process_group_stays():
    yield
    shutdown()


def model_and_optimizer():
    model = TinyMLP()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


class Halves(Plugin):
    """Supports fp32 on the CPU only, and returns what it is told to."""

    name = "halves"
    capabilities = frozenset({Capability.CPU, Capability.FP32})

    def __init__(self, change=lambda objects: objects):
        self.change = change

    def configure(self, objects, context):
        return self.change(objects)


@pytest.mark.parametrize(
    ("plugin", "error", "match"),
    [
        ("zerp", PluginError, "No plugin named 'zerp' is installed"),
        (3, TypeError, "got `int`"),
        (Halves, TypeError, "got the class `Halves`"),
    ],
)
def test_plugin_that_is_none(plugin, error, match):
    with pytest.raises(error, match=match):
        Booster("cpu", plugin=plugin)


def test_precision_that_the_plugin_does_not_support():
    with pytest.raises(ConfigError, match=r"'halves' does not support precision 'bf16'. It supports: fp32"):
        Booster("cpu", "bf16", Halves())


def test_device_that_the_plugin_does_not_support():
    with pytest.raises(ConfigError, match=r"'halves' does not run on device type 'meta'"):
        Booster("meta", plugin=Halves())


@pytest.mark.parametrize(("device", "match"), [("cpuu", "not a device that torch knows"), ("cuda:0", "sees none here")])
def test_device_that_is_not_there(device, match):
    if device == "cuda:0" and torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    with pytest.raises(ConfigError, match=match):
        Booster(device)


def test_default_plugin_moves_the_model():
    model, optimizer, *_ = Booster("meta").boost(*model_and_optimizer())
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert optimizer.param_groups[0]["params"][0] is next(model.parameters())


def test_objects_in_the_wrong_order():
    model, optimizer = model_and_optimizer()
    booster = Booster("cpu")
    with pytest.raises(TypeError, match=r"`model` of .* must be a torch.nn.Module; got `SGD`"):
        booster.boost(optimizer, model)
    with pytest.raises(TypeError, match=r"`criterion` of .* must be a callable; got `list`"):
        booster.boost(model, optimizer, [1])
    with pytest.raises(TypeError, match=r"`dataloader` of .* got `list`"):
        booster.boost(model, optimizer, None, [1])
    with pytest.raises(TypeError, match=r"`lr_scheduler` of .* got `float`"):
        booster.boost(model, optimizer, None, None, 0.1)


def test_model_that_is_wrapped_elsewhere():
    class DistributedDataParallel(nn.Module):
        pass

    with pytest.raises(ConfigError, match=r"already wrapped by `DistributedDataParallel`"):
        Booster("cpu").boost(DistributedDataParallel())


def test_optimizer_that_is_boosted():
    booster = Booster("cpu")
    model, optimizer = model_and_optimizer()
    _, boosted, *_ = booster.boost(model, optimizer)
    with pytest.raises(ConfigError, match=r"optimizer is already boosted"):
        booster.boost(model, boosted)


def test_optimizer_of_another_model_is_described():
    model, _ = model_and_optimizer()
    _, optimizer = model_and_optimizer()
    with pytest.raises(
        ConfigError, match=r"holds 4 parameter\(s\) that are not the model's: group 0, index 0, shape \(16"
    ):
        Booster("cpu").boost(model, optimizer)


def test_scheduler_of_another_optimizer():
    model, optimizer = model_and_optimizer()
    scheduler = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(model.parameters(), lr=0.1), 1)
    with pytest.raises(ConfigError, match=r"steers another optimizer"):
        Booster("cpu").boost(model, optimizer, lr_scheduler=scheduler)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (tuple, "`tuple` instead of a `Boosted`"),
        (lambda objects: objects, "a model of type `TinyMLP` instead of a `ModelWrapper`"),
    ],
)
def test_plugin_that_returns_nonsense(change, match):
    with pytest.raises(PluginError, match=f"'halves': `configure` returned {match}"):
        Booster("cpu", plugin=Halves(change)).boost(*model_and_optimizer())


def test_calls_that_need_what_boost_returned():
    booster = Booster("cpu")
    model, optimizer = model_and_optimizer()
    with pytest.raises(
        TypeError, match=r"`Booster.backward` needs the optimizer returned by `Booster.boost`; got `SGD`"
    ):
        booster.backward(torch.ones(()), optimizer)
    with pytest.raises(TypeError, match=r"`Booster.no_sync` needs the model returned by .*got `.*TinyMLP`"):
        booster.no_sync(model)
    with pytest.raises(ConfigError, match=r"0 models are boosted"):
        booster.no_sync()
    with pytest.raises(TypeError, match=r"`Booster.save_optimizer` needs the optimizer"):
        booster.save_optimizer(optimizer, "x")
    with pytest.raises(TypeError, match=r"`Booster.save_model` needs a torch.nn.Module; got `dict`"):
        booster.save_model({}, "x")


def test_model_of_another_booster():
    boosted, *_ = Booster("cpu").boost(TinyMLP())
    with pytest.raises(TypeError, match=r"belongs to another Booster"):
        Booster("cpu").save_model(boosted, "x")


def test_full_gradient_by_a_wrong_name():
    booster = Booster("cpu")
    model, *_ = booster.boost(*model_and_optimizer())
    with pytest.raises(ConfigError, match=r"no parameter named 'first.wait'. Did you mean 'first.weight'\?"):
        booster.full_gradient(model, "first.wait")
    assert booster.full_gradient(model, "first.weight") is None


def test_two_models_in_one_booster():
    booster = Booster("cpu")
    pairs = [booster.boost(*model_and_optimizer()) for _ in range(2)]
    with pytest.raises(ConfigError, match=r"2 models are boosted"):
        booster.no_sync()
    for model, optimizer, *_ in pairs:
        with booster.no_sync(model):
            booster.backward(model(torch.ones(1, 8)).sum(), optimizer)
        assert booster.full_gradient(model, "second.bias").tolist() == [1.0] * 4


def test_gradients_of_zero_may_be_there():
    model, optimizer = model_and_optimizer()
    model(torch.ones(2, 8)).sum().backward()
    optimizer.zero_grad(set_to_none=False)
    Booster("cpu").boost(model, optimizer)
