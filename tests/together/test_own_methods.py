"""Methods of an optimizer's class that write parameters, as ``eval`` of schedule-free optimizers does."""

import torch
from matrix import matrix, named
from torch import nn

from booster_core import Booster
from booster_core.plugin import load
from booster_testing import run_on_ranks
from booster_testing.training import whole_model


class Averaging(torch.optim.Optimizer):
    """SGD that keeps averages of the parameters, which `eval` puts in their place and `train` takes out again."""

    def __init__(self, params, lr, *, through_data):
        super().__init__(params, {"lr": lr, "count": 0})
        self.through_data = through_data

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["count"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    average = self.state[p].setdefault("average", p.clone())
                    p.sub_(p.grad, alpha=group["lr"])
                    average.lerp_(p, 1 / group["count"])

    @torch.no_grad()
    def _swap(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p in self.state:
                    kept = p.clone()
                    target = p.data if self.through_data else p
                    target.copy_(self.state[p]["average"])
                    self.state[p]["average"].copy_(kept)

    def eval(self):
        self._swap()
        return "averages"

    def train(self):
        self._swap()


PLUGINS = {
    "ddp": ("ddp", {}),
    "fsdp": ("fsdp", {}),
    "zero1": ("zero", {}),
    "zero2-overlap": ("zero", {"stage": 2, "overlap_allgather": True, "bucket_bytes": 256}),
    "zero-offload": ("zero", {"offload": "cpu"}),
    "gemini": ("gemini", {"min_chunk_bytes": 256}),
    "gemini-kept": ("gemini", {"min_chunk_bytes": 256, "shard_param_frac": 0.0}),
    "gemini-offload": ("gemini", {"min_chunk_bytes": 256, "offload_param_frac": 1.0, "offload_optim_frac": 1.0}),
    "hybrid": ("hybrid", {"zero_stage": 1}),
    "hybrid3": ("hybrid", {"zero_stage": 3}),
}
X = torch.linspace(-1, 1, 16).view(2, 8)


def make(through_data):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1, bias=False))
    return model, Averaging(model.parameters(), 0.1, through_data=through_data)


def batch(step):
    return torch.randn(8, 8, generator=torch.Generator().manual_seed(step))


@torch.no_grad()
def looked_at(model, optimizer, whole):
    """Return what the averages compute, and the weights with and without them."""
    model.eval()
    assert optimizer.eval() == "averages"
    found = [model(X).clone(), whole()]
    optimizer.train()
    model.train()
    return [*found, whole()]


def trained(name, through_data, folder):
    model, optimizer = make(through_data)
    plugin, options = PLUGINS[name]
    if "offload_param_frac" in options:
        options = {**options, "offload_dir": folder}
    booster = Booster("cpu", plugin=load(plugin)(**options))
    model, optimizer, *_ = booster.boost(model, optimizer)
    rank, size = booster.context.coordinator.rank, booster.context.coordinator.world_size
    found = []
    for step in range(4):
        booster.backward(model(batch(step).chunk(size)[rank]).square().mean(), optimizer)
        optimizer.step()
        optimizer.zero_grad()
        if step % 2:
            found.append(looked_at(model, optimizer, lambda: dict(whole_model(booster, model))))
    return found


def alone():
    model, optimizer = make(through_data=False)
    found = []
    for step in range(4):
        model(batch(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 2:
            found.append(
                looked_at(model, optimizer, lambda: {key: value.clone() for key, value in model.state_dict().items()})
            )
    return found


@matrix(1, name=PLUGINS, through_data=named([False, True], ["in-place", "data"]))
def test_what_a_method_writes_reaches_every_rank(name, through_data, tmp_path):
    expected = alone()
    for of_rank in run_on_ranks(trained, 2, name, through_data, str(tmp_path)):
        for (output, averages, weights), (plain_output, plain_averages, plain) in zip(of_rank, expected, strict=True):
            torch.testing.assert_close(output, plain_output)
            torch.testing.assert_close(averages, plain_averages)
            torch.testing.assert_close(weights, plain)
