"""Optimizers that treat elements in one parameter group and matrices in another step as they do in one process."""

from __future__ import annotations

import torch
import torch.distributed as dist
from matrix import matrix, named
from torch import nn

from booster_core import Booster
from booster_core.errors import ConfigError
from booster_fsdp import TorchFSDPPlugin
from booster_gemini import GeminiPlugin
from booster_hybrid import HybridParallelPlugin
from booster_testing import expect_on_ranks, run_on_ranks
from booster_testing.compare import assert_same_tensors, tolerance_for
from booster_zero import LowLevelZeroPlugin, ZeroConfig

CLOSE = tolerance_for(torch.float64)
PLUGINS = {
    "zero": LowLevelZeroPlugin,
    "fsdp": TorchFSDPPlugin,
    "gemini": lambda **options: GeminiPlugin(min_chunk_bytes=256, **options),
    "hybrid": lambda **options: HybridParallelPlugin(tp_size=1, pp_size=1, zero=ZeroConfig(**options)),
}


class Lars(torch.optim.Optimizer):
    """Scales updates by the norms of whole parameters, in the groups that ask for it."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr, "trust": False})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    ratio = p.norm() / p.grad.norm() if group["trust"] else 1.0
                    p.sub_(p.grad * group["lr"] * ratio)


def make():
    torch.manual_seed(8)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 7), nn.Tanh(), nn.Linear(7, 3)).double()


def groups_of(net, *, adds):
    matrices = [p for p in net.parameters() if p.dim() == 2]
    vectors = [p for p in net.parameters() if p.dim() == 1]
    first, second = {"params": vectors}, {"params": matrices, "lr": 0.01, "trust": True}
    return ([first], second) if adds else ([first, second], None)


def train(batches, net, optimizer, backward, model):
    for step in range(5):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(8, 6, generator=generator, dtype=torch.float64)[batches]
        backward(model(x).square().mean(), optimizer)
        optimizer.step()
        optimizer.zero_grad()


def plainly():
    net = make()
    groups, _ = groups_of(net, adds=False)
    train(slice(None), net, Lars(groups), lambda loss, _: loss.backward(), net)
    return {key: p.detach() for key, p in net.named_parameters()}


def boosted(name, folder, *, adds=False, **options):
    net = make()
    booster = Booster("cpu", plugin=PLUGINS[name](**options))
    groups, further = groups_of(net, adds=adds)
    paths = {id(p): key for key, p in net.named_parameters()}
    model, optimizer, *_ = booster.boost(net, Lars(groups))
    if further is not None:
        held = [model.unwrap().get_parameter(paths[id(p)]) for p in further["params"]]
        optimizer.add_param_group({**further, "params": held})
    train(slice(dist.get_rank(), None, dist.get_world_size()), net, optimizer, booster.backward, model)
    booster.save_model(model, f"{folder}/model.safetensors")


@matrix(
    ["boost-zero"],
    **{"adds, options": named([(False, {}), (True, {"partition": "parameter"})], ["boost", "added"], joint=True)},
    name=PLUGINS,
)
def test_groups_of_two_kinds_step_as_in_one_process(name, adds, options, tmp_path):
    from safetensors.torch import load_file

    run_on_ranks(boosted, 2, name, str(tmp_path), adds=adds, **options)
    assert_same_tensors(load_file(tmp_path / "model.safetensors"), plainly(), CLOSE)


@matrix(["fsdp"], name=PLUGINS)
def test_a_group_of_another_kind_is_refused_where_parameters_are_cut(name, tmp_path):
    match = "Lars takes the parameters of the new group as wholes.*partition='parameter'"
    expect_on_ranks(ConfigError, match, boosted, 2, name, str(tmp_path), adds=True)
