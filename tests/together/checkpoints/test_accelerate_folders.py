"""Accelerate and FSDP2: its two folders load here, for the one above there is a remedy, and ours load there."""

from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from ranked import on_ranks
from torch import nn
from torch.distributed.fsdp import fully_shard

from booster_core import Booster
from booster_core.errors import CheckpointError
from booster_core.ranks import DistCoordinator
from booster_testing.compare import EXACT, assert_same_tensors
from booster_zero import LowLevelZeroPlugin

pytest.importorskip("accelerate", reason="needs Accelerate: pip install accelerate")


def made(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 4))


def batch():
    return torch.linspace(-1, 1, 12).view(2, 6)


def sharded(seed):
    """Return a model that FSDP2 shards."""
    model = made(seed)
    for layer in (model[0], model[2], model):
        fully_shard(layer)
    return model


@contextmanager
def accelerator_of(model, kind):
    """Yield an `Accelerator` that saves and loads an FSDP2 model.

    On CPUs Accelerate takes no FSDP plugin, so the model is sharded and the plugin set by hand; it saves by itself.
    """
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.state import AcceleratorState
    from accelerate.utils import DistributedType

    AcceleratorState._reset_state(reset_partial_state=True)  # it may tell of another rank that this process was before
    accelerator = Accelerator(cpu=True)
    accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type=kind)
    accelerator._models.append(model)
    is_sharded = mock.PropertyMock(return_value=DistributedType.FSDP)
    with mock.patch.object(Accelerator, "distributed_type", is_sharded):
        yield accelerator


def whole_state(model, optimizer):
    """Return the values of a model that FSDP2 shards and AdamW's first moments, whole."""
    values = {name: tensor.full_tensor().detach() for name, tensor in model.named_parameters()}
    return values, {
        name: optimizer.state[tensor]["exp_avg"].full_tensor()
        for name, tensor in model.named_parameters()
        if tensor in optimizer.state
    }


def boosted(seed, lr):
    booster, module = Booster("cpu", plugin=LowLevelZeroPlugin(stage=1)), made(seed)
    model, optimizer, *_ = booster.boost(module, torch.optim.AdamW(module.parameters(), lr=lr))
    return booster, model, optimizer


def state_of(booster, model, optimizer):
    """Return the model's values, and this rank's pieces of the first moments."""
    moments = [
        (shard.name, shard.flat_range, shard.data.clone())
        for shard in booster.state_adapter(model, optimizer).optimizer_shards()
        if shard.state == "exp_avg"
    ]
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}, moments


def assert_pieces(whole, own):
    """Assert that each rank's pieces are those of whole moments, and that together they are all of them."""
    pieces = [piece for of_rank in DistCoordinator().all_gather_object(own) for piece in of_rank]
    for name, (start, stop), part in pieces:
        assert torch.equal(part.view(-1), whole[name].reshape(-1)[start:stop])
    assert sum(part.numel() for *_, part in pieces) == sum(tensor.numel() for tensor in whole.values())


@on_ranks(2)
def test_folders_of_accelerate_load_and_the_one_above_names_them(tmp_path):
    model = sharded(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(batch()).square().mean().backward()
    optimizer.step()
    with accelerator_of(model, "SHARDED_STATE_DICT") as accelerator:
        accelerator._optimizers.append(optimizer)
        accelerator.save_state(tmp_path)
    values, moments = whole_state(model, optimizer)
    booster, model, optimizer = boosted(1, lr=0.7)
    with pytest.raises(CheckpointError, match=r"'optimizer_0', 'pytorch_model_fsdp_0'. Pass the path of the one"):
        booster.load_model(model, tmp_path)
    booster.load_model(model, tmp_path / "pytorch_model_fsdp_0")
    booster.load_optimizer(optimizer, tmp_path / "optimizer_0")
    loaded, pieces = state_of(booster, model, optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert_same_tensors(loaded, values, EXACT)
    assert_pieces(moments, pieces)


@on_ranks(2)
def test_our_files_and_folders_load_in_accelerate(tmp_path):
    """Train one step under ZeRO, and save for both."""
    booster, model, optimizer = boosted(0, lr=0.1)
    booster.backward(model(batch()).square().mean(), optimizer)
    optimizer.step()
    booster.save_model(model, tmp_path / "pytorch_model_fsdp.bin", use_safetensors=False)
    state = tmp_path / "state"
    for _ in range(2):  # also over its own
        booster.save_model(model, state / "pytorch_model_fsdp_0", gather_dtensor=False, prefix="model")
        booster.save_optimizer(optimizer, state / "optimizer_0", gather_dtensor=False, prefix="optimizer")
    saved, pieces = state_of(booster, model, optimizer)
    for folder, kind in ((tmp_path, "FULL_STATE_DICT"), (state, "SHARDED_STATE_DICT")):
        model = sharded(1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.7)
        with accelerator_of(model, kind) as accelerator:
            if kind == "SHARDED_STATE_DICT":
                accelerator._optimizers.append(optimizer)
            accelerator.load_state(folder)
        values, moments = whole_state(model, optimizer)
        assert_same_tensors(values, saved, EXACT)
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert {float(state["step"]) for state in optimizer.state.values()} == {1.0}
    assert_pieces(moments, pieces)
