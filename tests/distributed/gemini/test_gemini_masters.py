"""Parameters that begin to train after `boost`, in bf16: they get fp32 masters, as those of the first groups do."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from booster_core import Booster
from booster_gemini import GeminiPlugin
from booster_testing import run_on_ranks
from booster_testing.training import whole_model

STEPS, LR = 100, 1e-4
"""A step is a fifth of what bf16 rounds away at most: without a master, nothing moves."""


def make():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False), nn.Linear(8, 1, bias=False))
    for layer in net:
        nn.init.constant_(layer.weight, 0.25)
    return net


def train(late, options):
    """Return how far each matrix moves in all steps after a first one, and the formats that the optimizer updates."""
    net = make()
    net[0].requires_grad_(not late)
    booster = Booster("cpu", "bf16", GeminiPlugin(min_chunk_bytes=64, **options))
    first = [*net[1].parameters(), *net[2].parameters()]
    optimizer = torch.optim.SGD(first if late else net.parameters(), lr=LR, momentum=0.1)
    model, optimizer, *_ = booster.boost(net, optimizer)
    for step in range(STEPS + 1):
        if step == 1 and late:
            net[0].requires_grad_()
            optimizer.add_param_group({"params": list(net[0].parameters())})
        x = torch.full((2, 8), 0.5 + dist.get_rank())
        booster.backward(model(x).sum(), optimizer)
        if step == 0:
            for group in optimizer.param_groups:
                group["lr"] = 0.0
            optimizer.step()
            for group in optimizer.param_groups:
                group["lr"] = LR
        else:
            optimizer.step()
        optimizer.zero_grad()
    formats = {str(piece.values.dtype) for piece in optimizer.layout.pieces().values()}
    return {name: float((p.float() - 0.25).mean()) for name, p in whole_model(booster, model).items()}, formats


@pytest.mark.parametrize("options", [{}, {"replica_size": 2}], ids=["split", "replicas"])
def test_a_parameter_that_is_added_later_gets_a_master(options):
    for (late, formats), (early, _) in zip(
        run_on_ranks(train, 2, True, options), run_on_ranks(train, 2, False, options), strict=True
    ):
        assert formats == {"torch.float32"}
        assert early["0.weight"] < -0.005
        assert late == pytest.approx(early, abs=2**-10)  # a rounding of bf16
