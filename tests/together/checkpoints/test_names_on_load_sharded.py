"""Load hooks that change names on load, and optimizers' files of torch, under strategies that shard."""

import pytest
import torch
from ranked import on_ranks
from safetensors.torch import load_file, save_file
from torch import nn

from booster_core import Booster
from booster_core.ranks import DistCoordinator
from booster_testing import run_on_ranks


def make(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))


def read_old_file(state, prefix, *_):
    """Take a weight from a file in which it has another name and is transposed."""
    if f"{prefix}kernel" in state:
        state[f"{prefix}weight"] = state.pop(f"{prefix}kernel").t()


def make_hooked(seed):
    torch.manual_seed(seed)
    first = nn.Linear(4, 5)
    first._register_load_state_dict_pre_hook(read_old_file)
    return nn.Sequential(first, nn.utils.parametrizations.weight_norm(nn.Linear(5, 3)))


@pytest.mark.parametrize("plugin", ["ddp", "fsdp", "zero", "gemini", "hybrid"])
@on_ranks(2)
def test_the_load_hooks_of_modules_run(plugin, tmp_path):
    expected = make_hooked(0).state_dict()
    old = {
        name.replace("parametrizations.", "").replace(".original0", "_g").replace(".original1", "_v"): tensor
        for name, tensor in expected.items()
    }
    old["0.kernel"] = old.pop("0.weight").t().contiguous()
    if DistCoordinator().is_master():
        save_file(old, tmp_path / "old.safetensors")
    DistCoordinator().block_all()
    booster, model = Booster("cpu", None, plugin), make_hooked(1)
    model, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert booster.load_model(model, tmp_path / "old.safetensors").is_complete
    booster.save_model(model, tmp_path / "new.safetensors")
    found = load_file(tmp_path / "new.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def groups_of(model):
    return [{"params": model[1].parameters(), "weight_decay": 0.1}, {"params": model[0].parameters()}]


def load_torchs_optimizer(plugin, path):
    model = make(1)
    booster = Booster("cpu", None, plugin)
    optimizer = torch.optim.AdamW(groups_of(model), lr=7.0)
    model, optimizer, *_ = booster.boost(model, optimizer)
    booster.load_optimizer(optimizer, path)
    booster.save_optimizer(optimizer, f"{path}.{plugin}", shard=True)


def test_a_sharded_optimizer_reads_torchs_file(tmp_path):
    """As one process does, of which `checkpoint/test_names_on_load` shows that it has the optimizer's values."""
    model = make()
    optimizer = torch.optim.AdamW(groups_of(model), lr=0.05)
    model(torch.ones(2, 4)).square().sum().backward()
    optimizer.step()
    path = tmp_path / "optimizer.pt"
    torch.save(optimizer.state_dict(), path)
    run_on_ranks(load_torchs_optimizer, 2, "zero", str(path))
    run_on_ranks(load_torchs_optimizer, 1, None, str(path))
    alone, sharded = (
        {file.name: file.read_bytes() for file in (tmp_path / f"optimizer.pt.{plugin}").iterdir()}
        for plugin in (None, "zero")
    )
    assert alone == sharded
    assert b"0.05" in alone["param_groups.json"]
