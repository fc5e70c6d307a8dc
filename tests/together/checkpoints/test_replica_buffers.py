"""A saved model has the buffers of one rank: the first, whatever the others' forward has made of theirs."""

from __future__ import annotations

import torch
from cases import Setting
from matrix import matrix
from plugin_runs import boosted, runs
from ranked import on_ranks
from safetensors.torch import load_file
from torch import nn

import booster_runtime
from booster_core.ranks.coordinator import DistCoordinator
from booster_ddp import TorchDDPPlugin
from booster_fsdp import TorchFSDPPlugin

SETTINGS = {
    **runs("ddp", "fsdp", "zero1", "gemini", "hybrid-dp"),
    "ddp, no broadcast": Setting(TorchDDPPlugin, {"broadcast_buffers": False}),
    "fsdp, replicas": Setting(TorchFSDPPlugin, {"replica_size": 2, "broadcast_buffers": False}),
}


class Net(nn.Module):
    """BatchNorm in six layers, and a buffer that is large enough to be written in pieces."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)) for _ in range(6))
        self.register_buffer("history", torch.zeros(1 << 19))

    def forward(self, x):
        self.history.add_(x.detach().mean())
        for layer in self.layers:
            x = layer(x)
        return x


def assert_saved_with_those_of_rank_0(name, folder, *, average=False):
    torch.manual_seed(0)
    booster, model, optimizer = boosted(SETTINGS[name], Net())
    generator = torch.Generator().manual_seed(DistCoordinator().rank)
    for _ in range(3):
        booster.backward(model(torch.randn(16, 8, generator=generator)).square().mean(), optimizer)
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        # After the last exchange between ranks, each changes its own once more.
        model(torch.randn(16, 8, generator=generator))
    if average:
        booster_runtime.ema(booster, model).save(folder / "model", shard=True)
    else:
        booster.save_model(model, folder / "model", shard=True)
    first, second = DistCoordinator().all_gather_object(dict(model.unwrap().named_buffers()))
    assert not any(torch.equal(first[key], second[key]) for key in first if "num_batches" not in key)
    saved = {
        key: tensor for file in (folder / "model").glob("*.safetensors") for key, tensor in load_file(file).items()
    }
    assert saved.keys() >= first.keys()
    wrong = [key for key, buffer in first.items() if not torch.equal(saved[key], buffer)]
    assert not wrong


@matrix(["ddp"], name=SETTINGS)
@on_ranks(2)
def test_a_model_is_saved_with_the_buffers_of_the_first_rank(name, tmp_path):
    assert_saved_with_those_of_rank_0(name, tmp_path)


@on_ranks(2)
def test_an_average_is_saved_with_the_buffers_of_the_first_rank(tmp_path):
    assert_saved_with_those_of_rank_0("ddp", tmp_path, average=True)
