"""Load hooks that change names on load, and optimizers' files of torch, under strategies that shard."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from booster_core import Booster
from booster_testing import run_on_ranks


def make(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))


class Hooked(nn.Linear):
    """Reads a file in which its weight has another name and is transposed."""

    def __init__(self, width):
        super().__init__(width, width + 1)
        self._register_load_state_dict_pre_hook(self._of_old_file)

    @staticmethod
    def _of_old_file(state, prefix, *_):
        if f"{prefix}kernel" in state:
            state[f"{prefix}weight"] = state.pop(f"{prefix}kernel").t()


def make_hooked(seed):
    torch.manual_seed(seed)
    return nn.Sequential(Hooked(4), nn.utils.parametrizations.weight_norm(nn.Linear(5, 3)))


def load_by_hooks(plugin, path):
    booster, model = Booster("cpu", None, plugin), make_hooked(1)
    model, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert booster.load_model(model, path).is_complete
    booster.save_model(model, f"{path}.{plugin}.safetensors")


@pytest.mark.parametrize("plugin", ["ddp", "fsdp", "zero", "gemini", "hybrid"])
def test_the_load_hooks_of_modules_run(plugin, tmp_path):
    expected = make_hooked(0).state_dict()
    old = {
        name.replace("parametrizations.", "").replace(".original0", "_g").replace(".original1", "_v"): tensor
        for name, tensor in expected.items()
    }
    old["0.kernel"] = old.pop("0.weight").t().contiguous()
    save_file(old, path := tmp_path / "m.safetensors")
    run_on_ranks(load_by_hooks, 2, plugin, str(path))
    found = load_file(f"{path}.{plugin}.safetensors")
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
