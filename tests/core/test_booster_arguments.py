"""What a user can get wrong at Booster's door, in one process; the conformance kit repeats the main ones on ranks."""

import copy
import re
from functools import cached_property
from types import SimpleNamespace

import peft
import pytest
import torch
import torch.distributed.checkpoint
from torch import nn

from booster_core import Booster, Plugin
from booster_core.errors import ConfigError, PluginError
from booster_core.plugin import Capability
from booster_core.plugin.single import SingleDevicePlugin
from booster_core.ranks.launch import shutdown
from booster_runtime import full_gradient
from booster_testing.models import TinyMLP, tiny_llama


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
    api_version = 2
    capabilities = frozenset({Capability.CPU, Capability.FP32})

    def __init__(self, change=lambda objects: objects):
        self.change = change

    def configure(self, objects, context):
        return self.change(objects)


class WithoutVersion(Plugin):
    name = "without"

    def configure(self, objects, context):
        return objects


class OfTheFuture(Halves):
    api_version = 999


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"plugin": "zerp"}, PluginError, "No plugin named 'zerp' is installed"),
        ({"plugin": "auto"}, ConfigError, r"Pass what `booster_tools\.choose_plugin\(.*memory_budget_bytes=\.\.\.\)`"),
        ({"plugin": 3}, TypeError, "got `int`"),
        ({"plugin": Halves}, TypeError, "got the class `Halves`"),
        ({"plugin": WithoutVersion()}, PluginError, r"'without' \(WithoutVersion\) does not say which version"),
        ({"plugin": OfTheFuture()}, PluginError, r"'halves' \(OfTheFuture\) was written for version 999"),
        ({"mixed_precision": "ddp"}, ConfigError, r"is the name of a plugin. Did you mean `Booster\(plugin='ddp'\)`"),
        ({"mixed_precision": "bf16", "plugin": Halves()}, ConfigError, "does not support precision 'bf16'.*: fp32"),
        ({"device": "meta", "plugin": Halves()}, ConfigError, r"'halves' does not run on device type 'meta'"),
        ({"device": "cpuu"}, ConfigError, "not a device that torch knows"),
    ],
)
def test_arguments_that_no_booster_takes(arguments, error, match):
    with pytest.raises(error, match=match):
        Booster(**{"device": "cpu", **arguments})


def test_a_plugin_inherits_the_version_of_the_one_that_it_extends():
    """Whose methods it calls."""
    extends = type("Extends", (SingleDevicePlugin,), {})
    Booster("cpu", plugin=extends()).boost(*model_and_optimizer())


@pytest.mark.parametrize(
    ("given", "error", "match"),
    [
        ("ddp", ConfigError, r"`device='ddp'` is the name of a plugin.*`Booster\(plugin='ddp'\)`"),
        ("gemini", ConfigError, r"`Booster\(plugin='gemini'\)`"),
        ("bf16", ConfigError, r"is the name of a precision.*`Booster\(mixed_precision='bf16'\)`"),
        (Halves(), TypeError, r"`device` is a `Halves`, a plugin.*`Booster\(plugin=Halves\(...\)\)`"),
        (Halves, TypeError, r"`device` is the class `Halves`.*`Booster\(plugin=Halves\(...\)\)`"),
        (torch.nn.Linear(1, 1), TypeError, "`device` is a device or its name, such as 'cpu'; got `Linear`"),
    ],
)
def test_plugin_in_the_place_of_the_device(given, error, match):
    with pytest.raises(error, match=match):
        Booster(given)


class _Cuda:
    """What torch says of CUDA devices, of which this machine has none."""

    def __init__(self, monkeypatch):
        self.current = 0
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device("cuda"))
        monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: self.current)


@pytest.mark.parametrize("asked", [None, "cuda"])
def test_device_of_a_booster_made_before_the_launch_is_that_of_the_local_rank(asked, monkeypatch):
    cuda = _Cuda(monkeypatch)
    booster = Booster(asked)
    cuda.current = 3  # as the launch sets it
    assert booster.device == torch.device("cuda", 3)
    cuda.current = 1
    assert booster.device == torch.device("cuda", 3), "fixed at the first use"


