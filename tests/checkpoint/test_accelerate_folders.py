"""What Accelerate saves of a model that FSDP2 shards: its two folders load, and for the one above there is a remedy."""

from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from booster_core import Booster
from booster_core.errors import CheckpointError
from booster_testing import run_on_ranks
from booster_zero import LowLevelZeroPlugin

pytest.importorskip("accelerate", reason="needs Accelerate: pip install accelerate")


def made(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 4))


def batch():
    return torch.linspace(-1, 1, 12).view(2, 6)


def save_by_accelerate(folder):
    """Train one step, and return the model's values and AdamW's first moments, whole."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.utils import DistributedType

    accelerator = Accelerator(cpu=True)
    # On CPUs Accelerate takes no FSDP plugin, so the model is sharded and the plugin set by hand; it saves by itself.
    accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT")
    model = made(0)
    for layer in (model[0], model[2], model):
        fully_shard(layer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(batch()).square().mean().backward()
    optimizer.step()
    accelerator._models.append(model)
    accelerator._optimizers.append(optimizer)
    is_sharded = mock.PropertyMock(return_value=DistributedType.FSDP)
    with mock.patch.object(Accelerator, "distributed_type", is_sharded):
        accelerator.save_state(folder)
    values = {name: tensor.full_tensor().detach() for name, tensor in model.named_parameters()}
    states = {name: optimizer.state[tensor]["exp_avg"].full_tensor() for name, tensor in model.named_parameters()}
    return values, states


def load_both(folder):
    booster, module = Booster("cpu", plugin=LowLevelZeroPlugin(stage=1)), made(1)
    model, optimizer, *_ = booster.boost(module, torch.optim.AdamW(module.parameters(), lr=0.7))
    with pytest.raises(CheckpointError, match=r"'optimizer_0', 'pytorch_model_fsdp_0'. Pass the path of the one"):
        booster.load_model(model, folder)
    booster.load_model(model, f"{folder}/pytorch_model_fsdp_0")
    booster.load_optimizer(optimizer, f"{folder}/optimizer_0")
    adapter = booster.state_adapter(model, optimizer)
    moments = [
        (shard.name, shard.flat_range, shard.data.clone())
        for shard in adapter.optimizer_shards()
        if shard.state == "exp_avg"
    ]
    return (
        {name: tensor.clone() for name, tensor in model.state_dict().items()},
        moments,
        optimizer.param_groups[0]["lr"],
    )


def test_folders_of_accelerate_load_and_the_one_above_names_them(tmp_path):
    (values, states), _ = run_on_ranks(save_by_accelerate, 2, str(tmp_path / "state"))
    found = run_on_ranks(load_both, 2, str(tmp_path / "state"))
    seen = dict.fromkeys(states, 0)
    for loaded, moments, rate in found:
        assert rate == 0.1
        assert loaded.keys() == values.keys()
        assert all(torch.equal(loaded[name], values[name]) for name in values)
        for name, (start, stop), part in moments:
            assert torch.equal(part.view(-1), states[name].reshape(-1)[start:stop])
            seen[name] += stop - start
    assert seen == {name: tensor.numel() for name, tensor in states.items()}
