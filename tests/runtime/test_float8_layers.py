"""Linear layers in 8 bits on one process: gradients are torchao's, and what is refused."""

import pytest
import torch
from isolated_libraries import FOLDER, emulated, missing_libraries
from torch import nn

from booster_core import Booster
from booster_core.errors import ConfigError
from booster_runtime import full_gradient
from booster_runtime.float8 import convert_to_float8
from booster_testing import run_on_ranks
from booster_testing.compare import EXACT, assert_same_tensors
from booster_testing.models import tiny_llama

pytestmark = [
    pytest.mark.usefixtures("ranks_with_isolated_libraries"),
    pytest.mark.skipif(bool(missing_libraries(["torchao"])), reason=f"torchao not installed, nor in {FOLDER}"),
]


def make_model(**changes):
    torch.manual_seed(4)
    return tiny_llama(use_cache=False, attention_dropout=0.0, hidden_size=32, intermediate_size=48, **changes)


def tokens_of(step):
    tokens = torch.randint(64, (2, 8), generator=torch.Generator().manual_seed(step))
    return {"input_ids": tokens, "labels": tokens}


def of_torchao(model):
    settings = emulated()
    from torchao.float8 import convert_to_float8_training

    convert_to_float8_training(model, module_filter_fn=lambda _, name: "layers" in name, config=settings)


def gradients_of(convert):
    """Return the gradients of two steps."""
    model = make_model()
    convert(model)
    parameters = dict(model.named_parameters())
    booster = Booster("cpu")
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    gradients = {}
    for step in range(2):
        booster.backward(model(**tokens_of(step)).loss, optimizer)
        gradients |= {f"{step} {name}": full_gradient(booster, model, name).clone() for name in parameters}
        optimizer.step()
        optimizer.zero_grad()
    return gradients


def convert_ours(model):
    parameters = dict(model.named_parameters())
    assert len(convert_to_float8(model, config=emulated())) == 14, "seven of each of two layers, not the head"
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())


def compare():
    ours, theirs, wide = (gradients_of(convert) for convert in (convert_ours, of_torchao, lambda model: None))
    assert_same_tensors(ours, theirs, EXACT)
    name = "0 model.layers.0.mlp.up_proj.weight"
    return float((ours[name] - wide[name]).norm() / wide[name].norm())


def test_gradients_are_those_of_products_in_8_bits():
    (difference,) = run_on_ranks(compare, 1)
    assert 0.01 < difference < 0.3, "and differ from those of fp32"


def ask_other_devices():
    emulated()
    model = make_model()
    before = str(model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        with pytest.raises(ConfigError, match=r"capability 8.9 or later, and this machine has no CUDA device"):
            convert_to_float8(model)
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "get_device_capability", lambda: (8, 6))
        with pytest.raises(ConfigError, match=r"and this one has 8\.6"):
            convert_to_float8(model)
        assert str(model) == before, "nothing is changed"
        patch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
        assert len(convert_to_float8(model)) == 14


def test_a_device_without_such_units_is_refused():
    run_on_ranks(ask_other_devices, 1)


def choose_layers():
    def chosen(name, _):
        return name.endswith("0.mlp.up_proj")

    assert convert_to_float8(make_model(), chosen, config=emulated()) == ["model.layers.0.mlp.up_proj"]
    linear = nn.Sequential(nn.Linear(8, 16))
    with pytest.raises(ConfigError, match=r"None of the 1 linear layers of `Sequential`"):
        convert_to_float8(linear, config=emulated())
    with pytest.raises(ConfigError, match="'0' maps 8 to 16 features, which are not both multiples of 16"):
        convert_to_float8(linear, lambda *_: True, config=emulated())
    with pytest.raises(TypeError, match=r"must be a torchao\.float8\.Float8LinearConfig; got `str`"):
        convert_to_float8(linear, config="fast")
    with pytest.raises(ConfigError, match="Leave out `enable_fsdp_float8_all_gather`"):
        convert_to_float8(linear, config=emulated(enable_fsdp_float8_all_gather=True))


def test_layers_that_are_chosen_must_fit():
    run_on_ranks(choose_layers, 1)


@pytest.mark.parametrize(
    ("model", "error", "message"),
    [
        (lambda: None, TypeError, "needs a torch.nn.Module; got `function`"),
        (nn.Linear(16, 16), ConfigError, "inside of a user's model before `boost`; got `Linear`"),
        (Booster("cpu").boost(nn.Sequential(nn.Linear(16, 16)))[0], ConfigError, "before `boost`; got"),
    ],
)
def test_other_models_are_refused(model, error, message):
    with pytest.raises(error, match=message):
        convert_to_float8(model)