@pytest.mark.parametrize("asked", [None, "cuda"])
def test_device_asked_for_before_the_launch_of_several_processes(asked, monkeypatch):
    _Cuda(monkeypatch)
    variables = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    booster = Booster(asked)
    with pytest.raises(ConfigError, match=r"Call `booster_core\.launch\(\)` before the device is used"):
        _ = booster.device
    assert Booster("cuda:1").device == torch.device("cuda", 1), "what was said holds"
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: None)
    assert Booster().device == torch.device("cpu")


@pytest.mark.parametrize("kind", ["cuda", "mps", "xpu", "mtia", "hpu", "xla", "ipu", "privateuseone"])
@pytest.mark.parametrize("make", [str, lambda kind: f"{kind}:0", torch.device])
def test_device_that_is_not_there(make, kind):
    """Also types without a module of torch (xla), and the one of which a device of another library takes the name."""
    if torch.accelerator.is_available() and torch.accelerator.current_accelerator().type == kind:
        pytest.skip(f"this machine has a device of type {kind}")
    asked = make(kind)
    expected = re.escape(f"`device={asked!r}` needs a device of type '{kind}'") + ".*sees none here. It sees the CPU"
    with pytest.raises(ConfigError, match=expected):
        Booster(asked)


@pytest.mark.parametrize("is_available", [True, False])
def test_device_of_another_library(monkeypatch, is_available):
    backend = SimpleNamespace(is_available=lambda: is_available, device_count=lambda: 1)
    monkeypatch.setattr(torch, "privateuseone", backend, raising=False)
    if is_available:
        assert Booster("privateuseone").device == torch.device("privateuseone")
        with pytest.raises(ConfigError, match="`device='privateuseone:1'` is not here"):
            Booster("privateuseone:1")
    else:
        with pytest.raises(ConfigError, match=r"'privateuseone', and torch .* sees none here"):
            Booster("privateuseone")


def test_device_of_an_index_that_is_not_there(monkeypatch):
    _Cuda(monkeypatch)
    assert Booster("cuda:3").device == torch.device("cuda", 3)
    with pytest.raises(ConfigError, match=r"torch sees 4 device\(s\) of type 'cuda', 'cuda:0' to 'cuda:3'"):
        Booster("cuda:4")


def test_an_attribute_error_in_an_attribute_of_a_booster_is_told_as_it_is(monkeypatch):
    class WithoutEngine(Booster):
        @property
        def own(self):
            return self.plugin.missing_in_own

        @cached_property
        def checkpoint_io(self):
            return self.plugin.missing_in_engine

    booster = WithoutEngine()
    for name, missing in (("own", "missing_in_own"), ("checkpoint_io", "missing_in_engine")):
        with pytest.raises(AttributeError, match=f"'SingleDeviceStrategy' object has no attribute '{missing}'"):
            getattr(booster, name)

    def break_hooks():
        msg = "module 'torch' has no attribute 'xyz'"
        raise AttributeError(msg)

    monkeypatch.setattr("booster_core.booster.hook_relay", break_hooks)
    with pytest.raises(AttributeError, match="module 'torch' has no attribute 'xyz'") as raised:
        _ = booster.context
    assert raised.traceback[-1].name == "break_hooks"


def test_a_name_that_a_booster_does_not_have_is_told():
    with pytest.raises(
        AttributeError, match=r"^`Booster` has no `prepare`\. What stands for calls of other libraries is in"
    ):
        _ = Booster().prepare
    assert not hasattr(Booster(), "prepare")
    with pytest.raises(AttributeError, match=r"has no `profile`; there is `booster_tools\.profile`\. "):
        _ = Booster().profile


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
    with pytest.raises(TypeError, match=r"`dataloader` of .* got `int`"):
        booster.boost(model, optimizer, None, [1])
    with pytest.raises(TypeError, match=r"`lr_scheduler` of .* got `float`"):
        booster.boost(model, optimizer, None, None, 0.1)


