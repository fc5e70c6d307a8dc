"""State dicts of models of which each rank holds a part: loaded again as they are, and refused by `torch.save`."""

import copy
import io
import pickle

import pytest
import torch
from matrix import matrix

from booster_core import Booster
from booster_core.errors import CheckpointError, ConfigError
from booster_ddp import TorchDDPPlugin
from booster_fsdp import TorchFSDPPlugin
from booster_gemini import GeminiPlugin
from booster_hybrid import HybridParallelPlugin
from booster_testing import run_on_ranks
from booster_testing.models import TinyMLP, tiny_llama
from booster_zero import LowLevelZeroPlugin

IN_PARTS = {
    "fsdp": (TorchFSDPPlugin, {}),
    "hybrid-tp": (HybridParallelPlugin, {"tp_size": 2}),
    "hybrid-pp": (HybridParallelPlugin, {"pp_size": 2}),
}
WHOLE = {
    "ddp": (TorchDDPPlugin, {}),
    "zero": (LowLevelZeroPlugin, {}),
    "hybrid-dp": (HybridParallelPlugin, {}),
}


def boosted(plugin, options, make=tiny_llama):
    torch.manual_seed(0)
    model = make()
    return Booster("cpu", plugin=plugin(**options)).boost(model, torch.optim.SGD(model.parameters(), lr=0.1)).model


def refuse(name):
    model = boosted(*IN_PARTS[name])
    for state in (model.state_dict(), model.unwrap().state_dict(), {"model": model.state_dict(), "epoch": 3}):
        for save in (torch.save, pickle.dump):
            with pytest.raises(CheckpointError, match=r"one rank's shards of the model.*booster\.save_model"):
                save(state, io.BytesIO())
    before = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    model.load_state_dict(before)
    for key, values in model.state_dict().items():
        assert torch.equal(*(getattr(each, "to_local", lambda each=each: each)() for each in (values, before[key])))


@matrix(["hybrid-tp"], name=IN_PARTS)
def test_parts_are_not_saved_as_if_they_were_whole(name):
    run_on_ranks(refuse, 2, name)


def save_and_load(name):
    model = boosted(*WHOLE[name], make=TinyMLP)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    TinyMLP().load_state_dict(torch.load(file))


@matrix(["hybrid-dp"], name=WHOLE)
def test_whole_states_are_saved_by_torch(name):
    run_on_ranks(save_and_load, 2, name)


def names_under_ddp(asked):
    model = boosted(TorchDDPPlugin, {"find_unused_parameters": asked}, TinyMLP)
    state = model.module.state_dict()
    plain = TinyMLP()
    plain.load_state_dict(state)
    with torch.no_grad():
        model.unwrap().first.bias.zero_()
    model.module.load_state_dict(plain.state_dict())
    assert list(model.module.state_dict()) == list(plain.state_dict())
    return torch.equal(model.unwrap().first.bias, plain.first.bias)


@pytest.mark.parametrize("asked", [None, False])
def test_the_module_of_ddp_has_the_names_of_the_users_model(asked):
    assert run_on_ranks(names_under_ddp, 2, asked) == [True, True]


def ask_the_hollow_model():
    model = boosted(GeminiPlugin, {"min_chunk_bytes": 8192}, TinyMLP)
    with pytest.raises(ConfigError, match=r"'first\.weight' is kept in shards"):
        model.unwrap().state_dict()
    return model.state_dict()["first.weight"].isfinite().all().item()


def test_geminis_placeholders_are_not_taken_for_values():
    assert run_on_ranks(ask_the_hollow_model, 2) == [True, True]
