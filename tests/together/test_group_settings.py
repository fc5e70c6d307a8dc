"""Optimizers that treat elements in one parameter group and matrices in another step as they do in one process."""

from __future__ import annotations

from dataclasses import replace

import torch
from cases import Case, Setting, assert_equals_one_process
from matrix import matrix, named
from torch import nn

from booster_fsdp import TorchFSDPPlugin
from booster_gemini import GeminiPlugin
from booster_hybrid import HybridParallelPlugin
from booster_testing.compare import tolerance_for
from booster_zero import LowLevelZeroPlugin, ZeroConfig


def gemini(**options):
    return GeminiPlugin(min_chunk_bytes=256, **options)


def hybrid(**options):
    return HybridParallelPlugin(tp_size=1, pp_size=1, zero=ZeroConfig(**options))


PLUGINS = {"zero": LowLevelZeroPlugin, "fsdp": TorchFSDPPlugin, "gemini": gemini, "hybrid": hybrid}


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


def net():
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 7), nn.Tanh(), nn.Linear(7, 3)).double()


def batch(number, replica):
    generator = torch.Generator().manual_seed(10 * number + replica)
    return torch.randn(4, 6, generator=generator, dtype=torch.float64)


def group_of(model, kind):
    return {"params": [parameter for name, parameter in model.named_parameters() if name.endswith(kind)]}


def group_of_matrices(model):
    return {**group_of(model, "weight"), "lr": 0.01, "trust": True}


def lars(model):
    return Lars([group_of(model, "bias"), group_of_matrices(model)])


def lars_of_vectors(model):
    return Lars([group_of(model, "bias")])


def add_matrices(step, model, optimizer):
    if step == 0:
        optimizer.add_param_group(group_of_matrices(model))


AT_BOOST = Case(build=net, batch=batch, optimizer=lars, steps=5, max_norm=None, tolerance=tolerance_for(torch.float64))
ADDED = replace(AT_BOOST, optimizer=lars_of_vectors, before_step=add_matrices)


@matrix(
    ["boost-zero", "added-zero"],
    **{"case, options": named([(AT_BOOST, {}), (ADDED, {"partition": "parameter"})], ["boost", "added"], joint=True)},
    name=PLUGINS,
)
def test_groups_of_two_kinds_step_as_in_one_process(name, case, options):
    assert_equals_one_process(case, Setting(PLUGINS[name], options))