def test_model_that_is_wrapped_elsewhere():
    class DistributedDataParallel(nn.Module):
        pass

    with pytest.raises(ConfigError, match=r"already wrapped by `DistributedDataParallel`"):
        Booster("cpu").boost(DistributedDataParallel())


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_model_that_is_scripted(tmp_path):
    model = torch.jit.script(nn.Linear(2, 1))
    with pytest.raises(ConfigError, match=r"scripted or traced.*Pass the model itself"):
        Booster("cpu").boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    Booster("cpu").save_model(model, tmp_path / "model.safetensors")


def test_optimizer_that_is_boosted():
    booster = Booster("cpu")
    model, optimizer = model_and_optimizer()
    boosted, stepped, *_ = booster.boost(model, optimizer)
    with pytest.raises(ConfigError, match=r"optimizer is already boosted\. Make one from the parameters"):
        booster.boost(model_and_optimizer()[0], stepped)
    for again in (model, boosted):
        with pytest.raises(ConfigError, match=r"This `TinyMLP` is already boosted.*`booster\.save_model`"):
            booster.boost(again, optimizer)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_model_that_is_boosted_in_another_form():
    """Frozen, where what `boost` returned is gone, compiled, or with adapters since; not a copy from before."""
    model = tiny_llama().requires_grad_(requires_grad=False)
    before = copy.deepcopy(model)
    Booster("cpu").boost(model)
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))
    for again in (model, torch.compile(model, backend="eager"), adapted):
        with pytest.raises(ConfigError, match="is already boosted"):
            Booster("cpu").boost(again)
    Booster("cpu").boost(before)


def test_model_whose_boost_raised_is_boosted():
    model, optimizer = model_and_optimizer()
    with pytest.raises(PluginError):
        Booster("cpu", plugin=Halves(tuple)).boost(model, optimizer)
    Booster("cpu").boost(model, optimizer)


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
        full_gradient(booster, model, "first.wait")
    assert full_gradient(booster, model, "first.weight") is None


def test_two_models_in_one_booster():
    booster = Booster("cpu")
    pairs = [booster.boost(*model_and_optimizer()) for _ in range(2)]
    with pytest.raises(ConfigError, match=r"2 models are boosted"):
        booster.no_sync()
    for model, optimizer, *_ in pairs:
        with booster.no_sync(model):
            booster.backward(model(torch.ones(1, 8)).sum(), optimizer)
        assert full_gradient(booster, model, "second.bias").tolist() == [1.0] * 4


def test_gradients_of_zero_may_be_there():
    model, optimizer = model_and_optimizer()
    model(torch.ones(2, 8)).sum().backward()
    optimizer.zero_grad(set_to_none=False)
    Booster("cpu").boost(model, optimizer)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_options_of_saves_by_the_names_of_other_libraries(tmp_path):
    booster, model = Booster("cpu"), TinyMLP()
    booster.save_model(model, tmp_path / "dcp", format="dcp")
    read = {name: torch.empty_like(tensor) for name, tensor in model.state_dict().items()}
    torch.distributed.checkpoint.load(read, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert all(torch.equal(values, model.state_dict()[name]) for name, values in read.items())
    large = nn.ModuleList([nn.Linear(512, 512, bias=False) for _ in range(4)])  # 1 MiB each
    booster.save_model(large, tmp_path / "sharded", shard=True, max_shard_size="2.2MB")
    assert len([*(tmp_path / "sharded").glob("*.safetensors")]) == 2
    with pytest.raises(ConfigError, match=r"`format='hf'` is none. Use 'dcp'"):
        booster.save_model(model, tmp_path / "none", format="hf")
    with pytest.raises(ConfigError, match=r"`max_shard_size='5 pounds'` is not a size"):
        booster.save_model(model, tmp_path / "none", max_shard_size="5 pounds")


def test_a_run_that_resumes_from_nothing_is_told(tmp_path, caplog):
    booster = Booster("cpu")
    model, optimizer, *_ = booster.boost(*model_and_optimizer())
    assert booster.load_checkpoint(tmp_path / "mistyped", model=model, optimizer=optimizer, resume=True).step == 0
    assert f"There is no checkpoint in '{tmp_path / 'mistyped'}' yet: the run begins at step 0." in caplog.text
