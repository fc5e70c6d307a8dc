"""State dicts of models of which each rank holds a part: loaded again as they are, and refused by `torch.save`."""

import copy
import io
import pickle
from contextlib import nullcontext

import pytest
import torch
from cases import Setting
from matrix import matrix
from plugin_runs import RUNS, backward, boosted, runs
from ranked import on_ranks

from booster_core.errors import CheckpointError, ConfigError
from booster_ddp import TorchDDPPlugin
from booster_hybrid import HybridParallelPlugin
from booster_testing.models import TinyMLP, tiny_llama

IN_PARTS = runs("fsdp", "hybrid-tp", "hybrid-pp")
SHARDED_OPTIMIZERS = {"zero": RUNS["zero1"], "gemini": RUNS["gemini"]}
WHOLE = {"ddp": RUNS["ddp"], "zero": RUNS["zero1"], "hybrid-dp": Setting(HybridParallelPlugin)}


def boost(setting, make=tiny_llama):
    torch.manual_seed(0)
    return boosted(setting, make())[1]


@matrix(["hybrid-tp"], name=IN_PARTS)
@on_ranks(2)
def test_parts_are_not_saved_as_if_they_were_whole(name):
    model = boost(IN_PARTS[name])
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


@matrix(["hybrid-dp"], name=WHOLE)
@on_ranks(2)
def test_whole_states_are_saved_by_torch(name):
    model = boost(WHOLE[name], TinyMLP)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    TinyMLP().load_state_dict(torch.load(file))


def save_optimizer_state(setting, folder):
    """Step once, let each rank write its optimizer's state, as ``<rank>.pt``, and return what `boost` gave."""
    torch.manual_seed(0)
    model = tiny_llama()
    booster = setting.make_booster()
    model, optimizer, *_ = booster.boost(model, torch.optim.Adam(model.parameters(), lr=0.1))
    batch = {"input_ids": torch.arange(16).view(2, 8), "labels": torch.arange(16).view(2, 8)}
    backward(booster, model, optimizer, batch)
    optimizer.step()
    torch.save(optimizer.state_dict(), folder / f"{booster.context.coordinator.rank}.pt")
    booster.context.coordinator.block_all()
    return booster, model, optimizer


@pytest.mark.parametrize("name", [*SHARDED_OPTIMIZERS, *IN_PARTS])
@on_ranks(2)
def test_an_optimizers_state_is_loaded_by_the_rank_that_it_is_of(name, tmp_path):
    booster, _model, optimizer = save_optimizer_state({**IN_PARTS, **SHARDED_OPTIMIZERS}[name], tmp_path)
    rank = booster.context.coordinator.rank
    optimizer.load_state_dict(torch.load(tmp_path / f"{rank}.pt"))
    first = torch.load(tmp_path / "0.pt")
    refusal = r"^This optimizer's state is that of rank 0 of 2 .*, and here it is that of rank 1 of 2"
    with nullcontext() if rank == 0 else pytest.raises(CheckpointError, match=refusal):
        optimizer.load_state_dict(first)
    _, _whole_model, whole = boosted(RUNS["ddp"], tiny_llama())
    with pytest.raises(CheckpointError, match=r"that of rank 0 of 2 .*, and here it is whole.*booster.save_optimizer"):
        whole.load_state_dict(first)
    plain = torch.optim.Adam(tiny_llama().parameters())
    for state in (first, copy.deepcopy(first), copy.copy(first)):
        with pytest.raises(CheckpointError, match=r"that of rank 0 of 2 .*, and an optimizer of the whole model would"):
            plain.load_state_dict(state)


@on_ranks(2)
def test_an_optimizers_whole_state_is_any_ranks(tmp_path):
    _, _model, optimizer = save_optimizer_state(RUNS["ddp"], tmp_path)
    for rank in range(2):
        optimizer.load_state_dict(torch.load(tmp_path / f"{rank}.pt"))


@pytest.mark.parametrize("asked", [None, False])
@on_ranks(2)
def test_the_module_of_ddp_has_the_names_of_the_users_model(asked):
    model = boost(Setting(TorchDDPPlugin, {"find_unused_parameters": asked}), TinyMLP)
    state = model.module.state_dict()
    plain = TinyMLP()
    plain.load_state_dict(state)
    with torch.no_grad():
        model.unwrap().first.bias.zero_()
    model.module.load_state_dict(plain.state_dict())
    assert list(model.module.state_dict()) == list(plain.state_dict())
    assert torch.equal(model.unwrap().first.bias, plain.first.bias)


@on_ranks(2)
def test_geminis_placeholders_are_not_taken_for_values():
    model = boost(RUNS["gemini"], TinyMLP)
    with pytest.raises(ConfigError, match=r"'first\.weight' is kept in shards"):
        model.unwrap().state_dict()
    assert model.state_dict()["first.weight"].isfinite().all().item()
